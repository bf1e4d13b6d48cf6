"""Runs as forks of one process that has Megatron imported: a second or two each, where importing takes seven.

The zygote imports what a run imports, in the order of a run that is not `--verbose`, and does nothing else: it parses
no argument, draws no random number and starts no thread. Every fork gets its own command line, environment, folder
and output, and runs the module as `python -m` does. The ranks of one run are led by a fork
that stands in for torchrun: it sets the same variables, serves the same store, and ends all ranks when one fails.

What a fork cannot show is what importing does: variables that are read then, what is printed then, a forgotten import,
and hash seeds that differ between ranks. Runs of fresh processes, some under torchrun, stay for that.
"""

import atexit
import ctypes
import functools
import gc
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

MEGATRON = (
    *("torch._dynamo", "torch.onnx", "megatron.core.models.mimo"),
    *("transformers.models.auto.tokenization_auto", "transformers.convert_slow_tokenizer"),
    *("megatron_prores._C", "megatron_prores.megatron.gpt", "megatron_prores.megatron.generate"),
    *("megatron_prores.megatron.plan", "megatron_prores.megatron.progress", "megatron_prores.megatron.guard"),
)

# What each entry module imports when it runs. A zygote is shared by those that import the same.
IMPORTS = {
    "megatron_prores.megatron.pretrain_gpt": MEGATRON,
    "megatron_prores.cli": MEGATRON,
    "megatron_prores.deepspeed.pretrain_gpt": (*MEGATRON, "megatron_prores.deepspeed.trainer"),
}


def environment(**extra: str) -> dict[str, str]:
    """For runs on the host, also where there are GPUs."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **extra}


@dataclass
class Task:
    """What to run.

    Attributes:
        module: run as `__main__`.
        argv: the command line without the program.
        ranks: processes; one is started as without torchrun.
        env: the whole environment.
        folder: to run in.
        output: file for stdout of all ranks; `errors` is stderr's.
    """

    module: str
    argv: list[str]
    ranks: int
    env: dict[str, str]
    folder: Path
    output: Path
    errors: Path


class Job:
    """A started task, with what is needed of `subprocess.Popen`."""

    def __init__(self, pid: int, connection: Connection):
        self.pid = pid
        self._connection = connection
        self._returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self._returncode is None and self._connection.poll():
            self._returncode = self._connection.recv()
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        if self._returncode is None and not self._connection.poll(timeout):
            raise subprocess.TimeoutExpired("a fork", timeout)
        return self.poll()


class Zygote:
    """The process that forks; it runs one task at a time and ends with the process that started it."""

    def __init__(self, modules: tuple[str, ...]):
        self._connection, theirs = Pipe()
        with theirs:
            arguments = [str(os.getpid()), str(theirs.fileno()), *modules]
            self._process = subprocess.Popen(
                [sys.executable, __file__, *arguments],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for pytest
            )

    def start(self, task: Task) -> Job:
        self._connection.send(task)
        return Job(self._connection.recv(), self._connection)


def zygote(module: str) -> Zygote:
    """The zygote for an entry module, started when it is first asked for."""
    return _zygote(IMPORTS[module])


@functools.cache
def _zygote(modules: tuple[str, ...]) -> Zygote:
    return Zygote(modules)


def _die_with(parent: int) -> None:
    """End by SIGKILL when the parent ends, however it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _fork() -> int:
    """`os.fork()`, with a child in a session of its own that ends with its parent."""
    parent = os.getpid()
    if child := os.fork():
        return child
    _die_with(parent)
    os.setsid()
    return 0


def _import(modules: list[str]) -> None:
    from megatron_prores.megatron import host, screen

    # As launch.parse() does: Megatron's log handler goes where there is none yet, and Megatron is imported on the host.
    screen.hush()
    host.install()
    for module in modules:
        importlib.import_module(module)
    host.uninstall()
    if threads := len(os.listdir("/proc/self/task")) - 1:
        raise RuntimeError(f"importing started {threads} threads, which a fork would lack")
    gc.collect()
    gc.freeze()


def _serve(connection: Connection) -> Task | None:
    """Fork for every task that comes in.

    Returns:
        In a fork what it is to run; None when no more can come.
    """
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return None
        if child := _fork():
            connection.send(child)
            connection.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            continue
        connection.close()
        for descriptor, file in ((1, task.output), (2, task.errors)):
            opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(opened, descriptor)
            os.close(opened)
        return task if task.ranks == 1 else _lead(task)


def _lead(task: Task) -> Task:
    """Be torchrun: returns only in the ranks, which find their place in their environment."""
    listener = socket.create_server(("127.0.0.1", 0))
    world = {"WORLD_SIZE": task.ranks, "LOCAL_WORLD_SIZE": task.ranks, "GROUP_RANK": 0}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": listener.getsockname()[1]}
    world |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_RUN_ID": "fork"}
    running = []
    for rank in range(task.ranks):
        if child := _fork():
            running.append(child)
            continue
        listener.close()
        task.env |= {name: str(value) for name, value in {**world, "RANK": rank, "LOCAL_RANK": rank}.items()}
        return task
    os._exit(_watch(running, listener))


def _watch(running: list[int], listener: socket.socket) -> int:
    from torch.distributed import TCPStore

    address, descriptor = listener.getsockname(), listener.detach()
    # Not before the ranks are forked: it has threads.
    store = TCPStore(*address, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    while running:
        time.sleep(0.1)  # torchrun's interval
        for child in running.copy():
            pid, status = os.waitpid(child, os.WNOHANG)
            if not pid:
                continue
            running.remove(child)
            if status:
                for other in running:
                    os.killpg(other, signal.SIGTERM)
                for other in running:
                    os.waitpid(other, 0)
                return 1
    del store
    return 0


def _become(task: Task) -> None:
    import numpy

    os.chdir(task.folder)
    sys.path[0] = str(task.folder)
    os.environ.clear()
    os.environ.update(task.env)
    numpy.random.seed()
    sys.argv[1:] = task.argv
    sys.modules.pop(task.module, None)
    runpy.run_module(task.module, run_name="__main__", alter_sys=True)
    # The interpreter's end without its last part, which takes half a second to clear every module. Only where the run
    # ended well: after an error, destructors of half-built objects must not add to what was said.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    parent, descriptor, *modules = sys.argv[1:]
    _die_with(int(parent))
    _import(modules)
    task = _serve(Connection(int(descriptor)))
    if task is None:
        os._exit(0)
    _become(task)


if __name__ == "__main__":
    main()
