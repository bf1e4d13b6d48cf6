"""alpha, and other constants of a layer, multiplied into weights: the same function without them.

alpha * (W x + b) = (alpha W) x + alpha b, so that a pre-norm layer in mid-warm-up is a stock layer with other output
projections. Likewise a constant after a norm belongs into its gain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_prores.errors import UserError
from megatron_prores.huggingface.layout import Kind, Weight
from megatron_prores.variants import placement_of


def refuse_unfoldable(norm: str) -> None:
    """Refuse placements that keep a norm that a pre-norm layer does not have.

    Raises:
        UserError: says which.
    """
    placement = placement_of(norm)
    if placement.after:
        raise UserError(
            f"--prores-norm {norm} normalises the residual stream after each add, and a Llama nowhere in its layers: "
            "it cannot be exported"
        )
    if placement.branch:
        raise UserError(
            f"--prores-norm {norm} normalises what attention and the MLP give, and a Llama only what they get: "
            "it cannot be exported"
        )


@dataclass(frozen=True)
class Folding:
    """What to multiply into the weights of each layer.

    Attributes:
        alphas: alpha(l, N) of the layers 1..L, into output projections and their biases.
        input_scales: of the layers 1..L, into the norms before attention and the MLP.
        zero_centered: Megatron's gains are stored less 1 (`--apply-layernorm-1p`).
    """

    alphas: Sequence[float]
    input_scales: Sequence[float]
    zero_centered: bool = False

    @classmethod
    def of(cls, norm: str, alphas: Sequence[float], zero_centered: bool = False) -> "Folding":
        """For a placement by name; `alphas` as the forward pass uses them, rounded to float32."""
        placement = placement_of(norm)
        scales = [placement.input_scale(layer) for layer in range(1, len(alphas) + 1)]
        return cls([float(torch.tensor(alpha, dtype=torch.float32)) for alpha in alphas], scales, zero_centered)

    @property
    def layers(self) -> list[int]:
        """The layers with an alpha that is not 1."""
        return [layer for layer, alpha in enumerate(self.alphas, start=1) if alpha != 1]

    def __call__(self, weight: Weight, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weight in another dtype, multiplied in float32 and rounded once; bit for bit itself where it may be."""
        factor = 1.0
        if weight.kind is Kind.OUTPUT:
            factor = self.alphas[weight.layer - 1]
        elif weight.kind is Kind.NORM and weight.layer:
            factor = self.input_scales[weight.layer - 1]
        if weight.kind is Kind.NORM and self.zero_centered:
            tensor = tensor.float() + 1
        return tensor.to(dtype) if factor == 1 else (tensor.float() * factor).to(dtype)
