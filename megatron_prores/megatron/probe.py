"""`--prores-probe-interval N`: every N iterations, look into every layer while the model reads one fixed microbatch.

A probe is one forward pass through Megatron's own pipeline schedule, in evaluation mode, of the first
`--eval-micro-batch-size` sequences of the validation data, which every data-parallel rank reads. The trainer's data
iterators, random states and model stay as they were, so that losses are bit for bit those of a run without probes.
The rank with the TensorBoard writer collects the layers from its tensor- and pipeline-parallel ranks and writes
them as `megatron_prores.probe_files` says, and the activation norms as TensorBoard scalars too.

A run that does not ask for probes has none of this: no wrapped function in its loop, no hook, no file.
"""

import copy
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from megatron.training import get_args, get_tensorboard_writer, get_timers, get_wandb_writer, training
from torch.utils.data import default_collate

from megatron_prores.errors import UserError
from megatron_prores.megatron import driver, progress
from megatron_prores.megatron.arguments import validate_probe
from megatron_prores.megatron.layer_outputs import LayerOutputs, LayerRecord, merged, sample_tokens
from megatron_prores.megatron.screen import is_first_rank, say
from megatron_prores.probe_files import FOLDER, Probe, write_probe


def install() -> None:
    """Probe the runs that ask for it; a second call does nothing."""
    original = training.setup_model_and_optimizer
    if getattr(original, "with_probe", False):
        return

    @functools.wraps(original)
    def setup_model_and_optimizer(*args, **kwargs):
        validate_probe(get_args())
        result = original(*args, **kwargs)
        if getattr(get_args(), "prores_probe_interval", 0):
            _watch(optimizer=result[1])
        return result

    setup_model_and_optimizer.with_probe = True
    training.setup_model_and_optimizer = setup_model_and_optimizer


def _watch(optimizer: Any) -> None:
    """Wrap what the trainer calls from here on: for its datasets, for its loop, and at the end of every iteration."""
    build, train, after_step = (
        training.build_train_valid_test_datasets,
        training.train,
        training.post_training_step_callbacks,
    )
    validation: list = []  # of each of this rank's model chunks
    probe: Callable[..., None] | None = None

    @functools.wraps(build)
    def build_train_valid_test_datasets(*args, **kwargs):
        result = build(*args, **kwargs)
        validation.append(result[1])
        return result

    @functools.wraps(train)
    def train_with_probes(*args, **kwargs):
        nonlocal probe
        run = get_args()
        given = inspect.signature(train).bind(*args, **kwargs).arguments
        datasets = validation or [None] * len(given["model"])  # not built where no rank of the stage reads them
        probe = functools.partial(_probe, given, optimizer, _Microbatch(datasets))
        if is_first_rank():
            say(f"probes: every {run.prores_probe_interval} iterations, in {run.tensorboard_dir}/{FOLDER}")
        if _is_due(run.iteration):
            # Parameters are whole, and the trainer, too, does not gather them before the first step.
            probe(run.iteration, gather=False)
        return train(*args, **kwargs)

    @functools.wraps(after_step)
    def post_training_step_callbacks(model, optimizer, scheduler, iteration, *args, **kwargs):
        result = after_step(model, optimizer, scheduler, iteration, *args, **kwargs)
        if _is_due(iteration):
            get_timers()("interval-time").stop()
            probe(iteration)
            get_timers()("interval-time", log_level=0).start()
        return result

    training.build_train_valid_test_datasets = build_train_valid_test_datasets
    training.train = train_with_probes
    training.post_training_step_callbacks = post_training_step_callbacks


def _is_due(iteration: int) -> bool:
    """At the start of a run, every N iterations, and at its end. A resumed run writes its first one again."""
    args = get_args()
    return iteration % args.prores_probe_interval == 0 or iteration == args.train_iters


class _Microbatch:
    """The first sequences of the validation data, as often as a schedule asks for them.

    Attributes:
        tokens: int64 [b, s]; None on ranks that read no data.
    """

    def __init__(self, datasets: list):
        sequences = range(get_args().eval_micro_batch_size)
        self._batches = [
            None if dataset is None else default_collate([_aside(dataset)[index] for index in sequences])
            for dataset in datasets
        ]
        self.tokens = _first([batch and batch["tokens"].numpy() for batch in self._batches])
        if self.tokens is None and mpu.is_pipeline_first_stage() and mpu.get_tensor_model_parallel_rank() == 0:
            raise UserError("--prores-probe-interval needs validation data: give a --split with a second part")

    def iterators(self) -> list[Iterator[dict] | None]:
        """One for each model chunk."""
        return [None if batch is None else _copies(batch) for batch in self._batches]


def _copies(batch: dict) -> Iterator[dict]:
    """A forward step may take its batch apart."""
    while True:
        yield dict(batch)


def _first(arrays: list[np.ndarray | None]) -> np.ndarray | None:
    return next((array for array in arrays if array is not None), None)


def _aside(dataset: Any) -> Any:
    """A copy that shares the data: a dataset keeps the masks of the sequence that is read from it first."""
    dataset = copy.copy(dataset)
    if hasattr(dataset, "datasets"):  # blended
        dataset.datasets = [copy.copy(part) for part in dataset.datasets]
    return dataset


def _probe(given: dict[str, Any], optimizer: Any, microbatch: _Microbatch, iteration: int, gather: bool = True) -> None:
    """Look at all layers with the weights and alphas after an iteration.

    Args:
        given: the arguments of the trainer's loop.
        gather: parameters may be spread over the data-parallel ranks.
    """
    args, start = get_args(), time.perf_counter()
    model = given["model"]
    sampled = sample_tokens(args.eval_micro_batch_size, args.seq_length)
    writer_rank = torch.distributed.get_world_size() - 1  # where Megatron has its TensorBoard writer
    group = mpu.get_model_parallel_group()
    is_recorded = writer_rank in torch.distributed.get_process_group_ranks(group)
    outputs = LayerOutputs(_layers(model) if is_recorded else (), sampled, _first_token(args))
    driver.set_step(iteration)
    with _evaluating(model, optimizer, gather), outputs:
        _forward(given, microbatch)
    if is_recorded:
        part = (_shared_once(outputs.records(), args), microbatch.tokens)
        parts: list = [None] * torch.distributed.get_world_size(group)
        is_writer = torch.distributed.get_rank() == writer_rank
        torch.distributed.gather_object(part, parts if is_writer else None, dst=writer_rank, group=group)
        if is_writer:
            probe = merged([records for records, _ in parts], sampled, _first([tokens for _, tokens in parts]))
            write_probe(args.tensorboard_dir, iteration, probe)
            _log(probe, iteration)
    progress.exclude(time.perf_counter() - start)


def _layers(model: list[torch.nn.Module]) -> list[torch.nn.Module]:
    return [layer for chunk in model for layer in get_attr_wrapped_model(chunk, "decoder").layers]


def _first_token(args: Any) -> int:
    """Position of this rank's first token in every sequence."""
    if not args.sequence_parallel:
        return 0
    return mpu.get_tensor_model_parallel_rank() * (args.seq_length // args.tensor_model_parallel_size)


def _shared_once(records: dict[int, LayerRecord], args: Any) -> dict[int, LayerRecord]:
    """Without sequence parallelism all tensor-parallel ranks have the same tokens."""
    return records if args.sequence_parallel or mpu.get_tensor_model_parallel_rank() == 0 else {}


@contextmanager
def _evaluating(model: list[torch.nn.Module], optimizer: Any, gather: bool) -> Iterator[None]:
    """What Megatron does round an evaluation, and everything as it was afterwards."""
    config, rerun = get_model_config(model[0]), get_rerun_state_machine()
    timers, mode, training_modes = config.timers, rerun.get_mode(), [chunk.training for chunk in model]
    # Only there while --overlap-param-gather gathers parameters in the forward pass.
    overlapped = any(getattr(chunk, "remove_forward_pre_hook_handles", None) for chunk in model)
    if overlapped:
        training.disable_forward_pre_hook(model, optimizer=optimizer, param_sync=gather)
    config.timers = None
    rerun.set_mode(RerunMode.DISABLED)
    for chunk in model:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk, was_training in zip(model, training_modes, strict=True):
            chunk.train(was_training)
        rerun.set_mode(mode)
        config.timers = timers
        if overlapped:
            training.enable_forward_pre_hook(model)


def _forward(given: dict[str, Any], microbatch: _Microbatch) -> None:
    args, model = get_args(), given["model"]
    iterators, microbatches = microbatch.iterators(), 1
    if args.virtual_pipeline_model_parallel_size:
        # The schedule cannot do with fewer: the same one again and again.
        microbatches = get_model_config(model[0]).microbatch_group_size_per_vp_stage
    get_forward_backward_func(schedule_pg_collection=given.get("pg_collection"))(
        forward_step_func=given["forward_step_func"],
        data_iterator=iterators,
        model=model,
        num_microbatches=microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.eval_micro_batch_size,
        decoder_seq_length=args.decoder_seq_length,
        forward_only=True,
        pg_collection=given.get("pg_collection"),
        p2p_communicator=given.get("p2p_communicator"),
    )


def _log(probe: Probe, iteration: int) -> None:
    scalars = {
        f"prores/activation_norm/layer_{layer:03}": float(norm)
        for layer, norm in zip(probe.layers, probe.norms, strict=True)
    }
    if writer := get_tensorboard_writer():
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, iteration)
    if wandb := get_wandb_writer():
        wandb.log(scalars, iteration)
