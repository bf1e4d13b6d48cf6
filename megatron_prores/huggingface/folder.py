"""A folder that is there whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_prores.errors import UserError, is_text


def check_new(path: str, mark: str, overwrite: bool) -> None:
    """Refuse an output folder that holds something, or cannot be made.

    Args:
        mark: a file that says that a folder came from this command. No other folder is ever replaced.

    Raises:
        UserError: names it.
    """
    folder = Path(path).absolute()
    if not is_text(str(folder)):
        raise UserError(f"--output {path}: no model can be saved at a path that is not UTF-8; give another")
    if folder.is_symlink() or folder.exists():
        if not folder.is_dir() or folder.is_symlink():
            raise UserError(f"--output {path} is there and is not a folder")
        if any(folder.iterdir()):
            if not (folder / mark).is_file():
                raise UserError(f"--output {path} is not empty: name another folder")
            if not overwrite:
                raise UserError(f"--output {path} is not empty: name another folder, or replace it with --overwrite")
    parent = next(parent for parent in folder.parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"--output {path} cannot be written: {parent} is not writable")


@contextmanager
def new_folder(path: str, mark: str, overwrite: bool = False) -> Iterator[Path]:
    """An empty folder to write into, that takes its place at `path` when all went well.

    Until then it is `.NAME.partial` beside it. What a killed process left there goes with the next try.

    Raises:
        UserError: as `check_new()`.
    """
    folder = Path(path).absolute()
    partial, old = (folder.with_name(f".{folder.name}.{state}") for state in ("partial", "old"))
    if old.exists() and not folder.exists():  # killed between the two renames below
        old.rename(folder)
    check_new(path, mark, overwrite)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        check_new(path, mark, overwrite)
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
