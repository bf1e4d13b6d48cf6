"""What must agree between a checkpoint and the run that resumes from it.

alpha is a function of the step and the schedule's settings, so no alpha is stored. The settings are: Megatron saves
the run's arguments, the ProRes flags among them, in every checkpoint and in the same file as the iteration.
"""

import argparse
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.training import checkpointing, get_args, training

from megatron_prores.errors import UserError
from megatron_prores.megatron.arguments import schedule_from_args
from megatron_prores.megatron.damage import DAMAGE, reason
from megatron_prores.megatron.screen import say


def install() -> None:
    """Compare schedules and norm placements on resume, let `--use-checkpoint-args` restore them too, and explain
    checkpoints that cannot be read; a second call does nothing.
    """
    if getattr(training.load_checkpoint, "with_prores", False):
        return
    original_check = checkpointing.check_checkpoint_args

    @functools.wraps(original_check)
    def check_checkpoint_args(checkpoint_args, *args, **kwargs):
        original_check(checkpoint_args, *args, **kwargs)
        check_schedule(checkpoint_args, get_args())

    checkpointing.check_checkpoint_args = check_checkpoint_args
    original_load_args = checkpointing.load_args_from_checkpoint

    @functools.wraps(original_load_args)
    def load_args_from_checkpoint(args, *rest, **kwargs):
        result = original_load_args(args, *rest, **kwargs)
        if isinstance(result, tuple):  # without a checkpoint it is the arguments alone
            args.prores_norm = saved_norm(result[1])
            restore_schedule(result[1], args)
        return result

    checkpointing.load_args_from_checkpoint = load_args_from_checkpoint
    wrapper = functools.wraps(training.load_checkpoint)(_explained(training.load_checkpoint))
    wrapper.with_prores = True
    training.load_checkpoint = wrapper


def check_norm(checkpoint_args: argparse.Namespace, args: argparse.Namespace) -> None:
    """Refuse to load a checkpoint with its norms placed otherwise: another model, at times with the same parameters.

    Raises:
        UserError: names both.
    """
    saved = saved_norm(checkpoint_args)
    if saved != args.prores_norm:
        raise UserError(
            f"the checkpoint was trained with --prores-norm {saved}, this run asks for {args.prores_norm}: "
            f"use --prores-norm {saved}, or start a new run without --load"
        )


def saved_norm(checkpoint_args: argparse.Namespace) -> str:
    """The placement of a checkpoint's norms; a stock Megatron checkpoint has "pre"."""
    return getattr(checkpoint_args, "prores_norm", "pre")


def check_schedule(checkpoint_args: argparse.Namespace, args: argparse.Namespace) -> None:
    """Refuse to resume with another schedule, or another T, than the checkpoint was trained with.

    Raises:
        UserError: names both values; not raised with `--prores-override`.
    """
    saved, current = schedule_from_args(checkpoint_args), schedule_from_args(args)
    if saved == current or saved.name == current.name == "none":
        return
    if getattr(args, "prores_override", False):
        if args.rank == 0:
            say(f"ProRes: resuming with {current}; the checkpoint was trained with {saved}")
        return
    keep = "use the same flags"
    if getattr(args, "prores_warmup_fraction", None) is not None and saved.total_steps:
        total = f"{float(saved.total_steps):g}"
        keep = f"a fraction of a longer run is a longer warm-up, keep it with --prores-total-warmup-steps {total}"
    raise UserError(
        f"the checkpoint was trained with ProRes {saved}, this run asks for {current}: "
        f"{keep}, or change the schedule from here on with --prores-override"
    )


def restore_schedule(checkpoint_args: argparse.Namespace, args: argparse.Namespace) -> None:
    """Give a run with `--use-checkpoint-args` the schedule of the checkpoint (`none`, if that is stock Megatron's).

    By Megatron's rule for its own flags: what has a default, like the schedule's name, is always the checkpoint's, and
    what has none, the length of the warm-up, is the checkpoint's unless a flag gives it. `check_schedule` then
    refuses another length. With `--prores-override` the command line's schedule stays as it is.
    """
    if getattr(args, "prores_override", False):
        return
    settings = saved_settings(checkpoint_args)
    args.prores_schedule = settings.pop("prores_schedule")
    if all(getattr(args, name, None) is None for name in settings):
        vars(args).update(settings)


def saved_settings(checkpoint_args: argparse.Namespace) -> dict[str, Any]:
    """The `--prores-*` settings that give the checkpoint's schedule in a run of any length."""
    settings = {
        "prores_schedule": getattr(checkpoint_args, "prores_schedule", "none"),
        "prores_warmup_steps": getattr(checkpoint_args, "prores_warmup_steps", None),
        "prores_total_warmup_steps": getattr(checkpoint_args, "prores_total_warmup_steps", None),
        "prores_warmup_fraction": getattr(checkpoint_args, "prores_warmup_fraction", None),
    }
    if settings["prores_warmup_fraction"] is not None:
        schedule = schedule_from_args(checkpoint_args)  # a fraction of that run; this one may be longer
        total = schedule.total_steps or schedule.warmup_steps
        settings |= {"prores_warmup_fraction": None, "prores_total_warmup_steps": float(total)}
    return settings


def _explained(load: Callable) -> Callable:
    """Megatron's load, with a line that names the checkpoint, the reason and what still loads."""

    def load_checkpoint(*args, **kwargs):
        try:
            with _norms_compared():
                result = load(*args, **kwargs)
            _tell_loaded(get_args(), result[0])
            return result
        except UserError:
            raise
        except SystemExit as error:  # how Megatron ends without a checkpoint, or without the name of one
            folder = _source(get_args())
            raise UserError(
                f"there is no checkpoint to load in {folder}: its latest_checkpointed_iteration.txt is missing or does "
                f"not name an iteration{_advice(folder, sys.maxsize)}"
            ) from error
        except AssertionError as error:  # how Megatron says that the checkpoint is another run's
            scheduler = "OptimizerParamScheduler" in str(error)
            hint = "; --override-opt-param-scheduler takes this run's learning-rate schedule" if scheduler else ""
            folder = _source(get_args())
            raise UserError(
                f"this run differs from the one that saved the checkpoint in {folder}: "
                + reason(error).removeprefix("AssertionError: ")
                + hint
            ) from error
        except DAMAGE as error:
            folder = _source(get_args())
            iteration = checkpointing.get_loaded_iteration()
            raise UserError(
                f"the checkpoint of iteration {iteration} in {folder} cannot be loaded ({reason(error)})"
                + _advice(folder, iteration)
            ) from error

    return load_checkpoint


@contextmanager
def _norms_compared() -> Iterator[None]:
    """While Megatron loads a checkpoint: otherwise it misses parameters before it compares arguments."""
    original = checkpointing._load_base_checkpoint

    @functools.wraps(original)
    def load_base_checkpoint(*args, **kwargs):
        result = original(*args, **kwargs)
        if result[0] and "args" in result[0]:
            check_norm(result[0]["args"], get_args())
        return result

    checkpointing._load_base_checkpoint = load_base_checkpoint
    try:
        yield
    finally:
        checkpointing._load_base_checkpoint = original


def _tell_loaded(args: argparse.Namespace, iteration: int) -> None:
    found = checkpointing.get_loaded_iteration()  # a finetuning run starts at iteration 0 all the same
    if args.rank != 0 or not (args.load or args.pretrained_checkpoint):
        return
    if found is not None and found >= 0:
        say(f"loaded checkpoint of iteration {found} from {_source(args)}")
    elif not iteration:
        say(f"no checkpoint in {args.load} yet: starting from random weights")


def _source(args: argparse.Namespace) -> str:
    """Where Megatron loads from: `--pretrained-checkpoint` is for runs that have no checkpoint of their own yet."""
    own = checkpointing.checkpoint_exists(args.load) or not args.pretrained_checkpoint
    return args.load if own else args.pretrained_checkpoint


def _advice(folder: str | None, failed: int) -> str:
    if not folder or not os.path.isdir(folder):
        return ""
    saved = [int(match[1]) for name in os.listdir(folder) if (match := re.fullmatch(r"iter_(\d+)", name))]
    earlier = sorted(number for number in saved if number < failed)
    return (
        f"; to continue from an earlier one use --ckpt-step {earlier[-1]}" if earlier else "; no earlier one is there"
    )
