"""One run of a comparison: trained in processes of its own, measured, and not done again."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from megatron_prores import __version__
from megatron_prores.compare.arms import Arm
from megatron_prores.errors import UserError
from megatron_prores.machine import cpu_name
from megatron_prores.report import Scalars, read_scalars
from megatron_prores.whole_file import replacing

FINISHED, DIVERGED = "finished", "diverged"
_NOT_A_NUMBER = (16, 17)  # exit codes of Megatron's trainer: the loss or a gradient is NaN or infinite
_STEP = re.compile(rb"^step +(\d+)/", re.MULTILINE)
_ERROR = re.compile(r"^error: .*|^\w*(?:Error|Exception)\b.*", re.MULTILINE)


class RunFailed(Exception):
    """A run that ended without a result. The message says where to look."""


@dataclass(frozen=True)
class Run:
    """One arm from one seed.

    Attributes:
        folder: holds checkpoints/, tensorboard/, log.txt and, once the run is over, curves.npz and result.json.
        length: in iterations.
        command: trains it, and continues from its last checkpoint.
        evaluation: measures its last checkpoint on the held-out set into evaluation.json; None without such a set.
    """

    arm: Arm
    seed: int
    folder: Path
    length: int
    command: tuple[str, ...]
    evaluation: tuple[str, ...] | None

    @property
    def name(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"

    def is_finished(self) -> bool:
        return (self.folder / "result.json").exists()

    def step(self) -> int:
        """The iteration that the run has reached, as its log says."""
        try:
            with open(self.folder / "log.txt", "rb") as log:
                log.seek(max(0, os.path.getsize(log.name) - 65536))
                found = _STEP.findall(log.read())
        except FileNotFoundError:
            return 0
        return int(found[-1]) if found else 0


def claim(run: Run, settings: Mapping[str, Any]) -> None:
    """Make the run's folder, or make sure that it was made for the same settings.

    Raises:
        UserError: it holds a run with other settings, or cannot be written.
    """
    path = run.folder / "settings.json"
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _write(path, json.dumps(settings, indent=1))
            return
        before = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"--output: {run.folder} cannot be written ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged: remove {run.folder} to do this run again") from error
    changed = [name for name in sorted(before.keys() | settings.keys()) if before.get(name) != settings.get(name)]
    if changed:
        shown = ", ".join(f"{name} was {before.get(name)} and is {settings.get(name)}" for name in changed[:3])
        raise UserError(
            f"{run.folder} was made with other settings ({shown}{', ...' if len(changed) > 3 else ''}): "
            "give another --output, or remove that folder"
        )


def carry_out(run: Run, environment: Mapping[str, str], on_start: Callable[[subprocess.Popen], None]) -> None:
    """Train to the end, measure, and write down the result; a run that is finished is left alone.

    Args:
        environment: variables to set for the processes.
        on_start: told of every process, to be able to stop it.

    Raises:
        RunFailed: the run ended without a result.
    """
    with open(run.folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunFailed(f"{run.folder}: another process works on this run") from error
        if run.is_finished():
            return
        start = _size(run.folder / "log.txt")
        code = _train(run, environment, on_start, lock.fileno())
        state = {0: FINISHED, **dict.fromkeys(_NOT_A_NUMBER, DIVERGED)}.get(code)
        if state is None:
            raise RunFailed(f"{run.name}: ended with exit code {code}: {_reason(run.folder / 'log.txt', start)}")
        if state == FINISHED and (reached := _last_checkpoint(run)) != run.length:
            raise RunFailed(f"{run.name}: ended at iteration {reached} of {run.length} (see {run.folder / 'log.txt'})")
        evaluation = None
        if state == FINISHED and run.evaluation:
            start = _size(run.folder / "log.txt")
            code = _call(run, run.evaluation, environment, on_start, lock.fileno())
            if code:
                raise RunFailed(f"{run.name}: prores evaluate failed: {_reason(run.folder / 'log.txt', start)}")
            evaluation = json.loads((run.folder / "evaluation.json").read_text())
        _finish(run, state, evaluation)


def _last_checkpoint(run: Run) -> int:
    try:
        return int((run.folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError):
        return 0


def _train(run: Run, environment: Mapping[str, str], on_start: Callable, lock: int) -> int:
    log = run.folder / "log.txt"
    start = _size(log)
    code = _call(run, run.command, environment, on_start, lock)
    if code == 1:  # torchrun's, whatever the rank's was
        with open(log, "rb") as file:
            file.seek(start)
            if b"is NaN or infinite (exit code" in file.read():
                return _NOT_A_NUMBER[0]
    return code


def _call(run: Run, command: tuple[str, ...], environment: Mapping[str, str], on_start: Callable, lock: int) -> int:
    with open(run.folder / "log.txt", "ab") as log:
        # The process keeps the lock's file open: should this one be killed, nobody starts the run beside it.
        process = subprocess.Popen(
            command,
            env=os.environ | dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(lock,),
            start_new_session=True,
        )
        on_start(process)
        return process.wait()


def stop(process: subprocess.Popen, patience: float = 10.0) -> None:
    """End a process and those that it has started."""
    ask_to_stop(process)
    deadline = time.monotonic() + patience
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def ask_to_stop(process: subprocess.Popen) -> None:
    """The signal alone, to a process and those that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _reason(log: Path, start: int) -> str:
    """What the log says, from a byte on, that looks like an error, in a line: earlier attempts stand before it."""
    text = log.read_bytes()[start:].decode(errors="replace")[-20000:]
    found = _ERROR.findall(text)
    return f"{found[0].removeprefix('error: ')} (see {log})" if found else f"see {log}"


def _finish(run: Run, state: str, evaluation: dict | None) -> None:
    # A run that diverged in its first steps may have logged nothing.
    scalars = read_scalars(run.folder / "tensorboard") if state == FINISHED or _has_logs(run) else {}
    write_curves(run.folder / "curves.npz", scalars)
    result = {"state": state, "evaluation": evaluation, "made_with": _made_with()}
    _write(run.folder / "result.json", json.dumps(result, indent=1))


def _has_logs(run: Run) -> bool:
    return any((run.folder / "tensorboard").glob("*tfevents*"))


def _made_with() -> dict[str, str]:
    versions = {name: version(name) for name in ("torch", "megatron-core")}
    return {"machine": cpu_name(), **versions, "megatron_prores": __version__}


def write_curves(path: Path, scalars: Scalars) -> None:
    """All scalars of a run as one compressed file, replaced as a whole."""
    arrays = {
        f"{tag}:{what}": array for tag, series in scalars.items() for what, array in zip("xy", series, strict=True)
    }
    with replacing(path) as new, new.open("wb") as file:
        np.savez_compressed(file, **arrays)


def read_curves(path: Path) -> Scalars:
    """What `write_curves` wrote."""
    with np.load(path) as arrays:
        tags = [name.removesuffix(":x") for name in arrays.files if name.endswith(":x")]
        return {tag: (arrays[f"{tag}:x"], arrays[f"{tag}:y"]) for tag in tags}


def _write(path: Path, text: str) -> None:
    with replacing(path) as new:
        new.write_text(text)


def trainer_command(processes: int, flags: list[str]) -> tuple[str, ...]:
    """A run of Megatron's trainer in so many processes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return (sys.executable, *(torchrun if processes > 1 else ()), "-m", "megatron_prores.megatron.pretrain_gpt", *flags)
