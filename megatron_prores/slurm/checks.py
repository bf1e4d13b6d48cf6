"""What keeps a job from running, and what its user should know, before it waits in a queue."""

import re
from collections.abc import Iterator, Sequence

from megatron_prores.errors import UserError
from megatron_prores.slurm import prepare, script

_TIME = re.compile(r"(?:--time[= ]|-t ?)(.+)")

# By engine: the file in which its trainer names the last checkpoint.
_TRACKERS = {"megatron": prepare.TRACKER, "deepspeed": "latest"}


def check_layouts(job: script.Job) -> list[str]:
    """The notes of `prores plan` about every run on so many processes.

    Raises:
        UserError: a run could not start.
    """
    from megatron_prores.deepspeed import arguments
    from megatron_prores.megatron import launch

    is_deepspeed = job.engine == "deepspeed"
    extra = arguments.add_deepspeed_arguments if is_deepspeed else None
    notes: dict[str, None] = {}
    if job.site is None:
        notes["there is no site file: no account, partition or environment is chosen"] = None
    for run in job.runs:
        argv = [*job.flags, *run.flags]
        config, defaults = arguments.read(argv) if is_deepspeed else ({}, ())
        args = launch.parse_for_any_machine(argv, extra, defaults)
        if args.num_experts or args.use_checkpoint_args:
            notes["prores plan knows neither experts nor checkpoints: the layout is not checked"] = None
            continue
        from megatron_prores.megatron.plan import plan

        try:
            notes |= dict.fromkeys(plan(args, job.nodes * job.processes).notes)
            if is_deepspeed:
                arguments.reconcile(args, config)
            notes |= dict.fromkeys(_missing_data(args))
        except UserError as error:
            where = f"{run.folder.name}: " if job.is_array else ""
            raise UserError("\n".join(where + line for line in str(error).splitlines())) from error
    return list(notes)


def _missing_data(args) -> Iterator[str]:
    """Files that are not here are no error: the nodes may see other file systems."""
    from megatron.training.utils import get_blend_and_blend_per_split

    from megatron_prores.megatron.data_check import check_data

    try:
        check_data(args)
    except UserError as error:
        if not any(get_blend_and_blend_per_split(args)):
            raise
        yield f"seen from here, {error}"


def check_folders(job: script.Job) -> Iterator[str]:
    """What is in the runs' folders already: a start there continues it.

    Raises:
        UserError: it is the other engine's.
    """
    for run in job.runs:
        for engine, name in _TRACKERS.items():
            tracker = run.folder / "checkpoints" / name
            if not tracker.is_file():
                continue
            if engine != job.engine:
                raise UserError(f"{run.folder} holds checkpoints of --engine {engine}: give another --run")
            yield f"{run.folder} holds a checkpoint ({tracker.read_text().strip()}): the job continues from it"


def refuse_short(limit: str | None, options: Sequence[str]) -> None:
    """A start that is warned at once trains one step, saves and waits in the queue again, for ever.

    Args:
        limit: --time, as sbatch takes it.
        options: more for sbatch; a limit there wins.

    Raises:
        UserError: the warning comes at once.
    """
    given = f"--time {limit}"
    for option in options:
        if found := _TIME.fullmatch(option):
            limit, given = found[1], f"--sbatch={option}"
    if not limit or any(option.startswith("--signal") for option in options):
        return
    seconds = _seconds(limit)
    if seconds is not None and 0 < seconds <= script.WARNING_SECONDS:
        raise UserError(
            f"{given} leaves no time to train: Slurm warns {script.WARNING_SECONDS} s before the limit; "
            "give more, or a later warning with --sbatch=--signal=B:USR1@SECONDS"
        )


def _seconds(limit: str) -> int | None:
    """Of a time limit in one of sbatch's forms; None for another, which sbatch itself judges."""
    days, dash, rest = limit.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in (*parts, days or "0")) or len(parts) > 3:
        return None
    numbers = [*map(int, parts)]
    if not dash and len(numbers) < 3:  # minutes, or minutes:seconds
        numbers.insert(0, 0)
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
