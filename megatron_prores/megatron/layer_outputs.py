"""What the decoder layers of a rank put out in a forward pass, by hooks that are there only during that pass.

What is recorded is defined in `megatron_prores.probe_files`.
"""

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatron_prores.probe_files import Probe
from megatron_prores.variants import placement_of

LayerRecord = tuple[float, np.ndarray, np.ndarray, np.ndarray]
"""Activation norm over this rank's tokens; which of the sampled tokens these are [m]; their directions, float16 [m, h];
their magnitudes, float32 [m]."""


def sample_tokens(sequences: int, length: int, count: int = 32) -> np.ndarray:
    """Tokens spread evenly over a microbatch, whatever ranks it is on.

    Returns:
        int64 [n, 2], n = count or all tokens if there are fewer: sequence and position.
    """
    count = min(count, sequences * length)
    flat = (2 * np.arange(count) + 1) * sequences * length // (2 * count)
    return np.stack(np.divmod(flat, length), axis=1)


def merged(ranks: list[dict[int, LayerRecord]], sampled: np.ndarray, tokens: np.ndarray) -> Probe:
    """One probe of what the ranks have of the layers and of their tokens, every token on one rank."""
    layers = sorted(set().union(*ranks))
    norms, directions, magnitudes = [], [], []
    for layer in layers:
        records = [records[layer] for records in ranks if layer in records]
        order = np.argsort(np.concatenate([here for _, here, _, _ in records]))
        norms.append(np.mean([norm for norm, *_ in records]))  # all ranks of a sequence have as many of its tokens
        directions.append(np.concatenate([some for _, _, some, _ in records])[order])
        magnitudes.append(np.concatenate([some for _, _, _, some in records])[order])
    return Probe(
        layers=np.array(layers, dtype=np.int64),
        norms=np.array(norms, dtype=np.float32),
        directions=np.array(directions),
        magnitudes=np.array(magnitudes),
        sampled=sampled,
        tokens=tokens,
    )


class LayerOutputs:
    """Records the layers of this rank while it is entered; a layer that runs again replaces its record.

    Args:
        layers: Megatron's decoder layers, with ProRes or without.
        sampled: int64 [n, 2], sequence and position of the tokens whose residual outputs are kept.
        start: position of this rank's first token, where ranks share the sequence.
    """

    def __init__(self, layers: Iterable[torch.nn.Module], sampled: np.ndarray, start: int = 0):
        self._layers = list(layers)
        self._sampled = sampled
        self._start = start
        self._norms: dict[int, Tensor] = {}
        self._residuals: dict[int, Tensor] = {}
        self._here: np.ndarray | None = None
        self._handles: list = []

    def __enter__(self) -> "LayerOutputs":
        for layer in self._layers:
            number = layer.layer_number
            attention, mlp = _branches(layer)
            for module, hook in ((attention, self._attention), (mlp, self._mlp), (layer, self._layer)):
                self._handles.append(module.register_forward_hook(partial(hook, number)))
        return self

    def __exit__(self, *error) -> None:
        while self._handles:
            self._handles.pop().remove()

    def records(self) -> dict[int, LayerRecord]:
        """By layer number, on the host."""
        return {
            number: (norm.item(), self._here, *_split(self._residuals[number])) for number, norm in self._norms.items()
        }

    # Forward hooks return nothing, so that the outputs stay as they are.

    def _attention(self, number: int, module, args, output) -> None:
        self._residuals[number] = self._branch(output)

    def _mlp(self, number: int, module, args, output) -> None:
        self._residuals[number] = self._residuals[number] + self._branch(output)

    def _layer(self, number: int, module, args, output) -> None:
        stream = output[0] if isinstance(output, tuple) else output  # [s, b, h], and what cross-attention would read
        self._norms[number] = _root_mean_square(stream.detach().float()).mean()

    def _branch(self, output: Tensor | tuple[Tensor, Tensor | None]) -> Tensor:
        """float32 [m, h]: the sampled tokens that are on this rank."""
        branch, bias = output if isinstance(output, tuple) else (output, None)
        sequences, positions = self._sampled.T
        self._here = np.flatnonzero((positions >= self._start) & (positions < self._start + branch.shape[0]))
        # Megatron adds the residual with gradients even in an evaluation, and a norm of the branch with it.
        kept = branch.detach()[positions[self._here] - self._start, sequences[self._here]].float()
        return kept if bias is None else kept + bias.detach().float()


def _branches(layer: torch.nn.Module) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The modules whose outputs alpha multiplies: attention and MLP, or the norms that a placement puts after them."""
    if placement_of(getattr(layer, "norm", "pre")).branch:
        return layer.post_self_attn_layernorm, layer.post_mlp_layernorm
    return layer.self_attention, layer.mlp


def _root_mean_square(x: Tensor) -> Tensor:
    return x.square().mean(dim=-1).sqrt()


def _split(residual: Tensor) -> tuple[np.ndarray, np.ndarray]:
    magnitude = _root_mean_square(residual)
    direction = residual / torch.where(magnitude == 0, 1, magnitude)[:, None]
    return direction.half().cpu().numpy(), magnitude.cpu().numpy()
