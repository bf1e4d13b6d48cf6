"""`prores compare`: train arms from several seeds, all else equal, and report what differs."""

import argparse
import os
import shlex
import signal
import sys
from pathlib import Path

from megatron_prores.errors import UserError, is_text
from megatron_prores.options import Parser, count


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="prores compare",
        usage="%(prog)s --arms FILE --output DIR [options] --config FILE [FLAGS OF THE TRAINER]",
        description="Train every arm from every seed and write a report (HTML, PNG, CSV). Runs that are finished are "
        "not done again, others continue. All other flags, --config among them, are the trainer's and shared by all.",
    )
    parser.add_argument("--arms", required=True, metavar="FILE", help="YAML: name of an arm -> its flags and values")
    parser.add_argument("--output", required=True, metavar="DIR", help="report, and a folder for each run")
    parser.add_argument("--seeds", type=count, default=3, metavar="N", help="of each arm: 1 to N (default: 3)")
    parser.add_argument("--processes", type=count, default=1, metavar="P", help="of each run (default: 1)")
    parser.add_argument(
        "--jobs", type=count, metavar="N", help="runs at a time (default: as many as there are GPUs, or cores)"
    )
    parser.add_argument(
        "--evaluate-data",
        metavar="PREFIX",
        help="held-out set for the last checkpoints (default: the validation data, where it is one dataset)",
    )
    parser.add_argument("--report-only", action="store_true", help="train nothing; report what is finished")
    return parser


def main(argv: list[str]) -> None:
    """Train what is left, write the report, and print what came out; exit code 1 if a run failed.

    Raises:
        UserError: an arm could not be trained, or --output holds a comparison with other settings.
    """
    options, flags = _parser().parse_known_args(argv)
    for word in argv:
        if not is_text(word):
            raise UserError(f"{word!r} is not UTF-8 text, and the report shows the command: rename it")
    from megatron_prores.compare import arms, page, results, wording

    compared = arms.read_arms(options.arms)
    output = Path(options.output).resolve()
    if options.report_only:
        arms.check_trained(options.arms, compared, output / "arms")
    failures = [] if options.report_only else _train(argv, options, flags, compared, output)
    finished = results.read_results(compared, output)
    path = page.write_report(finished, output)
    for line in [*wording.sentences(finished), f"report: {path}", *(f"failed: {failure}" for failure in failures)]:
        _say(line)
    if failures:
        sys.exit(1)


def _train(argv: list[str], options: argparse.Namespace, flags: list[str], compared: list, output: Path) -> list[str]:
    """Carry out what is not finished; what failed."""
    from megatron_prores.compare import page, plan, pool

    seeds = range(1, options.seeds + 1)
    slots = _slots(options, "--host" in flags)  # before the plan, for which this process is on the host: no GPU counts
    runs = plan.plan_runs(compared, seeds, flags, options.processes, output, options.evaluate_data)
    (output / page.COMMAND_FILE).write_text(f"prores compare {shlex.join(argv)}\n")
    left = sum(not run.is_finished() for run in runs)
    _say(f"{len(runs)} runs of {runs[0].length} iterations, {left} to do, up to {len(slots)} at a time")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return pool.train_all(runs, slots, _say)
    except KeyboardInterrupt:
        _say("interrupted: the same command goes on where it stopped")
        raise


def _interrupt(*_) -> None:
    raise KeyboardInterrupt


def _slots(options: argparse.Namespace, on_host: bool) -> list[dict[str, str]]:
    """Variables of the runs that are trained at a time: their GPUs, or on the host one thread for each process.

    The number of threads changes the order of sums, so that it must not depend on how many runs share the machine.
    """
    import torch

    gpus = 0 if on_host else torch.cuda.device_count()
    if not gpus:
        jobs = options.jobs or max(1, (os.cpu_count() or 1) // options.processes)
        return [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}] * jobs
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    jobs = min(options.jobs or gpus, gpus // options.processes)
    if not jobs:
        raise UserError(f"--processes {options.processes}: there are {gpus} GPUs")
    sets = (visible[index * options.processes : (index + 1) * options.processes] for index in range(jobs))
    return [{"CUDA_VISIBLE_DEVICES": ",".join(devices)} for devices in sets]


def _say(line: str) -> None:
    from megatron_prores.megatron import screen

    screen.say(line)
