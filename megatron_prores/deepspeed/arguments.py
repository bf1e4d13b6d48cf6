"""The command line of the DeepSpeed entry: what Megatron's flags and the DeepSpeed config both have a word in."""

import argparse
from typing import Any

from megatron_prores.deepspeed import section
from megatron_prores.errors import UserError
from megatron_prores.megatron.arguments import schedule_from_args


def add_deepspeed_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The flags of the `deepspeed` launcher and of DeepSpeed's own examples."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument(
        "--deepspeed_config",
        "--deepspeed-config",
        dest="deepspeed_config",
        metavar="FILE",
        help='DeepSpeed config (JSON): ZeRO stage, precision, offload, and "prores"; required',
    )
    group.add_argument(
        "--to-megatron",
        metavar="DIR",
        help="write the checkpoint of --load to DIR in Megatron's format, in the layout of the training, and end",
    )
    group.add_argument("--deepspeed", action="store_true", help="accepted; this entry always uses DeepSpeed")
    group.add_argument("--local_rank", type=int, default=None, help="set by the deepspeed launcher")
    return parser


def read(argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The DeepSpeed config that a command line names, and the flags that it stands for.

    Args:
        argv: the command line without the program.

    Returns:
        The config, and Megatron's and ProRes's flags for what it says about precision and ProRes.

    Raises:
        UserError: there is no config, it cannot be read, or its "prores" section is wrong.
    """
    parser = add_deepspeed_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    parser.error = _refuse
    path = parser.parse_known_args(argv)[0].deepspeed_config
    if path is None:
        raise UserError("--deepspeed_config is missing: give a DeepSpeed config, e.g. configs/deepspeed/zero1.json")
    config = section.read_config(path)
    section.check_types(config)
    settings = section.parse(config)
    flags = [f"--{name}" for name in ("bf16", "fp16") if _is_enabled(config, name)]
    given = config.get("prores", {})
    for key in ("schedule", "warmup_steps", "total_warmup_steps"):
        if key in given:
            flags += [f"--prores-{key.replace('_', '-')}={given[key]}"]
    if settings.override:
        flags += ["--prores-override"]
    return config, flags


def _refuse(message: str) -> None:
    raise UserError(message)


def _is_enabled(config: dict[str, Any], precision: str) -> bool:
    return bool((config.get(precision) or {}).get("enabled"))


# Megatron's flags for what DeepSpeed does in its place, or does not do.
_UNSUPPORTED = {
    "use_distributed_optimizer": '--use-distributed-optimizer (use "zero_optimization")',
    "overlap_grad_reduce": '--overlap-grad-reduce (DeepSpeed\'s "overlap_comm")',
    "overlap_param_gather": "--overlap-param-gather (ZeRO does it)",
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "use_torch_fsdp2": "--use-torch-fsdp2",
    "virtual_pipeline_model_parallel_size": "virtual pipeline stages",
    "sequence_parallel": "--sequence-parallel",
    "num_experts": "--num-experts",
    "use_mup": "--use-mup",
    "calculate_per_token_loss": "--calculate-per-token-loss",
    "fp8": "fp8",
    "fp4": "fp4",
    "async_save": "--async-save",
    "non_persistent_save_interval": "--non-persistent-save-interval",
    "pretrained_checkpoint": "--pretrained-checkpoint",
    "iterations_to_skip": "--iterations-to-skip",
    "loss_scale": '--loss-scale (use "fp16" in the DeepSpeed config)',
    "use_checkpoint_args": "--use-checkpoint-args",
    "ckpt_convert_format": "--ckpt-convert-format",
    "log_params_norm": "--log-params-norm",
    "log_num_zeros_in_grad": "--log-num-zeros-in-grad",
    "save_params_interval": "--save-params-interval",
    "save_wgrads_interval": "--save-wgrads-interval",
    "save_dgrads_interval": "--save-dgrads-interval",
    "save_activations_interval": "--save-activations-interval",
    "check_weight_hash_across_dp_replicas_interval": "--check-weight-hash-across-dp-replicas-interval",
    "optimizer_cpu_offload": '--optimizer-cpu-offload (use "offload_optimizer")',
    "use_precision_aware_optimizer": "--use-precision-aware-optimizer",
    "decoupled_lr": "--decoupled-lr",
    "reset_attention_mask": "--reset-attention-mask",
    "prores_probe_interval": "--prores-probe-interval",
    "multi_latent_attention": "--multi-latent-attention",
}


# Their defaults are not DeepSpeed's: only what was given can be refused.
_LOSS_SCALING = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def reconcile(args: argparse.Namespace, config: dict[str, Any]) -> dict[str, Any]:
    """The config as DeepSpeed gets it: sizes, precision and clipping are those of Megatron's flags.

    Raises:
        UserError: the config and the flags contradict each other, or a flag has no meaning under DeepSpeed.
    """
    _refuse_unsupported(args)
    for precision in ("bf16", "fp16"):
        if getattr(args, precision) != _is_enabled(config, precision) and precision in config:
            raise UserError(f'--{precision} and "{precision}" in the DeepSpeed config contradict each other')
    if "prores" in config:
        asked, flags = section.parse(config).resolve(args.num_layers), schedule_from_args(args)
        if asked != flags:
            raise UserError(
                f'"prores" in the DeepSpeed config asks for {asked}, the flags and --config files for {flags}: '
                "say it in one place"
            )
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    config = {**config}
    _settle(config, "train_batch_size", args.global_batch_size, "--global-batch-size")
    _settle(config, "train_micro_batch_size_per_gpu", args.micro_batch_size, "--micro-batch-size")
    _settle(config, "gradient_accumulation_steps", microbatches, "--global-batch-size")
    _settle(config, "gradient_clipping", args.clip_grad, "--clip-grad")
    if "scheduler" in config:
        raise UserError('"scheduler" in the DeepSpeed config: the learning rate follows Megatron\'s flags, remove it')
    _settle_optimizer(args, config)
    if args.finetune and config.get("zero_optimization", {}).get("stage") == 3:
        raise UserError(
            "--finetune does not work with ZeRO stage 3, from which DeepSpeed loads weights only as a whole"
        )
    for precision in ("bf16", "fp16"):
        if getattr(args, precision):
            config.setdefault(precision, {"enabled": True})
    config.setdefault("steps_per_print", None)  # Megatron's log has it all
    return config


def _settle(config: dict[str, Any], key: str, value: float, flag: str) -> None:
    if config.setdefault(key, value) != value:
        raise UserError(
            f'"{key}": {config[key]} in the DeepSpeed config contradicts {flag}, which makes it {value}: '
            "leave it out of the config"
        )


def _settle_optimizer(args: argparse.Namespace, config: dict[str, Any]) -> None:
    """Where the config names an optimizer, its settings are those of Megatron's flags."""
    if "optimizer" not in config:
        return
    params = {**config["optimizer"].get("params", {})}
    is_adam = str(config["optimizer"].get("type")).lower() in ("adam", "adamw")  # others may not know these
    for key, value, flags in (
        ("lr", args.lr, "--lr"),
        ("weight_decay", args.weight_decay, "--weight-decay"),
        ("betas", [args.adam_beta1, args.adam_beta2], "--adam-beta1 and --adam-beta2"),
        ("eps", args.adam_eps, "--adam-eps"),
    ):
        if is_adam:
            params.setdefault(key, value)
        if params.get(key, value) != value:
            raise UserError(
                f'"{key}": {params[key]} of "optimizer" in the DeepSpeed config contradicts {flags}, '
                f"which makes it {value}: leave it out of the config"
            )
    config["optimizer"] = {**config["optimizer"], "params": params}


def _refuse_unsupported(args: argparse.Namespace) -> None:
    from megatron.core.optimizer import OptimizerConfig

    for name, flag in _UNSUPPORTED.items():
        if getattr(args, name, None):
            raise UserError(f"{flag} is not supported under DeepSpeed: remove it, or use Megatron's own trainer")
    for name in _LOSS_SCALING:
        if getattr(args, name) != getattr(OptimizerConfig, name):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f'{flag} is not supported under DeepSpeed: use "fp16" in its config')
    if args.context_parallel_size > 1:
        raise UserError("--context-parallel-size is not supported under DeepSpeed: use Megatron's own trainer")
    if args.qk_layernorm and args.tensor_model_parallel_size > 1:
        raise UserError(
            "--qk-layernorm with --tensor-model-parallel-size above 1 is not supported under DeepSpeed: it leaves "
            "the gradients of its norms apart: use Megatron's own trainer"
        )
    if args.no_load_optim and not args.skip_train:
        raise UserError("--no-load-optim is not supported under DeepSpeed: use --finetune, or load everything")
    if args.optimizer != "adam":
        raise UserError(f'--optimizer {args.optimizer} is not supported under DeepSpeed: use "optimizer" in its config')
