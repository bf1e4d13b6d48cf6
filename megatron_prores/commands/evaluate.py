"""`prores evaluate`: perplexity of a checkpoint on a held-out set, or scores of an exported model on tasks."""

import argparse

from megatron_prores.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", metavar="DIR", help="what training was given as --save")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration of the checkpoint (default: the latest)")
    parser.add_argument(
        "--data", metavar="PREFIX", help="perplexity on this dataset of prores prepare-data (without .bin or .idx)"
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="only the dataset's first documents, as many as hold N tokens"
    )
    parser.add_argument(
        "--tasks", metavar="A,B", help="scores on these tasks of lm-evaluation-harness; nothing is downloaded"
    )
    parser.add_argument("--model", metavar="DIR", help="for --tasks, instead of --checkpoint: what prores export wrote")
    parser.add_argument("--include-path", metavar="DIR", help="with tasks of your own")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N documents of each task")
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
        UserError: an option is missing or out of range, or the model, its tokenizer, the data or a task cannot be used.
    """
    _check_combination(args)
    if args.data:
        from megatron_prores.megatron import evaluate  # with torch, which takes seconds to load

        evaluate.run(args)
        return
    from megatron_prores.huggingface import tasks

    if args.model:
        tasks.run(args)
        return
    with tasks.exported(args) as args.model:
        tasks.run(args)


def _check_combination(args: argparse.Namespace) -> None:
    """Each of the two evaluations has options of its own."""
    if (args.data is None) == (args.tasks is None):
        raise UserError("prores evaluate needs --data PREFIX or --tasks A,B, one of them; see prores evaluate --help")
    if (args.checkpoint is None) == (args.model is None):
        raise UserError("prores evaluate needs --checkpoint DIR, or with --tasks --model DIR; see its --help")
    foreign = ("model", "include_path", "limit") if args.data else ("max_tokens",)
    foreign += ("ckpt_step", "tokenizer_model") if args.model else ()
    for name in foreign:
        if getattr(args, name) is not None:
            kind = "--data" if args.data else "--model" if name in ("ckpt_step", "tokenizer_model") else "--tasks"
            raise UserError(f"--{name.replace('_', '-')} has no meaning with {kind}: leave it out")
