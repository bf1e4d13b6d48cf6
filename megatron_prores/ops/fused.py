"""The operators of csrc/ with their gradients: one pass over memory forward, one backward.

Importing this module loads `megatron_prores._C`, and raises ImportError where it was not built.

Dropout takes 16 random bits an element from a Philox counter, so that the probability is a multiple of 1/65536. The
mask is a function of two integers drawn from torch's current generator on x's device and of the element's place: it
is computed again in the backward pass and never stored. Recomputation that restores the generator repeats it.
"""

import torch
from torch import Tensor

from megatron_prores import _C
from megatron_prores.ops.plain import rms_norm

build_info = _C.build_info
use_instruction_set = _C.use_instruction_set

_forward = torch.ops.prores.scaled_residual.default
_backward = torch.ops.prores.scaled_residual_backward.default
_norm_forward = torch.ops.prores.scaled_residual_rms_norm.default
_norm_backward = torch.ops.prores.scaled_residual_rms_norm_backward.default


def scaled_residual(
    x: Tensor,
    residual: Tensor,
    alpha: Tensor,
    bias: Tensor | None = None,
    prob: float = 0.0,
    training: bool = True,
    residual_scale: float = 1.0,
) -> Tensor:
    """`megatron_prores.ops.scaled_residual`, fused."""
    _check(x, residual=residual, alpha=alpha, bias=bias)
    x, residual, bias, rng = _prepare(x, residual, bias, prob if training else 0.0)
    return _forward(x, residual, alpha, bias, rng, prob, residual_scale)


def scaled_residual_rms_norm(
    x: Tensor,
    residual: Tensor,
    alpha: Tensor,
    weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
    prob: float = 0.0,
    training: bool = True,
    residual_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`megatron_prores.ops.scaled_residual_rms_norm`, fused."""
    _check(x, residual=residual, alpha=alpha, bias=bias, weight=weight)
    x, bias = _branch(x, residual, bias)
    if weight.dtype != x.dtype:  # no kernel for these types
        stream = scaled_residual(x, residual, alpha, bias, prob, training, residual_scale)
        return stream, rms_norm(stream, weight, eps)
    x, residual, bias, rng = _prepare(x, residual, bias, prob if training else 0.0)
    stream, normed, _ = _norm_forward(x, residual, alpha, bias, rng, weight.contiguous(), prob, residual_scale, eps)
    return stream, normed


def _check(x: Tensor, **operands: Tensor | None) -> None:
    # The operators check the rest themselves. One operand without memory would have none of them run.
    for name, operand in operands.items():
        if operand is not None and operand.device != x.device:
            raise RuntimeError(f"prores: {name} is on {operand.device}, x on {x.device}")


def _branch(x: Tensor, residual: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    # Kernels exist for equal types, and for a half-precision branch on a float32 stream.
    half_on_float = residual.dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16)
    dtype = x.dtype if half_on_float and (bias is None or bias.dtype == x.dtype) else residual.dtype
    return x.to(dtype), bias if bias is None else bias.to(dtype)


def _prepare(x: Tensor, residual: Tensor, bias: Tensor | None, prob: float):
    x, bias = _branch(x, residual, bias)
    if bias is not None:
        bias = bias.contiguous()
    rng = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=x.device) if prob > 0.0 else None
    return x.contiguous(), residual.contiguous(), bias, rng


@torch.library.register_fake("prores::scaled_residual")
def _(x, residual, alpha, bias, rng, prob, residual_scale):
    return torch.empty_like(residual)


@torch.library.register_fake("prores::scaled_residual_backward")
def _(grad, alpha, rng, prob, residual_scale, x_dtype, with_bias):
    d_residual = grad.new_empty(0) if residual_scale == 1.0 else torch.empty_like(grad)
    d_bias = grad.new_empty(grad.shape[-1] if with_bias else 0, dtype=x_dtype)
    return torch.empty_like(grad, dtype=x_dtype), d_residual, d_bias


@torch.library.register_fake("prores::scaled_residual_rms_norm")
def _(x, residual, alpha, bias, rng, weight, prob, residual_scale, eps):
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    rstd = residual.new_empty(rows, dtype=torch.promote_types(residual.dtype, torch.float32))
    return torch.empty_like(residual), torch.empty_like(x), rstd


@torch.library.register_fake("prores::scaled_residual_rms_norm_backward")
def _(grad_stream, grad_normed, stream, rstd, weight, alpha, rng, prob, residual_scale, with_bias):
    d_bias = torch.empty_like(weight) if with_bias else weight.new_empty(0)
    return torch.empty_like(grad_normed), torch.empty_like(stream), d_bias, torch.empty_like(weight)


def _save(ctx, inputs, output):
    x, _, alpha, bias, rng, ctx.prob, ctx.residual_scale = inputs
    ctx.save_for_backward(alpha, rng)
    ctx.x_dtype, ctx.with_bias = x.dtype, bias is not None


def _differentiate(ctx, grad):
    alpha, rng = ctx.saved_tensors
    d_x, d_residual, d_bias = _backward(
        grad.contiguous(), alpha, rng, ctx.prob, ctx.residual_scale, ctx.x_dtype, ctx.with_bias
    )
    # An operator's output must not be its input: where the residual is not scaled, grad is passed on here.
    return d_x, grad if ctx.residual_scale == 1.0 else d_residual, None, d_bias if ctx.with_bias else None, *[None] * 3


def _save_norm(ctx, inputs, output):
    _, _, alpha, bias, rng, weight, ctx.prob, ctx.residual_scale, _ = inputs
    stream, _, rstd = output
    ctx.save_for_backward(stream, rstd, weight, alpha, rng)
    ctx.with_bias = bias is not None


def _differentiate_norm(ctx, grad_stream, grad_normed, _):
    d_x, d_residual, d_bias, d_weight = _norm_backward(
        grad_stream.contiguous(),
        grad_normed.contiguous(),
        *ctx.saved_tensors,
        ctx.prob,
        ctx.residual_scale,
        ctx.with_bias,
    )
    return d_x, d_residual, None, d_bias if ctx.with_bias else None, None, d_weight, *[None] * 3


def _refuse(ctx, *grads):
    raise RuntimeError(
        "prores: the fused operators have no second derivatives; use megatron_prores.ops.use_op('torch')"
    )


torch.library.register_autograd("prores::scaled_residual_backward", _refuse)
torch.library.register_autograd("prores::scaled_residual_rms_norm_backward", _refuse)
torch.library.register_autograd("prores::scaled_residual", _differentiate, setup_context=_save)
torch.library.register_autograd("prores::scaled_residual_rms_norm", _differentiate_norm, setup_context=_save_norm)
