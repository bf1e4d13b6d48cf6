"""The alphas of the layers that live on this rank, where the forward pass reads them.

alpha reaches the forward as a 0-dim float32 tensor at an address that never moves, filled in place between steps.
A Python float would recompile under torch.compile and go stale inside a CUDA graph. 0-dim, because such a tensor
does not promote bf16 activations. Held by a plain object and not by `nn.Module`, because mixed-precision wrappers
cast every float buffer (1/3 would become 0.333984 in bf16).
"""

from collections.abc import Iterable

import torch

from megatron_prores.errors import UserError
from megatron_prores.schedule import Schedule


class LayerCoefficient:
    """alpha(l, t) of one decoder layer.

    Attributes:
        layer_number: l, global and 1-based.
        value: 0-dim float32 tensor on the layer's device.
    """

    def __init__(self, layer_number: int, device: torch.device | str | int):
        self.layer_number = layer_number
        self.value = torch.zeros((), dtype=torch.float32, device=device)
        self._is_set = False  # what the forward looks at: a compiled one would be guarded by the number below
        self._filled: float | None = None

    def fill(self, alpha: float) -> None:
        """Set alpha in place. Launches at most one kernel and never waits for the device."""
        if alpha != self._filled:
            self.value.fill_(alpha)
            self._filled = alpha
            self._is_set = True

    def read(self) -> torch.Tensor:
        """The tensor, for the forward pass.

        Raises:
            UserError: no step was set yet, so that nothing drives the schedule.
        """
        if not self._is_set:
            raise UserError(
                f"ProRes layer {self.layer_number} runs but nothing sets its alpha: call "
                "megatron_prores.megatron.enable() before Megatron parses its arguments, or "
                "megatron_prores.deepspeed.initialize() before the first forward"
            )
        return self.value


class StageCoefficients:
    """The schedule applied to this rank's layers, however many there are (a pipeline stage may hold none)."""

    def __init__(self, schedule: Schedule, coefficients: Iterable[LayerCoefficient]):
        self.schedule = schedule
        self.coefficients = sorted(coefficients, key=lambda coefficient: coefficient.layer_number)

    def set_step(self, step: int) -> None:
        """Make the next forward use alpha(l, step), where `step` = t optimizer steps are completed."""
        alphas = self.schedule.alpha(step)
        for coefficient in self.coefficients:
            coefficient.fill(float(alphas[coefficient.layer_number - 1]))
