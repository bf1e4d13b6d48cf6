"""`prores report`: a run's loss and alpha from its TensorBoard logs."""

import argparse

from megatron_prores.report import LOSS_TAG, check_png_path, draw_run, read_scalars


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensorboard-dir", required=True, metavar="DIR", help="what the run got as --tensorboard-dir")
    parser.add_argument("--png", required=True, metavar="FILE", help="the picture to write")


def run(args: argparse.Namespace) -> None:
    """Draw the run and print one line: where the picture is, the last step and its loss.

    Raises:
        UserError: the directory holds no training loss, or the picture cannot be written.
    """
    check_png_path(args.png)
    scalars = read_scalars(args.tensorboard_dir)
    draw_run(scalars, args.png)
    steps, losses = scalars[LOSS_TAG]
    print(f"{args.png}: {len(steps)} steps, loss of step {steps[-1]} {losses[-1]:.4f}")
