"""`prores export`: a Megatron checkpoint of any layout as a Hugging Face Llama, its alphas in the weights."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_prores.errors import UserError
from megatron_prores.huggingface import layout, llama_config
from megatron_prores.huggingface.files import save_weights
from megatron_prores.huggingface.folder import check_new, new_folder
from megatron_prores.huggingface.folding import Folding
from megatron_prores.huggingface.rotary import check_rotary
from megatron_prores.megatron import screen
from megatron_prores.megatron.saved_model import find_iteration, fitting_tokenizer, load_model, parse_saved
from megatron_prores.options import refuse_torchrun

RECORD = "prores_export.json"


def run(options: argparse.Namespace) -> None:
    """`prores export`. For the options see its `add_arguments`.

    Raises:
        UserError: the checkpoint, its tokenizer or the output cannot be used, or the model is not a Llama.
    """
    refuse_torchrun("prores export")
    check_new(options.output, RECORD, options.overwrite)
    iteration = find_iteration(options.checkpoint, options.ckpt_step)
    args = parse_saved(options, iteration)
    llama_config.refuse_inexpressible(args)
    try:
        with new_folder(options.output, RECORD, options.overwrite) as folder:
            record = _write(args, options.dtype, folder)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    screen.say(f"exported iteration {args.iteration} to {options.output}: {record['summary']}")


def _write(args: argparse.Namespace, dtype: str | None, folder: Path) -> dict:
    """The whole model into an empty folder.

    Returns:
        What `RECORD` holds.
    """
    from megatron.core.utils import unwrap_model
    from megatron.training.argument_utils import gpt_config_from_args

    from megatron_prores.megatron import driver

    vocab_size = fitting_tokenizer(args).vocab_size
    dtype = getattr(torch, dtype) if dtype else args.params_dtype
    config = llama_config.llama_config(
        args, vocab_size, gpt_config_from_args(args).rope_scaling_factor, str(dtype).removeprefix("torch.")
    )
    model = unwrap_model(load_model(args))
    check_rotary(model, config)
    folding = Folding.of(args.prores_norm, driver.alphas(args.iteration), bool(args.layernorm_zero_centered_gamma))
    shape = llama_config.shape_of(args)
    files = save_weights(folder, _tensors(model, shape, folding, dtype, vocab_size))
    record = _record(args, folding, dtype, files)
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    _write_settings(args, config, folder)
    return record


def _tensors(
    model: torch.nn.Module, shape: layout.Shape, folding: Folding, dtype: torch.dtype, vocab_size: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and weights in Hugging Face's form."""
    state = {layout.megatron_name(name): parameter.detach() for name, parameter in model.named_parameters()}
    for weight in layout.weights(shape):
        if weight.kind is layout.Kind.ABSENT:
            yield weight.names[0], torch.zeros(model.config.hidden_size, dtype=dtype)
            continue
        if weight.megatron not in state:
            raise UserError(f"the model is not a Llama and cannot be exported: it has no {weight.megatron}")
        tensor = folding(weight, state.pop(weight.megatron), dtype)
        if weight.kind is layout.Kind.VOCABULARY:
            tensor = tensor[:vocab_size]
        yield from zip(weight.names, layout.split(weight.kind, tensor, shape), strict=True)
    if state:
        raise UserError(f"the model is not a Llama and cannot be exported: it has {', '.join(sorted(state)[:3])}")


def _record(args: argparse.Namespace, folding: Folding, dtype: torch.dtype, files: int) -> dict:
    from megatron_prores.megatron import driver

    schedule = driver.stage_coefficients().schedule
    layers = folding.layers
    alphas = [folding.alphas[layer - 1] for layer in layers]
    folded = "every alpha is 1, the weights are as they were"
    if layers:
        folded = (
            f"alpha {min(alphas):.6g} to {max(alphas):.6g} multiplied into the output projections of "
            f"{len(layers)} of {args.num_layers} layers"
        )
    if any(scale != 1 for scale in folding.input_scales):
        folded += f"; 1/sqrt(l) of --prores-norm {args.prores_norm} into the norms"
    return {
        "summary": f"{str(dtype).removeprefix('torch.')}, {files} file{'s' * (files > 1)}; {folded}",
        "iteration": args.iteration,
        "schedule": schedule.name,
        "warmup_steps": float(schedule.warmup_steps),
        "norm": args.prores_norm,
        "alphas": list(folding.alphas),
        "alphas_folded": bool(layers),
        "norm_scales_folded": [scale for scale in folding.input_scales if scale != 1],
    }


def _write_settings(args: argparse.Namespace, config: dict, folder: Path) -> None:
    """`config.json`, `generation_config.json` and the tokenizer's files."""
    import transformers
    from megatron.training.global_vars import get_tokenizer

    special = {"bos_token_id": None, "eos_token_id": get_tokenizer().eod, "pad_token_id": None}
    if args.tokenizer_type == "HuggingFaceTokenizer":
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            args.tokenizer_model, trust_remote_code=args.trust_remote_code
        )
        tokenizer.save_pretrained(folder)
        special = {name: getattr(tokenizer, name) for name in special}
    else:
        screen.say(f"note: the tokenizer is not exported, transformers has none of the type {args.tokenizer_type}")
    special |= {"transformers_version": transformers.__version__}
    for name, content in (("config", config | special), ("generation_config", special)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
