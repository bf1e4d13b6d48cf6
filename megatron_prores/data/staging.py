"""Output files that appear all at once, when they are complete, or not at all."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_prores.errors import UserError


@contextlib.contextmanager
def staging(prefix: Path, names: Sequence[str], overwrite: bool) -> Iterator[Path]:
    """A hidden folder beside the outputs, in which they are written; `publish` then renames them.

    The folder is locked while a run uses it, and the lock ends with the process. What lies in an unlocked one was
    left by a run that was killed, and is removed.

    Args:
        prefix: where the outputs go; its folder is made where it is missing.
        names: the file and folder names that will be published, without their folder.
        overwrite: whether outputs may exist already.

    Raises:
        UserError: the outputs exist, another run is writing them, or the folder cannot be written.
    """
    existing = [name for name in names if (prefix.parent / name).exists()]
    if existing and not overwrite:
        raise UserError(f"{prefix.parent / existing[0]} exists already; --overwrite replaces it")
    folder = prefix.parent / f".{prefix.name}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"cannot write in {prefix.parent} ({error.strerror})") from error
    try:
        _lock(lock, folder, prefix)
        try:
            _empty(folder)
            yield folder
        except OSError as error:
            raise UserError(f"cannot write {error.filename or prefix} ({error.strerror})") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def publish(folder: Path, target: Path, names: Sequence[str]) -> None:
    """Rename `folder / name` to `target / name`, in an order in which an incomplete dataset has no `.idx`."""
    for path in folder.rglob("*"):
        if path.is_file():
            _sync(path)  # or a power failure could leave the new name on an empty file
    is_index = {name: name.endswith(".idx") for name in names}
    for name in sorted(names, key=is_index.get, reverse=True):
        _remove(target / name)
    for name in sorted(names, key=is_index.get):
        os.replace(folder / name, target / name)


def _lock(descriptor: int, folder: Path, prefix: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another prepare-data is writing {prefix}") from None
    except OSError:
        return  # a file system without locks: as if there were no other run
    if not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat()):
        raise UserError(f"another prepare-data has just finished {prefix}")


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
