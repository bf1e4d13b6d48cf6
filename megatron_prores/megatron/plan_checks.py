"""What would be wrong with a run: errors that keep it from starting, and notes about what it may not be meant to do."""

import argparse
from collections.abc import Iterator

from megatron_prores.megatron.arguments import run_length
from megatron_prores.schedule import Schedule
from megatron_prores.warmup_summary import describe_progress

# Of the run, for the variants that normalise after the sum (arXiv 2603.05369, section 4).
_POST_LR_WARMUP = 0.1

# Post-norm wants a gentle start: in the paper's Table 6 these diverge or lose to linear-square.
_TOO_FAST_FOR_POST = ("linear", "linear-sqrt", "equal", "reverse", "stagewise-0")

_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings")
_POSITIVE = (
    *_REQUIRED,
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("micro_batch_size", "global_batch_size", "num_layers_per_virtual_pipeline_stage"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "num_distributed_optimizer_instances"),
    *(
        "make_vocab_size_divisible_by",
        "num_virtual_stages_per_pipeline_rank",
        "ffn_hidden_size",
        "num_query_groups",
        "kv_channels",
        "vocab_size",
    ),
)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def missing_sizes(args: argparse.Namespace) -> Iterator[str]:
    """Sizes without which nothing can be worked out."""
    for name in _REQUIRED:
        if getattr(args, name) is None:
            yield f"{_flag(name)} is missing"
    for name in _POSITIVE:
        value = getattr(args, name)
        if value is not None and value < 1:
            yield f"{_flag(name)} must be 1 or more, not {value}"


def layout_errors(args: argparse.Namespace) -> Iterator[str]:
    """Sizes that do not divide, all of them; of Megatron's own checks the first one ends the run."""
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    context = args.context_parallel_size
    model_size = tensor * pipeline * context
    if args.world_size % model_size:
        fitting = args.world_size // model_size * model_size
        near = [str(size) for size in (fitting, fitting + model_size) if size]
        yield (
            f"{args.world_size} processes are not divisible by tensor {tensor} x pipeline {pipeline} x context "
            f"{context} = {model_size}: {' or '.join(near)} would be"
        )
    elif args.global_batch_size is not None:
        data = args.world_size // model_size
        if args.global_batch_size % (args.micro_batch_size * data):
            yield (
                f"--global-batch-size {args.global_batch_size} is not divisible by --micro-batch-size "
                f"{args.micro_batch_size} x data-parallel size {data} = {args.micro_batch_size * data}"
            )
    yield from _width_errors(args, tensor)
    yield from _depth_errors(args, pipeline)
    if args.seq_length % (2 * context) and context > 1:
        yield f"--seq-length {args.seq_length} is not divisible by 2 x --context-parallel-size {context}"
    if args.max_position_embeddings < args.seq_length:
        yield f"--max-position-embeddings {args.max_position_embeddings} is below --seq-length {args.seq_length}"


def _width_errors(args: argparse.Namespace, tensor: int) -> Iterator[str]:
    heads = args.num_attention_heads
    if args.kv_channels is None and args.hidden_size % heads:
        yield f"--hidden-size {args.hidden_size} is not divisible by --num-attention-heads {heads}"
    groups = args.num_query_groups if args.group_query_attention else heads
    if args.group_query_attention and heads % groups:
        yield f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}"
    if args.group_query_attention and groups % tensor and tensor % groups:
        yield f"--num-query-groups {groups} neither divides --tensor-model-parallel-size {tensor} nor the reverse"
    for name in ("num_attention_heads", "ffn_hidden_size"):
        if (getattr(args, name) or tensor) % tensor:
            yield f"{_flag(name)} {getattr(args, name)} is not divisible by --tensor-model-parallel-size {tensor}"


def _depth_errors(args: argparse.Namespace, pipeline: int) -> Iterator[str]:
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if args.pipeline_model_parallel_layout is not None:
        return  # Megatron and, for its coverage of the layers, the plan read it
    if first is not None or last is not None:
        yield from _uneven_depth_errors(args, pipeline, [layers for layers in (first, last) if layers is not None])
        return
    slots = args.num_layers + args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    yield from _chunk_errors(args, pipeline, slots)


def _uneven_depth_errors(args: argparse.Namespace, pipeline: int, given: list[int]) -> Iterator[str]:
    left, stages = args.num_layers - sum(given), pipeline - len(given)
    if left < 0 or (stages < 1 and left) or (stages > 0 and left % stages):
        yield (
            f"of --num-layers {args.num_layers}, {left} are left for {stages} pipeline stages: see "
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
        )


def _chunk_errors(args: argparse.Namespace, pipeline: int, slots: int) -> Iterator[str]:
    counted = "" if slots == args.num_layers else f" ({slots} with embedding and loss)"
    if slots % pipeline:
        yield (
            f"--num-layers {args.num_layers}{counted} is not divisible by --pipeline-model-parallel-size {pipeline}: "
            "change one, or see --pipeline-model-parallel-layout"
        )
        return
    for name in ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"):
        size = getattr(args, name)
        if size is not None and slots // pipeline % size:
            yield f"the {slots // pipeline} layers of a pipeline stage are not divisible by {_flag(name)} {size}"


def learning_rate_errors(args: argparse.Namespace) -> Iterator[str]:
    """What Megatron's scheduler refuses only once the model is built. For validated arguments."""
    if args.skip_train:
        return
    if args.lr is None:
        yield "--lr is missing"
    unit = "iters" if args.train_iters else "samples"
    decay = getattr(args, f"lr_decay_{unit}") or getattr(args, f"train_{unit}")
    warmup = getattr(args, f"lr_warmup_{unit}")
    fraction = args.lr_warmup_fraction
    if fraction is not None and not 0 <= fraction < 1:
        yield f"--lr-warmup-fraction must be at least 0 and less than 1, not {fraction}"
    if warmup < 0:
        yield f"--lr-warmup-{unit} must be 0 or more, not {warmup}"
    if fraction is None and warmup >= decay:
        yield f"--lr-warmup-{unit} {warmup} must be shorter than the run's learning-rate schedule ({decay} {unit})"
    if args.lr_decay_style == "WSD" and getattr(args, f"lr_wsd_decay_{unit}") is None:
        yield f"--lr-decay-style WSD needs the length of its decay: --lr-wsd-decay-{unit}"


def notes(args: argparse.Namespace, schedule: Schedule, wants_sequence_parallel: bool) -> Iterator[str]:
    """What works and may not be meant. For validated arguments, which no longer say what was asked for."""
    iterations = run_length(args)
    outlasts = describe_progress(schedule, iterations) if iterations else None
    if outlasts:
        yield outlasts
    yield from learning_rate_notes(args, schedule)
    yield from _layout_notes(args, wants_sequence_parallel)
    yield from _memory_notes(args)


def learning_rate_notes(args: argparse.Namespace, schedule: Schedule) -> Iterator[str]:
    """Learning rates that do not suit the run's length or its norm. For validated arguments."""
    yield from _variant_notes(args, schedule, lr_warmup_share(args))
    unit = "iters" if args.train_iters else "samples"
    length = getattr(args, f"lr_decay_{unit}") or getattr(args, f"train_{unit}")
    decay = getattr(args, f"lr_wsd_decay_{unit}")
    if args.lr_decay_style == "WSD" and length and decay and decay >= length:
        yield (
            f"--lr-wsd-decay-{unit} {decay} is as long as the run ({length}) or longer: "
            "the learning rate decays from the start"
        )


def lr_warmup_share(args: argparse.Namespace) -> float | None:
    """The learning rate's warm-up as a fraction of the run; None where nothing is trained."""
    unit = "iters" if args.train_iters else "samples"
    length = getattr(args, f"train_{unit}")
    if not length:
        return None
    if args.lr_warmup_fraction is not None:
        return args.lr_warmup_fraction * (getattr(args, f"lr_decay_{unit}") or length) / length
    return getattr(args, f"lr_warmup_{unit}") / length


def _variant_notes(args: argparse.Namespace, schedule: Schedule, warmup: float | None) -> Iterator[str]:
    norm = args.prores_norm
    if norm in ("post", "deepnorm") and warmup is not None and warmup < _POST_LR_WARMUP:
        yield f"the learning rate warms up over {warmup:.1%} of the run; norm {norm} takes 10% in the paper"
    if norm == "post" and schedule.name in _TOO_FAST_FOR_POST:
        yield f"norm post with schedule {schedule.name} may fail to train at a high learning rate: use linear-square"
    if norm == "deepnorm" and args.prores_init not in (None, "deepnorm"):
        yield f"--prores-init {args.prores_init} replaces the initialisation that belongs to norm deepnorm"


def _layout_notes(args: argparse.Namespace, wants_sequence_parallel: bool) -> Iterator[str]:
    if wants_sequence_parallel and not args.sequence_parallel:
        yield "--sequence-parallel does nothing without tensor parallelism"
    pipeline = args.pipeline_model_parallel_size
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    if microbatches < pipeline:
        yield f"fewer microbatches ({microbatches}) than pipeline stages ({pipeline}): stages wait for each other"
    if args.context_parallel_size > 1 and args.transformer_impl == "local":
        yield "--context-parallel-size needs Transformer Engine where the run takes place"


def _memory_notes(args: argparse.Namespace) -> Iterator[str]:
    if not args.bf16 and not args.fp16:
        yield "neither --bf16 nor --fp16: the run is in fp32, and Megatron's estimate of memory assumes bf16"
    left_out = {
        "full recompute": args.recompute_granularity == "full",
        "context parallelism": args.context_parallel_size > 1,
    }
    names = " and ".join(name for name, is_used in left_out.items() if is_used)
    if names:
        yield f"Megatron's estimate of activations knows no {names}, which lower them"
