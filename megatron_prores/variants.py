"""Where a layer's norms sit, the constants that a placement adds, and the weights that a model starts from.

The placements and initialisations of the paper (arXiv 2603.05369, Tables 1 and 2), as plain numbers: nothing here
knows an engine. l = 1..L is the decoder layer, F its attention or its MLP, N a norm with its own gain.
"""

import math
from dataclasses import dataclass

from megatron_prores.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Placement:
    """One way to put norms round the residual add of a branch, `A*x + alpha*F(x)`.

    Attributes:
        before: F reads N(x) and not x.
        branch: F's output, with the bias of its last linear layer, is normalised; alpha stays outside.
        after: the sum is normalised, so that the residual stream itself is.
        scales_residual: A is (2L)^(1/4) and not 1; alpha never multiplies it.
        scales_input: F reads N(x)/sqrt(l), a constant and not a gain (the authors' code only starts the gains there).
    """

    before: bool = True
    branch: bool = False
    after: bool = False
    scales_residual: bool = False
    scales_input: bool = False

    def residual_scale(self, num_layers: int) -> float:
        """A of a model of L layers."""
        return (2 * num_layers) ** 0.25 if self.scales_residual else 1.0

    def input_scale(self, layer_number: int) -> float:
        """What the norm before F is multiplied by in layer l, 1-based."""
        return 1 / math.sqrt(layer_number) if self.scales_input else 1.0


PLACEMENTS = {
    "pre": Placement(),  # x + alpha*F(N(x))
    "post": Placement(before=False, after=True),  # N(x + alpha*F(x))
    "sandwich": Placement(branch=True),  # x + alpha*N(F(N(x)))
    "deepnorm": Placement(before=False, after=True, scales_residual=True),  # N((2L)^(1/4)*x + alpha*F(x))
    "lns": Placement(scales_input=True),  # x + alpha*F(N(x)/sqrt(l))
}

INITS = ("default", "ds", "scaled", "deepnorm")


def placement_of(norm: str) -> Placement:
    """The placement of that name.

    Raises:
        UserError: there is none.
    """
    if norm not in PLACEMENTS:
        raise UserError(f"unknown norm placement {norm}{did_you_mean(norm, PLACEMENTS)}: use {', '.join(PLACEMENTS)}")
    return PLACEMENTS[norm]


def init_of(norm: str, init: str | None) -> str | None:
    """The initialisation of a run: what was asked for, or DeepNorm's own for DeepNorm, or None for the engine's."""
    return init or ("deepnorm" if norm == "deepnorm" else None)


def weight_distribution(
    init: str, part: str, std: float, layer_number: int, num_layers: int, fan_in: int, fan_out: int
) -> tuple[float, float]:
    """The normal distribution that a weight starts from.

    | init | o, down | q, k | v, gate, up |
    | --- | --- | --- | --- |
    | default | s | s | s |
    | ds | s/sqrt(2l) | s | s |
    | scaled | s/sqrt(2L) | s | s |
    | deepnorm | (8L)^(-1/4) Xavier | Xavier | (8L)^(-1/4) Xavier |

    with Xavier = sqrt(2/(fan_in + fan_out)). DS-Init is open_lm's form of it. Embedding and head have s in all four.

    Args:
        init: one of `INITS`.
        part: "embedding", "head", "q", "k", "v", "o", "gate", "up" or "down".
        std: s.
        layer_number: l, 1-based.
        num_layers: L.
        fan_in, fan_out: of the whole projection: all heads of q, all groups of k, gate without up.

    Returns:
        s, and the multiple of s at which the distribution is cut off: 3, as the paper takes over from OLMo-2 (what
        is left has a std of 0.987 s; the authors' code cuts nothing off), and infinity for Xavier's.
    """
    if part not in ("embedding", "head"):
        if init == "deepnorm":
            gain = 1.0 if part in ("q", "k") else (8 * num_layers) ** -0.25
            return gain * math.sqrt(2 / (fan_in + fan_out)), math.inf
        if part in ("o", "down"):
            std /= math.sqrt({"default": 1, "ds": 2 * layer_number, "scaled": 2 * num_layers}[init])
    return std, 3.0
