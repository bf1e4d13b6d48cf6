"""Encoding in several processes, with the order kept and the memory bounded."""

import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection

import numpy as np

from megatron_prores.data.sources import Document
from megatron_prores.data.tokenizer import Encoder, tokenizer_threads
from megatron_prores.errors import UserError

_BATCH_CHARACTERS = 1 << 18
_BATCH_DOCUMENTS = 1024


@dataclass(frozen=True, slots=True)
class Encoded:
    """A document as ids, the size of its text in UTF-8, and the part of the dataset (0, 1, ...) it belongs to."""

    ids: np.ndarray
    text_bytes: int
    part: int


def encode_documents(encoder: Encoder, documents: Iterable[tuple[Document, int]], workers: int) -> Iterator[Encoded]:
    """Encode (document, part) pairs. The result is the same for any number of processes.

    Raises:
        UserError: a text is not valid Unicode, or a process died.
    """
    batches = _batches(documents)
    if workers > 1:
        yield from _in_processes(encoder, batches, workers)
        return
    for batch in batches:
        with tokenizer_threads(on=False):
            encoded = _encode(encoder, batch)
        yield from encoded


def _batches(documents: Iterable[tuple[Document, int]]) -> Iterator[list[tuple[Document, int]]]:
    batch, characters = [], 0
    for document, part in documents:
        batch.append((document, part))
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(encoder: Encoder, batch: list[tuple[Document, int]]) -> list[Encoded]:
    sizes = [len(document.utf8()) for document, _ in batch]
    ids = encoder.encode([document.text for document, _ in batch])
    return [Encoded(*item) for item in zip(ids, sizes, [part for _, part in batch], strict=True)]


def _in_processes(encoder: Encoder, batches: Iterable, workers: int) -> Iterator[Encoded]:
    # Each process has a pipe of its own and one batch at a time, in turns: the order is kept, no more than that is in
    # memory, and there is neither a thread nor a lock that a signal or a dying process could leave behind.
    pool = []
    try:
        pool = [_Worker(encoder) for _ in range(workers)]
        turns = cycle(pool)
        for batch in batches:
            worker = next(turns)
            finished = worker.receive()
            worker.send(batch)
            yield from finished
        for _ in pool:
            yield from next(turns).receive()
    except (EOFError, ConnectionError) as error:
        raise UserError("a tokenizing process died, perhaps of too little memory; try fewer --workers") from error
    finally:
        for worker in pool:
            worker.stop()


class _Worker:
    def __init__(self, encoder: Encoder):
        # spawn: a fork would copy the locks that threads of tokenizers and torch hold, but not the threads.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(encoder, theirs), daemon=True)
        self._process.start()
        theirs.close()  # or the death of the process would not end the pipe
        self._busy = False

    def send(self, batch: list[tuple[Document, int]]) -> None:
        self._pipe.send(batch)
        self._busy = True

    def receive(self) -> list[Encoded]:
        """What was made of the latest batch; nothing if there was none."""
        if not self._busy:
            return []
        self._busy = False
        result = self._pipe.recv()
        if isinstance(result, UserError):
            raise result
        return result

    def stop(self) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join()


def _work(encoder: Encoder, pipe: Connection) -> None:
    # Ctrl-C reaches every process; this one ends at once, in the middle of a long text too, and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        while True:
            batch = pipe.recv()
            try:
                result = _encode(encoder, batch)
            except UserError as error:
                result = error
            pipe.send(result)
    except (EOFError, ConnectionError):
        return  # the main process has ended, in whatever way
