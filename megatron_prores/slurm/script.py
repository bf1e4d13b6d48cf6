"""The batch script of a run, or of an array of runs, as text."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# By engine: the module that torchrun starts.
MODULES = {
    "megatron": "megatron_prores.megatron.pretrain_gpt",
    "deepspeed": "megatron_prores.deepspeed.pretrain_gpt",
}


# Before the time limit: room for the longest step and a checkpoint.
WARNING_SECONDS = 300


@dataclass(frozen=True)
class Run:
    """One run: its folder and what distinguishes it in an array, as flags."""

    folder: Path
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """What is asked of Slurm.

    Attributes:
        directory: where the job runs; relative paths in flags count from there.
        job_sh: launch_scripts/slurm/job.sh.
        site: the site file; None for job.sh's own.
        output: of the batch script, with Slurm's % patterns.
        options: for sbatch, such as `--time=1:00:00`.
        processes: on each node.
        flags: of the trainer, the same for every run.
        at_once: how many runs of an array may run together.
    """

    name: str
    engine: str
    directory: Path
    job_sh: Path
    site: Path | None
    output: str
    nodes: int
    processes: int
    options: tuple[str, ...]
    flags: tuple[str, ...]
    runs: tuple[Run, ...]
    at_once: int | None = None

    @property
    def is_array(self) -> bool:
        return len(self.runs) > 1


def render(job: Job) -> str:
    """The script; `sbatch` takes it as it is, today or later."""
    lines = ["#!/usr/bin/env bash", *(f"#SBATCH {option}" for option in _directives(job))]
    lines += [
        "# Written by `prores submit`.",
        "# shellcheck disable=SC2016  # a $ in a name is one",
        "set -euo pipefail",
        f"cd {shlex.quote(str(job.directory))}",
    ]
    if job.site:
        lines.append(f"export PRORES_SITE={shlex.quote(str(job.site))}")
    lines.append(f"export PRORES_PROCESSES={job.processes}")
    lines += ["# shellcheck source=/dev/null", f"source {shlex.quote(str(job.job_sh))}"]
    lines += ["flags=(", *(f"    {line}" for line in _by_flag(job.flags)), ")"]
    if job.is_array:
        lines.append('case "$SLURM_ARRAY_TASK_ID" in')
        lines += [f"{index}) {_call(job, run)} ;;" for index, run in enumerate(job.runs)]
        lines.append("esac")
    else:
        lines.append(_call(job, job.runs[0]))
    return "\n".join([*lines, ""])


def _directives(job: Job) -> list[str]:
    array = f"--array=0-{len(job.runs) - 1}" + (f"%{job.at_once}" if job.at_once else "")
    return [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        *([array] if job.is_array else []),
        f'--output="{job.output}"',
        "--open-mode=append",
        "--requeue",
        # An option below may say otherwise.
        f"--signal=B:USR1@{WARNING_SECONDS}",
        *job.options,
    ]


def _call(job: Job, run: Run) -> str:
    own = [shlex.quote(word) for word in (str(run.folder), *run.flags)]
    return " ".join(["run_job", MODULES[job.engine], own[0], '"${flags[@]}"', *own[1:]])


def _by_flag(flags: Sequence[str]) -> list[str]:
    """A line for every flag with its values."""
    lines: list[list[str]] = []
    for word in flags:
        if word.startswith("--") or not lines:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return [" ".join(line) for line in lines]
