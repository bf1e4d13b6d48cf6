"""Pretrain a GPT with ProRes in Megatron's own trainer.

    torchrun --nproc-per-node 2 -m megatron_prores.megatron.pretrain_gpt --config configs/megatron/quickstart.yaml

Takes every Megatron flag, the `--prores-*` flags, `--config FILE.yaml`, `--host` and `--verbose`.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial

from megatron_prores.errors import UserError
from megatron_prores.megatron import launch, screen
from megatron_prores.warmup_summary import describe_progress


def run(
    argv: list[str],
    extra: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    defaults: Sequence[str] = (),
    use_engine: Callable[[argparse.Namespace], None] = lambda args: None,
) -> None:
    """Train as the command line says.

    Args:
        argv: the command line without the program.
        extra: adds flags of another engine to the parser.
        defaults: flags that config files and the command line win over.
        use_engine: puts another engine into Megatron's trainer once the arguments are known.

    Raises:
        UserError: the command line, the data or a checkpoint cannot be used.
    """
    args = launch.parse(argv, extra, defaults)

    # Megatron may be imported only now that the device is chosen.
    from megatron.core import mpu
    from megatron.core.enums import ModelType
    from megatron.training import get_tensorboard_writer, pretrain, training
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

    from megatron_prores.megatron import gpt, plan_checks, progress, spec
    from megatron_prores.megatron.arguments import is_stock, schedule_from_args, validate_prores_arguments
    from megatron_prores.megatron.data_check import check_data

    gpt.refuse_unsupported(args)
    gpt.check_layout(args)
    check_settings(args)
    check_folders(args)
    if errors := list(plan_checks.learning_rate_errors(args)):
        raise UserError("\n".join(errors))
    if screen.is_first_rank():  # one reader is enough; without it the others do not start
        launch.accepted(check_data, args)
    validate_prores_arguments(args)
    schedule = schedule_from_args(args)
    choose_spec(args, is_stock(schedule.name, args.prores_norm))
    _tell_layout(args)
    _tell_warmup(args, schedule)
    if screen.is_first_rank():
        for note in plan_checks.learning_rate_notes(args, schedule):
            screen.say(f"note: {note}")
    model = launch.accepted(gpt_config_from_args, args)
    launch.accepted(model.finalize)
    spec.refuse_unbuildable(model)
    use_engine(args)
    config = pretrain_cfg_container_from_args(args, model)
    progress.install()
    mpu.initialize_model_parallel = partial(launch.accepted, mpu.initialize_model_parallel)
    training.setup_model_and_optimizer = partial(launch.accepted, training.setup_model_and_optimizer)
    try:
        pretrain(
            config,
            gpt.datasets,
            ModelType.encoder_or_decoder,
            gpt.forward_step,
            get_embedding_ranks=gpt.embedding_ranks,
        )
    finally:
        # Megatron leaves its writer's thread to the interpreter's exit, which may lose what was written last.
        if writer := get_tensorboard_writer():
            writer.close()


def check_settings(args) -> None:
    """Refuse settings that Megatron stumbles over only in mid-run.

    Raises:
        UserError: names the flag.
    """
    from megatron_prores.megatron.arguments import validate_probe

    if not args.train_iters and not args.train_samples and not args.skip_train:
        raise UserError("the run has no length: give --train-iters or --train-samples")
    if args.eval_iters and not args.eval_interval:
        raise UserError("give --eval-interval N, 1 or more, or --eval-iters 0")
    if not args.eval_interval:  # Megatron divides by it even where nothing is evaluated
        args.eval_interval = 1
    for name in ("log_interval", "tensorboard_log_interval"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be 1 or more, not {getattr(args, name)}")
    validate_probe(args)
    if not 0 < args.seed < 2**31:
        raise UserError(f"--seed must be above 0 and below 2**31, not {args.seed}")
    if args.transformer_impl == "local" and (args.fp8 or getattr(args, "fp4", None)):
        raise UserError("fp8 and fp4 need Transformer Engine: --transformer-impl transformer_engine")


def check_folders(args) -> None:
    """Refuse folders that cannot be written, while nothing is trained yet.

    Raises:
        UserError: names the flag.
    """
    for name in ("save", "tensorboard_dir"):
        _check_writable(name.replace("_", "-"), getattr(args, name))


def _check_writable(flag: str, folder: str | None) -> None:
    if folder is None:
        return
    try:
        os.makedirs(folder, exist_ok=True)
        probe = os.path.join(folder, f".writable-{os.getpid()}")
        with open(probe, "w"):
            os.unlink(probe)
    except OSError as error:
        raise UserError(f"--{flag} {folder} cannot be written ({error.strerror})") from error


def choose_spec(args, stock: bool) -> None:
    """Whatever spec a checkpoint's arguments brought along, the schedule and the placement decide between ours."""
    if args.spec is not None and args.spec[0] != "megatron_prores.megatron.spec":
        raise UserError(
            f"--spec {' '.join(args.spec)} would replace ProRes's layers: remove it, or call "
            "megatron_prores.megatron.enable() in your own script"
        )
    if args.spec is None or args.spec[1] in ("stock_layer_spec", "prores_layer_spec"):
        args.spec = ["megatron_prores.megatron.spec", "prores_layer_spec"]
        if stock and "--spec" not in sys.argv:
            args.spec[1] = "stock_layer_spec"


def _tell_layout(args) -> None:
    if screen.is_first_rank():
        screen.say(
            f"processes: {args.world_size} = tensor {args.tensor_model_parallel_size} x pipeline "
            f"{args.pipeline_model_parallel_size} x context {args.context_parallel_size} x data "
            f"{args.data_parallel_size}; {args.params_dtype}".replace("torch.", "")
        )


def _tell_warmup(args, schedule) -> None:
    from megatron_prores.megatron.arguments import run_length

    iterations = run_length(args)
    note = describe_progress(schedule, iterations) if iterations else None
    if note and args.prores_strict:
        raise UserError(f"{note} (--prores-strict)")
    if note and screen.is_first_rank():
        screen.say(f"note: {note}")


def exit_on_error(main: Callable[[], None]) -> None:
    """Run a `main`; what cannot be used becomes one line from one rank and exit code 2, Ctrl-C exit code 130."""
    try:
        main()
    except UserError as error:
        if "--verbose" in sys.argv:
            traceback.print_exc()
        screen.complain(error)
        sys.exit(2)
    except SystemExit as error:
        if error.code in (16, 17):  # Megatron's, after it has checked a result twice
            screen.complain(UserError(f"the loss or a gradient is NaN or infinite (exit code {error.code})"))
        raise
    except KeyboardInterrupt:
        if screen.is_first_rank():
            screen.say("interrupted: the same command with --load continues from the last checkpoint")
        os._exit(130)  # not through Megatron's exit handlers, which may wait for ranks that are gone


def main() -> None:
    exit_on_error(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    main()
