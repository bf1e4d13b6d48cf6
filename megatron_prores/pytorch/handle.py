"""ProRes on a model that is there already: what its modules write to the residual stream is multiplied by alpha."""

import sys
from numbers import Real

import torch
from torch import Tensor, nn

from megatron_prores.coefficients import LayerCoefficient, StageCoefficients
from megatron_prores.errors import UserError
from megatron_prores.pytorch.residual_writes import Layer, find_layers, map_output
from megatron_prores.pytorch.trial import Example
from megatron_prores.schedule import Schedule


def attach(
    model: nn.Module,
    schedule: str | Schedule = "linear",
    warmup_steps: Real | None = None,
    *,
    total_warmup_steps: Real | None = None,
    example: Example = None,
) -> "ProRes":
    """Turn every layer `x + F(N(x))` of the model into `x + alpha(l, t) * F(N(x))` (arXiv 2603.05369).

    The modules that write to the residual stream are found by two trial forwards in eval mode (`residual_writes`) and
    get a forward hook that multiplies their output; norms behind a branch are inside F. Nothing else of the model
    changes: weights, state_dict, RNG and, at alpha = 1, every bit of its results. Call `set_step` before the first
    forward.

    Args:
        model: any pre-norm or sandwich-norm Transformer in torch, Hugging Face's or your own; also wrapped in
            DistributedDataParallel or compiled. Before ZeRO-3 or a pipeline takes it apart.
        schedule: a name out of `SCHEDULES`, or a `Schedule` for as many layers as the model has.
        warmup_steps: T, the first layer's warm-up in optimizer steps (1000 if not given); not with a `Schedule`.
        total_warmup_steps: W instead of T, optimizer steps until every alpha is 1.
        example: arguments of a forward if the model does not run on token ids alone: a tuple or a dict of keywords.

    Raises:
        UserError: the model is not a module, ProRes is attached already, the residual structure is not recognised (the
            message says what was looked for and found), or the schedule does not fit.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"attach needs a torch module, not a {type(model).__name__}")
    if not isinstance(schedule, str | Schedule):
        raise UserError(f"schedule must be a name or a Schedule, not a {type(schedule).__name__}")
    model = _unwrapped(model)
    if any(_hooks(module) for module in model.modules()):
        raise UserError(f"ProRes is attached to this {type(model).__name__} already: detach() it first")
    if isinstance(schedule, Schedule) and (warmup_steps, total_warmup_steps) != (None, None):
        raise UserError("give the ProRes warm-up once: in the Schedule, as warmup_steps or as total_warmup_steps")
    layers = find_layers(model, example)
    if not isinstance(schedule, Schedule):
        schedule = Schedule.resolve(
            schedule, len(layers), warmup_steps=warmup_steps, total_warmup_steps=total_warmup_steps
        )
    if schedule.num_layers != len(layers):
        raise UserError(f"the ProRes schedule is for {schedule.num_layers} layers; the model has {len(layers)}")
    return ProRes(model, schedule, layers)


class ProRes:
    """ProRes attached to a model; made by `attach`.

    Attributes:
        schedule: the schedule, with L and T.
        layers: the recognised layers: number, name, and the modules whose outputs are scaled.
        coefficients: alpha of each layer, which another clock than `set_step` may fill.
        step: t of the last `set_step`, or None.
    """

    def __init__(self, model: nn.Module, schedule: Schedule, layers: list[Layer]):
        self.schedule = schedule
        self.layers = layers
        self.coefficients = [_Coefficient(layer) for layer in layers]
        self.step: int | None = None
        self._model = model
        for layer, coefficient in zip(layers, self.coefficients, strict=True):
            for module, places in layer.writes.values():
                module.register_forward_hook(_Scale(coefficient, places))
        _forget_compiled()

    def set_step(self, step: int) -> None:
        """Make the next forward use alpha(l, step), where `step` = t optimizer steps are completed.

        Once per optimizer step, before the forward: not between a forward and its backward. No synchronisation and
        nothing to recompile; where the model has moved to another device since, alpha follows it.

        Raises:
            UserError: the step is negative, or ProRes was detached.
        """
        if not self.layers:
            raise UserError("ProRes was detached from this model")
        StageCoefficients(self.schedule, self.coefficients).set_step(step)
        self.step = step

    def detach(self, copy: nn.Module | None = None) -> None:
        """Take ProRes off the model, or only off a deep copy of it: what is left is as it was. Again is harmless."""
        for module in _unwrapped(self._model if copy is None else copy).modules():
            for key in _hooks(module):
                del module._forward_hooks[key]
        if copy is None:
            self.layers, self.coefficients = [], []
        _forget_compiled()

    def describe(self) -> str:
        """A table: each layer, the modules whose outputs are scaled, alpha."""
        rows = [("layer", "module", "scaled outputs", "alpha")]
        for layer, coefficient in zip(self.layers, self.coefficients, strict=True):
            alpha = f"{coefficient.value.item():.6g}" if coefficient.is_set else "not set"
            rows.append((str(layer.number), layer.name, ", ".join(layer.writes), alpha))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"ProRes: {self.schedule}", *lines])

    __repr__ = describe


class _Coefficient(LayerCoefficient):
    """alpha of a layer, on the device of the layer's weights."""

    def __init__(self, layer: Layer):
        super().__init__(layer.number, _device(layer.block))
        self._block = layer.block

    @property
    def is_set(self) -> bool:
        return self._is_set

    def fill(self, alpha: float) -> None:
        device = _device(self._block)
        if device != self.value.device:  # the model has moved
            self.value = self.value.to(device)
        super().fill(alpha)

    def read(self) -> Tensor:
        if not self._is_set:
            raise UserError(
                f"ProRes layer {self.layer_number} runs but nothing sets its alpha: call set_step(step) on what "
                "megatron_prores.attach() returned, before every step"
            )
        return self.value


class _Scale:
    """Forward hook: the items of a module's output that go to the residual stream, times alpha."""

    def __init__(self, coefficient: _Coefficient, places: frozenset[int]):
        self.coefficient = coefficient
        self.places = places

    def __call__(self, module: nn.Module, args: tuple, output: object) -> object:
        return map_output(output, self._scale)

    def _scale(self, x: Tensor, place: int) -> Tensor:
        if place not in self.places:
            return x
        alpha = self.coefficient.read()
        if x.dtype.itemsize < 4:  # a half-precision product would round alpha itself
            return (x.float() * alpha).to(x.dtype)
        return x * alpha

    def __deepcopy__(self, memo: dict) -> "_Scale":
        return self  # a copied model (an average of weights, say) is on the same clock

    def __reduce__(self):
        raise UserError("a model with ProRes attached is not pickled whole: save its state_dict(), or detach() first")


def _hooks(module: nn.Module) -> list[int]:
    return [key for key, hook in module._forward_hooks.items() if isinstance(hook, _Scale)]


def _device(block: nn.Module) -> torch.device:
    """Where the layer computes; the CPU as long as that is unknown."""
    device = next((parameter.device for parameter in block.parameters()), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def _unwrapped(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod"):  # torch.compile's wrapper
            model = model._orig_mod
        else:
            return model


def _forget_compiled() -> None:
    """Have everything compiled anew: what was compiled before a hook came or went does not look for hooks again."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
