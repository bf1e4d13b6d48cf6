"""What every pipeline stage of a model holds, from Megatron's own modules, built without memory or process groups."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, fields

from megatron.core import mpu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig
from torch._subclasses.fake_tensor import FakeTensorMode


@dataclass(frozen=True)
class Stage:
    """One virtual chunk of one pipeline stage.

    Attributes:
        rank: the pipeline rank.
        chunk: the virtual chunk, 0 where there is one.
        layers: global layer numbers, from 1.
        parameters: held by one tensor-parallel rank.
        share: of the model's parameters, each counted once: no copy of a tied embedding, all of a split matrix.
    """

    rank: int
    chunk: int
    layers: tuple[int, ...]
    parameters: int
    share: int


class _OneRank:
    """Stands in for a process group of one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def build_stages(model: GPTModelConfig) -> list[Stage]:
    """Every stage and chunk in the order of the layers.

    The modules are Megatron's, with unsplit weights on fake tensors, which have a shape and no memory. Megatron marks
    the weights that tensor parallelism splits, so that a rank's share needs no group. Parameters are the same with
    Transformer Engine's modules, which cannot be built everywhere; the local ones stand in for them.
    """
    whole = copy.copy(model)
    whole.transformer = copy.copy(model.transformer)
    unsplit = {"tensor_model_parallel_size": 1, "context_parallel_size": 1, "sequence_parallel": False}
    local = {"transformer_impl": "local", "gradient_accumulation_fusion": False, "perform_initialization": False}
    for name, value in {**unsplit, **local}.items():
        setattr(whole.transformer, name, value)
    pipeline = model.transformer.pipeline_model_parallel_size
    tied = model.share_embeddings_and_output_weights
    # The last of several stages has a copy of tied embeddings, to set up with the first: build it as its own weight.
    whole.share_embeddings_and_output_weights = tied and pipeline == 1
    chunks = model.transformer.virtual_pipeline_model_parallel_size
    with _pretended_pipeline(pipeline, chunks), FakeTensorMode():
        return [
            _stage(whole, rank, chunk, chunks, model.transformer.tensor_model_parallel_size, tied)
            for chunk in range(chunks or 1)
            for rank in range(pipeline)
        ]


@contextlib.contextmanager
def _pretended_pipeline(size: int, chunks: int | None) -> Iterator[None]:
    """Megatron's layout functions ask for these where they are given no group."""
    virtual = mpu.get_virtual_pipeline_model_parallel_world_size()
    mpu.set_pipeline_model_parallel_world_size(size)
    mpu.set_virtual_pipeline_model_parallel_world_size(chunks)
    mpu.set_tensor_model_parallel_world_size(1)
    mpu.set_tensor_model_parallel_rank(0)
    try:
        yield
    finally:
        mpu.set_virtual_pipeline_model_parallel_world_size(virtual)
        mpu.set_pipeline_model_parallel_world_size(None)
        mpu.set_pipeline_model_parallel_rank(None)
        mpu.set_tensor_model_parallel_world_size(None)
        mpu.set_tensor_model_parallel_rank(None)


def _stage(model: GPTModelConfig, rank: int, chunk: int, chunks: int | None, tensor: int, tied: bool) -> Stage:
    mpu.set_pipeline_model_parallel_rank(rank)
    vp_stage = None if chunks is None else chunk
    is_first = rank == chunk == 0
    is_last = (rank, chunk) == (model.transformer.pipeline_model_parallel_size - 1, (chunks or 1) - 1)
    built = GPTModelBuilder(model).build_model(_groups(), is_first, is_last, vp_stage)
    offset = get_transformer_layer_offset(model.transformer, vp_stage, rank)
    whole = sum(parameter.numel() for parameter in built.parameters())
    split = sum(p.numel() for p in built.parameters() if getattr(p, "tensor_model_parallel", False))
    return Stage(
        rank,
        chunk,
        tuple(range(offset + 1, offset + 1 + len(built.decoder.layers))),
        parameters=whole - split + split // tensor,
        share=whole - (built.output_layer.weight.numel() if tied and is_last and not is_first else 0),
    )


def _groups() -> ProcessGroupCollection:
    groups = ProcessGroupCollection()
    for field in fields(ProcessGroupCollection):
        setattr(groups, field.name, _OneRank() if field.name in ("tp", "cp") else None)
    return groups
