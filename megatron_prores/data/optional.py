"""Imports that are slow, noisy or optional, made where they are needed."""

import contextlib
import importlib
import logging
import warnings
from collections.abc import Iterator
from types import ModuleType

from megatron_prores.errors import UserError


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back warnings, as text and as log records ("Apex is not installed", "retrying in 1s"); errors still pass."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def require(name: str) -> ModuleType:
    """Import a module that comes with the `hf` extra.

    Raises:
        UserError: it is not installed.
    """
    try:
        with quiet():
            return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"prepare-data needs {name}, which does not import ({first_line(error)}); pip install 'megatron_prores[hf]'"
        ) from error


def first_line(error: BaseException) -> str:
    """What an error says, on one line."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__
