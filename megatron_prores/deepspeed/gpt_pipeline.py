"""Megatron's GPT as a DeepSpeed pipeline: each stage is Megatron's own model of that stage, taken apart into layers.

The layers are numbered over the whole model, so that a checkpoint can be loaded with other stages: 0 is the embedding,
l is decoder layer l, L+1 the last norm, L+2 the head. Which stage holds which is Megatron's division.
"""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_prores.errors import UserError


class EmbeddingLayer(torch.nn.Module):
    """Tokens and positions of [b, s] to hidden states of [s, b, h].

    On a last stage with tied weights it only holds the copy of the word embeddings that the head reads.
    """

    def __init__(self, stage: GPTModel):
        super().__init__()
        if stage.pre_process:
            self.embedding = stage.embedding
        else:
            self.embedding = torch.nn.Module()
            self.embedding.word_embeddings = stage.output_layer

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        tokens, positions = inputs
        return self.embedding(input_ids=tokens, position_ids=positions)


class DecoderLayer(torch.nn.Module):
    """Decoder layer l on hidden states of [s, b, h], with causal attention."""

    def __init__(self, stage: GPTModel, number: int):
        super().__init__()
        self.layer = next(layer for layer in stage.decoder.layers if layer.layer_number == number)
        self._rotary = [stage.rotary_pos_emb] if stage.position_embedding_type == "rope" else []
        self._length = stage.config.tensor_model_parallel_size if stage.config.sequence_parallel else 1

    def forward(self, hidden: Tensor) -> Tensor:
        # A list keeps the shared module out of this one's children.
        rotary = self._rotary[0](hidden.shape[0] * self._length) if self._rotary else None
        return self.layer(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary)[0]


class FinalNorm(torch.nn.Module):
    """The norm before the head."""

    def __init__(self, stage: GPTModel):
        super().__init__()
        self.norm = stage.decoder.final_layernorm

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class Head(torch.nn.Module):
    """Hidden states of [s, b, h] to logits of [s, b, vocabulary / tensor parallel size]."""

    def __init__(self, stage: GPTModel):
        super().__init__()
        self.output_layer = stage.output_layer

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output_layer(hidden)[0]


class GPTPipeline(PipelineModule):
    """A `PipelineModule` of this rank's stage of a GPT.

    Args:
        stage: Megatron's model of this stage.
        loss: from logits and (labels, loss mask) of the last stage to the microbatch's mean loss.
        recompute_layers: decoder layers between two activation checkpoints; 0 keeps all activations.

    Attributes:
        config, pg_collection, vp_stage: as Megatron's trainer asks its models for.

    Raises:
        UserError: a stage would hold no decoder layer.
    """

    def __init__(self, stage: GPTModel, loss: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor], recompute_layers: int):
        self._layers_of_stages = _layers_of_stages(stage)
        number_of_layers = sum(self._layers_of_stages)
        decoder = [LayerSpec(DecoderLayer, stage, number) for number in range(1, number_of_layers + 1)]
        if stage.share_embeddings_and_output_weights:
            tied: dict[str, Any] = {"tied_weight_attr": "embedding.word_embeddings.weight"}

            def head(embedding: EmbeddingLayer, hidden: Tensor) -> Tensor:
                return stage.output_layer(hidden, weight=embedding.embedding.word_embeddings.weight)[0]

            first = TiedLayerSpec("embedding", EmbeddingLayer, stage, **tied)
            last = TiedLayerSpec("embedding", EmbeddingLayer, stage, forward_fn=head, **tied)
        else:
            first, last = LayerSpec(EmbeddingLayer, stage), LayerSpec(Head, stage)
        super().__init__(
            [first, *decoder, LayerSpec(FinalNorm, stage), last],
            topology=PipeModelDataParallelTopology(
                num_pp=parallel_state.get_pipeline_model_parallel_world_size(),
                num_mp=parallel_state.get_tensor_model_parallel_world_size(),
                num_dp=parallel_state.get_data_parallel_world_size(),
            ),
            loss_fn=loss,
            activation_checkpoint_interval=recompute_layers,
            activation_checkpoint_func=_recompute,
            checkpointable_layers=[DecoderLayer.__name__],  # the embedding's input has no gradient
        )
        self.config, self.pg_collection, self.vp_stage = stage.config, stage.pg_collection, None

    def _partition_layers(self, method: str = "") -> None:
        """Megatron's division into stages, whatever DeepSpeed's method is."""
        self.parts = [0]
        for layers in self._layers_of_stages:
            self.parts.append(self.parts[-1] + layers)
        self.parts[1:] = [end + 1 for end in self.parts[1:]]  # the embedding
        self.parts[-1] = self._num_layers
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def _layers_of_stages(stage: GPTModel) -> list[int]:
    group = parallel_state.get_pipeline_model_parallel_group()
    layers: list = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(layers, len(stage.decoder.layers), group=group)
    if 0 in layers:
        raise UserError(
            f"DeepSpeed's pipeline needs a decoder layer on every stage, and they hold {layers}: check --num-layers "
            "and the pipeline split flags"
        )
    return layers


def _recompute(function: Callable, *inputs: Tensor) -> Tensor:
    """Megatron's activation checkpoint, which knows the random states of tensor parallelism."""
    return tensor_parallel.checkpoint(function, False, *inputs)
