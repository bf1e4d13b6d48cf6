"""A layer's autograd graph, read as a sum."""

import torch
from torch import Tensor, nn

_SUMS = {"AddBackward0", "SubBackward0"}
# f(a*x) = a*f(x). A product commutes where only one factor is a function of x, a quotient where only its numerator is.
_PRODUCTS = {"MulBackward0", "DivBackward0"}
_COMMUTE = {
    "AliasBackward0",
    "CloneBackward0",
    "ExpandBackward0",
    "NativeDropoutBackward0",
    "NegBackward0",
    "PermuteBackward0",
    "ReshapeAliasBackward0",
    "SliceBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "TBackward0",
    "ToCopyBackward0",
    "TransposeBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}


class Mark(torch.autograd.Function):
    """The identity, so that the graph shows where `module`'s output number `place` is."""

    @staticmethod
    def forward(ctx, x: Tensor, module: nn.Module, place: int) -> Tensor:
        ctx.module, ctx.place = module, place
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None, None


class Sum:
    """A layer's output as a sum of its input x, of marked module outputs and of others.

    Attributes:
        carries_x: x is one of the terms.
        scales_x: x has a factor, which alpha leaves alone.
        writes: the marks of the module outputs that are terms.
        others: what else is a term, in words.
        consumers: how many operations use each mark's tensor on the way to the output.
    """

    def __init__(self, out: torch.autograd.graph.Node, x: Tensor, marks: set[torch.autograd.graph.Node]):
        self._x = x
        self._marks = marks
        self.scales_x = False
        self.consumers: dict[torch.autograd.graph.Node, int] = {}
        self._depends = self._follow(out)
        self.carries_x, self.writes, self.others = self._terms(out)

    def _is_x(self, node) -> bool:
        return getattr(node, "variable", None) is self._x

    def _follow(self, out) -> set:
        """The nodes that x reaches; counts the uses of each mark."""
        order, seen, stack = [], {out}, [out]
        users: dict = {}
        while stack:
            node = stack.pop()
            order.append(node)
            for below, _ in node.next_functions:
                if below is None:
                    continue
                users.setdefault(below, []).append(node)
                if below not in seen:
                    seen.add(below)
                    stack.append(below)
        self.consumers = {node: len(users.get(node, ())) for node in order if node in self._marks}
        depends, stack = set(), [node for node in order if self._is_x(node)]
        while stack:
            node = stack.pop()
            if node not in depends:
                depends.add(node)
                stack.extend(users.get(node, ()))
        return depends

    def _terms(self, node) -> tuple[bool, set, set[str]]:
        if node not in self._depends:
            return False, set(), {"something that does not depend on the layer's input"}
        if self._is_x(node):
            return True, set(), set()
        kind = node.name()
        marked = node in self._marks
        below = [child for child, _ in node.next_functions]
        if kind in _PRODUCTS:
            quotient_by_x = kind == "DivBackward0" and below[1] in self._depends
            below = [child for child in below if child in self._depends]
            commutes = len(below) == 1 and not quotient_by_x
        else:
            commutes = marked or kind in _SUMS or kind in _COMMUTE
        if commutes:
            parts = [self._terms(child) for child in below if child is not None or kind in _SUMS]
            carries_x = any(part[0] for part in parts)
            self.scales_x |= carries_x and kind in _PRODUCTS
            if marked and not carries_x:  # a branch; a module that adds it to x itself is looked into
                return False, {node}, set()
            return carries_x, set().union(*(part[1] for part in parts)), set().union(*(part[2] for part in parts))
        return False, set(), {f"the result of {kind.removesuffix('0').removesuffix('Backward')}"}
