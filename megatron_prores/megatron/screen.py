"""What a person reads while Megatron runs, apart from what Megatron prints."""

import logging
import os
import sys
import warnings
from typing import TextIO

import torch

_screen: TextIO = sys.stdout


def hush() -> None:
    """Hold back Python's warnings and log records below ERROR."""
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.ERROR)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found"
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # "Retrying in 8s", where a tokenizer is neither here nor there


def quiet() -> None:
    """Keep the terminal for `say()`: what Megatron and its libraries print to stdout is dropped from now on.

    At file-descriptor level, because gloo and NCCL print from C++. stderr stays as it is, for tracebacks and
    crashes, but hushed. Child processes inherit this.
    """
    global _screen
    hush()
    if _screen is not sys.stdout:
        return
    _screen = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, encoding="utf-8", errors="replace")
    sys.stdout.flush()
    dropped = os.open(os.devnull, os.O_WRONLY)
    os.dup2(dropped, sys.stdout.fileno())
    os.close(dropped)
    sys.unraisablehook = lambda unraisable: None  # destructors of half-built objects, after an error told below


def say(line: str) -> None:
    """Print a line for the person at the terminal, whether or not Megatron's own output is shown."""
    print(line, file=_screen, flush=True)


def is_first_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def complain(error: Exception) -> None:
    """Print an error as one line on stderr, from one rank only."""
    if _claims_the_word():
        print(f"error: {error}", file=sys.stderr, flush=True)


def _claims_the_word() -> bool:
    """True on the first rank that asks. Before the ranks are connected all fail alike and rank 0 speaks."""
    if not torch.distributed.is_initialized():
        return is_first_rank()
    store = torch.distributed.distributed_c10d._get_default_store()
    return store.add("prores/error", 1) == 1
