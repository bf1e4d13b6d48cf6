"""What several commands ask of their options."""

import argparse
import os

from megatron_prores.errors import UserError


class Parser(argparse.ArgumentParser):
    """One that says in a line what it does not accept, and takes no abbreviations.

    Raises:
        UserError: from `parse_args()`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str):
        raise UserError(f"{self.prog}: {message}; see {self.prog} --help")


def count(text: str) -> int:
    """An argparse type: a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return int(text)


def refuse_torchrun(command: str) -> None:
    """For commands that load a model of any layout into one process.

    Raises:
        UserError: this process is one of several.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) != 1:
        raise UserError(f"{command} runs in one process: start it without torchrun")


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
