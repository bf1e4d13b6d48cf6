"""Where a Llama's weights are in Megatron and in Hugging Face: names, and how Megatron keeps several in one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch


class Kind(Enum):
    """What a weight is, where that matters."""

    PLAIN = "the same in both"
    NORM = "a norm's gain"
    QKV = "queries, keys and values, one after another for each group of heads"
    GATE_UP = "the gate and then what it gates"
    OUTPUT = "writes to the residual stream"
    VOCABULARY = "a row for each token, and padding in Megatron"
    ABSENT = "a bias that Megatron does not have: zeros in Hugging Face"


@dataclass(frozen=True)
class Weight:
    """A weight of the model.

    Attributes:
        megatron: its name in Megatron; of an absent one the name that it would have.
        names: what it is made of in Hugging Face.
        layer: l, 1-based; 0 outside the layers.
    """

    kind: Kind
    megatron: str
    names: tuple[str, ...]
    layer: int = 0


@dataclass(frozen=True)
class Shape:
    """What the names and layouts depend on.

    Attributes:
        layers: L.
        queries, groups: the number of query heads, and of groups that share a key and a value.
        tied: the head is the embedding.
        qkv_bias, bias: q, k and v have biases; all linear layers have.
    """

    layers: int
    queries: int
    groups: int
    tied: bool
    qkv_bias: bool = False
    bias: bool = False


_ATTENTION, _MLP = "self_attn.", "mlp."
_QKV = tuple(_ATTENTION + name for name in ("q_proj", "k_proj", "v_proj"))
_O = (_ATTENTION + "o_proj",)
_LINEAR = (
    (Kind.QKV, "self_attention.linear_qkv", _QKV),
    (Kind.OUTPUT, "self_attention.linear_proj", _O),
    (Kind.GATE_UP, "mlp.linear_fc1", (_MLP + "gate_proj", _MLP + "up_proj")),
    (Kind.OUTPUT, "mlp.linear_fc2", (_MLP + "down_proj",)),
)
_NORMS = (
    ("input_layernorm.weight", "input_layernorm.weight"),
    ("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
)

# Transformer Engine keeps the norms with the linear layers after them.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def weights(shape: Shape) -> Iterator[Weight]:
    """Every weight of the model once, in the order of the forward pass."""
    yield Weight(Kind.VOCABULARY, "embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
    for layer in range(1, shape.layers + 1):
        for kind, megatron, names in _in_a_layer(shape):
            ours = tuple(f"model.layers.{layer - 1}.{name}" for name in names)
            yield Weight(kind, f"decoder.layers.{layer - 1}.{megatron}", ours, layer)
    yield Weight(Kind.NORM, "decoder.final_layernorm.weight", ("model.norm.weight",))
    if not shape.tied:
        yield Weight(Kind.VOCABULARY, "output_layer.weight", ("lm_head.weight",))


def _in_a_layer(shape: Shape) -> Iterator[tuple[Kind, str, tuple[str, ...]]]:
    for megatron, name in _NORMS:
        yield Kind.NORM, megatron, (name,)
    for kind, megatron, names in _LINEAR:
        yield kind, f"{megatron}.weight", tuple(f"{name}.weight" for name in names)
        has_bias = shape.bias or (shape.qkv_bias and kind is Kind.QKV)
        lacks_bias = shape.qkv_bias and not shape.bias and names == _O  # in a Llama o has one if q, k and v have
        if has_bias or lacks_bias:
            yield kind if has_bias else Kind.ABSENT, f"{megatron}.bias", tuple(f"{name}.bias" for name in names)


def megatron_name(parameter: str) -> str:
    """The name that `weights()` gives to a parameter of a `GPTModel`, whichever layers it is built of."""
    for fused, separate in _FUSED_NORMS.items():
        if parameter.endswith("." + fused):
            return parameter.removesuffix(fused) + separate
    return parameter


def split(kind: Kind, weight: torch.Tensor, shape: Shape) -> Sequence[torch.Tensor]:
    """A weight or bias of Megatron, [rows, ...], as the parts that Hugging Face names; views where that is possible.

    Rows of QKV are [group, queries of the group + key + value, head size]; of GATE_UP [gate or up, rows].
    """
    if kind is Kind.QKV:
        heads = weight.unflatten(0, (shape.groups, shape.queries // shape.groups + 2, -1))
        return [part.flatten(0, 2) for part in (heads[:, :-2], heads[:, -2:-1], heads[:, -1:])]
    return weight.chunk(2) if kind is Kind.GATE_UP else [weight]


def fuse(kind: Kind, parts: Sequence[torch.Tensor], shape: Shape) -> torch.Tensor:
    """What `split()` takes apart."""
    if kind is Kind.QKV:
        heads = [part.unflatten(0, (shape.groups, -1, _head_size(parts, shape))) for part in parts]
        return torch.cat(heads, dim=1).flatten(0, 2)
    return torch.cat(list(parts)) if kind is Kind.GATE_UP else parts[0]


def fits(kind: Kind, parts: Sequence[torch.Tensor], shape: Shape, whole: Sequence[int]) -> bool:
    """True where the parts make up a weight of the shape `whole`."""
    rows = [len(part) for part in parts]
    if kind is Kind.QKV:
        even = rows[0] * shape.groups == rows[1] * shape.queries and rows[1] == rows[2]
    else:
        even = len(set(rows)) == 1
    return even and sum(rows) == whole[0] and all(part.shape[1:] == tuple(whole)[1:] for part in parts)


def _head_size(parts: Sequence[torch.Tensor], shape: Shape) -> int:
    return len(parts[0]) // shape.queries
