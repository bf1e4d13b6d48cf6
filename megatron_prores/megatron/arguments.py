"""The `--prores-*` flags in Megatron's parser, and the schedule that they ask for."""

import argparse

from megatron_prores.errors import UserError
from megatron_prores.ops.choice import OPS, use_op
from megatron_prores.schedule import DEFAULT_WARMUP_STEPS, SCHEDULES, Schedule
from megatron_prores.variants import INITS, PLACEMENTS, init_of


def add_prores_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the ProRes group to a parser. Usable as Megatron's `extra_args_provider`."""
    group = parser.add_argument_group("ProRes", "Progressive Residual Warmup (arXiv 2603.05369)")
    group.add_argument(
        "--prores-schedule",
        default="linear",
        metavar="NAME",
        help=f"how alpha(l, t) warms up: {', '.join(SCHEDULES)} (default: linear; none is stock Megatron)",
    )
    length = group.add_mutually_exclusive_group()
    length.add_argument(
        "--prores-warmup-steps",
        type=float,
        metavar="T",
        help=f"warm-up of the first layer in iterations (default: {DEFAULT_WARMUP_STEPS}); layer l takes T*l in linear",
    )
    length.add_argument(
        "--prores-total-warmup-steps", type=float, metavar="W", help="instead of T: iterations until every alpha is 1"
    )
    length.add_argument(
        "--prores-warmup-fraction", type=float, metavar="F", help="instead of T: W as a fraction of the run"
    )
    group.add_argument(
        "--prores-norm",
        default="pre",
        choices=tuple(PLACEMENTS),
        help="where a layer's norms sit, with and without ProRes: pre x + aF(N(x)) (default), post N(x + aF(x)), "
        "sandwich x + aN(F(N(x))), deepnorm N(Ax + aF(x)) with A = (2L)^(1/4), lns x + aF(N(x)/sqrt(l))",
    )
    group.add_argument(
        "--prores-init",
        choices=INITS,
        help="initial weights, the same in every layout; s is --init-method-std. default: std s everywhere; "
        "ds: output projections of layer l s/sqrt(2l); scaled: output projections s/sqrt(2L); deepnorm: Xavier with "
        "gain (8L)^(-1/4), and 1 for queries and keys, in the layers. Without the flag: Megatron's own, and deepnorm "
        "with --prores-norm deepnorm",
    )
    group.add_argument(
        "--prores-op",
        default="auto",
        choices=OPS,
        help="the residual add and the RMSNorm after it: fused (C++/CUDA); torch, which at alpha = 1 is bit for bit "
        "Megatron's; or auto (default), fused where that is built for the device",
    )
    group.add_argument(
        "--prores-strict", action="store_true", help="refuse a warm-up that is longer than the run (default: a note)"
    )
    group.add_argument(
        "--prores-override",
        action="store_true",
        help="resume although the checkpoint was trained with another schedule or T",
    )
    group.add_argument(
        "--prores-probe-interval",
        type=int,
        default=0,
        metavar="N",
        help="every N iterations, and before the first and after the last, record each layer's activation norm and "
        "residual output for one validation microbatch in --tensorboard-dir (default: 0, off)",
    )
    return parser


def schedule_from_args(args: argparse.Namespace) -> Schedule:
    """The schedule of a run from Megatron's arguments, or of a checkpoint from the arguments saved in it.

    Arguments without ProRes in them (a stock Megatron checkpoint) give the schedule `none`.

    Raises:
        UserError: the settings contradict each other or are out of range.
    """
    return Schedule.resolve(
        getattr(args, "prores_schedule", "none"),
        args.num_layers,
        warmup_steps=getattr(args, "prores_warmup_steps", None),
        total_warmup_steps=getattr(args, "prores_total_warmup_steps", None),
        warmup_fraction=getattr(args, "prores_warmup_fraction", None),
        train_iters=run_length(args),
    )


def run_length(args: argparse.Namespace) -> int | None:
    """The run's length in iterations, also where it is given in samples; None if it is not given."""
    if getattr(args, "train_iters", None):
        return args.train_iters
    if getattr(args, "train_samples", None) and getattr(args, "global_batch_size", None):
        return args.train_samples // args.global_batch_size
    return None


def validate_prores_arguments(args: argparse.Namespace) -> None:
    """Refuse combinations with ProRes that could not work, before anything is built.

    Raises:
        UserError: names the flag to change.
    """
    use_op(getattr(args, "prores_op", "auto"))
    schedule = schedule_from_args(args)
    norm = getattr(args, "prores_norm", "pre")
    validate_init(args)
    if is_stock(schedule.name, norm):
        return
    unsupported = {
        "yaml_cfg": "--yaml-cfg (it replaces the arguments; use --config)",
        "mtp_num_layers": "--mtp-num-layers (its layers keep Megatron's stock residual)",
        "hybrid_layer_pattern": "--hybrid-layer-pattern (its layers are numbered differently)",
        "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
        "modelopt_enabled": "ModelOpt",
        "inference_fuse_tp_communication": "--inference-fuse-tp-communication (it adds the residual inside the linear)",
    }
    for name, flag in unsupported.items():
        if getattr(args, name, None):
            raise UserError(
                f"ProRes does not support {flag}: remove it, or switch ProRes off with --prores-schedule none"
                + (" --prores-norm pre" if norm != "pre" else "")
            )
    if norm in ("post", "deepnorm", "lns") and args.transformer_impl != "local":
        raise UserError(
            f"--prores-norm {norm} needs norms that are not fused into the linear layers: use --transformer-impl local"
        )


def validate_probe(args: argparse.Namespace) -> None:
    """Refuse runs that `--prores-probe-interval` cannot look into.

    Raises:
        UserError: names the flag to change.
    """
    interval = getattr(args, "prores_probe_interval", 0)
    if interval < 0:
        raise UserError(f"--prores-probe-interval must be 0 (off) or more, not {interval}")
    if not interval:
        return
    if not args.tensorboard_dir:
        raise UserError("--prores-probe-interval needs --tensorboard-dir, the folder that it writes to")
    if not args.eval_iters and not args.full_validation:
        raise UserError("--prores-probe-interval needs validation data: give --eval-iters 1 or more")
    unsupported = {
        "--context-parallel-size above 1": args.context_parallel_size > 1,
        "CUDA graphs (--cuda-graph-impl)": args.cuda_graph_impl != "none",
        "--use-megatron-fsdp": args.use_megatron_fsdp,
        "--use-torch-fsdp2": args.use_torch_fsdp2,
        "--hybrid-layer-pattern": args.hybrid_layer_pattern,
        "--multiple-validation-sets": args.multiple_validation_sets,
        "--dataloader-type external": args.dataloader_type == "external",
    }
    for flag, given in unsupported.items():
        if given:
            raise UserError(f"--prores-probe-interval does not support {flag}: remove one of them")


def is_stock(schedule: str, norm: str) -> bool:
    """True where Megatron's own layers compute what the flags ask for."""
    return schedule == "none" and norm == "pre"


def validate_init(args: argparse.Namespace) -> None:
    """Refuse models that the initialisation asked for does not cover.

    Raises:
        UserError: names the flag to change.
    """
    norm = getattr(args, "prores_norm", "pre")
    init = init_of(norm, getattr(args, "prores_init", None))
    if init is None:
        return
    unsupported = {
        "num_experts": "--num-experts",
        "multi_latent_attention": "--multi-latent-attention",
        "attention_output_gate": "--attention-output-gate",
        "mtp_num_layers": "--mtp-num-layers",
        "use_mup": "--use-mup (it scales the weights itself)",
        "init_method_xavier_uniform": "--init-method-xavier-uniform",
        "init_model_with_meta_device": "--init-model-with-meta-device",
    }
    unsupported = [flag for name, flag in unsupported.items() if getattr(args, name, None)]
    if not getattr(args, "perform_initialization", True):
        unsupported.append("--no-initialization")
    if unsupported:
        implied = "" if args.prores_init else f", which --prores-norm {norm} implies,"
        raise UserError(f"--prores-init {init}{implied} does not support {unsupported[0]}: remove one of them")


def install() -> None:
    """Make every parser that Megatron builds from now on know the ProRes flags."""
    from megatron.training import arguments

    if getattr(arguments.add_megatron_arguments, "with_prores", False):
        return
    add_megatron_arguments = arguments.add_megatron_arguments

    def with_prores(parser):
        return add_prores_arguments(add_megatron_arguments(parser))

    with_prores.with_prores = True
    arguments.add_megatron_arguments = with_prores
