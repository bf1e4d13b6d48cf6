"""The operators in plain torch: the reference for the fused ones, and what runs where those are not built."""

import torch
from torch import Tensor
from torch.nn import functional as F


def scaled_residual(
    x: Tensor,
    residual: Tensor,
    alpha: Tensor,
    bias: Tensor | None = None,
    prob: float = 0.0,
    training: bool = True,
    residual_scale: float = 1.0,
) -> Tensor:
    """`megatron_prores.ops.scaled_residual`, step by step.

    Bias and dropout are applied in the residual's dtype, the scaled sum is taken in at least float32 and rounded once:
    with alpha = 1 and residual_scale = 1 the result and every gradient are bit for bit those of
    `residual + dropout(x + bias)`. Dropout is torch's.
    """
    if x.dtype != residual.dtype:
        x = x.to(residual.dtype)
    if bias is not None:
        x = x + bias.to(residual.dtype)
    if training and prob > 0.0:
        x = F.dropout(x, p=prob)
    # A half-precision product would round alpha itself (1/3 to 0.333984) before it is used.
    wide = torch.promote_types(residual.dtype, torch.float32)
    stream = residual.to(wide)
    if residual_scale != 1.0:
        stream = stream * residual_scale
    return torch.addcmul(stream, x.to(wide), alpha.detach().to(wide)).to(residual.dtype)


def rms_norm(stream: Tensor, weight: Tensor, eps: float) -> Tensor:
    """torch's RMSNorm in the stream's dtype, returned in the weight's, which the linear after it wants."""
    return F.rms_norm(stream, weight.shape, weight.to(stream.dtype), eps).to(weight.dtype)


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
    """`megatron_prores.ops.scaled_residual_rms_norm`, step by step."""
    stream = scaled_residual(x, residual, alpha, bias, prob, training, residual_scale)
    return stream, rms_norm(stream, weight, eps)
