"""Layer specs for Megatron's `--spec megatron_prores.megatron.spec prores_layer_spec`.

Megatron chooses the layer as it always does, from `--transformer-impl`, experts, latent attention and so on; the
layer class is then replaced, and in the local implementation the norms, so that sequence parallelism works.
"""

import copy
from dataclasses import replace
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import global_vars
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec

from megatron_prores.errors import UserError
from megatron_prores.megatron.layer import ProResTransformerLayer
from megatron_prores.megatron.norm import build_norm


def prores_layer_spec(
    config: GPTModelConfig, vp_stage: int | None = None, norm: str | None = None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage (and virtual chunk), scaled by alpha.

    Args:
        norm: a name in `megatron_prores.variants.PLACEMENTS`; None is what `--prores-norm` says, or "pre" where
            Megatron has not parsed any flags.

    Raises:
        UserError: Transformer Engine is asked for and not installed, or the configuration builds layers that ProRes
            does not know.
    """
    return _stage_spec(config, vp_stage, ProResTransformerLayer, norm=norm or _norm_of_this_run())


def stock_layer_spec(config: GPTModelConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Megatron's own layers, without ProRes, with norms that work under sequence parallelism."""
    return _stage_spec(config, vp_stage, TransformerLayer)


def _norm_of_this_run() -> str:
    return getattr(global_vars._GLOBAL_ARGS, "prores_norm", "pre")


def _stage_spec(
    config: GPTModelConfig, vp_stage: int | None, layer_class: type, **params: str
) -> TransformerBlockSubmodules:
    refuse_unbuildable(config)
    spec = default_layer_spec(config, vp_stage)
    if isinstance(spec, ModuleSpec):  # one layer for all; with experts Megatron gives the stage's list instead
        layers = get_num_layers_to_build(config.transformer, vp_stage)
        spec = TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=LayerNormImpl)
    # Every placement keeps Megatron's norm before the head, as in the authors' code: all then end alike, with logits in
    # the same range. For post and deepnorm it is a second norm on a stream that is normalised already.
    return replace(
        spec,
        layer_specs=[_layer_spec(layer, layer_class, **params) for layer in spec.layer_specs],
        layer_norm=_norm(spec.layer_norm),
    )


def _layer_spec(spec: ModuleSpec, layer_class: type, **params: str) -> ModuleSpec:
    if spec.module is not TransformerLayer:
        raise UserError(
            f"ProRes does not know the layer {spec.module.__name__} that these flags build: "
            "use a plain GPT layer, or switch ProRes off with --prores-schedule none"
        )
    spec = copy.deepcopy(spec)  # Megatron shares specs and rewrites them in place
    submodules = spec.submodules
    submodules.input_layernorm = _norm(submodules.input_layernorm)
    submodules.pre_mlp_layernorm = _norm(submodules.pre_mlp_layernorm)
    attention = submodules.self_attention.submodules
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if hasattr(attention, name):
            setattr(attention, name, _norm(getattr(attention, name)))
    spec.module = layer_class
    spec.params |= params
    return spec


def _norm(norm: Any) -> Any:
    return build_norm if norm in (WrappedTorchNorm, FusedLayerNorm) else norm


def refuse_unbuildable(config: GPTModelConfig) -> None:
    """Refuse implementations that are not installed or not for training.

    Raises:
        UserError: names the flag to change.
    """
    implementation = config.transformer.transformer_impl
    if implementation == "transformer_engine" and not HAVE_TE:
        raise UserError(
            "--transformer-impl transformer_engine needs Transformer Engine, which is not installed: "
            "pip install 'transformer-engine[pytorch]', or use --transformer-impl local"
        )
    if implementation == "inference_optimized":
        raise UserError("--transformer-impl inference_optimized is not for training: use transformer_engine or local")
    if config.restore_modelopt_state:
        raise UserError("ProRes does not support ModelOpt layer specs: restore the model without ModelOpt state")


# For code that takes a spec object and not a function of the config. Pre-norm; the norm after the last layer is
# Megatron's.
prores_local_layer_spec = _layer_spec(get_gpt_layer_local_spec(), ProResTransformerLayer)
