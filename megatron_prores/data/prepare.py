"""From inputs to datasets: read, perhaps train a tokenizer, encode, write."""

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_prores.data.optional import quiet
from megatron_prores.data.parallel import encode_documents
from megatron_prores.data.sources import Corpus, Document
from megatron_prores.data.staging import publish, staging
from megatron_prores.data.tokenizer import Encoder, load_tokenizer, tokenizer_threads, train_tokenizer
from megatron_prores.errors import UserError, is_text

# A vocabulary hardly changes after this much text, and a corpus of a terabyte would take days.
TRAINING_BYTES = 1 << 30


@dataclass
class Part:
    """One dataset: its path prefix, and what went into it."""

    prefix: Path
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0


@dataclass
class Report:
    """What `prepare_data` did.

    Attributes:
        parts: one dataset, or the training and the validation dataset.
        tokenizer: the name or folder for Megatron's --tokenizer-model.
        vocab_size: number of tokens, not padded.
        trained_on: bytes of text the tokenizer was trained on; 0 for one that was given.
        skipped: files in folders that are not UTF-8 text.
        empty: documents without text.
        seconds: wall time of each step.
    """

    parts: list[Part]
    tokenizer: str
    vocab_size: int = 0
    trained_on: int = 0
    skipped: int = 0
    empty: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


def prepare_data(
    inputs: Sequence[str],
    output: str | Path,
    *,
    tokenizer: str | None = None,
    train_vocab_size: int | None = None,
    json_key: str = "text",
    split: str = "train",
    globs: Sequence[str] = (),
    workers: int = 1,
    validation_fraction: float | None = None,
    overwrite: bool = False,
) -> Report:
    """Write the documents of `inputs` as Megatron indexed datasets.

    The files are `output`.bin and .idx; with a validation fraction `output`-train and `output`-valid instead. They are
    the same for any number of workers. A script that asks for more than one needs an `if __name__ == "__main__"` guard.

    Args:
        inputs, json_key, split, globs: see `Corpus`.
        output: path prefix.
        tokenizer: name or folder of a Hugging Face tokenizer; or else
        train_vocab_size: train one of this many tokens on the training documents; saved as `output`-tokenizer.
        workers: number of tokenizing processes; with 1 this process does it.
        validation_fraction: about this share of the documents is held out, chosen by a hash of their text, so that
            copies of a document are never on both sides.
        overwrite: replace outputs that exist.

    Raises:
        UserError: an input, the tokenizer or the output cannot be used, or there are no documents.
    """
    if (tokenizer is None) == (train_vocab_size is None):
        raise UserError("give either a tokenizer or the size of the vocabulary to train")
    if workers < 1:
        raise UserError(f"--workers must be at least 1, not {workers}")
    if validation_fraction is not None and not 0 < validation_fraction < 1:
        raise UserError(f"--validation-fraction must be between 0 and 1, not {validation_fraction}")
    if str(output).endswith("/") or not Path(output).name:
        raise UserError(f"--output {output} is a folder; give a path prefix, such as {Path(output) / 'corpus'}")
    output = Path(output).expanduser()
    if train_vocab_size is not None and not is_text(str(output)):
        raise UserError(f"--output {output}: the tokenizer cannot be saved at a path that is not UTF-8; give another")
    tokenizer = tokenizer and os.path.expanduser(tokenizer)
    endings = [""] if validation_fraction is None else ["-train", "-valid"]
    parts = [Part(Path(f"{output}{ending}")) for ending in endings]
    saved = f"{output.name}-tokenizer"
    names = [part.prefix.name + suffix for part in parts for suffix in (".bin", ".idx")]
    if train_vocab_size is not None:
        names.append(saved)

    report = Report(parts, tokenizer or f"{output}-tokenizer")
    with staging(output, names, overwrite) as folder:
        corpus = Corpus(inputs, json_key=json_key, split=split, globs=globs)
        _refuse_empty_part(inputs, corpus, validation_fraction)
        with _step(report, "tokenizer"):
            if tokenizer is not None:
                loaded = load_tokenizer(tokenizer)
            else:
                texts = _training_texts(corpus, validation_fraction, report)
                with tokenizer_threads(on=workers > 1):
                    loaded = train_tokenizer(texts, train_vocab_size)
                loaded.save_pretrained(folder / saved)
            report.vocab_size = len(loaded)
        with _step(report, "encoding"):
            _write(folder, report, loaded, corpus, validation_fraction, workers)
        report.skipped, report.empty = corpus.skipped, corpus.empty
        publish(folder, output.parent, names)
    return report


def held_out(document: Document, fraction: float) -> bool:
    """Whether a document is in the validation dataset: a function of its text alone."""
    digest = hashlib.blake2b(document.utf8(), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


def _refuse_empty_part(inputs: Sequence[str], corpus: Corpus, fraction: float | None) -> None:
    """Before the work: reads no further than to the first document of each part."""
    missing = {False: ""} if fraction is None else {False: "training ", True: "validation "}
    for document in corpus:
        missing.pop(fraction is not None and held_out(document, fraction), None)
        if not missing:
            return
    raise _no_documents(inputs, corpus, next(iter(missing.values())))


def _training_texts(corpus: Corpus, fraction: float | None, report: Report) -> Iterator[str]:
    with _progress("training the tokenizer", corpus.total_bytes) as bar:
        for document in corpus:
            if fraction is not None and held_out(document, fraction):
                continue
            size = len(document.utf8())
            report.trained_on += size
            bar.update(size)
            yield document.text
            if report.trained_on >= TRAINING_BYTES:
                return


def _write(folder: Path, report: Report, tokenizer, corpus: Corpus, fraction: float | None, workers: int) -> None:
    with quiet():
        import torch
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    # One more than the largest id, for a vocabulary may have holes.
    encoder = Encoder.of(tokenizer, DType.optimal_dtype(max(tokenizer.get_vocab().values()) + 1))
    paths = [folder / part.prefix.name for part in report.parts]
    documents = ((document, int(fraction is not None and held_out(document, fraction))) for document in corpus)
    with contextlib.ExitStack() as stack:
        builders = [IndexedDatasetBuilder(f"{path}.bin", dtype=encoder.dtype) for path in paths]
        for builder in builders:
            stack.enter_context(builder.data_file)
        encoded = stack.enter_context(contextlib.closing(encode_documents(encoder, documents, workers)))
        bar = stack.enter_context(_progress("tokenizing", corpus.total_bytes))
        for item in encoded:
            part, builder = report.parts[item.part], builders[item.part]
            builder.add_item(torch.from_numpy(item.ids))
            builder.end_document()
            part.documents += 1
            part.tokens += len(item.ids)
            part.text_bytes += item.text_bytes
            bar.update(item.text_bytes)
        for builder, path in zip(builders, paths, strict=True):
            builder.finalize(f"{path}.idx")


def _no_documents(inputs: Sequence[str], corpus: Corpus, which: str) -> UserError:
    shown = ", ".join(inputs[:3]) + (", ..." if len(inputs) > 3 else "")
    hint = f"; a {'larger' if which.startswith('v') else 'smaller'} --validation-fraction may help" if which else ""
    return UserError(
        f"no {which}documents in {shown} "
        f"({corpus.skipped} files that are not UTF-8 text and {corpus.empty} empty documents left out){hint}"
    )


@contextlib.contextmanager
def _step(report: Report, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    report.seconds[name] = time.perf_counter() - start


def _progress(what: str, total: int | None):
    from tqdm import tqdm

    # disable=None: no bar where stderr is a file.
    return tqdm(desc=what, total=total, unit="B", unit_scale=True, disable=None, leave=False, file=sys.stderr)
