"""`prores schedule`: print and draw alpha for any schedule, before training."""

import argparse
import json
import math
import shutil
import sys

import numpy as np

from megatron_prores.errors import UserError
from megatron_prores.schedule import DEFAULT_WARMUP_STEPS, SCHEDULES, Schedule, describe
from megatron_prores.warmup_summary import describe_progress, format_alpha

# Beyond any model and any run; it keeps a typing error from becoming a request for terabytes.
_MOST_LAYERS = 100_000
_MOST_STEPS = 10**15

_WIDEST = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schedule", default="linear", metavar="NAME", help="one of --list (default: linear)")
    parser.add_argument("--num-layers", type=_whole, metavar="L", help="decoder layers of the whole model")
    parser.add_argument(
        "--warmup-steps",
        type=float,
        metavar="T",
        help=f"warm-up of the first layer in optimizer steps (default: {DEFAULT_WARMUP_STEPS})",
    )
    parser.add_argument(
        "--total-warmup-steps", type=_whole, metavar="W", help="instead of T: until the last layer is at 1"
    )
    parser.add_argument(
        "--warmup-fraction", type=float, metavar="F", help="instead of T: W as a fraction of --train-iters"
    )
    parser.add_argument("--train-iters", type=_whole, metavar="N", help="the run's length in optimizer steps")
    parser.add_argument("--at", type=_steps, metavar="STEPS", help="steps to show, with commas between: 0,500,1000")
    parser.add_argument("--json", action="store_true", help="print one JSON object with every layer instead of a table")
    parser.add_argument("--png", metavar="FILE", help="also draw alpha of every layer over the steps")
    parser.add_argument("--strict", action="store_true", help="fail if the warm-up outlasts the run")
    parser.add_argument("--list", action="store_true", help="list the schedules and stop")


def run(args: argparse.Namespace) -> None:
    """Print alpha at some steps, and draw it if --png is given.

    Raises:
        UserError: the settings contradict each other or are out of range, or the picture cannot be written.
    """
    if args.list:
        for name in SCHEDULES:
            print(f"{name:<18}{describe(name)}")
        return
    schedule = _schedule(args)
    progress = None if args.train_iters is None else describe_progress(schedule, args.train_iters)
    if args.strict and progress:
        raise UserError(f"{progress}; shorten the warm-up, or leave --strict out")
    if args.png:
        # Only now: drawing needs Matplotlib, which takes a second to load.
        from megatron_prores.report import draw_schedule

        draw_schedule(schedule, args.train_iters, args.png)
    steps = _default_steps(schedule, args.train_iters) if args.at is None else args.at
    values = schedule.alpha(steps)
    if args.json:
        print(
            json.dumps({"schedule": schedule.name, "alpha": dict(zip(map(str, steps), values.tolist(), strict=True))})
        )
    else:
        print(_table(schedule, steps, values))
    # Beside a JSON object, only stderr is left for people.
    notes = sys.stderr if args.json else sys.stdout
    if progress:
        print(progress, file=notes)
    if args.png:
        print(f"wrote {args.png}", file=notes)


def _schedule(args: argparse.Namespace) -> Schedule:
    if args.num_layers is None:
        raise UserError("give the number of decoder layers: --num-layers L")
    if args.num_layers > _MOST_LAYERS:
        raise UserError(f"--num-layers must be at most {_MOST_LAYERS}, not {args.num_layers}")
    if args.train_iters is not None and args.train_iters < 1:
        raise UserError(f"--train-iters must be at least 1, not {args.train_iters}")
    if args.strict and args.train_iters is None:
        raise UserError("--strict compares the warm-up with the run: give the run's length, --train-iters N")
    return Schedule.resolve(
        args.schedule,
        args.num_layers,
        warmup_steps=args.warmup_steps,
        total_warmup_steps=args.total_warmup_steps,
        warmup_fraction=args.warmup_fraction,
        train_iters=args.train_iters,
    )


def _whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number") from None
    if abs(value) > _MOST_STEPS:
        raise argparse.ArgumentTypeError(f"{text[:40]} is too large")
    return value


def _steps(text: str) -> list[int]:
    """`0,500,1000` as steps; each one once, in the order given."""
    steps = []
    for part in text.split(","):
        step = _whole(part)
        if step < 0:
            raise argparse.ArgumentTypeError(f"a step must be >= 0, not {step}")
        steps.append(step)
    return list(dict.fromkeys(steps))


def _default_steps(schedule: Schedule, train_iters: int | None) -> list[int]:
    """The start, the ends of the first layer's and of the last layer's warm-up, some between, and the run's end."""
    total = schedule.total_steps
    steps = {0}
    if total > 0:
        steps |= {math.ceil(schedule.warmup_steps)} | {math.ceil(total * quarter / 4) for quarter in range(1, 5)}
    if train_iters is not None:
        steps.add(train_iters)
    return sorted(steps)


def _table(schedule: Schedule, steps: list[int], values: np.ndarray) -> str:
    """Rows are steps and columns layers: all of them, or an even selection that fits the terminal."""
    num_layers = schedule.num_layers
    label = max(len("step"), *(len(str(step)) for step in steps))
    width = min(_WIDEST, shutil.get_terminal_size((_WIDEST, 24)).columns)
    column = 2 + max(len(f"l={num_layers}"), len(format_alpha(0.5)))
    fitting = max(2, (width - label) // column)
    layers = np.unique(np.linspace(1, num_layers, min(fitting, num_layers)).round().astype(int))
    lines = [
        f"ProRes {schedule}, {num_layers} layer{'s' * (num_layers > 1)}",
        f"{'step':>{label}}" + "".join(f"{f'l={layer}':>{column}}" for layer in layers),
    ]
    for step, row in zip(steps, values, strict=True):
        lines.append(f"{step:>{label}}" + "".join(f"{format_alpha(row[layer - 1]):>{column}}" for layer in layers))
    if len(layers) < num_layers:
        lines.append(f"({len(layers)} of {num_layers} layers; --json prints all)")
    return "\n".join(lines)
