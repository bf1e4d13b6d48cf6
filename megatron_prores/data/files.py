"""The bytes of a file, whether it is plain, gzip or zstd."""

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatron_prores.data.optional import first_line, require
from megatron_prores.errors import UserError

_COMPRESSED = (".gz", ".zst")
_CHUNK = 1 << 16


def format_of(path: Path) -> str:
    """The suffix that says what is inside, in lower case: `.jsonl` for `a.jsonl.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def is_compressed(path: Path) -> bool:
    """Whether the name ends in `.gz` or `.zst`."""
    return path.suffix.lower() in _COMPRESSED


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """The decompressed bytes of a file, as a buffered stream.

    Raises:
        UserError: the file cannot be read, or its compressed data are damaged or cut short.
    """
    kind = path.suffix.lower()
    zstandard = require("zstandard") if kind == ".zst" else None
    damaged = (EOFError, gzip.BadGzipFile, zlib.error, *([zstandard.ZstdError] if zstandard else []))
    try:
        with open(path, "rb") as raw:
            if kind == ".gz":
                yield gzip.GzipFile(fileobj=raw)
            elif zstandard:
                yield io.BufferedReader(_ZstdStream(raw, zstandard), 1 << 20)
            else:
                yield raw
    except damaged as error:
        raise UserError(f"{path}: damaged {kind} data ({first_line(error)})") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or first_line(error)})") from error


class _ZstdStream(io.RawIOBase):
    """All frames of a zstd file. zstandard's own reader takes a file that was cut short for one that is complete."""

    def __init__(self, compressed: BinaryIO, zstandard):
        # Archives made with `zstd --long=31` need the large window; it is only allocated for them.
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._compressed = compressed
        self._frame = self._decompressor.decompressobj()
        self._pending = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._pending:
            # What follows the end of a frame is the next frame.
            rest = self._frame.unused_data if self._frame.eof else b""
            chunk = rest or self._compressed.read(_CHUNK)
            if not chunk:
                if not self._frame.eof:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            if self._frame.eof:
                self._frame = self._decompressor.decompressobj()
            self._pending = memoryview(self._frame.decompress(chunk))
        size = min(len(buffer), len(self._pending))
        buffer[:size] = self._pending[:size]
        self._pending = self._pending[size:]
        return size
