"""`prores report`: a run's loss, alpha, spikes and layers from its TensorBoard logs and probes."""

import argparse
from math import isnan

from megatron_prores.heat_map import draw_layers
from megatron_prores.probe_files import read_probes
from megatron_prores.report import (
    GRAD_NORM_TAG,
    LOSS_TAG,
    Scalars,
    check_png_path,
    draw_run,
    read_scalars,
    training_loss,
)
from megatron_prores.spikes import spike_score


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensorboard-dir", required=True, metavar="DIR", help="what the run got as --tensorboard-dir")
    parser.add_argument("--png", metavar="FILE", help="the picture to write of loss and alpha")
    parser.add_argument(
        "--layers-png",
        metavar="FILE",
        help="the picture to write of the layers' activation norms and of the cosines of their residual outputs to the "
        "last ones, for a run with --prores-probe-interval",
    )


def run(args: argparse.Namespace) -> None:
    """Draw what is asked for; print where it is, the last step and its loss, and how spiky the run was.

    Raises:
        UserError: the directory holds no training loss or no probes, or a picture cannot be written.
    """
    for path in filter(None, (args.png, args.layers_png)):
        check_png_path(path)
    scalars = read_scalars(args.tensorboard_dir)
    steps, losses = training_loss(scalars)
    if args.png:
        draw_run(scalars, args.png)
    print(f"{args.png or args.tensorboard_dir}: {len(steps)} steps, loss of step {steps[-1]} {losses[-1]:.4f}")
    print(f"spike score (share of steps 7 standard deviations off the 1000 before): {_spikes(scalars)}")
    if args.layers_png:
        probes = read_probes(args.tensorboard_dir)
        draw_layers(probes, args.layers_png)
        print(
            f"{args.layers_png}: {len(probes.layers)} layers, {len(probes.steps)} probes from step {probes.steps[0]} "
            f"to {probes.steps[-1]}"
        )


def _spikes(scalars: Scalars) -> str:
    named = {"loss": LOSS_TAG, "gradient norm": GRAD_NORM_TAG}
    scores = {name: spike_score(*scalars[tag]) for name, tag in named.items() if tag in scalars}
    return ", ".join(f"{name} {'unknown' if isnan(score) else f'{100 * score:.3g}%'}" for name, score in scores.items())
