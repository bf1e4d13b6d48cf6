"""What several commands ask of their options."""

import argparse
import os

from megatron_prores.errors import UserError


def count(text: str) -> int:
    """An argparse type: a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return int(text)


def check_output(path: str | None) -> None:
    """Find out before the work, not after it, that --output cannot be written.

    Raises:
        UserError: it is a folder, or its folder is missing or read-only.
    """
    if path is None:
        return
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.access(folder, os.W_OK):
        raise UserError(f"--output {path} cannot be written")
