"""The one task that Slurm starts on every node: torchrun, and a warning that reaches the ranks.

    srun --ntasks-per-node=1 python -m megatron_prores.slurm.node --endpoint HOST:PORT --processes 8 --logs DIR \
        -- -m megatron_prores.megatron.pretrain_gpt --exit-signal-handler ...

Slurm warns with TERM (preemption, requeue, cancellation) or with the signal of `--signal` (time limit). Where it tracks
processes by cgroup, only the task's own process gets it, and everything dies as soon as that process ends. torchrun is
no help: it dies of USR1, and at TERM it stops the ranks and exits 1 although they have saved. So this process takes
both signals, keeps torchrun out of it, and sends TERM to the ranks, which save, agree, and exit 0; torchrun follows.
"""

import argparse
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_prores.errors import UserError, run_and_exit

_WARNINGS = (signal.SIGTERM, signal.SIGUSR1)
_POLL_SECONDS = 0.2

# From <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def torchrun_command(endpoint: str, processes: int, logs: str, program: list[str], host_suffix: str = "") -> list[str]:
    """torchrun on this node of this job step, by Slurm's variables.

    Args:
        endpoint: HOST:PORT of the rendezvous, the same on all nodes; its host is the step's first node.
        logs: a folder for one log per rank.
        program: what torchrun starts, with its arguments.
        host_suffix: makes a node's name resolve to its address on the fast network.
    """
    node = os.environ["SLURMD_NODENAME"]
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nnodes={os.environ['SLURM_STEP_NUM_NODES']}",
        f"--nproc-per-node={processes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={os.environ['SLURM_JOB_ID']}-{restarts}",
        # By number, because a host may not know the name that others call it by.
        f"--rdzv-conf=is_host={int(os.environ['SLURM_NODEID'] == '0')}",
        # Slurm's name of this node; torchrun's own choice, the host's full name, need not resolve elsewhere.
        f"--local-addr={node}{host_suffix}",
        # Through a file each, so that lines of different ranks do not run into each other.
        *("--tee=3", f"--log-dir={logs}"),
        *program,
    ]


def check_interface(name: str, logs: str) -> None:
    """Find out before torchrun starts that the network interface of the site file is not on this node.

    A beginning of a name is enough for NCCL, which also takes `=name` and `^name`.

    Args:
        logs: the folder of this start's logs: a job ends at its first start where it finds an error line there.

    Raises:
        UserError: names those that are.
    """
    found = [interface for _, interface in socket.if_nameindex()]
    if not name or name[0] in "=^" or any(interface.startswith(name) for interface in found):
        return
    node = os.environ.get("SLURMD_NODENAME", "this node")
    line = f"network_interface={name} is not on {node}: set it in the site file to one of {', '.join(found)}"
    Path(logs).mkdir(parents=True, exist_ok=True)
    (Path(logs) / f"{node}.log").write_text(f"error: {line}\n")
    raise UserError(line)


def run(command: list[str]) -> int:
    """Run torchrun to its end, with warnings passed on to its ranks.

    Returns:
        torchrun's exit code; 128 + N where signal N ended it.
    """
    warned = False

    def warn(signum: int, frame) -> None:
        nonlocal warned
        warned = True

    for signum in _WARNINGS:
        signal.signal(signum, warn)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_as_launcher)
    told: set[int] = set()
    while True:
        try:
            code = launcher.wait(_POLL_SECONDS)
            break
        except subprocess.TimeoutExpired:
            if warned:
                told |= _tell_ranks(launcher.pid, told)
    _kill_orphans()
    return code if code >= 0 else 128 - code


def _as_launcher() -> None:
    """In torchrun's process, before it starts: it dies with this one, and never of USR1.

    Where Slurm tracks processes by parentage, every process of the task gets the signal.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _tell_ranks(launcher: int, told: set[int]) -> set[int]:
    """Send TERM to the ranks that are ready for it; the others are still loading, and would die of it."""
    ready = {rank for rank in _children(launcher) if rank not in told and catches(rank, signal.SIGTERM)}
    for rank in ready:
        try:
            os.kill(rank, signal.SIGTERM)
        except ProcessLookupError:
            continue
        print(f"warned of the end: process {rank} saves after this step", file=sys.stderr, flush=True)
    return ready


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler for the signal; False where there is no such process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return bool(caught and int(caught[1], 16) >> (signum - 1) & 1)


def _children(pid: int) -> Iterator[int]:
    """Of every thread: a child belongs to the thread that started it."""
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            yield from map(int, thread.read_text().split())
        except OSError:
            continue


def _kill_orphans() -> None:
    """A torchrun that was killed leaves its ranks to this process, which adopts orphans, and would wait for no one."""
    while orphans := list(_children(os.getpid())):
        for orphan in orphans:
            os.kill(orphan, signal.SIGKILL)
            os.waitpid(orphan, 0)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m megatron_prores.slurm.node", allow_abbrev=False)
    parser.add_argument("--endpoint", required=True, metavar="HOST:PORT", help="of the rendezvous")
    parser.add_argument("--processes", required=True, type=int, metavar="N", help="on each node")
    parser.add_argument("--logs", required=True, metavar="DIR", help="one log per rank goes there")
    parser.add_argument("--host-suffix", default="", metavar="TEXT", help="added to a node's name to make its address")
    parser.add_argument("--interface", default="", metavar="NAME", help="the network interface that must be there")
    parser.add_argument("program", nargs="+", help="what torchrun starts, after --")
    args = parser.parse_args()
    check_interface(args.interface, args.logs)
    sys.exit(run(torchrun_command(args.endpoint, args.processes, args.logs, args.program, args.host_suffix)))


if __name__ == "__main__":
    run_and_exit(main)
