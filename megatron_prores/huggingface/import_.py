"""`prores import`: a Hugging Face Llama as a Megatron checkpoint that pretraining continues from."""

import argparse
import os
from pathlib import Path

import torch

from megatron_prores.errors import UserError
from megatron_prores.huggingface import layout, megatron_flags
from megatron_prores.huggingface.files import SavedWeights
from megatron_prores.huggingface.folder import check_new, new_folder
from megatron_prores.huggingface.rotary import check_rotary
from megatron_prores.megatron import launch, screen
from megatron_prores.options import refuse_torchrun

CONFIG = "model.yaml"
_TOKENIZER = "tokenizer"
_IGNORED = "rotary_emb.inv_freq"  # old versions of transformers save it


def run(options: argparse.Namespace) -> None:
    """`prores import`. For the options see its `add_arguments`.

    Raises:
        UserError: the model, its tokenizer or the output cannot be used, or Megatron has no such model.
    """
    refuse_torchrun("prores import")
    source = Path(options.model)
    if not source.is_dir():
        raise UserError(f"--model {source}: no such folder (nothing is downloaded)")
    check_new(options.output, CONFIG, options.overwrite)
    config = megatron_flags.read_config(source)
    weights = SavedWeights(source)
    try:
        shape = _shape(config, weights)
        _check_names(config, weights, shape, source)
        dtype = options.dtype or weights.dtype()
        with new_folder(options.output, CONFIG, options.overwrite) as folder:
            tokens = _copy_tokenizer(Path(options.tokenizer_model or source), folder / _TOKENIZER)
            if tokens > config["vocab_size"]:
                raise UserError(f"the tokenizer has {tokens} tokens and the model {config['vocab_size']}")
            flags = megatron_flags.model_flags(config, shape)
            final = Path(options.output).absolute()
            flags |= megatron_flags.run_flags(config, tokens, str(final / _TOKENIZER), dtype)
            yaml = megatron_flags.yaml_of(flags, f"{source.name}, imported from Hugging Face.")
            (folder / CONFIG).write_text(yaml, encoding="utf-8")
            args = _parse(options, folder)
            _write(args, config, weights, shape, final)
    finally:
        weights.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    screen.say(f"imported {source} to {options.output}: {dtype}; continue from it with")
    screen.say(f"  --config {os.path.join(options.output, CONFIG)} --pretrained-checkpoint {options.output}")


def _shape(config: dict, weights: SavedWeights) -> layout.Shape:
    qkv_bias_only = bool(config.get("attention_bias")) and not config.get("mlp_bias")
    shape = megatron_flags.shape_of(config, qkv_bias_only)
    for weight in layout.weights(shape):
        name = weight.names[0]
        if weight.kind is layout.Kind.ABSENT and name in weights.names() and weights.read(name).any():
            raise UserError(f"{name} is not zero and the MLP has no biases: Megatron has no such model")
    return shape


def _check_names(config: dict, weights: SavedWeights, shape: layout.Shape, source: Path) -> None:
    expected = {name for weight in layout.weights(shape) for name in weight.names}
    found = {name for name in weights.names() if not name.endswith(_IGNORED)}
    if shape.tied:
        found.discard("lm_head.weight")
    for what, names in (("lacks", expected - found), ("holds an unknown", found - expected)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"{source} {what} {min(names)}{more}: not the weights of its config.json")


def _copy_tokenizer(source: Path, folder: Path) -> int:
    """Save the tokenizer anew.

    Returns:
        How many tokens it has.
    """
    from transformers import AutoTokenizer

    if not source.is_dir():
        raise UserError(f"--tokenizer-model {source}: no such folder (nothing is downloaded)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except Exception as error:  # raises what it likes
        raise UserError(
            f"{source} holds no tokenizer that transformers can load ({type(error).__name__}): "
            "name its folder with --tokenizer-model"
        ) from error
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def _parse(options: argparse.Namespace, folder: Path) -> argparse.Namespace:
    argv = ["--config", str(folder / CONFIG), "--tokenizer-model", str(folder / _TOKENIZER)]
    argv += ["--save", str(folder), "--save-interval", "1", "--no-save-optim", "--no-save-rng"]
    argv += ["--micro-batch-size", "1", "--no-initialization"]
    argv += ["--host"] * options.host + ["--verbose"] * options.verbose
    return launch.parse(argv)


def _write(args: argparse.Namespace, config: dict, weights: SavedWeights, shape: layout.Shape, final: Path) -> None:
    from megatron.core.utils import unwrap_model
    from megatron.training import checkpointing

    from megatron_prores.megatron.saved_model import build_model

    model = build_model(args)
    check_rotary(unwrap_model(model[0]), config)
    _fill(unwrap_model(model[0]), weights, shape)
    # The checkpoint says what will be true when the folder is in its place.
    args.tokenizer_model, args.config = str(final / _TOKENIZER), [str(final / CONFIG)]
    checkpointing.save_checkpoint(0, model, None, None, 0)


@torch.no_grad()
def _fill(model: torch.nn.Module, weights: SavedWeights, shape: layout.Shape) -> None:
    state = {layout.megatron_name(name): parameter for name, parameter in model.named_parameters()}
    for weight in layout.weights(shape):
        if weight.kind is layout.Kind.ABSENT:
            continue
        parts = [weights.read(name) for name in weight.names]
        target = state.pop(weight.megatron)
        if not layout.fits(weight.kind, parts, shape, target.shape):
            shapes = ", ".join(f"{name} {list(part.shape)}" for name, part in zip(weight.names, parts, strict=True))
            raise UserError(f"the weights do not fit config.json: {shapes}")
        target.copy_(layout.fuse(weight.kind, parts, shape))
    if state:
        raise UserError(f"Megatron's model has {min(state)} and the Hugging Face model nothing for it")
