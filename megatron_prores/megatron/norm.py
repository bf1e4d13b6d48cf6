"""The norms of the local layer spec and of the placements: they work under sequence parallelism without Transformer
Engine.
"""

import torch
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F

from megatron_prores.errors import UserError
from megatron_prores.ops import is_fused, scaled_residual_rms_norm


class _Norm(torch.nn.Module):
    """What torch's norms lack.

    Attributes:
        output_scale: a constant on the output. It is taken into the gain, which costs nothing.
        keeps_dtype: return the input's dtype. Otherwise that of the weight, which the linear layer after the norm
            wants, also for a float32 residual.
    """

    output_scale = 1.0
    keeps_dtype = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gains = [parameter.to(x.dtype) for parameter in self.parameters()]
        if self.output_scale != 1.0:
            gains = [gain * self.output_scale for gain in gains]
        out = self._function(x, self.normalized_shape, *gains, eps=self.eps)
        return out if self.keeps_dtype else out.to(self.weight.dtype)


class _RMSNorm(_Norm, torch.nn.RMSNorm):
    """Also does the residual add before it, in the same pass over memory where the operators are fused."""

    _function = staticmethod(F.rms_norm)
    _known: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor, *add) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The norm of x; with the other arguments of `scaled_residual` the new stream and its norm."""
        if add:
            # Called as any module, so that hooks that wait for the weight run first (overlapped parameter gather).
            residual, alpha, *rest = add
            gain = self.weight if self.output_scale == 1.0 else self.weight * self.output_scale
            return scaled_residual_rms_norm(x, residual, alpha, gain, self.eps, *rest)
        known, self._known = self._known, None
        return known[1] if known is not None and known[0] is x else super().forward(x)

    def remember(self, stream: torch.Tensor, normed: torch.Tensor) -> None:
        """Answer the next call with `normed` if it is about this very `stream`."""
        self._known = (stream, normed)


def takes_add(norm: torch.nn.Module | None, residual: torch.Tensor) -> bool:
    """True where a norm can do the residual add before it: `stream, normed = norm(x, residual, alpha, ...)`.

    That is where both are one fused operator, which gives the weight's dtype.
    """
    if not isinstance(norm, _RMSNorm) or not is_fused(residual.device.type):
        return False
    return not norm.keeps_dtype or residual.dtype == norm.weight.dtype


class _LayerNorm(_Norm, torch.nn.LayerNorm):
    _function = staticmethod(F.layer_norm)


_NORMS = {"RMSNorm": _RMSNorm, "LayerNorm": _LayerNorm}


class NoNorm(IdentityOp):
    """In place of a norm that a placement does not have; still what the linear layer after it wants as dtype.

    An `IdentityOp`, which is how Megatron knows that there is nothing to recompute or to offload.
    """

    def __init__(self, config: TransformerConfig, **kwargs):
        super().__init__()
        self.dtype = config.params_dtype if config.fp32_residual_connection else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.dtype is None else x.to(self.dtype)


def has_apex() -> bool:
    """True for NVIDIA Apex with its fused norms; the PyPI project of the same name has none."""
    try:
        from apex.normalization import FusedLayerNorm  # noqa: F401
    except Exception:  # an Apex built for another torch fails with whatever its loader raises
        return False
    return True


def build_norm(config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs) -> torch.nn.Module:
    """A norm over the last dimension, with Megatron's signature for norms in a layer spec.

    Apex's fused LayerNorm where NVIDIA Apex and a GPU are there, else `build_torch_norm()`.

    Raises:
        UserError: zero-centred gains, or a norm that torch does not have.
    """
    if config.layernorm_zero_centered_gamma:
        raise UserError(
            "--apply-layernorm-1p needs Transformer Engine: install it and use --transformer-impl transformer_engine"
        )
    if config.normalization == "LayerNorm" and torch.cuda.is_available() and has_apex():
        return FusedLayerNorm(config, hidden_size, eps, persist_layer_norm=config.persist_layer_norm)
    return build_torch_norm(config, hidden_size, eps)


def build_torch_norm(config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs) -> torch.nn.Module:
    """torch's own `rms_norm` or `layer_norm`, with the signature of norms in a layer spec.

    A float32 input (`--fp32-residual-connection`) is normalised in float32. Parameter names and initial values are
    those of Megatron's norms. Under sequence parallelism each rank sees a part of the sequence only: the
    `sequence_parallel` mark makes Megatron sum the parameters' gradients over tensor-parallel ranks.

    Raises:
        UserError: zero-centred gains, or a norm that torch does not have.
    """
    if config.layernorm_zero_centered_gamma:
        raise UserError("--apply-layernorm-1p is not supported with the norms that --prores-norm adds: remove one")
    if config.normalization not in _NORMS:
        raise UserError(f"--normalization {config.normalization} is not supported: use RMSNorm or LayerNorm")
    norm = _NORMS[config.normalization](hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm
