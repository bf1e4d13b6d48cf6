"""What a Megatron model is as a Llama: its `config.json`, or why it is none."""

import argparse
from collections.abc import Iterator

from megatron_prores.errors import UserError
from megatron_prores.huggingface.folding import refuse_unfoldable
from megatron_prores.huggingface.layout import Shape

# What all Llamas have in common, by Megatron's flag. Not here: what shows in the parameters, which are all looked at.
_LLAMA = {
    "position_embedding_type": ("rope", "rotary position embeddings"),
    "rotary_percent": (1.0, "rotary embeddings over whole heads"),
    "rotary_interleaved": (False, "rotary embeddings that pair the halves of a head"),
    "no_rope_freq": (None, "rotary embeddings in every layer"),
    "normalization": ("RMSNorm", "RMSNorm"),
    "swiglu": (True, "SwiGLU"),
    "glu_linear_offset": (0.0, "plain SwiGLU"),
    "activation_func_clamp_value": (None, "plain SwiGLU"),
    "window_size": (None, "attention over the whole context"),
    "softmax_type": ("vanilla", "a plain softmax"),
    "softmax_scale": (None, "attention scaled by 1/sqrt(head size)"),
    "qk_layernorm": (False, "no norms of queries and keys"),
    "qk_l2_norm": (False, "no norms of queries and keys"),
    "attention_output_gate": (False, "no gate after attention"),
    "multi_latent_attention": (False, "ordinary keys and values"),
    "experimental_attention_variant": (None, "softmax attention"),
    "num_experts": (None, "no experts"),
    "heterogeneous_layers_config_path": (None, "the same layer throughout"),
    "apply_residual_connection_post_layernorm": (False, "residuals from before the norms"),
    "use_mup": (False, "no multipliers of embeddings and logits"),
}


def refuse_inexpressible(args: argparse.Namespace) -> None:
    """Refuse models that compute what no Llama does, from Megatron's validated arguments.

    Raises:
        UserError: one line, with every difference.
    """
    refuse_unfoldable(getattr(args, "prores_norm", "pre"))
    if differences := list(_differences(args)):
        raise UserError(f"the model is not a Llama and cannot be exported: {'; '.join(differences)}")


def _differences(args: argparse.Namespace) -> Iterator[str]:
    for name, (value, description) in _LLAMA.items():
        actual = getattr(args, name, value)
        if actual != value and (actual or value):  # some flags say no by None, 0 or False
            flag = f"--{name.replace('_', '-')}"
            said = flag if actual is True else f"no {flag}" if actual in (False, None) else f"{flag} {actual}"
            yield f"it has {said}, a Llama {description}"
    if args.hidden_size % args.num_attention_heads:
        yield (
            f"a Llama's width is a multiple of its heads, and --hidden-size {args.hidden_size} none of "
            f"--num-attention-heads {args.num_attention_heads}"
        )


def shape_of(args: argparse.Namespace) -> Shape:
    """What names and layouts depend on."""
    return Shape(
        layers=args.num_layers,
        queries=args.num_attention_heads,
        groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        tied=not args.untie_embeddings_and_output_weights,
        qkv_bias=bool(args.add_qkv_bias),
        bias=bool(args.add_bias_linear),
    )


def llama_config(args: argparse.Namespace, vocab_size: int, rope_scaling_factor: float, dtype: str) -> dict:
    """`config.json`, without the ids of special tokens.

    Args:
        args: Megatron's, accepted by `refuse_inexpressible()`.
        vocab_size: without padding.
        rope_scaling_factor: that the model was built with, where there is `--use-rope-scaling`.
        dtype: of the weights, such as "bfloat16".
    """
    shape = shape_of(args)
    scaling = rope_scaling(args, rope_scaling_factor)
    theta = float(args.rotary_base)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": args.hidden_size,
        "intermediate_size": args.ffn_hidden_size,
        "num_hidden_layers": args.num_layers,
        "num_attention_heads": shape.queries,
        "num_key_value_heads": shape.groups,
        "head_dim": args.kv_channels,
        "hidden_act": "silu",
        "max_position_embeddings": args.max_position_embeddings,
        "initializer_range": args.init_method_std,
        "rms_norm_eps": args.layernorm_epsilon,
        "tie_word_embeddings": shape.tied,
        "attention_bias": shape.bias or shape.qkv_bias,
        "mlp_bias": shape.bias,
        "attention_dropout": 0.0,
        # As transformers 5 reads it, and as everything older does.
        "rope_parameters": {"rope_theta": theta, **(scaling or {"rope_type": "default"})},
        "rope_theta": theta,
        "rope_scaling": scaling,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def rope_scaling(args: argparse.Namespace, factor: float) -> dict | None:
    """Hugging Face's settings for Megatron's two ways to stretch rotary embeddings.

    Raises:
        UserError: both at once, which Hugging Face does not have.
    """
    interpolation = args.rotary_seq_len_interpolation_factor
    if interpolation in (None, 1):
        return LLAMA3_SCALING | {"factor": float(factor)} if args.use_rope_scaling else None
    if args.use_rope_scaling:
        raise UserError(
            "a Llama cannot have both --use-rope-scaling and --rotary-seq-len-interpolation-factor: "
            "the model cannot be exported"
        )
    return {"rope_type": "linear", "factor": float(interpolation)}


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What Megatron's `--use-rope-scaling` fixes; the factor comes on top."""
