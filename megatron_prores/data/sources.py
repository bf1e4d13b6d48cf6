"""Documents, one after the other, out of files, folders and Hugging Face datasets."""

import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from megatron_prores.data.files import format_of, is_compressed, open_bytes
from megatron_prores.data.optional import first_line, quiet, require
from megatron_prores.errors import UserError

# Tests and test data, programs, and what others installed: not the library's own source.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
_RECORDS = (".jsonl", ".json", ".parquet")
_ROWS = 256  # rows of a table that are in memory at a time


@dataclass(frozen=True, slots=True)
class Document:
    """A text, and the place where it was found, for messages."""

    text: str
    origin: str

    def utf8(self) -> bytes:
        """The text in UTF-8.

        Raises:
            UserError: it holds half of a surrogate pair (as JSON's "\\ud800"), which is not text.
        """
        try:
            return self.text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{self.origin}: not valid Unicode ({error.reason}, character {error.start + 1})") from None


class Corpus:
    """All documents of the inputs, in an order that depends on nothing but their names. Can be read repeatedly.

    Attributes:
        total_bytes: size of all files; None where the amount of text is not known beforehand.
        skipped: files in folders that the latest reading passed over because they are not UTF-8 text.
        empty: documents that the latest reading passed over because they hold nothing but white space.
    """

    def __init__(self, inputs: Sequence[str], *, json_key: str = "text", split: str = "train", globs: Sequence = ()):
        """
        Args:
            inputs: paths of files or folders, names of Hugging Face datasets (`name` or `name:config`), or `stdlib`.
            json_key: the key or column of the text in JSON lines, parquet files and datasets.
            split: the split of Hugging Face datasets.
            globs: patterns for the files of folders; none means all. `*.py` holds at any depth.

        Raises:
            UserError: an input does not exist, cannot be read, or has no column `json_key`.
        """
        self.json_key, self.split, self.globs = json_key, split, tuple(globs)
        self.total_bytes: int | None = 0
        self.skipped = self.empty = 0
        try:
            self._readers = [reader for name in inputs for reader in self._resolve(name)]
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be read ({error.strerror})") from error

    def __iter__(self) -> Iterator[Document]:
        """Raises UserError where an input turns out to be malformed or damaged."""
        self.skipped = self.empty = 0
        for reader in self._readers:
            for document in reader():
                if document.text.isspace() or not document.text:
                    self.empty += 1
                else:
                    yield document

    def _resolve(self, name: str) -> list[partial]:
        if not name:
            raise UserError("--input holds an empty name")
        if name == "stdlib":
            return self._folder(Path(sysconfig.get_path("stdlib")), self.globs or ("*.py",), _NOT_STDLIB)
        path = Path(name).expanduser()
        if path.is_dir():
            return self._folder(path, self.globs, frozenset())
        if path.is_file():
            return [self._file(path)]
        if path.exists():
            raise UserError(f"{name}: neither a file nor a folder")
        # Anything that cannot be the name of a dataset is a path, and says so without asking the network.
        if name.count("/") > 1 or name[:1] in "./~" or name.endswith("/") or format_of(path) in (*_RECORDS, ".txt"):
            raise UserError(f"{name}: no such file or folder")
        self.total_bytes = None
        return [partial(self._rows, self._dataset(name), name)]

    def _folder(self, folder: Path, globs: Sequence[str], not_in: set[str] | frozenset[str]) -> list[partial]:
        names = []
        for here, folders, files in os.walk(folder, onerror=_stop):
            # Hidden folders hold repositories and caches, not text.
            folders[:] = [name for name in folders if name not in not_in and not name.startswith(".")]
            names += [os.path.relpath(os.path.join(here, name), folder) for name in files if not name.startswith(".")]
        if globs:
            names = [name for name in names if any(PurePosixPath(name).match(pattern) for pattern in globs)]
        return [self._file(folder / name, in_folder=True) for name in sorted(names) if (folder / name).is_file()]

    def _file(self, path: Path, in_folder: bool = False) -> partial:
        kind = format_of(path)
        # A plain .json in a folder of sources is a source like any other.
        records = kind in _RECORDS and not (in_folder and path.suffix == ".json")
        if kind == ".parquet" or is_compressed(path):
            self.total_bytes = None
        elif self.total_bytes is not None:
            self.total_bytes += path.stat().st_size
        if not records:
            return partial(self._text, path, in_folder)
        if kind != ".parquet":
            return partial(self._json_lines, path)
        if is_compressed(path):
            raise UserError(f"{path}: a parquet file is compressed inside; decompress it first")
        return partial(self._rows, self._parquet(path), str(path))

    def _text(self, path: Path, in_folder: bool) -> Iterator[Document]:
        with open_bytes(path) as stream:
            content = stream.read()
        try:
            if in_folder and b"\0" in content:
                raise ValueError("binary")
            yield Document(content.decode("utf-8-sig"), str(path))
        except ValueError as error:
            if not in_folder:
                raise UserError(
                    f"{path}: not UTF-8 text ({first_line(error)}); inputs are text, .jsonl, .json lines and .parquet"
                ) from error
            self.skipped += 1

    def _json_lines(self, path: Path) -> Iterator[Document]:
        # `datasets` reads JSON lines too, but names no line in its errors and takes a missing key for null.
        with open_bytes(path) as stream:
            for number, line in enumerate(stream, 1):
                origin = f"{path} line {number}"
                try:
                    content = line.decode("utf-8-sig" if number == 1 else "utf-8")
                    if not content.strip():
                        continue
                    row = json.loads(content)
                except json.JSONDecodeError as error:
                    raise UserError(f"{origin}: not valid JSON ({error.msg}, column {error.colno})") from None
                except UnicodeDecodeError as error:
                    raise UserError(f"{origin}: not UTF-8 ({error.reason}, byte {error.start + 1})") from None
                except (ValueError, RecursionError) as error:  # a number of 5000 digits, 100,000 brackets
                    raise UserError(f"{origin}: not readable JSON ({first_line(error)})") from None
                if not isinstance(row, dict):
                    raise UserError(
                        f"{origin}: a JSON {_json_name(row)}, not an object like {{{self.json_key!r}: ...}}"
                    )
                if self.json_key not in row:
                    raise UserError(
                        f"{origin}: no key {self.json_key!r} (keys: {_some(row)}); --json-key names the key"
                    )
                yield self._document(row[self.json_key], origin)

    def _document(self, text: object, origin: str) -> Document:
        if not isinstance(text, str):
            raise UserError(f"{origin}: {self.json_key!r} is {_json_name(text)}, not a string")
        return Document(text, origin)

    def _parquet(self, path: Path):
        datasets = require("datasets")
        try:
            with quiet():
                table = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        except Exception as error:
            raise UserError(f"{path}: not a readable parquet file ({first_line(error)})") from error
        return self._column(table, str(path))

    def _dataset(self, name: str):
        datasets = require("datasets")
        if not sys.stderr.isatty():
            datasets.disable_progress_bars()
        dataset, _, config = name.partition(":")
        try:
            with quiet():
                # Not streamed: read twice, it would be downloaded twice, and the copy on disk works without network.
                table = datasets.load_dataset(dataset, config or None, split=self.split)
        except Exception as error:
            raise UserError(
                f"{name!r} is neither an existing file or folder nor a Hugging Face dataset that loads "
                f"({first_line(error)})"
            ) from error
        return self._column(table, name)

    def _column(self, table, name: str):
        kinds = table.features or {}
        if self.json_key not in kinds:
            raise UserError(
                f"{name}: no column {self.json_key!r} (columns: {_some(kinds)}); --json-key names the column"
            )
        kind = getattr(kinds[self.json_key], "dtype", "nested")
        if kind not in ("string", "large_string"):
            raise UserError(f"{name}: column {self.json_key!r} holds {kind}, not strings")
        return table.select_columns([self.json_key])

    def _rows(self, table, name: str) -> Iterator[Document]:
        number = 0
        batches = table.iter(batch_size=_ROWS)
        while True:
            try:
                with quiet():
                    batch = next(batches, None)
            except Exception as error:  # pyarrow's, fsspec's or the file system's
                raise UserError(f"{name}: cannot be read after row {number} ({first_line(error)})") from error
            if batch is None:
                return
            for text in batch[self.json_key]:
                number += 1
                yield self._document(text, f"{name} row {number}")


def _stop(error: OSError) -> None:
    raise error  # os.walk would pass over a folder that it cannot read


def _json_name(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _some(names) -> str:
    shown = [repr(name) for name in list(names)[:8]]
    return ", ".join([*shown, "..."] if len(names) > 8 else shown) or "none"
