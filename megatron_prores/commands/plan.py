"""`prores plan`: what a Megatron run would be, without GPUs and without starting it."""

import argparse
import json
import math
import sys
from typing import TYPE_CHECKING

from megatron_prores.errors import UserError
from megatron_prores.warmup_summary import format_alpha

if TYPE_CHECKING:
    from megatron_prores.megatron.plan import Plan, Stage

_LABEL = 14


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Beside Megatron's and ProRes's own flags."""
    group = parser.add_argument_group("plan", "What the run would be, and what is wrong with it; nothing is started")
    group.add_argument(
        "--world-size",
        dest="plan_world_size",
        type=int,
        metavar="N",
        help="number of processes, one per GPU (default: the fewest that the layout needs)",
    )
    group.add_argument("--json", dest="plan_json", metavar="FILE", help="also write the plan there")
    return parser


def main(argv: list[str]) -> None:
    """Print the plan.

    Raises:
        UserError: the run could not start; one line for every reason.
    """
    sys.argv[0] = "prores plan"
    from megatron_prores.megatron import launch, screen  # with torch, which takes seconds to load

    args = launch.parse_for_any_machine(argv, add_arguments)
    from megatron_prores.megatron.plan import plan

    if args.plan_world_size is not None and args.plan_world_size < 1:
        raise UserError(f"--world-size must be 1 or more, not {args.plan_world_size}")
    result = plan(args, args.plan_world_size)
    if args.plan_json:
        _write(result, args.plan_json)
    screen.say("\n".join([*_summary(result), "", *_stage_table(result), *_note_lines(result)]))


def _write(plan: "Plan", path: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(plan.as_json(), file, indent=2)
    except OSError as error:
        raise UserError(f"--json {path} cannot be written ({error.strerror})") from error


def _summary(plan: "Plan") -> list[str]:
    held = plan.parameters_per_rank
    per_rank = " to ".join(dict.fromkeys((_large(min(held)), _large(max(held)))))
    flops = plan.flops_per_iteration * plan.iterations
    chunks = f" x {plan.virtual_chunks} chunks" if plan.virtual_chunks > 1 else ""
    bubble = f", pipeline bubble {plan.bubble:.1%}" if plan.pipeline_parallel > 1 else ""
    lines = {
        "model": f"{_large(plan.parameters)} parameters ({plan.parameters:,}), {plan.num_layers} layers, "
        f"norm {plan.norm}, initialisation {plan.init or 'of Megatron'}",
        "processes": f"{plan.world_size:,} = tensor {plan.tensor_parallel} x pipeline {plan.pipeline_parallel}{chunks} "
        f"x context {plan.context_parallel} x data {plan.data_parallel}; {plan.dtype}",
        "per rank": f"{per_rank} parameters",
        "memory": f"{_bytes(plan.memory.total)} on the fullest rank: weights and optimizer "
        f"{_bytes(plan.memory.weights_and_optimizer)}, activations {_bytes(plan.memory.activations)}",
        "batch": f"{plan.global_batch_size:,} sequences of {plan.seq_length:,} tokens: {plan.microbatches:,} "
        f"microbatch{'es' * (plan.microbatches > 1)} of {plan.micro_batch_size}{bubble}",
        "run": f"{plan.iterations:,} iterations, {_large(plan.tokens)} tokens "
        f"({plan.tokens / plan.parameters:.3g} per parameter), {flops:.3g} FLOPs",
        "learning rate": f"{plan.lr:g}, warmed up over {plan.lr_warmup:.1%} of the run",
        "ProRes": f"{plan.schedule}{_warm(plan)}",
    }
    return [f"{name:<{_LABEL}}{text}" for name, text in lines.items()]


def _warm(plan: "Plan") -> str:
    total = math.ceil(plan.schedule.total_steps)
    if not total or total > plan.iterations:
        return ""
    return f": all layers at 1 after {total / plan.iterations:.1%} of the run"


def _stage_table(plan: "Plan") -> list[str]:
    """One row per stage and chunk: its layers, its parameters on a rank, alpha of its first and last layer."""
    total = math.ceil(plan.schedule.total_steps)
    steps = sorted({0, *(math.ceil(total * quarter / 4) for quarter in range(1, 5))})
    chunk = ["chunk"] if plan.virtual_chunks > 1 else []
    rows = [["stage", *chunk, "layers", "parameters", *(f"t={step}" for step in steps)]]
    for stage in plan.stages:
        place = [str(stage.rank), *([str(stage.chunk)] if chunk else [])]
        alphas = (_alpha_span(stage, values) for values in plan.schedule.alpha(steps))
        rows.append([*place, _span(stage), _large(stage.parameters), *alphas])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return ["alpha of each stage's first and last layer after t iterations; parameters on one rank", *lines]


def _span(stage: "Stage") -> str:
    if len(stage.layers) < 2:
        return "".join(map(str, stage.layers)) or "none"
    return f"{stage.layers[0]}-{stage.layers[-1]}"


def _alpha_span(stage: "Stage", alphas) -> str:
    if not stage.layers:
        return "-"
    ends = [format_alpha(alphas[layer - 1]) for layer in (stage.layers[0], stage.layers[-1])]
    return "..".join(dict.fromkeys(ends))


def _note_lines(plan: "Plan") -> list[str]:
    return ["", *(f"note: {note}" for note in plan.notes)] if plan.notes else []


def _large(value: float) -> str:
    """Four significant digits with the unit of a parameter count."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.4g}{unit}"
    return str(value)


def _bytes(size: float) -> str:
    value, unit = (size / 2**30, "GiB") if size >= 2**30 else (size / 2**20, "MiB")
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
