"""`prores status`: how the runs in a folder stand, from their files and from Slurm's queue."""

import argparse
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_prores.errors import UserError
from megatron_prores.report import LOSS_TAG, VALIDATION_TAG
from megatron_prores.slurm import queue, state
from megatron_prores.warmup_summary import format_alpha

_ALPHA_TAG = re.compile(r"prores/alpha/layer_(\d+)")

# Large, and no run is below them.
_NOT_RUNS = ("checkpoints", "tensorboard", "logs")


@dataclass(frozen=True)
class Progress:
    """What the log of a run's latest start says.

    Attributes:
        alphas: of the first and the last layer.
        seconds_per_iteration: None with fewer than two iterations.
    """

    iteration: int
    loss: float
    validation_loss: float | None
    alphas: tuple[float, ...]
    seconds_per_iteration: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="*", default=["runs"], metavar="DIR", help="of a run, or of many (default: runs)"
    )


def run(args: argparse.Namespace) -> None:
    """Print a row for every run.

    Raises:
        UserError: a folder is not there, or holds no run that was under Slurm.
    """
    for folder in args.folder:
        if not Path(folder).is_dir():
            raise UserError(f"there is no directory {folder}")
    runs = [run for folder in args.folder for run in _find(Path(folder))]
    if not runs:
        raise UserError(f"no run under Slurm in {', '.join(args.folder)}: none has a file {state.NAME}")
    jobs = queue.jobs()
    header = ("run", "job", "state", "iteration", "loss", "validation", "alpha", "left", "requeued")
    rows = [header, *(_row(folder, found, jobs) for folder, found in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    if jobs is None:
        print("note: squeue does not answer here; states are what the jobs wrote last")
    for folder, found in runs:
        if found.reason and found.state == "failed":
            print(f"{folder}: {found.reason}")


def _find(folder: Path) -> Iterator[tuple[Path, state.State]]:
    for name, below, _ in os.walk(folder):
        below[:] = sorted(set(below) - set(_NOT_RUNS))
        if found := state.read(Path(name)):
            yield Path(name), found


def _row(folder: Path, found: state.State, jobs: dict[str, str] | None) -> tuple[str, ...]:
    stands = _stands(found, jobs)
    progress = _progress(folder / "tensorboard")
    target = f"/{found.target}" if found.target else ""
    if progress is None:
        return (str(folder), found.job, stands, f"0{target}", "-", "-", "-", "-", str(found.requeued))
    left = "-"
    if progress.seconds_per_iteration and found.target and stands == "running":
        left = _duration(max(found.target - progress.iteration, 0) * progress.seconds_per_iteration)
    return (
        str(folder),
        found.job,
        stands,
        f"{progress.iteration}{target}",
        f"{progress.loss:.4f}",
        "-" if progress.validation_loss is None else f"{progress.validation_loss:.4f}",
        "..".join(dict.fromkeys(map(format_alpha, progress.alphas))) or "-",
        left,
        str(found.requeued),
    )


def _stands(found: state.State, jobs: dict[str, str] | None) -> str:
    """Where a run has not ended by itself, Slurm has the last word."""
    if found.state not in state.UNFINISHED or jobs is None:
        return found.state
    return jobs.get(found.job, "ended by Slurm: submit it again")


def _progress(tensorboard: Path) -> Progress | None:
    """From the newest event file that holds a loss: every start of a run writes its own, and they can be long."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    for path in sorted(tensorboard.glob("*tfevents*"), key=lambda path: path.stat().st_mtime, reverse=True):
        events = EventAccumulator(str(path), size_guidance={SCALARS: 0}).Reload()
        tags = events.Tags()[SCALARS]
        if LOSS_TAG not in tags:
            continue
        losses = events.Scalars(LOSS_TAG)
        first, last = losses[0], losses[-1]
        steps = last.step - first.step
        layers = sorted(tag for tag in tags if _ALPHA_TAG.fullmatch(tag))
        return Progress(
            iteration=last.step,
            loss=last.value,
            validation_loss=events.Scalars(VALIDATION_TAG)[-1].value if VALIDATION_TAG in tags else None,
            alphas=tuple(events.Scalars(layer)[-1].value for layer in (layers[:1] + layers[-1:])),
            seconds_per_iteration=(last.wall_time - first.wall_time) / steps if steps else None,
        )
    return None


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}h{rest // 60:02}m" if hours else f"{rest // 60}m{rest % 60:02}s"
