"""Megatron's transformer layer with its two residual branches scaled by alpha(l, t), and its norms where asked."""

import copy
from collections.abc import Callable
from functools import partial

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.jit import jit_fuser
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_prores.coefficients import LayerCoefficient
from megatron_prores.errors import UserError
from megatron_prores.megatron.norm import NoNorm, build_torch_norm, takes_add
from megatron_prores.ops import is_fused, plain, scaled_residual
from megatron_prores.variants import Placement, placement_of

# Compiled as Megatron compiles its own bias-dropout-add; alpha is a tensor, so that one graph serves every step.
_compiled_scaled_residual = jit_fuser(plain.scaled_residual)


def scaled_bias_dropout_add(
    coefficient: LayerCoefficient,
    residual_scale: float = 1.0,
    branch_norm: torch.nn.Module | None = None,
    output_norm: torch.nn.Module | None = None,
    next_norm: torch.nn.Module | None = None,
) -> Callable:
    """A stand-in for Megatron's `get_bias_dropout_add`: `N(A*residual + alpha*dropout(M(x + bias)))`.

    Args:
        coefficient: the layer's alpha.
        residual_scale: A.
        branch_norm: M, or None for the identity.
        output_norm: N, or None for the identity.
        next_norm: the norm that is called next on what is returned. Where it can, it is computed with the add.

    Returns:
        `bda(training, fused)`, which returns `add((x, bias), residual, prob)`; x and residual are [s, b, h].
    """
    # A partial and not a closure: what it holds can be looked at.
    return partial(_bda, coefficient, residual_scale, branch_norm, output_norm, next_norm)


def _bda(coefficient, residual_scale, branch_norm, output_norm, next_norm, training: bool, fused: bool):
    def add(x_with_bias, residual, prob):
        x, bias = x_with_bias
        if branch_norm is not None:
            x, bias = branch_norm(x if bias is None else x + bias), None
        operands = (x, residual, coefficient.read(), bias, prob, training, residual_scale)
        if takes_add(output_norm, residual):
            return output_norm(*operands)[1]
        if takes_add(next_norm, residual):
            stream, normed = next_norm(*operands)
            next_norm.remember(stream, normed)
            return stream
        stream = _add_operator(residual, fused)(*operands)
        return stream if output_norm is None else output_norm(stream)

    return add


def _add_operator(residual: torch.Tensor, compiled: bool) -> Callable:
    if is_fused(residual.device.type):
        return scaled_residual
    return _compiled_scaled_residual if compiled else plain.scaled_residual


class ProResTransformerLayer(TransformerLayer):
    """A transformer layer that scales attention and MLP by alpha(l, t), with its norms where `norm` says.

    In the placement "pre", `x + alpha(l, t) * F(Norm(x))`, it has the same parameters, names and checkpoint keys as
    Megatron's layer. Only the two bias-dropout-add callables differ: eager runs, recompute, CUDA graphs and
    expert-parallel overlap all call them, while some bypass `forward`. Norms that a placement adds are applied there
    too, and are the submodules `post_self_attn_layernorm` and `post_mlp_layernorm`.

    Args:
        norm: a name in `megatron_prores.variants.PLACEMENTS`; a layer spec gives it as `params={"norm": ...}`.

    Attributes:
        norm: as given.
        coefficient: this layer's alpha; l is `layer_number`, as Megatron numbered the layer.

    Raises:
        UserError: the layer has a residual add that ProRes would not scale, or norms that cannot be placed.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        *args,
        norm: str = "pre",
        **kwargs,
    ):
        placement = placement_of(norm)
        _refuse_unscaled_residuals(config, submodules, kwargs.get("is_mtp_layer", False))
        _refuse_unplaceable_norms(config, submodules, norm, placement)
        submodules = copy.deepcopy(submodules)  # Megatron shares one spec among layers and rewrites parts of it
        if not placement.before:
            submodules.input_layernorm = submodules.pre_mlp_layernorm = NoNorm
        elif placement.scales_input:
            submodules.input_layernorm = submodules.pre_mlp_layernorm = build_torch_norm
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        self.norm = norm
        if placement.scales_input:
            scale = placement.input_scale(self.layer_number)
            self.input_layernorm.output_scale = self.pre_mlp_layernorm.output_scale = scale
        self.coefficient = LayerCoefficient(self.layer_number, _device())
        # The MLP's add leaves the norm after it alone: that one is the next layer's, which may be on another stage,
        # behind a recomputation boundary, or still waiting for its parameters.
        next_norm = None if self.recompute_pre_mlp_layernorm else self.pre_mlp_layernorm
        self.post_self_attn_layernorm, self.self_attn_bda = self._residual_add(placement, next_norm)
        self.post_mlp_layernorm, self.mlp_bda = self._residual_add(placement)

    def _residual_add(
        self, placement: Placement, next_norm: torch.nn.Module | None = None
    ) -> tuple[torch.nn.Module | None, Callable]:
        """The norm that the placement adds to a branch, if any, and the branch's residual add."""
        scale = placement.residual_scale(self.config.num_layers)
        if not placement.branch and not placement.after:
            return None, scaled_bias_dropout_add(self.coefficient, scale, next_norm=next_norm)
        norm = build_torch_norm(self.config, self.config.hidden_size, self.config.layernorm_epsilon)
        norm.keeps_dtype = placement.after  # the stream keeps its dtype
        where = {"output_norm" if placement.after else "branch_norm": norm}
        return norm, scaled_bias_dropout_add(self.coefficient, scale, next_norm=next_norm, **where)


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


def _refuse_unplaceable_norms(
    config: TransformerConfig, submodules: TransformerLayerSubmodules, norm: str, placement: Placement
) -> None:
    separate = IdentityOp not in (submodules.input_layernorm, submodules.pre_mlp_layernorm)
    if (placement.scales_input or not placement.before) and not separate:
        raise UserError(
            f"--prores-norm {norm} needs norms that are not fused into the linear layers: use --transformer-impl local"
        )
    selective = config.recompute_granularity == "selective" and "layernorm" in (config.recompute_modules or ())
    if selective and not placement.before:
        raise UserError(
            f"--recompute-modules layernorm recomputes the norms before attention and MLP, and --prores-norm {norm} "
            "has none: remove it"
        )
    if config.cuda_graph_impl != "none" and config.cuda_graph_modules and (placement.branch or placement.after):
        raise UserError(
            f"--cuda-graph-modules does not know the norms that --prores-norm {norm} adds: capture whole layers"
        )
