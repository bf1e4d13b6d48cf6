"""A quick check of one implementation of the operators on one device, for `prores doctor`.

Outputs and gradients may be off by twice what the same formula is in the same dtype, one torch operation after another;
float64 is the truth for both.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

DTYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float16),
    "float64": (torch.float64, torch.float64),
    "bfloat16 on float32": (torch.bfloat16, torch.float32),
    "float16 on float32": (torch.float16, torch.float32),
}
"""What the operators take: the dtypes of the branch and of the residual stream."""

_SHAPE = (67, 8, 123)  # enough for two threads; no vector width divides the rows
_ALPHA = torch.tensor(1 / 3).item()  # float32, as the operators take it
_RESIDUAL_SCALE, _EPS = 1.25, 1e-5
_LEAVES = ("x", "residual", "bias", "weight")


def check(implementation: ModuleType, device: str, dtypes: tuple[torch.dtype, torch.dtype]) -> str | None:
    """Run `ops.fused` or `ops.plain` forward and backward.

    Returns:
        None if all is well, else what is not.
    """
    try:
        # On busy cores, threads wait for each other far longer than such small tensors take.
        gpus = [torch.cuda.current_device()] if device == "cuda" else []
        with torch.random.fork_rng(gpus), _threads(1) as all_threads:
            wrong = _check_values(implementation, device, dtypes, all_threads)
            return wrong or _check_dropout(implementation, device, dtypes)
    except Exception as error:  # whatever it is, it belongs in the report
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def _check_values(
    implementation: ModuleType, device: str, dtypes: tuple[torch.dtype, torch.dtype], threads: int
) -> str | None:
    """The operators with and without the norm, each by so many threads, against float64."""
    alpha = torch.tensor(_ALPHA, device=device)

    def add(x, residual, bias, weight):
        return (implementation.scaled_residual(x, residual, alpha, bias, residual_scale=_RESIDUAL_SCALE),)

    def add_norm(x, residual, bias, weight):
        return implementation.scaled_residual_rms_norm(
            x, residual, alpha, weight, _EPS, bias, residual_scale=_RESIDUAL_SCALE
        )

    leaves, grads = _inputs(device, dtypes)
    for function, formula in ((add, _add), (add_norm, _add_norm)):
        wide = [tensor.double() for tensor in leaves], [grad.double() for grad in grads]
        with _threads(threads):
            results = _run(function, leaves, grads)
        same_dtype = _run(formula, leaves, grads)
        for name, exact in _run(formula, *wide).items():
            error, allowed = _off(results[name], exact), 2 * _off(same_dtype[name], exact)
            wider = torch.promote_types(results[name].dtype, torch.float32)
            allowed += 4 * torch.finfo(wider).eps * exact.abs().max().item()
            if not error <= allowed:  # NaN is not
                return f"{function.__name__}: {name} is off by {error:.2g}, allowed are {allowed:.2g}"
    return None


@contextlib.contextmanager
def _threads(count: int) -> Iterator[int]:
    """torch's number of threads, until the end; gives what it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def _inputs(device: str, dtypes: tuple[torch.dtype, torch.dtype]) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x_dtype, dtype = dtypes
    hidden = _SHAPE[-1:]
    leaves = [(_SHAPE, x_dtype), (_SHAPE, dtype), (hidden, x_dtype), (hidden, x_dtype)]
    grads = [(_SHAPE, dtype), (_SHAPE, x_dtype)]  # of the output and of the norm
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape, dtype in leaves + grads]
    return tensors[: len(leaves)], tensors[len(leaves) :]


def _add(x: Tensor, residual: Tensor, bias: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (residual * _RESIDUAL_SCALE + (x.to(residual.dtype) + bias.to(residual.dtype)) * _ALPHA,)


def _add_norm(x: Tensor, residual: Tensor, bias: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    (stream,) = _add(x, residual, bias, weight)
    return stream, F.rms_norm(stream, weight.shape, weight.to(stream.dtype), _EPS).to(weight.dtype)


def _run(function: Callable, leaves: list[Tensor], grads: list[Tensor]) -> dict[str, Tensor]:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    outputs = function(*leaves)
    found = torch.autograd.grad(outputs, leaves, grads[: len(outputs)], allow_unused=True)
    results = {name: output.detach() for name, output in zip(("the output", "the norm"), outputs, strict=False)}
    return results | {f"d_{name}": grad for name, grad in zip(_LEAVES, found, strict=True) if grad is not None}


def _off(result: Tensor, exact: Tensor) -> float:
    return (result.double() - exact).abs().max().item()


def _check_dropout(implementation: ModuleType, device: str, dtypes: tuple[torch.dtype, torch.dtype]) -> str | None:
    """The mask repeats with the generator's state, is the same forward and backward, and drops as many as it should."""
    x_dtype, dtype = dtypes
    residual, alpha = torch.zeros(_SHAPE, device=device, dtype=dtype), torch.ones((), device=device)

    def draw(seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        x = torch.ones(_SHAPE, device=device, dtype=x_dtype, requires_grad=True)
        out = implementation.scaled_residual(x, residual, alpha, prob=0.5)
        (d_x,) = torch.autograd.grad(out, x, torch.ones_like(out))
        return out.detach(), d_x

    (mask, backward), (again, _), (other, _) = draw(1), draw(1), draw(2)
    if not torch.equal(mask, again):
        return "dropout: the same state of the generator gives another mask"
    if torch.equal(mask, other):
        return "dropout: another state of the generator gives the same mask"
    if not torch.equal(mask, backward.to(dtype)):  # each is 0 or 2
        return "dropout: the backward pass has another mask than the forward pass"
    share = (mask == 0).double().mean().item()
    if abs(share - 0.5) > 5 * 0.5 / mask.numel() ** 0.5:
        return f"dropout: {share:.3f} of the elements are dropped instead of 0.5"
    return None
