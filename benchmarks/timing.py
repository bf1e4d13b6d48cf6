"""Times functions in turns, so that drift of the machine and its caches hit all alike."""

import gc
import os
import random
import sys
import time
from collections.abc import Callable

import psutil
import torch

FEWEST_ROUNDS, MOST_ROUNDS = 7, 200
BUSY = 0.1
"""Another process that takes this much of a core is worth a warning."""

# glibc gives large blocks back to the kernel and takes them anew, page by page, on every call: that would be most of
# what is timed. In a training run the allocator is in a steady state.
_STEADY_ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "34359738368"}
_COPIED_BYTES = {"cpu": 2**28, "cuda": 2**29}
_FLUSHED_BYTES = 2**28  # more than any GPU's L2
_HEAD_START_CYCLES = 2_000_000  # a millisecond: longer than Python takes to queue one call


def restart_with_steady_allocator() -> None:
    """glibc reads these variables once, when the process starts."""
    if any(name not in os.environ for name in _STEADY_ALLOCATOR):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**_STEADY_ALLOCATOR, **os.environ})


class Copy:
    """A plain copy of a block larger than the caches: the bandwidth that there is."""

    def __init__(self, device: str):
        self.source = torch.ones(_COPIED_BYTES[device] // 4, device=device)
        self.target = torch.empty_like(self.source)

    def __call__(self) -> None:
        self.target.copy_(self.source)

    def bandwidth(self, seconds: float) -> float:
        """Bytes read and written in a second."""
        return 2 * 4 * self.source.numel() / seconds


def time_in_turns(
    functions: dict[str, Callable[[], object]],
    device: str,
    seconds: float,
    before_round: Callable[[int], None] = lambda number: None,
) -> dict[str, list[float]]:
    """Seconds of every function in every round, each function once a round and in a new order each time."""
    order, shuffle = list(functions), random.Random(0).shuffle
    times: dict[str, list[float]] = {name: [] for name in functions}
    time_round = _gpu_round() if device == "cuda" else _cpu_round
    gc.collect()
    gc.disable()
    try:
        end = time.perf_counter() + seconds
        for number in range(MOST_ROUNDS):
            if number >= FEWEST_ROUNDS and time.perf_counter() > end:
                break
            shuffle(order)
            before_round(number)
            for name, taken in time_round({name: functions[name] for name in order}).items():
                times[name].append(taken)
    finally:
        gc.enable()
    return times


def _cpu_round(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    times = {}
    for name, function in functions.items():
        start = time.perf_counter()
        function()
        times[name] = time.perf_counter() - start
    return times


def _gpu_round() -> Callable[[dict[str, Callable[[], object]]], dict[str, float]]:
    """The GPU's own time from a cold L2, without the gaps in which it would wait for Python."""
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device="cuda")

    def time_round(functions):
        events = {}
        for name, function in functions.items():
            events[name] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            flushed.zero_()
            torch.cuda._sleep(_HEAD_START_CYCLES)
            events[name][0].record()
            function()
            events[name][1].record()
            torch.cuda.synchronize()
        return {name: start.elapsed_time(end) / 1e3 for name, (start, end) in events.items()}

    return time_round


class Watch:
    """Which other processes were busy between its start and `others()`."""

    def __init__(self):
        self.started, self.before = time.perf_counter(), self._seconds()

    @staticmethod
    def _seconds() -> dict[tuple[int, str], float]:
        me = psutil.Process()
        own = {me.pid, *(child.pid for child in me.children(recursive=True))}
        return {
            (process.pid, process.info["name"]): process.info["cpu_times"].user + process.info["cpu_times"].system
            for process in psutil.process_iter(["name", "cpu_times"])
            if process.pid not in own and process.info["cpu_times"]
        }

    def others(self) -> dict[str, float]:
        """Name and share of a core of each process above `BUSY`."""
        wall = time.perf_counter() - self.started
        shares = {
            name: (seconds - self.before.get((pid, name), 0.0)) / wall
            for (pid, name), seconds in sorted(self._seconds().items(), key=lambda item: item[1])
        }
        return {name: share for name, share in shares.items() if share > BUSY}
