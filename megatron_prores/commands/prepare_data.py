"""`prores prepare-data`: turn text into Megatron's indexed dataset."""

import argparse
import os
import shlex

from megatron_prores.data import Part, Report, prepare_data


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="text files (one document each), .jsonl/.json lines, .parquet, each of the first two also .gz or .zst; "
        "folders (read recursively: one document per file, but .jsonl and .parquet files as records); names of "
        "Hugging Face datasets, NAME or NAME:CONFIG; or 'stdlib', the source of Python's standard library",
    )
    parser.add_argument("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    tokenizer = parser.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument("--tokenizer", metavar="NAME_OR_DIR", help="a Hugging Face tokenizer that has an EOS token")
    tokenizer.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="SIZE",
        help="train a byte-level BPE of SIZE tokens (257 or more) on the training documents, up to 1 GiB of them, and "
        "save it as PREFIX-tokenizer",
    )
    parser.add_argument(
        "--validation-fraction",
        type=float,
        metavar="F",
        help="hold out about this share of the documents, chosen by a hash of their text; writes PREFIX-train and "
        "PREFIX-valid instead of PREFIX",
    )
    parser.add_argument("--json-key", default="text", metavar="KEY", help="key or column of the text (default: text)")
    parser.add_argument("--split", default="train", help="split of Hugging Face datasets (default: train)")
    parser.add_argument(
        "--glob", nargs="+", default=[], metavar="PATTERN", help="only these files of folders, such as '*.py' '*.md'"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=default_workers(),
        metavar="N",
        help="tokenizing processes (default: %(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace outputs that exist")


def default_workers() -> int:
    """The cores this process may use, up to 8."""
    return min(8, len(os.sched_getaffinity(0)))


def run(args: argparse.Namespace) -> None:
    """Prepare the data and print what was written and how Megatron is told of it.

    Raises:
        UserError: an input, the tokenizer or the output cannot be used.
    """
    report = prepare_data(
        args.input,
        args.output,
        tokenizer=args.tokenizer,
        train_vocab_size=args.train_tokenizer,
        json_key=args.json_key,
        split=args.split,
        globs=args.glob,
        workers=args.workers,
        validation_fraction=args.validation_fraction,
        overwrite=args.overwrite,
    )
    print("\n".join(describe(report)), flush=True)


def describe(report: Report) -> list[str]:
    """The lines for the terminal."""
    lines = [_tokenizer_line(report)]
    lines += [_part_line(part) for part in report.parts]
    if report.skipped or report.empty:
        lines.append(f"left out   {report.skipped:,} files that are not UTF-8 text, {report.empty:,} empty documents")
    lines.append(f"time       {sum(report.seconds.values()):.1f} s")
    return [*lines, "", "Megatron's flags:", "  " + shlex.join(megatron_flags(report))]


def megatron_flags(report: Report) -> list[str]:
    """The arguments that make Megatron train on these datasets."""
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", report.tokenizer]
    prefixes = [str(part.prefix) for part in report.parts]
    if len(prefixes) == 1:
        # One dataset: Megatron cuts validation data off its end.
        return [*flags, "--data-path", *prefixes, "--split", "98,2,0"]
    return [*flags, "--train-data-path", prefixes[0], "--valid-data-path", prefixes[1]]


def _tokenizer_line(report: Report) -> str:
    trained = f", trained on {_megabytes(report.trained_on)} of text" if report.trained_on else ""
    return f"tokenizer  {report.tokenizer}: {report.vocab_size:,} tokens{trained}"


def _part_line(part: Part) -> str:
    return (
        f"dataset    {part.prefix}.bin, .idx: {part.documents:,} documents, {part.tokens:,} tokens, "
        f"{_megabytes(part.text_bytes)} of text, {part.tokens / part.text_bytes:.3f} tokens per byte"
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size:,} bytes"
