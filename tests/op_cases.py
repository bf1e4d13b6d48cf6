"""Inputs, references and comparisons for the tests of the operators."""

import contextlib
import shutil

import pytest
import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# (dtype of x and bias, dtype of the residual); the second of the mixed ones is --fp32-residual-connection.
DTYPE_PAIRS = [*((dtype, dtype) for dtype in DTYPES), (torch.bfloat16, torch.float32), (torch.float16, torch.float32)]
# No kernel has these types: x is converted to the residual's.
CONVERTED_PAIRS = [(torch.float32, torch.bfloat16), (torch.float32, torch.float64), (torch.bfloat16, torch.float16)]
# Nothing that a vector width divides; more rows and fewer than chunks of partial sums; either side of a tile's end.
SHAPES = [(5, 123, 123), (7, 1, 33), (3,), (4, 1), (0, 2, 4), (2, 3, 0), *((2, n) for n in (1023, 1024, 1025, 2049))]
ALPHAS = [0.0, 1e-3, 1 / 3, 1.0]
INSTRUCTION_SETS = ["base", "avx2", "avx512"]
SPECIAL = [0.0, 1.0, 1 + 2**-7, 2**-14, 2**-24, 6e-8, 1e-38, 1e-45, 65504.0, 3.3e38, float("inf"), float("nan")]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_fused():
    """The fused operators' module. Where a C++ compiler is, its absence is a failure."""
    try:
        from megatron_prores.ops import fused
    except ImportError as error:
        if any(map(shutil.which, ("g++", "c++", "clang++"))):
            raise
        pytest.skip(f"no C++ compiler to build the extension: {error}")
    return fused


@contextlib.contextmanager
def instruction_set(name):
    """Run the CPU kernels of this one."""
    fused = require_fused()
    best = fused.build_info()["instruction_set"]
    if not fused.use_instruction_set(name):
        pytest.skip(f"this CPU has no {name}")
    try:
        yield fused
    finally:
        fused.use_instruction_set(best)


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def inputs(shape, dtypes, with_bias=True):
    """x, residual, bias (or None) and the gradient of the result, the same for every dtype up to rounding."""
    generator = torch.Generator().manual_seed(0)
    x_dtype, dtype = dtypes
    wide = [torch.randn(size, generator=generator, dtype=torch.float64) for size in (shape, shape, shape[-1:], shape)]
    x, residual, bias, grad = wide
    if x.numel():  # signed zeros show differences that values do not
        x.view(-1)[0], residual.view(-1)[0] = -0.0, -0.0
    leaves = [x.to(x_dtype), residual.to(dtype), bias.to(x_dtype) if with_bias else None]
    return leaves, grad.to(dtype)


def norm_inputs(shape, dtypes, with_bias=True):
    """x, residual, bias (or None), the norm's weight, and the gradients of the stream and of its norm."""
    leaves, grad = inputs(shape, dtypes, with_bias)
    generator = torch.Generator().manual_seed(1)
    weight, grad_normed = (torch.randn(size, generator=generator, dtype=torch.float64) for size in (shape[-1:], shape))
    return [*leaves, (1 + weight / 3).to(dtypes[0])], [grad, grad_normed.to(dtypes[0])]


def forward_backward(function, leaves, *grads):
    """The results of function(*leaves) and the gradients of the leaves that are there, from those of the results.

    A gradient that is None: nothing depends on that result.
    """
    leaves = [leaf if leaf is None else leaf.detach().requires_grad_() for leaf in leaves]
    outs = function(*leaves)
    outs = [outs] if torch.is_tensor(outs) else outs
    used = [out for out, grad in zip(outs, grads, strict=True) if grad is not None]
    d_outs = [grad for grad in grads if grad is not None]
    d_leaves = torch.autograd.grad(
        used, [leaf for leaf in leaves if leaf is not None], d_outs, allow_unused=True, materialize_grads=True
    )
    return [*(out.detach() for out in outs), *d_leaves]


def assert_as_exact_as_torch(function, formula, leaves, *grads, case=""):
    """Results and gradients are off by no more than twice what `formula` is in the same dtypes; float64 is the truth.

    `formula` is one torch operation after another.
    """
    exact = forward_backward(
        formula,
        [leaf if leaf is None else leaf.double() for leaf in leaves],
        *(grad if grad is None else grad.double() for grad in grads),
    )
    same_dtype = forward_backward(formula, leaves, *grads)
    results = forward_backward(function, leaves, *grads)
    for index, (result, plain, reference) in enumerate(zip(results, same_dtype, exact, strict=True)):
        assert result.dtype == plain.dtype and result.shape == plain.shape, f"{case}: result {index}"
        if result.numel():
            error, allowed = ((tensor - reference).abs().max().item() for tensor in (result, plain))
            eps = 4 * torch.finfo(torch.promote_types(result.dtype, torch.float32)).eps
            if result.numel() < 100:  # few numbers may be rounded well by chance
                eps = max(eps, torch.finfo(result.dtype).eps / 2)
            allowed = 2 * allowed + eps * reference.abs().max().item()
            assert error <= allowed, f"{case}: result {index} is off by {error:.3g}, allowed are {allowed:.3g}"


def same_bits(a, b):
    """Bit for bit, except that one NaN is as good as another."""
    bits = BITS[a.element_size()]
    a, b = (torch.where(tensor.isnan(), float("nan"), tensor).contiguous() for tensor in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(bits), b.view(bits))
