"""DeepSpeed as the engine in Megatron's trainer: four of its functions are replaced, the rest is Megatron's.

Data, learning-rate schedule, evaluation intervals, logs, signals and time limits stay as they are. Replaced are:
building model and optimizer, the training step, the evaluation, and saving.
"""

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from megatron.core import mpu as megatron_mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args, training
from torch import Tensor

from megatron_prores.deepspeed import checkpoint, faults, mpu, to_megatron
from megatron_prores.deepspeed.engine import start, switch_on
from megatron_prores.deepspeed.gpt_pipeline import GPTPipeline
from megatron_prores.errors import UserError
from megatron_prores.megatron import driver, gpt, initial, screen

_engine: deepspeed.DeepSpeedEngine | None = None
_reports: list[dict[str, Tensor]] = []
"""Loss sums and token counts of the microbatches since the last step, on ranks that compute a loss."""
_checks_loss = True


def install(config: dict[str, Any]) -> None:
    """Have Megatron's trainer train with DeepSpeed, as a config says."""
    global _checks_loss
    args = get_args()
    # Megatron checks a loss by computing it again, and the engine does not go back.
    _checks_loss, args.check_for_nan_in_loss_and_grad = args.check_for_nan_in_loss_and_grad, False

    def setup_model_and_optimizer(model_type, *args, cfg_container, pg_collection, **kwargs):
        return _setup(config, cfg_container, pg_collection)

    training.setup_model_and_optimizer = setup_model_and_optimizer
    training.train_step = train_step
    training.evaluate = evaluate
    training.save_checkpoint = save_checkpoint


class EngineOptimizer:
    """What Megatron's training loop asks of its optimizer."""

    is_stub_optimizer = False

    def __init__(self, engine: deepspeed.DeepSpeedEngine):
        self._engine = engine

    @property
    def param_groups(self) -> list[dict]:
        return self._engine.optimizer.param_groups

    def get_loss_scale(self) -> Tensor:
        return torch.tensor(float(getattr(self._engine.optimizer, "cur_scale", 1.0)))

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss


def _setup(config: dict[str, Any], container: Any, pg_collection: Any) -> tuple:
    global _engine
    args = get_args()
    deepspeed.init_distributed(args.distributed_backend)  # finds Megatron's
    args.iteration = args.num_floating_point_operations_so_far = 0
    universal = checkpoint.is_universal(config, args.load)
    config = {**config, "checkpoint": {**(config.get("checkpoint") or {}), "load_universal": universal}}
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    if screen.is_first_rank():
        screen.say(f"engine: DeepSpeed {deepspeed.__version__}, ZeRO stage {stage}")
    builder = container.model.get_builder_cls()(container.model)
    (model,) = builder.build_distributed_models(
        pg_collection=pg_collection, wrap_with_ddp=False, mixed_precision_wrapper=None, data_parallel_random_init=False
    )
    weights = initial.weights_from_args(args)
    if weights is not None and checkpoint.latest(args.load, universal) is None:
        initial.initialize(model, weights)
        initial.tell(weights)
    stage_model = model
    is_pipeline = args.pipeline_model_parallel_size > 1 or "pipeline" in config
    if is_pipeline:
        model = GPTPipeline(model, _pipeline_loss(model), _recompute_layers(args))
    checkpoint.miss_no_empty_states(model)
    if args.to_megatron is None:  # Megatron's format has them
        checkpoint.leave_out_empty_states(model)
    faults.refuse(model, config)
    groups = _parameter_groups(model, args)
    own_optimizer = None if "optimizer" in config else _adamw(groups, args, config)
    _engine = start(
        model=model,
        config=config,
        model_parameters=groups,
        optimizer=own_optimizer,
        lr_scheduler=training.get_optimizer_param_scheduler,
        mpu=None if is_pipeline else mpu,
    )
    stages = driver.bind([_engine.module], quietly=True)
    hook = switch_on(_engine, driver.stage_coefficients(), args.prores_override, say=screen.say)
    driver.use_clock(lambda iteration: iteration - _engine.skipped_steps)
    checkpoint.load(_engine, universal)
    if args.to_megatron is not None:
        to_megatron.save(_engine, stage_model)
        raise SystemExit(0)
    driver.tell(stages)
    return [_engine.module], EngineOptimizer(_engine), hook


def _parameter_groups(model: torch.nn.Module, args: Any) -> list[dict[str, Any]]:
    """As Megatron's: biases and norms have no weight decay."""
    groups: list[dict[str, Any]] = [{"params": [], "wd_mult": wd_mult} for wd_mult in (1.0, 0.0)]
    groups[0]["default_config"] = True  # whose learning rate Megatron logs
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[name.endswith(".bias") or parameter.dim() == 1]["params"].append(parameter)
    return [group for group in groups if group["params"]]


def _adamw(groups: list[dict[str, Any]], args: Any, config: dict[str, Any]) -> torch.optim.Optimizer:
    """On a GPU machine, DeepSpeed's for the host where the optimizer is offloaded there; else torch's."""
    options = {"lr": args.lr, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_eps}
    options["weight_decay"] = args.weight_decay
    offload = (config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    if offload.get("device", "none") != "none":
        if torch.cuda.is_available():
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            return DeepSpeedCPUAdam(groups, **options)
        config["zero_force_ds_cpu_optimizer"] = False  # it would be compiled first; torch's runs on the host as well
    return torch.optim.AdamW(groups, **options)


def _recompute_layers(args: Any) -> int:
    if args.recompute_granularity != "full":
        return 0
    if args.recompute_method != "uniform":
        raise UserError(
            f"--recompute-method {args.recompute_method} is not supported in DeepSpeed's pipeline: use uniform"
        )
    return args.recompute_num_layers or 1


def _pipeline_loss(stage: torch.nn.Module) -> Any:
    """The loss function of the last stage: mean over the microbatch's tokens that count."""

    def loss(logits: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        labels, loss_mask = targets
        return _mean(*gpt.loss(loss_mask, stage.compute_language_model_loss(labels, logits)))

    return loss


def _mean(total: Tensor, tokens: Tensor, report: dict[str, Tensor]) -> Tensor:
    _reports.append(report)
    return total / tokens.clamp(min=1)


def _pipeline_batches(data_iterator: Iterator) -> Iterator[tuple]:
    """Microbatches as DeepSpeed's first and last stage read them; other stages do not ask."""
    while True:
        batch = gpt.microbatch(data_iterator)
        yield (batch["tokens"], batch["position_ids"]), (batch["labels"], batch["loss_mask"])


def train_step(forward_step, data_iterator, *unused, **kwargs) -> tuple:
    """One optimizer step; see `megatron.training.training.train_step`."""
    skipped = _engine.skipped_steps
    _reports.clear()
    if isinstance(_engine.module, PipelineModule):
        _engine.reset_activation_shape()
        _engine.train_batch(data_iter=_pipeline_batches(data_iterator))
    else:
        for _ in range(get_num_microbatches()):
            output, loss = forward_step(data_iterator, _engine)
            _engine.backward(_mean(*loss(output)))
            _engine.step()
    reduced = _reduced()
    if _checks_loss and reduced and not torch.isfinite(reduced["lm loss"]):
        raise UserError(f"the loss of iteration {_engine.global_steps} is {float(reduced['lm loss'])}")
    grad_norm = _engine.get_global_grad_norm()
    grad_norm = None if grad_norm is None else float(grad_norm)
    return reduced, _engine.skipped_steps - skipped, False, False, 0, grad_norm, None, 0


def evaluate(forward_step, data_iterator, *unused, eval_iters=None, **kwargs) -> tuple:
    """Mean validation loss over all tokens; see `megatron.training.training.evaluate`."""
    args = get_args()
    iterations = args.eval_iters if eval_iters is None else eval_iters
    microbatches = args.eval_global_batch_size // (args.eval_micro_batch_size * args.data_parallel_size)
    _reports.clear()
    _engine.eval()
    for _ in range(iterations):
        if isinstance(_engine.module, PipelineModule):
            _engine.reset_activation_shape()
            _engine.eval_batch(_pipeline_batches(data_iterator), num_micro_batches=microbatches)
        else:
            with torch.no_grad():
                for _ in range(microbatches):
                    output, loss = forward_step(data_iterator, _engine)
                    _mean(*loss(output))
        args.consumed_valid_samples += args.eval_global_batch_size
    _engine.train()
    return _reduced(), None, False


def _reduced() -> dict[str, Tensor]:
    """Mean loss over the tokens of all microbatches and data-parallel ranks, on the last stage."""
    if not _reports:
        return {}
    total = torch.stack([report["lm loss"] for report in _reports]).sum(dim=0)
    torch.distributed.all_reduce(total, group=megatron_mpu.get_data_parallel_group(with_context_parallel=True))
    return {"lm loss": total[0] / total[1]}


def save_checkpoint(iteration, model, optimizer, scheduler, floating_point_operations, *unused, **kwargs) -> None:
    """See `megatron.training.training.save_checkpoint`."""
    checkpoint.save(_engine, iteration, floating_point_operations)
