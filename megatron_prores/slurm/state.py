"""RUN/slurm.state: how a run under Slurm stands, as its batch script, or its submission, wrote it last."""

from dataclasses import dataclass, fields
from pathlib import Path

from megatron_prores.whole_file import replacing

NAME = "slurm.state"

# What only Slurm can end.
UNFINISHED = ("submitted", "running", "waiting", "ending")


@dataclass(frozen=True)
class State:
    """Attributes:
    state: submitted, running, waiting (in the queue again), ending (Slurm stops it), complete or failed.
    reason: why it failed.
    job: as squeue shows it: 12, or 12_3 in an array.
    requeued: how often, since the job was submitted.
    target: iterations of the whole run; 0 where it is not known yet.
    """

    state: str
    reason: str = ""
    job: str = ""
    requeued: int = 0
    target: int = 0


def read(run: Path) -> State | None:
    """None where there is no such file, or not one of ours."""
    try:
        lines = (run / NAME).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    found = dict(line.split("=", 1) for line in lines if "=" in line)
    if "state" not in found:
        return None
    values: dict = {field.name: found.get(field.name, "") for field in fields(State)}
    for name in ("requeued", "target"):
        values[name] = int(values[name]) if values[name].isdigit() else 0
    return State(**values)


def write(run: Path, state: State) -> None:
    """In one piece, as `job.sh` does it."""
    with replacing(run / NAME) as new:
        new.write_text("".join(f"{field.name}={getattr(state, field.name)}\n" for field in fields(State)))
