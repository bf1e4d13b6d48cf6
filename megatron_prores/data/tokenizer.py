"""Text to token ids: a Hugging Face tokenizer, or a byte-level BPE trained on the spot."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from megatron_prores.data.optional import first_line, quiet, require
from megatron_prores.errors import UserError

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # every byte, and the end of a document

# A tokenizer's own records take some 100 times the space of the text, so that a longer text goes in pieces of about
# this many characters, cut where a letter is followed by a single space or newline and another letter. The usual
# pre-tokenizers cut there too, and the ids are the same as in one piece.
_PIECE = 1_000_000
_CUT = re.compile(r"(?<=[^\W\d_])(?=[ \n][^\W\d_])")


def load_tokenizer(name: str):
    """A transformers tokenizer by name or folder.

    Raises:
        UserError: there is none, or it has no EOS token.
    """
    transformers = require("transformers")
    path = Path(name).expanduser()
    is_path = name.count("/") > 1 or name[:1] in "./~" or ("/" in name and path.parent.is_dir())
    if is_path and not path.is_dir():
        raise UserError(f"tokenizer {name}: no such folder")
    try:
        with quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(path) if path.is_dir() else name)
    except Exception as error:
        raise UserError(f"tokenizer {name}: neither a folder nor a name that loads ({first_line(error)})") from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"tokenizer {name}: it has no EOS token, which ends each document; choose one that has")
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int):
    """A byte-level BPE of at most `vocab_size` tokens, as a transformers tokenizer; it can spell any text.

    The result does not depend on the number of threads. Its EOS is `<|endoftext|>`.

    Raises:
        UserError: `vocab_size` is below 257.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(f"a byte-level tokenizer needs {SMALLEST_VOCABULARY} tokens or more, not {vocab_size}")
    tokenizers, transformers = require("tokenizers"), require("transformers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = byte_level(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


@dataclass
class Encoder:
    """Texts to the ids of documents; can be sent to another process.

    A document is what the tokenizer puts before a text (nothing, or BOS), the ids of the text, and EOS, which is what
    Megatron calls `eod`. A special token that is spelled out in a text stays text: it never ends the document.

    Attributes:
        backend: a `tokenizers.Tokenizer`, or a transformers tokenizer that is written in Python.
        dtype: of the ids.
    """

    backend: object
    fast: bool
    prefix: list[int]
    suffix: list[int]
    dtype: type[np.number]

    @classmethod
    def of(cls, tokenizer, dtype: type[np.number]) -> "Encoder":
        """The encoder of a transformers tokenizer that has an EOS token."""
        bare = tokenizer("a", add_special_tokens=False).input_ids
        full = tokenizer("a").input_ids
        starts = [at for at in range(len(full) - len(bare) + 1) if full[at : at + len(bare)] == bare]
        if not starts:
            raise UserError("this tokenizer changes a text's ids when it adds its special tokens")
        prefix, suffix = full[: starts[0]], full[starts[0] + len(bare) :]
        if suffix[-1:] != [tokenizer.eos_token_id]:
            suffix = [*suffix, tokenizer.eos_token_id]
        return cls(
            tokenizer.backend_tokenizer if tokenizer.is_fast else tokenizer, tokenizer.is_fast, prefix, suffix, dtype
        )

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One array of ids per text, special tokens and EOS included."""
        ids = iter(self._encode([text for text in texts if len(text) <= _PIECE]))
        return [self._document([next(ids)] if len(text) <= _PIECE else self._pieces(text)) for text in texts]

    def _document(self, pieces: Iterable[list[int]]) -> np.ndarray:
        parts = chain([self.prefix], pieces, [self.suffix])
        return np.concatenate([np.array(part, dtype=self.dtype) for part in parts])

    def _pieces(self, text: str) -> Iterator[list[int]]:
        # One at a time, so that the tokenizer's records of one are gone before the next.
        return (next(self._encode([piece])) for piece in split_text(text))

    def _encode(self, texts: list[str]) -> Iterator[list[int]]:
        if not self.fast:
            # verbose: the tokenizer need not warn that a document is longer than a model's context.
            kwargs = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
            return (self.backend(text, **kwargs).input_ids for text in texts)
        # Settings, not content: what tokenizer.json may bring along, and what pickle loses.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True
        return (encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False))


def split_text(text: str, size: int = _PIECE) -> Iterator[str]:
    """Cut a text into pieces of at least `size` characters (the last one excepted) where words end."""
    start = 0
    while len(text) - start > size and (cut := _CUT.search(text, start + size)):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


@contextlib.contextmanager
def tokenizer_threads(on: bool) -> Iterator[None]:
    """Let `tokenizers` use all cores, or one. Beside other encoding processes it must use one."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if on else "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
