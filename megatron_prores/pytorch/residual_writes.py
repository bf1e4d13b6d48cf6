"""Which modules of a model write to its residual stream, read off the autograd graph of a trial forward.

A layer of a residual network is `x + F_1(..) + F_2(..) + ...`. The graph that autograd records of the layer says so:
from the layer's output back to its input x lead sums, and what else enters these sums are the branches. Every module's
output is marked in that graph, and a branch belongs to the module whose mark is met first, so that a norm behind the
branch (`x + N(F(x))`) is found and not what it normalises. Only what commutes with a scalar may lie between the mark
and the sum. Nothing is concluded from a name. The model runs in eval mode on two tokens, twice: the second run has
every branch at 0 and must find every layer to be the identity (but for a factor on x itself, where a model has one).
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron_prores.errors import UserError
from megatron_prores.pytorch.graph import Mark, Sum
from megatron_prores.pytorch.trial import Example, trial

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass
class Layer:
    """One layer and the modules that write to the residual stream in it.

    Attributes:
        number: l, 1-based place in the stack.
        name: of the layer in the model.
        block: the layer.
        writes: name of each writing module inside the layer, the module, and which items of its output it is that are
            added to the stream (0 for an output that is one tensor).
    """

    number: int
    name: str
    block: nn.Module
    writes: dict[str, tuple[nn.Module, frozenset[int]]] = field(default_factory=dict)


def map_output(output: object, scale: Callable[[Tensor, int], Tensor]) -> object:
    """A module's output with every tensor t at place i replaced by scale(t, i); what is no tensor stays."""
    if isinstance(output, Tensor):
        return scale(output, 0)
    if type(output) in (tuple, list):
        return type(output)(scale(item, i) if isinstance(item, Tensor) else item for i, item in enumerate(output))
    return output


def find_layers(model: nn.Module, example: Example = None) -> list[Layer]:
    """The layers of `model` in order, with the modules whose outputs are added to the residual stream.

    Weights that are not there yet (on the meta device, or partitioned by ZeRO-3) are stood in for.

    Raises:
        UserError: the trial forward fails, there is no single stack of layers, or a layer is not
            `x + sum of module outputs`.
    """
    stacks = _stacks(model)
    kind = type(model).__name__
    if not stacks:
        raise UserError(
            f"ProRes cannot attach to {kind}: looked for a list of layers (a ModuleList of modules with modules of "
            "their own) and found none"
        )
    probes = {name: [_Probe(layer) for layer in layers] for name, layers in stacks.items()}
    with _hooked(hook for stack in probes.values() for probe in stack for hook in probe.trace_hooks()):
        trial(model, example, stacks)
    used = [name for name, stack in probes.items() if any(probe.ran for probe in stack)]
    if len(used) != 1:
        raise UserError(
            f"ProRes cannot attach to {kind}: looked for one stack of layers that a forward runs through and found "
            f"{' and '.join(used) or 'none among ' + ', '.join(stacks)}"
            + ("; attach to the part of the model that holds the one you mean" if used else "")
        )
    stack = probes[used[0]]
    for probe in stack:
        probe.conclude(kind)
    layers = stacks[used[0]]
    _refuse_shared(kind, layers)
    with _hooked(hook for probe in stack for hook in probe.zero_hooks()):
        trial(model, example, stacks)
    for probe in stack:
        if not probe.identity:
            raise _refusal(
                kind,
                probe.layer,
                f"with {' and '.join(probe.layer.writes)} scaled by 0 the output is not x: more is done to the "
                "residual stream than these add",
            )
    return layers


def _refusal(kind: str, layer: Layer, found: str) -> UserError:
    return UserError(
        f"ProRes cannot attach to {kind}: looked for layers of the form x + F(x) with the output of a module as F; "
        f"in {layer.name} ({type(layer.block).__name__}) {found}"
    )


class _Probe:
    """What the trial forwards show of one layer."""

    def __init__(self, layer: Layer):
        self.layer = layer
        self.ran = self._runs = False
        self.identity = True
        self._x: Tensor | None = None
        self._scales_x = False
        self._called: set[nn.Module] = set()
        self._marks: list[torch.autograd.graph.Node] = []
        self._writes: dict[nn.Module, set[int]] = {}
        self._problem: str | None = None

    def trace_hooks(self) -> Iterator[torch.utils.hooks.RemovableHandle]:
        """Hooks under which a forward records the layer's writes."""
        block = self.layer.block
        for module in block.modules():
            if module is not block:
                yield module.register_forward_hook(self._mark, with_kwargs=True)
        yield block.register_forward_pre_hook(self._begin, with_kwargs=True)
        yield block.register_forward_hook(self._read)

    def zero_hooks(self) -> Iterator[torch.utils.hooks.RemovableHandle]:
        """Hooks under which a forward has every branch at 0 and compares the layer's output with its input."""
        block = self.layer.block
        for module, places in self.layer.writes.values():
            yield module.register_forward_hook(
                lambda module, args, output, places=places: map_output(output, lambda x, i: x * 0 if i in places else x)
            )
        yield block.register_forward_pre_hook(self._begin, with_kwargs=True)
        yield block.register_forward_hook(self._compare)

    def conclude(self, kind: str) -> None:
        """Fill in the layer's writes, or refuse."""
        if not self.ran:
            raise _refusal(kind, self.layer, "nothing ran: a forward does not reach it")
        if self._problem:
            raise _refusal(kind, self.layer, self._problem)
        block = self.layer.block
        names = {module: name for name, module in block.named_modules()}
        asleep = [names[module] for module in _parts(block) if module not in self._called]
        if asleep:
            raise _refusal(kind, self.layer, f"{' and '.join(asleep)} did not run, so that its output is unknown")
        self.layer.writes = {
            name: (module, frozenset(self._writes[module])) for module, name in names.items() if module in self._writes
        }

    def _begin(self, block, args, kwargs):
        """Give the layer a new residual stream: numbers of size 1, at which its graph starts."""
        self.ran = self._runs = True
        self._marks = []

        def fresh(value):
            if self._x is not None or not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            x = torch.randn(value.shape, generator=torch.Generator().manual_seed(self.layer.number))
            self._x = x.to(value).requires_grad_(torch.is_grad_enabled())
            return self._x.clone()  # not the leaf itself: some layers add in place

        self._x = None
        args = tuple(fresh(value) for value in args)
        return args, {name: fresh(value) for name, value in kwargs.items()}

    def _mark(self, module, args, kwargs, output):
        if not self._runs:  # a module that is part of another layer too
            return output
        self._called.add(module)
        given = {id(value) for value in (*args, *kwargs.values())}

        def mark(x, i):
            if not x.requires_grad or id(x) in given:  # dropout that is off, say, gives back what it gets
                return x
            x = Mark.apply(x, module, i)
            self._marks.append(x.grad_fn)
            return x

        return map_output(output, mark)

    def _read(self, block, args, output):
        """Take the layer's output apart into the stream and the branches."""
        self._runs = False
        out = _hidden(output)
        if self._x is None or out is None or out.grad_fn is None or out.shape != self._x.shape:
            self._problem = self._problem or "the output is not a tensor of the input's shape with an autograd graph"
            return
        total = Sum(out.grad_fn, self._x, set(self._marks))
        read = [mark for mark in self._marks if mark in total.writes]
        modules = {mark.module for mark in read}
        name = {module: name for name, module in block.named_modules()}
        if not total.carries_x:
            found = [f"the output of {name[mark.module]} ({type(mark.module).__name__})" for mark in read]
            found = " and ".join([*found, *sorted(total.others)])
            problem = f"what comes out is {found}, and x is not added to it"
        elif total.others:
            problem = f"{' and '.join(sorted(total.others))} is added to the residual stream, which no module puts out"
        elif not read:
            problem = "nothing is added to the residual stream"
        else:
            problem = next(
                (
                    f"the output of {name[mark.module]} does not only go to the residual stream"
                    for mark in self._marks
                    if mark.module in modules
                    and (total.consumers.get(mark, 0) > 1 or (mark not in total.writes and mark in total.consumers))
                ),
                None,
            )
        self._problem = self._problem or problem
        self._scales_x = total.scales_x
        for mark in read:
            self._writes.setdefault(mark.module, set()).add(mark.place)
        self._marks, self._x = [], None

    def _compare(self, block, args, output):
        out = _hidden(output)
        self.identity &= self._scales_x or torch.equal(out.to(self._x.dtype), self._x)


def _hidden(output: object) -> Tensor | None:
    """The residual stream in a layer's output: the output, or the first item of it."""
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The children with weights, through lists of them, which do not run themselves."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _parts(child)
        elif any(True for _ in child.parameters()):
            yield child


def _stacks(model: nn.Module) -> dict[str, list[Layer]]:
    """The lists of layers in the model, by name: none inside a layer, and each item a module made of modules."""
    stacks: dict[str, list[Layer]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, _CONTAINERS) or any(name.startswith(f"{outer}.") for outer in stacks):
            continue
        blocks = list(module.named_children())
        alike = isinstance(module, nn.ModuleList) or len({type(block) for _, block in blocks}) == 1
        layered = all(any(True for _ in block.children()) and not isinstance(block, _CONTAINERS) for _, block in blocks)
        if blocks and alike and layered:
            prefix = f"{name}." if name else ""
            stacks[name] = [Layer(i, f"{prefix}{key}", block) for i, (key, block) in enumerate(blocks, start=1)]
    return stacks


def _refuse_shared(kind: str, layers: list[Layer]) -> None:
    owner: dict[nn.Module, Layer] = {}
    for layer in layers:
        for name, (module, _) in layer.writes.items():
            first = owner.setdefault(module, layer)
            if first is not layer:
                raise _refusal(kind, layer, f"{name} is also a part of {first.name}, and cannot have two alphas")


@contextlib.contextmanager
def _hooked(handles: Iterator[torch.utils.hooks.RemovableHandle]):
    handles = list(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
