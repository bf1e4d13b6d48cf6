"""Sets alpha at Megatron's own clock: before every training step and every evaluation.

The clock t is Megatron's iteration, the number of completed iterations (it also counts iterations that were skipped
for an overflow). Training iteration k computes with alpha(k-1); an evaluation after iteration N with alpha(N).

megatron-core 0.19 has no per-step hook, so the functions that its trainer calls are replaced by wrappers. They run
outside CUDA graphs and outside the rerun loop.
"""

import functools
import inspect
from collections.abc import Callable

import torch
from megatron.core import mpu
from megatron.training import get_args, training

from megatron_prores.coefficients import StageCoefficients
from megatron_prores.errors import UserError
from megatron_prores.megatron.arguments import is_stock, schedule_from_args
from megatron_prores.megatron.layer import ProResTransformerLayer
from megatron_prores.megatron.screen import say
from megatron_prores.ops.choice import default_device_type, describe_op, use_op
from megatron_prores.schedule import Array, Schedule

StageLayers = list[tuple[int, int, list[int]]]
"""(pipeline rank, virtual chunk, layer numbers) of every stage, in the order of the layers."""

_coefficients: StageCoefficients | None = None
clock_of: Callable[[int], int] = int
"""t after a number of iterations: Megatron's own is the iteration itself."""


def stage_coefficients() -> StageCoefficients | None:
    """The alphas of this rank's layers; None before the model is built."""
    return _coefficients


def install() -> None:
    """Wrap the trainer's functions; a second call does nothing."""
    if getattr(training.train_step, "with_prores", False):
        return
    for name, wrap in (
        ("setup_model_and_optimizer", _bind_after),
        ("train_step", _set_iteration_before),
        ("evaluate_and_print_results", _set_evaluation_before),
    ):
        original = getattr(training, name)
        wrapper = functools.wraps(original)(wrap(original))
        wrapper.with_prores = True
        setattr(training, name, wrapper)


def _bind_after(setup: Callable) -> Callable:
    def setup_model_and_optimizer(*args, **kwargs):
        result = setup(*args, **kwargs)
        bind(result[0])
        return result

    return setup_model_and_optimizer


def _set_iteration_before(step: Callable) -> Callable:
    def train_step(*args, **kwargs):
        set_step(get_args().curr_iteration)
        return step(*args, **kwargs)

    return train_step


def _set_evaluation_before(evaluate: Callable) -> Callable:
    signature = inspect.signature(evaluate)

    def evaluate_and_print_results(*args, **kwargs):
        set_step(signature.bind(*args, **kwargs).arguments["iteration"])
        return evaluate(*args, **kwargs)

    return evaluate_and_print_results


def use_clock(clock: Callable[[int], int]) -> None:
    """Count completed steps from Megatron's iteration otherwise, for an engine that counts its own."""
    global clock_of
    clock_of = clock


def set_step(iteration: int) -> None:
    """Make the next forward use alpha(l, t) of the clock at a number of completed iterations."""
    if _coefficients is not None:
        _coefficients.set_step(clock_of(iteration))


def alphas(iteration: int) -> Array:
    """alpha of every layer, 1..L, after a number of completed iterations; `bind` comes first."""
    return _coefficients.schedule.alpha(clock_of(iteration))


def bind(model: list[torch.nn.Module], quietly: bool = False) -> StageLayers:
    """Find this rank's ProRes layers, compare notes with the other stages, and set alpha for the current iteration.

    Args:
        model: this rank's model chunks, as Megatron's trainer holds them.
        quietly: leave it to the caller to `tell` about the stages.

    Raises:
        UserError: (on every rank) the stages' layers together are not exactly 1..L.
    """
    global _coefficients
    args = get_args()
    if not hasattr(args, "prores_schedule"):
        raise UserError("call megatron_prores.megatron.enable() before Megatron parses its arguments, not after")
    use_op(args.prores_op)
    schedule = schedule_from_args(args)
    chunks = [[m for m in chunk.modules() if isinstance(m, ProResTransformerLayer)] for chunk in model]
    stages = _all_stages([[(layer.layer_number, layer.norm) for layer in chunk] for chunk in chunks])
    _check_norms({norm for _, _, layers in stages for _, norm in layers}, args.prores_norm)
    stages = [(rank, chunk, [number for number, _ in layers]) for rank, chunk, layers in stages]
    _check_coverage(stages, schedule, args.prores_norm)
    _coefficients = StageCoefficients(schedule, [layer.coefficient for chunk in chunks for layer in chunk])
    _coefficients.set_step(args.iteration)
    if not quietly:
        tell(stages)
    return stages


def tell(stages: StageLayers) -> None:
    """Print which stage holds which layers, alpha now, and what computes the residual add."""
    args = get_args()
    if torch.distributed.get_rank() == 0:
        say(stage_table(stages, schedule_from_args(args), args.iteration, args.prores_norm))
        if any(layers for _, _, layers in stages):  # this rank's own stage may hold none
            say(f"residual add: {describe_op(default_device_type())}")


def _all_stages(local: list[list]) -> list[tuple[int, int, list]]:
    group = mpu.get_pipeline_model_parallel_group()
    gathered: list = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, local, group=group)
    chunks = range(max(len(rank_chunks) for rank_chunks in gathered))
    return [(rank, chunk, gathered[rank][chunk]) for chunk in chunks for rank in range(len(gathered))]


def _check_norms(built: set[str], norm: str) -> None:
    for other in sorted(built - {norm}):
        raise UserError(
            f"--prores-norm {norm} is set but the layer spec builds {other}: use --spec megatron_prores.megatron.spec "
            f'prores_layer_spec, or give your spec params={{"norm": "{norm}"}}'
        )


def _check_coverage(stages: StageLayers, schedule: Schedule, norm: str) -> None:
    numbers = sorted(number for _, _, layers in stages for number in layers)
    if not numbers and is_stock(schedule.name, norm):
        return
    if not numbers:
        flag = f"--prores-norm {norm}" if schedule.name == "none" else f"--prores-schedule {schedule.name}"
        raise UserError(
            f"{flag} is set but the model has no ProRes layer: "
            "add --spec megatron_prores.megatron.spec prores_layer_spec, or use --prores-schedule none"
            + (" --prores-norm pre" if norm != "pre" else "")
        )
    if numbers != list(range(1, schedule.num_layers + 1)):
        raise UserError(
            f"the pipeline stages hold the layers {numbers} and not each of 1..{schedule.num_layers} once: "
            "check --num-layers and the pipeline split flags"
        )


def stage_table(stages: StageLayers, schedule: Schedule, step: int, norm: str = "pre") -> str:
    """Which layers and alphas every pipeline stage (and virtual chunk) holds at a step, one line each."""
    if not any(layers for _, _, layers in stages):
        return "ProRes is off (--prores-schedule none): Megatron's stock layers"
    alphas = schedule.alpha(step)
    virtual = len({chunk for _, chunk, _ in stages}) > 1
    placement = "" if norm == "pre" else f" {norm} norm;"
    lines = [f"ProRes {schedule};{placement} alpha at iteration {step}:"]
    for rank, chunk, layers in stages:
        name = f"  stage {rank}" + (f" chunk {chunk}" if virtual else "")
        if layers:
            values = " ".join(f"{alphas[number - 1]:.4g}" for number in layers)
            lines.append(f"{name}: layers {_span(layers)}, alpha {values}")
        else:
            lines.append(f"{name}: no layers")
    return "\n".join(lines)


def _span(layers: list[int]) -> str:
    consecutive = layers == list(range(layers[0], layers[-1] + 1))
    return f"{layers[0]}-{layers[-1]}" if consecutive and len(layers) > 1 else ", ".join(map(str, layers))
