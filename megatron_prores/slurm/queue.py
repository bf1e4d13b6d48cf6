"""Slurm's commands, with what they refuse as a `UserError`."""

import shutil
import subprocess
from pathlib import Path

from megatron_prores.errors import UserError

# The site file says in SBATCH_* variables where jobs go; sbatch reads them from its environment.
_SBATCH = 'if [ -n "$1" ]; then source "$1"; fi; exec sbatch --parsable "$2"'


def submit(script: Path, site: Path | None) -> str:
    """Submit a batch script.

    Returns:
        The job's number.

    Raises:
        UserError: sbatch is not here, or refuses the script.
    """
    if shutil.which("sbatch") is None:
        raise UserError("sbatch is not on PATH: submit from a login node, or see --dry-run")
    command = ["bash", "-eu", "-c", _SBATCH, "bash", str(site or ""), str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line.removeprefix("sbatch: error: ") for line in done.stderr.splitlines() if line.strip()]
        raise UserError(f"sbatch refuses the job: {'; '.join(lines) or f'exit code {done.returncode}'}")
    return done.stdout.strip().split(";")[0]


def jobs() -> dict[str, str] | None:
    """This user's jobs in the queue: number, 12 or 12_3, to state and, where it waits, why.

    Returns:
        None where squeue is missing or does not answer: then nothing is known.
    """
    try:
        done = subprocess.run(
            ["squeue", "--me", "--array", "--noheader", "--format=%i|%T|%r"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    found = {}
    for line in done.stdout.splitlines():
        number, state, reason = line.split("|", 2)
        found[number] = state.lower() if reason == "None" else f"{state.lower()} ({reason})"
    return found
