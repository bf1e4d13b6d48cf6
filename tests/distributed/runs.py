"""Starts real pretraining runs in processes of their own and reads back what they logged."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from zygote import Job, Task, environment, zygote

from megatron_prores.report import read_scalars

PRETRAIN = "megatron_prores.megatron.pretrain_gpt"

# What our entry point adds by itself on a machine without GPU, Apex and Transformer Engine.
HOST_FLAGS = [
    *("--distributed-backend", "gloo", "--transformer-impl", "local", "--no-rope-fusion"),
    *("--no-masked-softmax-fusion", "--no-gradient-accumulation-fusion", "--no-persist-layer-norm"),
]

# A GPT that takes a fraction of a second a step. Six layers: 2 and 3 divide it, 4 does not.
TINY = {
    "num-layers": 6,
    "hidden-size": 64,
    "num-attention-heads": 4,
    "ffn-hidden-size": 128,
    "seq-length": 32,
    "max-position-embeddings": 32,
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True,
    "attention-dropout": 0.0,
    "hidden-dropout": 0.0,
    "micro-batch-size": 2,
    "global-batch-size": 8,
    "train-iters": 8,
    "lr": 1.0e-3,
    "lr-decay-style": "constant",
    "eval-iters": 2,
    "eval-interval": 4,
    "log-interval": 1,
    "seed": 7,
    "prores-warmup-steps": 2,
}


@dataclass
class Run:
    """A finished run.

    Attributes:
        returncode: of the launcher; torchrun turns a failed rank into 1.
        losses: training loss by iteration, exactly as TensorBoard holds it (float32).
        evaluations: validation loss by iteration.
    """

    returncode: int
    output: str
    errors: str
    losses: dict[int, float]
    evaluations: dict[int, float]

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.errors.splitlines() if line.startswith("error: ")]

    def stages(self) -> list[tuple[str, str, str]]:
        """(stage, layers, alphas) as the run printed them at its start."""
        pattern = r"^  (stage [\d a-z]+): (?:layers ([\d, -]+), alpha (.*)|no layers)$"
        return [(m[1], m[2] or "", m[3] or "") for m in re.finditer(pattern, self.output, re.MULTILINE)]


def arguments(folder: Path, *flags: str, config: dict | None = None, script: Path | None = None) -> list[str]:
    """The command line, without the program, of a run that logs to `folder`.

    Args:
        config: changes to TINY; None removes a key.
        script: the program is a training script that knows no `--config`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {name: value for name, value in {**TINY, **(config or {})}.items() if value is not None}
    logs = ["--tensorboard-dir", str(folder / "logs")]
    if script is not None:
        return [*HOST_FLAGS, *_as_flags(config), *logs, *flags]
    config_file = folder / "config.yaml"
    config_file.write_text(yaml.safe_dump(config))
    return ["--config", str(config_file), *logs, *flags]


def _as_flags(config: dict) -> list[str]:
    flags = []
    for name, value in config.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        flags += [f"--{name}", *map(str, values)]
    return flags


def _start(
    folder: Path,
    *flags: str,
    processes: int = 1,
    module: str = PRETRAIN,
    script: Path | None = None,
    config: dict | None = None,
    env: dict[str, str] | None = None,
    fresh: bool | None = None,
) -> subprocess.Popen | Job:
    argv = arguments(folder, *flags, config=config, script=script)
    files = (folder / "output", folder / "errors")
    for file in files:
        file.write_text("")  # kill_at reads before a fork may have opened it
    if fresh is None:
        # Forks come too late for variables that act on import, and lack Megatron's log, which --verbose shows.
        fresh = bool(script or env or "--verbose" in flags)
    if not fresh:
        return zygote(module).start(Task(module, argv, processes, environment(), Path.cwd(), *files))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    program = [str(script)] if script else ["-m", module]
    line = [sys.executable, *(torchrun if processes > 1 else ()), *program, *argv]
    with files[0].open("w") as output, files[1].open("w") as errors:
        return subprocess.Popen(
            line, env=environment(**(env or {})), stdout=output, stderr=errors, start_new_session=True
        )


def run(folder: Path, *flags: str, timeout: float = 300, **kwargs) -> Run:
    """Run to the end, whatever the end is.

    Args:
        processes: ranks.
        module: the entry point.
        script: a training script in place of `module`, which knows no `--config`.
        config: changes to TINY; None removes a key.
        env: variables to set.
        fresh: as a person starts it, with torchrun for several processes, and not as forks of the zygote. By default
            where forks would not do.
    """
    return _read(folder, _end(_start(folder, *flags, **kwargs), timeout))


def pretrain(folder: Path, *flags: str, **kwargs) -> Run:
    """Run to the end and insist that it ended well."""
    result = run(folder, *flags, **kwargs)
    assert result.returncode == 0, f"{' '.join(flags)}\n{result.output[-4000:]}\n{result.errors[-4000:]}"
    return result


def kill_at(folder: Path, line: str, *flags: str, timeout: float = 300, **kwargs) -> None:
    """Start a run and SIGKILL all its processes as soon as it prints a line that starts with `line`."""
    process = _start(folder, *flags, **kwargs)
    deadline = time.monotonic() + timeout
    running, seen = True, False
    try:
        while running and not seen and time.monotonic() < deadline:
            time.sleep(0.01)
            running = process.poll() is None
            seen = any(printed.startswith(line) for printed in (folder / "output").read_text().splitlines())
    finally:
        _kill(process)
    assert seen, f"the run ended without printing {line!r}"


def _end(process: subprocess.Popen | Job, timeout: float) -> int:
    """The exit code; nothing of the run is left when this raises."""
    try:
        return process.wait(timeout)
    except BaseException:
        _kill(process)
        raise


def _kill(process: subprocess.Popen | Job) -> None:
    if process.poll() is not None:
        return
    # torchrun starts each worker in a session of its own, so a group is not enough.
    for child in [*_descendants(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    process.wait()


def outcomes(folder: Path, module: str, cases: dict[str, tuple[list[str], int]]) -> dict[str, tuple[int, str, str]]:
    """Run a module that needs no other rank for each case.

    Args:
        folder: to run in.
        cases: command line (without the program) and WORLD_SIZE by name.

    Returns:
        (exit code, stdout, stderr) by name.
    """
    files = (folder / "output", folder / "errors")
    found = {}
    for name, (argv, world) in cases.items():
        # One process finds its own address.
        place = {"WORLD_SIZE": str(world), "RANK": "0", "LOCAL_RANK": "0"} if world > 1 else {}
        job = zygote(module).start(Task(module, argv, 1, environment(**place), folder, *files))
        found[name] = (_end(job, 60), *(file.read_text() for file in files))
    return found


def _descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [descendant for child in map(int, children) for descendant in (*_descendants(child), child)]


def _read(folder: Path, returncode: int) -> Run:
    output, errors = ((folder / name).read_text() for name in ("output", "errors"))
    logs = folder / "logs"
    scalars = read_scalars(logs) if logs.is_dir() and any(logs.iterdir()) else {}

    def series(tag: str) -> dict[int, float]:
        steps, values = scalars.get(tag, ((), ()))
        return {int(step): float(value) for step, value in zip(steps, values, strict=True)}

    return Run(returncode, output, errors, series("lm loss"), series("lm loss validation"))
