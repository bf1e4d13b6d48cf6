"""`prores generate`: sample text from a checkpoint."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="what training was given as --save")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration of the checkpoint (default: the latest)")
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; several are continued one by one (default: 'def ')",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="stop after N (default: 128)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="divides the logits; above 1 is wilder (default: 0.8)",
    )
    parser.add_argument(
        "--top-k", type=int, default=50, metavar="K", help="sample among the K likeliest tokens; 0: all (default: 50)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample among the likeliest tokens that make up the probability P (default: 1.0, all)",
    )
    parser.add_argument("--greedy", action="store_true", help="always the likeliest token, instead of sampling")
    parser.add_argument("--seed", type=int, default=1234, metavar="S", help="same seed, same text (default: 1234)")
    parser.add_argument(
        "--tokenizer-model", metavar="PATH", help="the tokenizer, where it is no longer at the path that training used"
    )
    parser.add_argument("--output", metavar="FILE", help="also write prompts and continuations there, as JSON lines")
    parser.add_argument("--host", action="store_true", help="run on the host although GPUs are visible")
    parser.add_argument("--verbose", action="store_true", help="show everything that Megatron prints")


def run(args: argparse.Namespace) -> None:
    """Print every prompt with its continuation.

    Raises:
        UserError: an option is out of range, or the checkpoint or its tokenizer cannot be used.
    """
    from megatron_prores.megatron import generate  # with torch, which takes seconds to load

    generate.run(args)
