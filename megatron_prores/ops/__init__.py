"""The operators on the residual stream, fused where that is built, in plain torch otherwise."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from megatron_prores.ops import plain
from megatron_prores.ops.choice import OPS, is_fused, use_op

__all__ = ["OPS", "is_fused", "scaled_residual", "scaled_residual_rms_norm", "use_op"]


def scaled_residual(
    x: Tensor,
    residual: Tensor,
    alpha: Tensor,
    bias: Tensor | None = None,
    prob: float = 0.0,
    training: bool = True,
    residual_scale: float = 1.0,
) -> Tensor:
    """The residual add of ProRes (arXiv 2603.05369): `residual_scale * residual + alpha * dropout(x + bias, prob)`.

    The sum is taken in at least float32 and rounded once. With alpha = 1, residual_scale = 1, prob = 0 and no bias the
    result is bit for bit `residual + x`, in every dtype.

    Args:
        x: branch output, [..., hidden], float32, bfloat16, float16 or float64.
        residual: residual stream, x's shape; its dtype is the result's (a float32 residual stays float32).
        alpha: float32 tensor of one element on x's device. Its gradient is not taken.
        bias: [hidden], or None.
        prob: dropout probability; the mask is drawn from torch's current generator on x's device.
        training: dropout is the identity when False.
        residual_scale: constant on the residual (1 for pre-norm).

    Returns:
        The new residual stream, x's shape, residual's dtype.

    Raises:
        ValueError: prob is not between 0 and 1.
        TypeError: alpha is a number: as a constant it would be compiled in.
        RuntimeError: shapes, types or devices that do not fit, or a second derivative of the fused operator.

    Under forward-mode AD and torch.func plain torch computes it. What is compiled has to be compiled there too.
    """
    _check(x, residual, alpha, prob, bias=bias)
    return _implementation(x).scaled_residual(x, residual, alpha, bias, prob, training, residual_scale)


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
    """`scaled_residual` and the RMSNorm that follows it: `stream * weight / sqrt(mean(stream^2) + eps)`.

    Args:
        weight: gain of the norm, [hidden].
        eps: added to the mean square.

    Returns:
        The new residual stream as `scaled_residual` gives it, and its norm in the weight's dtype; both x's shape.
    """
    _check(x, residual, alpha, prob, bias=bias, weight=weight)
    return _implementation(x).scaled_residual_rms_norm(
        x, residual, alpha, weight, eps, bias, prob, training, residual_scale
    )


def _is_transformed() -> bool:
    """True under forward-mode AD and torch.func, for which the fused operators have no rules."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


# The compiler asks while it traces, inside the transformation; see choice.py.
_is_transformed._dynamo_marked_constant = True


def _check(x: Tensor, residual: Tensor, alpha: Tensor, prob: float, **vectors: Tensor | None) -> None:
    if not 0.0 <= prob <= 1.0:
        raise ValueError(f"prob is a probability, not {prob}")
    if not isinstance(alpha, Tensor):
        raise TypeError(f"alpha must be a float32 tensor on x's device, not {type(alpha).__name__}")
    if alpha.numel() != 1 or alpha.dtype != torch.float32:
        raise RuntimeError(f"alpha must be one float32 number, not {alpha.dtype} of shape {list(alpha.shape)}")
    if residual.shape != x.shape:
        raise RuntimeError(f"residual must have x's shape {list(x.shape)}, not {list(residual.shape)}")
    for name, vector in vectors.items():
        if vector is not None and vector.shape != x.shape[-1:]:
            raise RuntimeError(f"{name} must have the shape {list(x.shape[-1:])}, not {list(vector.shape)}")


def _implementation(x: Tensor):
    if is_fused(x.device.type) and not _is_transformed():
        from megatron_prores.ops import fused

        return fused
    return plain
