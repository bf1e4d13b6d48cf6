"""The host backend: Megatron's own trainer on a machine without a GPU.

Megatron names the device "cuda" in its sources. `install()` makes those names mean host memory, so that the
unmodified trainer runs on the CPU with gloo: any tensor, pipeline, virtual-pipeline, sequence or data parallel
layout can be tried before there are nodes to run it on. Numbers are real; speed is the CPU's.

It replaces, until `uninstall()`: the device of factory functions and of `.to`/`.cuda`, the CUDA random state (the
host generator stands in), streams, events and memory statistics (harmless stand-ins), the CUDA-only arguments of
`torch.distributed`, and Megatron's check for a GPU. `torch.cuda.is_available()` stays False. torch.compile is off.
"""

import collections
import contextlib
import functools
import logging
import os
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import torch

# Megatron flags whose defaults need CUDA or a CUDA-only package.
FLAGS = ["--distributed-backend", "gloo", "--no-rope-fusion", "--no-masked-softmax-fusion"]

# fmt: off
_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones", "ones_like", "rand",
    "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like",
)
# fmt: on

_HOST = torch.device("cpu")
_undo: list[Callable[[], None]] = []


def is_needed() -> bool:
    """True when no GPU is visible."""
    return not torch.cuda.is_available()


def is_installed() -> bool:
    return bool(_undo)


def install() -> None:
    """Let Megatron run on the host. Call it before Megatron is imported; a second call does nothing."""
    if _undo:
        return
    if "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ:  # Megatron's check for tensor parallelism
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        _undo.append(lambda: os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None))
    _replace_tensor_placement()
    _replace_cuda_runtime()
    _replace_data_loading()
    _replace_distributed()
    _replace_megatron()


def uninstall() -> None:
    """Put back everything that `install()` replaced.

    Functions that Megatron compiled when it was imported on the host stay uncompiled.
    """
    while _undo:
        _undo.pop()()
    if rules := sys.modules.get("torch._dynamo.trace_rules"):
        rules.clear_lru_cache()  # the compiler took the replaced functions for torch's


def _replace(owner: Any, name: str, replacement: Any) -> None:
    original = getattr(owner, name)
    _undo.append(lambda: setattr(owner, name, original))
    setattr(owner, name, replacement)


def _names_cuda(device: Any) -> bool:
    return (isinstance(device, torch.device) and device.type == "cuda") or (
        isinstance(device, str) and device.startswith("cuda")
    )


def _on_host(function: Callable) -> Callable:
    """The function, with a cuda device (given by keyword or by position) replaced by the host."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _HOST
        if any(map(_names_cuda, args)):
            args = tuple(_HOST if _names_cuda(arg) else arg for arg in args)
        return function(*args, **kwargs)

    return wrapper


def _replace_tensor_placement() -> None:
    for name in _FACTORIES:
        _replace(torch, name, _on_host(getattr(torch, name)))
    for name in ("to", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        _replace(torch.Tensor, name, _on_host(getattr(torch.Tensor, name)))
    _replace(torch.nn.Module, "to", _on_host(torch.nn.Module.to))
    _replace(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor)
    _replace(torch.nn.Module, "cuda", lambda module, *args, **kwargs: module)

    type_of = torch.Tensor.type

    def cuda_type(tensor, *args, **kwargs):
        # Megatron's optimizer sorts parameters by the name of their CUDA type.
        result = type_of(tensor, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    _replace(torch.Tensor, "type", cuda_type)


class _Event:
    """torch.cuda.Event on the wall clock."""

    def __init__(self, *args, **kwargs):
        self._seconds = 0.0

    def record(self, *args):
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: "_Event") -> float:
        return (end._seconds - self._seconds) * 1e3

    def synchronize(self):
        pass

    def wait(self, *args):
        pass


def _returning(value: Any) -> Callable:
    return lambda *args, **kwargs: value


def _replace_cuda_runtime() -> None:
    properties = types.SimpleNamespace(
        name="host", major=0, minor=0, total_memory=1, multi_processor_count=os.cpu_count()
    )
    stand_ins = {
        "current_device": _returning(_HOST),
        "is_available": _returning(False),  # it may count devices, as DeepSpeed asks it to
        # Megatron sets up model parallelism only where it counts at least one device.
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "set_device": _returning(None),
        "get_device_name": _returning("host"),
        "get_device_properties": _returning(properties),
        "get_device_capability": _returning((0, 0)),
        "synchronize": _returning(None),
        "empty_cache": _returning(None),
        "ipc_collect": _returning(None),
        "reset_peak_memory_stats": _returning(None),
        "memory_allocated": _returning(0),
        "max_memory_allocated": _returning(0),
        "memory_reserved": _returning(0),
        "max_memory_reserved": _returning(0),
        "memory_stats": lambda *args: collections.defaultdict(int),
        "mem_get_info": _returning((1, 1)),
        "is_current_stream_capturing": _returning(False),
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "current_stream": lambda *args, **kwargs: torch.cpu.current_stream(),
        "default_stream": lambda *args, **kwargs: torch.cpu.current_stream(),
        "Stream": lambda *args, **kwargs: torch.cpu.Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "Event": _Event,
    }
    for name, stand_in in stand_ins.items():
        _replace(torch.cuda, name, stand_in)


def _replace_data_loading() -> None:
    start = torch.utils.data.DataLoader.__iter__

    def start_without_drawing(loader):
        # A new iterator draws a seed from the host generator. Dropout draws from it too, here, and must not notice:
        # a resumed run starts its iterators at another moment than the run that it continues.
        state = torch.get_rng_state()
        try:
            return start(loader)
        finally:
            torch.set_rng_state(state)

    _replace(torch.utils.data.DataLoader, "__iter__", start_without_drawing)


def _without(function: Callable, *names: str) -> Callable:
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        for name in names:
            kwargs.pop(name, None)
        return function(*args, **kwargs)

    return wrapper


def _replace_distributed() -> None:
    distributed = torch.distributed
    _replace(distributed, "init_process_group", _without(distributed.init_process_group, "device_id"))
    _replace(distributed, "barrier", _without(distributed.barrier, "device_ids"))


def _not_about_host_generator(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


def _replace_megatron() -> None:
    # Compiling Megatron's small fused functions for the CPU takes longer than a trial run.
    _replace(torch, "compile", lambda function=None, **kwargs: function or (lambda decorated: decorated))

    from megatron.core.tensor_parallel import random

    _replace(random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state())
    _replace(random, "_set_cuda_rng_state", lambda new_state, *args, **kwargs: torch.set_rng_state(new_state))

    # Megatron warns where the host generator advances in place of the GPU's: everywhere, here.
    logger = logging.getLogger(random.__name__)
    logger.addFilter(_not_about_host_generator)
    _undo.append(lambda: logger.removeFilter(_not_about_host_generator))

    from megatron.training import training

    _replace(
        training,
        "initialize_megatron",
        functools.partial(training.initialize_megatron, allow_no_cuda=True),
    )
