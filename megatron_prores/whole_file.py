"""Files that are replaced as a whole or not at all."""

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """The path of a new file, which replaces `path` at the end. After an error or a kill `path` is as it was.

    Raises:
        OSError: it cannot be written, or not replace the other.
    """
    path = Path(path)
    # In the same directory, so that the replacement is one rename.
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield new
        new.replace(path)
    finally:
        with contextlib.suppress(OSError):
            new.unlink()
