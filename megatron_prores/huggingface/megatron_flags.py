"""A Hugging Face Llama as Megatron's flags: `model.yaml`."""

import json
from collections.abc import Iterator
from pathlib import Path

from megatron_prores.errors import UserError
from megatron_prores.huggingface.layout import Shape
from megatron_prores.huggingface.llama_config import LLAMA3_SCALING
from megatron_prores.huggingface.rotary import rope_parameters

_ARCHITECTURES = ("llama", "mistral")  # the latter is a Llama if it has no sliding window


def read_config(folder: Path) -> dict:
    """A model's `config.json` as a dict in which every setting stands, once it is known to be a Llama's.

    Raises:
        UserError: it is missing, or Megatron has no such model: one line, with every difference.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        kind = raw["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} cannot be read as a model's configuration ({why})") from error
    if kind not in _ARCHITECTURES:
        raise UserError(f"{path} is of the type {kind}: only {' and '.join(_ARCHITECTURES)} can be imported")
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(**raw).to_dict()
    except Exception as error:  # its validation raises what it likes
        raise UserError(f"{path} is not a valid configuration: {' '.join(str(error).split())}") from error
    if differences := list(_differences(config)):
        raise UserError(f"{path} cannot be imported: {'; '.join(differences)}")
    return config


def _differences(config: dict) -> Iterator[str]:
    if config["hidden_act"] not in ("silu", "swish"):
        yield f"hidden_act is {config['hidden_act']}, and only silu is supported"
    if config.get("sliding_window"):
        yield f"it has a sliding window of {config['sliding_window']}, which is not supported"
    if config.get("mlp_bias") and not config.get("attention_bias"):
        yield "it has mlp_bias and no attention_bias, and Megatron only both or the latter"
    if config.get("quantization_config"):
        yield "its weights are quantized: dequantize it first"
    rope = rope_parameters(config)
    if rope["rope_theta"] != int(rope["rope_theta"]):
        yield f"Megatron's --rotary-base is a whole number, and rope_theta is {rope['rope_theta']}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield "partial_rotary_factor is not 1, which is not supported"
    kind = rope.get("rope_type", "default")
    if kind == "linear" and rope["factor"] != int(rope["factor"]):
        yield f"Megatron's --rotary-seq-len-interpolation-factor is a whole number, and factor is {rope['factor']}"
    elif kind == "llama3":
        for name, value in LLAMA3_SCALING.items():
            if rope.get(name, value) != value:
                yield f"Megatron's --use-rope-scaling has {name} {value}, and here it is {rope[name]}"
    elif kind not in ("default", "linear"):
        yield f"Megatron has no rotary embeddings of the type {kind}"


def shape_of(config: dict, qkv_bias_only: bool) -> Shape:
    """What names and layouts depend on.

    Args:
        qkv_bias_only: the biases of o are zero and the MLP has none, so that Megatron's --add-qkv-bias will do.
    """
    return Shape(
        layers=config["num_hidden_layers"],
        queries=config["num_attention_heads"],
        groups=config["num_key_value_heads"],
        tied=config["tie_word_embeddings"],
        qkv_bias=qkv_bias_only,
        bias=bool(config.get("attention_bias")) and not qkv_bias_only,
    )


def model_flags(config: dict, shape: Shape) -> dict[str, object]:
    """Megatron's flags for the model, without those of its tokenizer and its dtype; `True` is a switch.

    Args:
        config: from `read_config()`.
        shape: of `shape_of()`.
    """
    rope = rope_parameters(config)
    flags: dict[str, object] = {
        "num-layers": shape.layers,
        "hidden-size": config["hidden_size"],
        "ffn-hidden-size": config["intermediate_size"],
        "num-attention-heads": shape.queries,
        "kv-channels": config.get("head_dim") or config["hidden_size"] // shape.queries,
        "max-position-embeddings": config["max_position_embeddings"],
        "position-embedding-type": "rope",
        "rotary-base": int(rope["rope_theta"]),
        "normalization": "RMSNorm",
        "norm-epsilon": config["rms_norm_eps"],
        "swiglu": True,
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "init-method-std": config["initializer_range"],
    }
    if shape.groups != shape.queries:
        flags |= {"group-query-attention": True, "num-query-groups": shape.groups}
    if not shape.tied:
        flags["untie-embeddings-and-output-weights"] = True
    if not shape.bias:
        flags["disable-bias-linear"] = True
    if shape.qkv_bias:
        flags["add-qkv-bias"] = True
    if rope["rope_type"] == "linear" and rope["factor"] != 1:
        flags["rotary-seq-len-interpolation-factor"] = int(rope["factor"])
    if rope["rope_type"] == "llama3":
        flags |= {"use-rope-scaling": True, "rope-scaling-factor": rope["factor"]}
    return flags


_LONGEST = 4096  # what a continued run gets by default of a model that can take more

_COMMENTS = {
    "num-layers": "The model.",
    "seq-length": "Sequences of the run; the model was made for up to max-position-embeddings.",
    "tokenizer-type": "Its tokenizer. The vocabulary is padded for tensor parallelism only: rows without training\n"
    "# take part in the softmax.",
    "bf16": "The weights' own precision.",
    "prores-schedule": "The layers of a trained model are all in use: a warm-up would first switch them off.\n"
    "# Set a schedule only to train from it as from an initialisation.",
}


def yaml_of(flags: dict[str, object], title: str) -> str:
    """Flags as a commented file for `--config`."""
    lines = [f"# {title}"]
    for name, value in flags.items():
        if name in _COMMENTS:
            lines += ["", f"# {_COMMENTS[name]}"]
        lines.append(f"{name}: {_yaml(value)}")
    return "\n".join(lines) + "\n"


def _yaml(value: object) -> str:
    text = json.dumps(value)
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text


def run_flags(config: dict, tokenizer_tokens: int, tokenizer_folder: str, dtype: str) -> dict[str, object]:
    """The flags that belong to the model's surroundings: context, tokenizer, precision, schedule.

    Args:
        tokenizer_tokens: how many the tokenizer knows; if the model has other rows, their number is fixed.
        dtype: "float32", "bfloat16" or "float16".
    """
    flags: dict[str, object] = {
        "seq-length": min(config["max_position_embeddings"], _LONGEST),
        "tokenizer-type": "HuggingFaceTokenizer",
        "tokenizer-model": tokenizer_folder,
        "make-vocab-size-divisible-by": 1,
    }
    if config["vocab_size"] != tokenizer_tokens:
        flags["padded-vocab-size"] = config["vocab_size"]
    flags |= {"bfloat16": {"bf16": True}, "float16": {"fp16": True}}.get(dtype, {})
    return flags | {"prores-schedule": "none"}
