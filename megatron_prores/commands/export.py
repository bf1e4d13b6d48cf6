"""`prores export`: a Megatron checkpoint as a Hugging Face model."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="what training was given as --save")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration of the checkpoint (default: the latest)")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to make, for from_pretrained()")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export in --output")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (default: the checkpoint's)"
    )
    parser.add_argument(
        "--tokenizer-model", metavar="PATH", help="the tokenizer, where it is no longer at the path that training used"
    )
    parser.add_argument("--host", action="store_true", help="run on the host although GPUs are visible")
    parser.add_argument("--verbose", action="store_true", help="show everything that Megatron prints")


def run(args: argparse.Namespace) -> None:
    """Write the model, with the alphas of its iteration in its weights.

    Raises:
        UserError: the checkpoint, its tokenizer or the output cannot be used, or the model is not a Llama.
    """
    from megatron_prores.huggingface import export  # with torch, which takes seconds to load

    export.run(args)
