"""`prores submit`: a run, or an array of runs, into Slurm's queue, once it is known that it can run."""

import argparse
import itertools
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import megatron_prores
from megatron_prores.errors import UserError, is_text
from megatron_prores.options import Parser, count
from megatron_prores.slurm import checks, prepare, queue, script, state

_LAUNCH_SCRIPTS = Path(megatron_prores.__file__).parents[1] / "launch_scripts" / "slurm"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="prores submit",
        usage="%(prog)s --run DIR --nodes N [--gpus-per-node G] [options] --config FILE [FLAGS OF THE TRAINER]",
        description="Check a run against its nodes, write its batch script and hand that to Slurm. All other flags, "
        "--config among them, are the trainer's; checkpoints and logs go into the run's folder.",
    )
    parser.add_argument("--run", required=True, metavar="DIR", help="the run's folder, or that of an array's runs")
    parser.add_argument("--nodes", required=True, type=count, metavar="N")
    parser.add_argument("--gpus-per-node", type=count, metavar="G", help="asked of Slurm; a process for each")
    parser.add_argument("--processes-per-node", type=count, metavar="P", help="where there are no GPUs (--host)")
    parser.add_argument("--time", metavar="LIMIT", help="of one start, as sbatch takes it; the job continues itself")
    parser.add_argument(
        "--array",
        action="append",
        default=[],
        metavar="NAME=VALUE,VALUE",
        help="a run for each value of a flag; several of these: for each combination",
    )
    parser.add_argument("--at-once", type=count, metavar="N", help="runs of an array that may run together")
    parser.add_argument("--engine", choices=script.MODULES, default="megatron", help="(default: megatron)")
    parser.add_argument("--site", metavar="FILE", help="site file (default: launch_scripts/slurm/site.sh, if there)")
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="one more for sbatch: --sbatch=--exclusive"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script; write and submit nothing")
    return parser


def main(argv: list[str]) -> None:
    """Submit, and print the job's number and where to look.

    Raises:
        UserError: the run could not start on these nodes, is in the queue already, or Slurm refuses it.
    """
    options, flags = _parser().parse_known_args(argv)
    folder = Path(options.run).resolve()
    runs = tuple(_runs(folder, options.array))
    job = _job(options, folder, tuple(flags), runs)
    lengths = [prepare.run_length([*flags, *run.flags]) for run in runs]

    from megatron_prores.megatron import screen  # with torch, which takes seconds to load

    for note in [*checks.check_layouts(job), *checks.check_folders(job)]:
        print(f"note: {note}", file=sys.stderr)
    text = script.render(job)
    if options.dry_run:
        screen.say(text.rstrip())
        return
    _refuse_queued(runs)
    path = folder / "job.sbatch"
    try:
        for run in runs:
            run.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, errors="surrogateescape")
    except OSError as error:
        raise UserError(f"--run {options.run} cannot be written ({error.strerror})") from error
    number = queue.submit(path, job.site)
    for index, (run, length) in enumerate(zip(runs, lengths, strict=True)):
        name = f"{number}_{index}" if job.is_array else number
        state.write(run.folder, state.State("submitted", job=name, target=length))
    what = f"array {number}: {len(runs)} runs" if job.is_array else f"job {number}"
    screen.say(f"submitted {what}; {path}\nsee: prores status {shlex.quote(options.run)}")


def _runs(folder: Path, arrays: list[str]) -> Iterator[script.Run]:
    """The combinations of what --array gives, each with a folder that says which it is."""
    axes = []
    for text in arrays:
        name, _, values = text.partition("=")
        name = name.removeprefix("--")
        if not name or not all(values.split(",")):
            raise UserError(f"--array {text} is not NAME=VALUE,VALUE")
        axes.append([(name, value) for value in values.split(",")])
    if not axes:
        yield script.Run(folder)
        return
    names = [axis[0][0] for axis in axes]
    if len(set(names)) < len(names):
        raise UserError(f"--array gives a flag twice: {', '.join(names)}")
    combinations = list(itertools.product(*axes))
    if len(set(combinations)) < len(combinations):
        raise UserError("--array gives a value twice")
    for combination in combinations:
        parts = (f"{name.removeprefix('prores-')}-{re.sub(r'[^\w.+-]', '-', value)}" for name, value in combination)
        yield script.Run(folder / "_".join(parts), tuple(f"--{name}={value}" for name, value in combination))


def _job(options: argparse.Namespace, folder: Path, flags: tuple[str, ...], runs: tuple[script.Run, ...]) -> script.Job:
    job_sh = _LAUNCH_SCRIPTS / "job.sh"
    if not job_sh.is_file():
        raise UserError(f"{job_sh} is not there: prores submit needs a checkout of the repository (pip install -e)")
    if (options.gpus_per_node is None) == (options.processes_per_node is None):
        raise UserError("give --gpus-per-node, or with --host --processes-per-node")
    if options.at_once and len(runs) == 1:
        raise UserError("--at-once is for an --array")
    if bad := set('"%\n') & set(str(folder)):
        raise UserError(f"--run {folder}: Slurm cannot write to a path with {' or '.join(map(repr, sorted(bad)))}")
    if not is_text(str(folder)):
        raise UserError(f"--run {folder}: Megatron saves nothing at a path that is not UTF-8; give another")
    checks.refuse_short(options.time, options.sbatch)
    site = Path(options.site).resolve() if options.site else _LAUNCH_SCRIPTS / "site.sh"
    if options.site and not site.is_file():
        raise UserError(f"--site {options.site} is not there")
    gpus = [f"--gpus-per-node={options.gpus_per_node}"] if options.gpus_per_node else []
    limit = [f"--time={options.time}"] if options.time else []
    return script.Job(
        name=re.sub(r"[^\w.-]", "-", folder.name) or "prores",
        engine=options.engine,
        directory=Path.cwd(),
        job_sh=job_sh,
        site=site if site.is_file() else None,
        output=f"{folder}/slurm-{'%A_%a' if len(runs) > 1 else '%j'}.out",
        nodes=options.nodes,
        processes=options.gpus_per_node or options.processes_per_node,
        options=(*gpus, *limit, *options.sbatch),
        flags=flags,
        runs=runs,
        at_once=options.at_once,
    )


def _refuse_queued(runs: tuple[script.Run, ...]) -> None:
    """Two jobs in one folder would write over each other's checkpoints."""
    known = None
    for run in runs:
        found = state.read(run.folder)
        if found is None or found.state not in state.UNFINISHED:
            continue
        known = queue.jobs() or {} if known is None else known
        if found.job in known:
            raise UserError(f"{run.folder} belongs to job {found.job} ({known[found.job]}): scancel {found.job} first")
