"""The norm of the local layer spec: one that works under sequence parallelism without Transformer Engine."""

import torch
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F

from megatron_prores.errors import UserError


class _RMSNorm(torch.nn.RMSNorm):
    """torch's norm that returns its weight's dtype, which the linear after it wants, also for a float32 residual."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps).to(self.weight.dtype)


class _LayerNorm(torch.nn.LayerNorm):
    """Likewise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps).to(self.weight.dtype)


_NORMS = {"RMSNorm": _RMSNorm, "LayerNorm": _LayerNorm}


def has_apex() -> bool:
    """True for NVIDIA Apex with its fused norms; the PyPI project of the same name has none."""
    try:
        from apex.normalization import FusedLayerNorm  # noqa: F401
    except Exception:  # an Apex built for another torch fails with whatever its loader raises
        return False
    return True


def build_norm(config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs) -> torch.nn.Module:
    """A norm over the last dimension, with Megatron's signature for norms in a layer spec.

    torch's own `rms_norm` or `layer_norm`, with a float32 input (`--fp32-residual-connection`) normalised in float32
    and returned in the parameters' dtype, or Apex's fused LayerNorm where NVIDIA Apex and a GPU are there.
    Parameter names and initial values are those of Megatron's norms. Under sequence parallelism each rank sees a
    part of the sequence only: the `sequence_parallel` mark makes Megatron sum the parameters' gradients over
    tensor-parallel ranks.

    Raises:
        UserError: zero-centred gains, or a norm that torch does not have.
    """
    if config.layernorm_zero_centered_gamma:
        raise UserError(
            "--apply-layernorm-1p needs Transformer Engine: install it and use --transformer-impl transformer_engine"
        )
    if config.normalization not in _NORMS:
        raise UserError(f"--normalization {config.normalization} is not supported: use RMSNorm or LayerNorm")
    if config.normalization == "LayerNorm" and torch.cuda.is_available() and has_apex():
        return FusedLayerNorm(config, hidden_size, eps, persist_layer_norm=config.persist_layer_norm)
    norm = _NORMS[config.normalization](hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm
