"""`--to-megatron DIR`: a DeepSpeed checkpoint in Megatron's format, for its trainer and this package's commands."""

import argparse
import os
from pathlib import Path

import deepspeed
from megatron.core.models.gpt import GPTModel
from megatron.training import checkpointing, get_args

from megatron_prores.errors import UserError
from megatron_prores.megatron.screen import is_first_rank, say


def check(args: argparse.Namespace) -> None:
    """Refuse a conversion that could not be what was meant; before anything is loaded.

    Raises:
        UserError: there is nothing to load, the iteration would be lost, or the folder is in use.
    """
    if args.to_megatron is None:
        return
    if args.load is None:
        raise UserError("--to-megatron converts a checkpoint: name its folder with --load")
    if args.finetune:
        raise UserError("--to-megatron keeps the iteration, and with it alpha: remove --finetune")
    if args.prores_override:
        raise UserError("--to-megatron keeps the checkpoint's schedule, and with it alpha: remove --prores-override")
    folder = Path(args.to_megatron).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--to-megatron {args.to_megatron} is there and is not an empty folder: name another")
    above = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserError(f"--to-megatron {args.to_megatron} cannot be written: {above} is not a writable folder")
    args.exit_on_missing_checkpoint = True
    # Nothing is trained: another length or learning rate is no reason to refuse the weights.
    args.override_opt_param_scheduler, args.use_checkpoint_opt_param_scheduler = True, False


def save(engine: deepspeed.DeepSpeedEngine, stage: GPTModel) -> None:
    """Write the weights of the loaded iteration, from every rank its part.

    Args:
        stage: Megatron's model of this rank's stage, whose parameters are the engine's.
    """
    args = get_args()
    args.save, args.no_save_optim, args.no_save_rng = args.to_megatron, True, True
    # ZeRO-3 holds a piece of each; a parameter that is whole is left alone.
    with deepspeed.zero.GatheredParameters(list(stage.parameters()), enabled=engine.zero_optimization_stage() == 3):
        checkpointing.save_checkpoint(args.iteration, [stage], None, None, args.num_floating_point_operations_so_far)
    if is_first_rank():
        if skipped := engine.skipped_steps:
            say(f"note: in Megatron's format alpha follows the iteration: {skipped} skipped steps are counted")
        say(f"iteration {args.iteration} is in {args.to_megatron}, in Megatron's format, without optimizer states")
