"""`prores evaluate`: perplexity of a checkpoint on a held-out set, or scores of an exported model on tasks."""

import argparse

from megatron_prores.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", metavar="DIR", help="what training was given as --save")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration of the checkpoint (default: the latest)")
    parser.add_argument("--data", metavar="PREFIX", help="held-out set of prores prepare-data, without .bin or .idx")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="only the set's first documents, as many as hold N tokens"
    )
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="sequences at a time (default: 8)")
    parser.add_argument(
        "--tokenizer-model", metavar="PATH", help="the tokenizer, where it is no longer at the path that training used"
    )
    parser.add_argument("--output", metavar="FILE", help="also write the results there, as JSON")
    parser.add_argument("--host", action="store_true", help="run on the host although GPUs are visible")
    parser.add_argument("--verbose", action="store_true", help="show everything that Megatron prints")


def run(args: argparse.Namespace) -> None:
    """Print what the model scores.

    Raises:
        UserError: an option is missing or out of range, or the checkpoint, its tokenizer or the data cannot be used.
    """
    for name in ("checkpoint", "data"):
        if getattr(args, name) is None:
            raise UserError(f"prores evaluate needs --{name}; see prores evaluate --help")

    from megatron_prores.megatron import evaluate  # with torch, which takes seconds to load

    evaluate.run(args)
