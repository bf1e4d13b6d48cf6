"""All runs of a comparison, as many at a time as there are devices for."""

import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from tqdm import tqdm

from megatron_prores.compare.runs import Run, RunFailed, ask_to_stop, carry_out, stop
from megatron_prores.errors import UserError


def train_all(runs: Sequence[Run], slots: Sequence[Mapping[str, str]], say: Callable[[str], None]) -> list[str]:
    """Carry out what is not finished, in the order given.

    What a run computes does not depend on how many run beside it: each has processes, threads and a folder of its own.

    Args:
        slots: variables of the processes that can run at a time, one mapping for each run beside the others.
        say: is told of every run that ends.

    Returns:
        The messages of the runs that failed.
    """
    waiting: queue.SimpleQueue[Run] = queue.SimpleQueue()
    for run in runs:
        if not run.is_finished():
            waiting.put(run)
    failures: list[str] = []

    def tell(line: str) -> None:
        with tqdm.external_write_mode():  # not into the bar
            say(line)

    with _processes() as (start, stopped):

        def work(slot: Mapping[str, str]) -> None:
            while not stopped.is_set():
                try:
                    run = waiting.get_nowait()
                except queue.Empty:
                    return
                began = time.monotonic()
                try:
                    carry_out(run, slot, start)
                    tell(f"{run.name}: done in {_minutes(time.monotonic() - began)}")
                except (RunFailed, UserError, OSError) as error:
                    if not stopped.is_set():
                        failures.append(str(error))
                        tell(f"failed: {error}")

        threads = [threading.Thread(target=work, args=(slot,), daemon=True) for slot in slots]
        for thread in threads:
            thread.start()
        _watch(threads, runs)
    return failures


def _watch(threads: Iterable[threading.Thread], runs: Sequence[Run]) -> None:
    """A bar of all runs' iterations, until the threads have ended."""

    def done() -> int:
        return sum(run.length if run.is_finished() else run.step() for run in runs)

    total = sum(run.length for run in runs)
    with tqdm(total=total, initial=done(), unit="step", disable=None, desc="training") as bar:
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.5)
            bar.update(max(0, done() - bar.n))


@contextmanager
def _processes() -> Iterator[tuple[Callable[[subprocess.Popen], None], threading.Event]]:
    """A register of what runs; whatever ends the block early ends those processes."""
    running: list[subprocess.Popen] = []
    stopped = threading.Event()
    try:
        yield running.append, stopped
    finally:
        stopped.set()
        with _uninterrupted():  # by a second Ctrl-C, which would leave processes behind
            for process in running:
                ask_to_stop(process)
            for process in running:
                stop(process)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # which alone is interrupted
        yield
        return
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
