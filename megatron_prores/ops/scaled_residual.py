"""residual_scale * residual + alpha * dropout(x + bias), in plain torch."""

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
    """The residual add of ProRes (arXiv 2603.05369): `residual_scale * residual + alpha * dropout(x + bias, prob)`.

    With alpha = 1 and residual_scale = 1 the result and every gradient are bit for bit those of
    `residual + dropout(x + bias)`, in every dtype: bias and dropout are applied in the residual's dtype, the scaled
    sum is taken in at least float32 and rounded once.

    Args:
        x: branch output, [..., hidden], float32, bfloat16, float16 or float64.
        residual: residual stream, x's shape; its dtype is the result's (a float32 residual stays float32).
        alpha: 0-dim float32 tensor on x's device. Its gradient is not taken.
        bias: [hidden], or None.
        prob: dropout probability, drawn from torch's current generator.
        training: dropout is the identity when False.
        residual_scale: constant on the residual (1 for pre-norm).

    Returns:
        The new residual stream, x's shape, residual's dtype.
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
    return torch.addcmul(stream, x.to(wide), alpha.to(wide)).to(residual.dtype)
