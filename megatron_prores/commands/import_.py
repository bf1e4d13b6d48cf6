"""`prores import`: a Hugging Face model as a Megatron checkpoint."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="a Llama with safetensors; nothing is downloaded")
    parser.add_argument("--output", required=True, metavar="DIR", help="to make: checkpoint, tokenizer, model.yaml")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier import in --output")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (default: the model's)"
    )
    parser.add_argument("--tokenizer-model", metavar="DIR", help="the tokenizer, where it is not in --model")
    parser.add_argument("--host", action="store_true", help="run on the host although GPUs are visible")
    parser.add_argument("--verbose", action="store_true", help="show everything that Megatron prints")


def run(args: argparse.Namespace) -> None:
    """Write the checkpoint, and beside it what Megatron's command line needs.

    Raises:
        UserError: the model, its tokenizer or the output cannot be used, or Megatron has no such model.
    """
    from megatron_prores.huggingface import import_  # with torch, which takes seconds to load

    import_.run(args)
