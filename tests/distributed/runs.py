"""Starts real pretraining runs in processes of their own and reads back what they logged."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_prores.report import read_scalars

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


def command(folder: Path, *flags: str, processes: int = 1, config: dict | None = None, script=None) -> list[str]:
    """The command line of a run that logs to `folder`; one process needs no launcher.

    Args:
        script: a training script that knows no `--config`, in place of our entry point.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {name: value for name, value in {**TINY, **(config or {})}.items() if value is not None}
    python = [sys.executable]
    if processes > 1:
        python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    if script is None:
        config_file = folder / "config.yaml"
        config_file.write_text(yaml.safe_dump(config))
        program = ["-m", "megatron_prores.megatron.pretrain_gpt", "--config", str(config_file)]
    else:
        program = [str(script), *HOST_FLAGS, *_as_flags(config)]
    return [*python, *program, "--tensorboard-dir", str(folder / "logs"), *flags]


def _as_flags(config: dict) -> list[str]:
    flags = []
    for name, value in config.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        flags += [f"--{name}", *map(str, values)]
    return flags


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **extra}


def run(folder: Path, *flags: str, timeout: float = 300, env: dict | None = None, **kwargs) -> Run:
    """Run to the end, whatever the end is."""
    done = subprocess.run(
        command(folder, *flags, **kwargs),
        env=environment(**(env or {})),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return _read(folder, done.returncode, done.stdout, done.stderr)


def pretrain(folder: Path, *flags: str, **kwargs) -> Run:
    """Run to the end and insist that it ended well."""
    result = run(folder, *flags, **kwargs)
    assert result.returncode == 0, f"{' '.join(flags)}\n{result.output[-4000:]}\n{result.errors[-4000:]}"
    return result


def kill_at(folder: Path, line: str, *flags: str, timeout: float = 300, **kwargs) -> None:
    """Start a run and SIGKILL all its processes as soon as it prints a line that starts with `line`."""
    process = subprocess.Popen(
        command(folder, *flags, **kwargs),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + timeout
    seen = False
    for printed in process.stdout:
        seen = printed.startswith(line)
        if seen or time.monotonic() > deadline:
            break
    # torchrun starts each worker in a session of its own, so the group is not enough.
    for child in [*_descendants(process.pid), process.pid]:
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    assert seen, f"the run ended without printing {line!r}"


def _descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [descendant for child in map(int, children) for descendant in (*_descendants(child), child)]


def _read(folder: Path, returncode: int, output: str, errors: str) -> Run:
    logs = folder / "logs"
    scalars = read_scalars(logs) if logs.is_dir() and any(logs.iterdir()) else {}

    def series(tag: str) -> dict[int, float]:
        steps, values = scalars.get(tag, ((), ()))
        return {int(step): float(value) for step, value in zip(steps, values, strict=True)}

    return Run(returncode, output, errors, series("lm loss"), series("lm loss validation"))
