"""Before every start of a job: how long the run is, and which checkpoint it continues from.

    python -m megatron_prores.slurm.prepare CHECKPOINTS FLAGS ...

prints the run's length in iterations. The batch script compares it with the last checkpoint to know what is left.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from megatron_prores.errors import UserError, run_and_exit
from megatron_prores.whole_file import replacing

TRACKER = "latest_checkpointed_iteration.txt"

# What the run folder decides.
_FOLDERS = ("save", "load", "tensorboard-dir")


def run_length(flags: Sequence[str]) -> int:
    """Iterations of the run that these flags and their `--config` files describe.

    Raises:
        UserError: the length is not given, or a flag would move the run out of its folder.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="append", default=[])
    for name in (*_FOLDERS, "train-iters", "train-samples", "global-batch-size"):
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}")
    try:
        given, _ = parser.parse_known_args(list(flags))
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from error
    settings: dict = {}
    for path in given.config:
        settings |= {str(key).replace("-", "_"): value for key, value in _read(path).items()}
    settings |= {name: value for name, value in vars(given).items() if value is not None}
    for name in _FOLDERS:
        if settings.get(name.replace("-", "_")) is not None:
            raise UserError(f"leave out --{name}: under Slurm a run has its checkpoints and logs in its own folder")
    return _iterations(settings)


def _read(path: str) -> dict:
    """What cannot be read as settings the trainer itself refuses, with the reason."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--config {path} cannot be read: {' '.join(str(error).split())}") from error
    return content if isinstance(content, dict) else {}


def _iterations(settings: Mapping) -> int:
    if settings.get("train_iters") is not None:
        return _count(settings, "train_iters")
    if settings.get("train_samples") is None or settings.get("rampup_batch_size") is not None:
        raise UserError("give --train-iters: a job that continues itself must know where the run ends")
    return _count(settings, "train_samples") // _count(settings, "global_batch_size")


def _count(settings: Mapping, name: str) -> int:
    try:
        number = int(settings[name])
    except (KeyError, TypeError, ValueError):
        number = 0
    if number < 1:
        flag = f"--{name.replace('_', '-')}"
        raise UserError(f"{flag} must be 1 or more, not {settings[name]}" if name in settings else f"{flag} is missing")
    return number


def repair_tracker(checkpoints: Path) -> str | None:
    """Name the last whole checkpoint again where the file that names it was cut off.

    Megatron truncates that file and writes it anew after every checkpoint, and does not wait for the disk: a node that
    loses power leaves it empty, and every later start would fail.

    Returns:
        What was done, in a line; None where nothing was wrong.
    """
    tracker = checkpoints / TRACKER
    try:
        if re.fullmatch(r"\d+|release", tracker.read_text().strip()):
            return None
    except FileNotFoundError:
        return None
    whole = [int(folder.name.removeprefix("iter_")) for folder in checkpoints.glob("iter_*") if _is_whole(folder)]
    if not whole:
        tracker.unlink()
        return f"{tracker} named no iteration and no whole checkpoint is there: starting anew"
    with replacing(tracker) as new, new.open("w") as file:
        file.write(str(max(whole)))
        file.flush()
        os.fsync(file.fileno())
    return f"{tracker} named no iteration: continuing from {max(whole)}, the last whole checkpoint"


def _is_whole(folder: Path) -> bool:
    """Megatron writes metadata.json once everything else of a checkpoint is on disk."""
    try:
        json.loads((folder / "metadata.json").read_text())
    except (OSError, ValueError):
        return False
    return folder.name.removeprefix("iter_").isdigit()


def main() -> None:
    checkpoints, *flags = sys.argv[1:]
    iterations = run_length(flags)
    if note := repair_tracker(Path(checkpoints)):
        print(f"note: {note}", file=sys.stderr)
    print(iterations)


if __name__ == "__main__":
    run_and_exit(main)
