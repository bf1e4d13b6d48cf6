"""What a run would be: sizes, stages, tokens, FLOPs, memory, and what is wrong with it, without starting anything."""

import argparse
import contextlib
import io
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import training
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.arguments import validate_args
from megatron.training.models.gpt import GPTModelConfig
from megatron.training.theoretical_memory_usage import report_theoretical_memory
from megatron.training.vocab_utils import calculate_padded_vocab_size

from megatron_prores.errors import UserError
from megatron_prores.megatron import gpt, plan_checks, pretrain_gpt, spec
from megatron_prores.megatron.arguments import is_stock, run_length, schedule_from_args, validate_prores_arguments
from megatron_prores.megatron.launch import accepted
from megatron_prores.megatron.stages import Stage, build_stages
from megatron_prores.schedule import Schedule

_MEBIBYTE = 2**20


@dataclass(frozen=True)
class Memory:
    """Megatron's theoretical estimate for the most loaded rank, in bytes; it assumes bf16 and even stages."""

    weights_and_optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights_and_optimizer + self.activations


@dataclass(frozen=True)
class Plan:
    """A run as its arguments describe it.

    Attributes:
        parameters: of the model, each once.
        stages: pipeline stages and virtual chunks in the order of the layers.
        iterations: the run's length.
        lr_warmup: as a fraction of the run.
        flops_per_iteration: forward and backward of one global batch, by Megatron's formula.
        notes: what works and may not be meant.
    """

    world_size: int
    tensor_parallel: int
    pipeline_parallel: int
    virtual_chunks: int
    context_parallel: int
    data_parallel: int
    dtype: str
    norm: str
    init: str | None
    schedule: Schedule
    num_layers: int
    parameters: int
    stages: list[Stage]
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    iterations: int
    lr: float
    lr_warmup: float
    flops_per_iteration: float
    memory: Memory
    notes: list[str]

    @property
    def microbatches(self) -> int:
        """Per iteration and data-parallel rank."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel)

    @property
    def bubble(self) -> float:
        """A pipeline stage's idle time over its working time, with Megatron's schedules."""
        return (self.pipeline_parallel - 1) / (self.microbatches * self.virtual_chunks)

    @property
    def tokens(self) -> int:
        return self.global_batch_size * self.seq_length * self.iterations

    @property
    def parameters_per_rank(self) -> list[int]:
        """By pipeline rank."""
        held = [0] * self.pipeline_parallel
        for stage in self.stages:
            held[stage.rank] += stage.parameters
        return held

    def as_json(self) -> dict:
        """Plain numbers, names and lists, with the derived ones."""
        schedule = {"name": self.schedule.name, "warmup_steps": float(self.schedule.warmup_steps)}
        derived = ("microbatches", "bubble", "tokens", "parameters_per_rank")
        return {
            **{name: value for name, value in asdict(self).items() if name != "schedule"},
            "schedule": {**schedule, "total_steps": float(self.schedule.total_steps)},
            "memory": {**asdict(self.memory), "total": self.memory.total},
            **{name: getattr(self, name) for name in derived},
        }


def plan(args: argparse.Namespace, world_size: int | None = None) -> Plan:
    """Work out what a run would be.

    Args:
        args: parsed and not yet validated, as `launch.parse_for_any_machine` gives them. Validated here, in place.
        world_size: the number of processes; without it the fewest that the layout needs.

    Raises:
        UserError: the run could not start; one line for every reason.
    """
    if args.use_checkpoint_args:
        raise UserError("a plan reads no checkpoint: give the model's flags or configs, without --use-checkpoint-args")
    _refuse(plan_checks.missing_sizes(args))
    model_size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    args.rank, args.world_size = 0, model_size if world_size is None else world_size
    wants_sequence_parallel = args.sequence_parallel
    first_checks = (gpt.refuse_unsupported, pretrain_gpt.check_settings, validate_prores_arguments)
    _refuse([*plan_checks.layout_errors(args), *_complaints(args, *first_checks)])
    if args.num_experts:
        raise UserError("a plan knows no experts yet: leave out --num-experts")
    accepted(validate_args, args)
    schedule = schedule_from_args(args)
    _refuse([*plan_checks.learning_rate_errors(args), *_complaints(args, gpt.check_layout)])
    pretrain_gpt.choose_spec(args, is_stock(schedule.name, args.prores_norm))
    _set_vocabulary(args)
    stages = accepted(build_stages, _model_config(args))
    _refuse(_coverage(stages, args.num_layers))
    notes = list(plan_checks.notes(args, schedule, wants_sequence_parallel))
    if args.prores_strict:
        _refuse(note for note in notes if "outlasts" in note)
    return _plan(args, schedule, stages, notes)


def _refuse(errors) -> None:
    if lines := "\n".join(errors):
        raise UserError(lines)


def _complaints(args: argparse.Namespace, *checks: Callable) -> list[str]:
    """What the entry point's own checks say, each of which stops at its first."""
    found = []
    for check in checks:
        try:
            check(args)
        except UserError as error:
            found.append(str(error))
    return found


def _set_vocabulary(args: argparse.Namespace) -> None:
    """As the run would: by its tokenizer if that is here, else by --vocab-size."""
    if args.padded_vocab_size:
        return
    is_here = args.tokenizer_model and os.path.exists(args.tokenizer_model)
    if is_here or (args.tokenizer_type == "NullTokenizer" and args.vocab_size):
        accepted(build_tokenizer, args)
    elif not args.vocab_size:
        raise UserError("the vocabulary's size is not known: give --vocab-size, or a --tokenizer-model that exists")
    if not args.padded_vocab_size:
        args.padded_vocab_size = calculate_padded_vocab_size(
            args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
        )


def _model_config(args: argparse.Namespace) -> GPTModelConfig:
    """The run's, with local layers where Transformer Engine is not installed here: it need not be."""
    if args.transformer_impl == "transformer_engine" and not spec.HAVE_TE:
        args.transformer_impl = "local"
    model = accepted(gpt_config_from_args, args)
    if model.transformer_layer_spec is spec.prores_layer_spec:
        model.transformer_layer_spec = partial(spec.prores_layer_spec, norm=args.prores_norm)
    accepted(model.finalize)
    spec.refuse_unbuildable(model)
    return model


def _coverage(stages: list[Stage], num_layers: int) -> list[str]:
    numbers = [layer for stage in stages for layer in stage.layers]
    if numbers == list(range(1, num_layers + 1)):
        return []
    return [
        f"the pipeline stages hold the layers {numbers} and not each of 1..{num_layers} once: check the split flags"
    ]


def _plan(args: argparse.Namespace, schedule: Schedule, stages: list[Stage], notes: list[str]) -> Plan:
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it returns
        weights, activations, _ = accepted(report_theoretical_memory, args, num_microbatches=microbatches)
    return Plan(
        world_size=args.world_size,
        tensor_parallel=args.tensor_model_parallel_size,
        pipeline_parallel=args.pipeline_model_parallel_size,
        virtual_chunks=args.virtual_pipeline_model_parallel_size or 1,
        context_parallel=args.context_parallel_size,
        data_parallel=args.data_parallel_size,
        dtype=str(args.params_dtype).removeprefix("torch."),
        norm=args.prores_norm,
        init=args.prores_init,
        schedule=schedule,
        num_layers=args.num_layers,
        parameters=sum(stage.share for stage in stages),
        stages=stages,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
        iterations=run_length(args) or 0,
        lr=args.lr or 0.0,
        lr_warmup=plan_checks.lr_warmup_share(args) or 0.0,
        flops_per_iteration=training.num_floating_point_operations(args, args.global_batch_size),
        memory=Memory(weights * _MEBIBYTE, activations * _MEBIBYTE),
        notes=notes,
    )
