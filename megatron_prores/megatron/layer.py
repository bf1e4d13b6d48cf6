"""Megatron's transformer layer with its two residual branches scaled by alpha(l, t)."""

import copy
from collections.abc import Callable

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.jit import jit_fuser
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_prores.coefficients import LayerCoefficient
from megatron_prores.errors import UserError
from megatron_prores.ops import scaled_residual

# Compiled as Megatron compiles its own bias-dropout-add; alpha is a tensor, so that one graph serves every step.
_fused_scaled_residual = jit_fuser(scaled_residual)


def scaled_bias_dropout_add(coefficient: LayerCoefficient) -> Callable:
    """A stand-in for Megatron's `get_bias_dropout_add` that scales the branch by the layer's alpha.

    Returns:
        `bda(training, fused)`, which returns `add((x, bias), residual, prob)`; x and residual are [s, b, h].
    """

    def bda(training: bool, fused: bool):
        op = _fused_scaled_residual if fused else scaled_residual

        def add(x_with_bias, residual, prob):
            x, bias = x_with_bias
            return op(x, residual, coefficient.read(), bias, prob, training)

        return add

    return bda


class ProResTransformerLayer(TransformerLayer):
    """A pre-norm transformer layer that computes `x + alpha(l, t) * F(Norm(x))` for attention and for the MLP.

    Same parameters, names and checkpoint keys as Megatron's layer. Only the two bias-dropout-add callables differ:
    eager runs, recompute, CUDA graphs and expert-parallel overlap all call them, while some bypass `forward`.

    Attributes:
        coefficient: this layer's alpha; l is `layer_number`, as Megatron numbered the layer.

    Raises:
        UserError: the layer has a residual add that ProRes would not scale.
    """

    def __init__(
        self, config: TransformerConfig, submodules: TransformerLayerSubmodules, layer_number: int = 1, *args, **kwargs
    ):
        _refuse_unscaled_residuals(config, submodules, kwargs.get("is_mtp_layer", False))
        # Megatron shares one spec among layers and rewrites parts of it.
        super().__init__(config, copy.deepcopy(submodules), layer_number, *args, **kwargs)
        self.coefficient = LayerCoefficient(self.layer_number, _device())
        self.self_attn_bda = scaled_bias_dropout_add(self.coefficient)
        self.mlp_bda = scaled_bias_dropout_add(self.coefficient)


def _device() -> torch.device | int:
    # Training moves the model to this device even where it is initialised on the host or on "meta".
    return torch.cuda.current_device() if torch.cuda.is_available() else torch.device("cpu")


def _refuse_unscaled_residuals(
    config: TransformerConfig, submodules: TransformerLayerSubmodules, is_mtp_layer: bool
) -> None:
    if is_mtp_layer:
        raise UserError("ProRes does not support multi-token prediction layers: remove --mtp-num-layers")
    if submodules.cross_attention is not IdentityOp or submodules.cross_attn_bda is not IdentityFuncOp:
        raise UserError("ProRes does not support layers with cross-attention: use a decoder-only layer spec")
    if config.inference_fuse_tp_communication:
        raise UserError("ProRes does not support --inference-fuse-tp-communication: it bypasses the residual add")
    for name in ("self_attn_bda", "mlp_bda"):
        if getattr(submodules, name) is not get_bias_dropout_add:
            raise UserError(f"ProRes needs Megatron's get_bias_dropout_add as {name} of the layer spec")
