"""The model of a checkpoint, as it was when it was saved, in one process.

What the model is comes from the arguments that Megatron saves in every checkpoint: they become the defaults of
Megatron's own parser, so that they go through the same validation as in training. Megatron's `--use-checkpoint-args`
restores a fixed list instead, which lacks, among others, the norm's epsilon, QK norms, RoPE scaling, sliding windows
and bf16.
"""

import argparse
import os
import re
from typing import Any

import torch

from megatron_prores.errors import UserError
from megatron_prores.megatron import launch
from megatron_prores.megatron.damage import DAMAGE, reason

# The groups of Megatron's parser that say what a model computes and how text becomes tokens; of two others, a few.
_GROUPS = (
    "transformer configuration",
    "network size",
    "moe",
    "mla",
    "experimental_attention_variant",
    "heterogeneous architecture",
    "tokenizer",
)
_ALSO = {"seq_length", "spec", "attention_softmax_in_fp32"}

# In those groups, what belongs to the training run or its machine and not to the model (and, at the end, older names
# that Megatron fills in itself and then refuses).
_NOT = re.compile(
    r"recompute_|distribute_saved_activations|cuda_graph|enable_cuda_graph|external_cuda_graph|inference_|offload_"
    r"|fine_grained_|delta_offload|min_offloaded|activation_offload|delay_offload|fp8|fp4|attention_backend"
    r"|flash_attention_version|init_model_with_meta_device|account_for_|config_logger_dir|batch_invariant_mode"
    r"|encoder_num_layers|decoder_num_layers"
)


def find_iteration(folder: str, step: int | None = None) -> int:
    """The iteration of the checkpoint to load from what training was given as `--save`: `step`, or the latest.

    Raises:
        UserError: it is not there; names those that are.
    """
    names = os.listdir(folder) if os.path.isdir(folder) else []
    saved = sorted(int(match[1]) for name in names if (match := re.fullmatch(r"iter_(\d{7,})", name)))
    if not saved:
        inside = re.fullmatch(r"iter_0*(\d+)", os.path.basename(os.path.abspath(folder)))
        hint = f"; give the folder above it, with --ckpt-step {inside[1]}" if names and inside else ""
        why = "it holds no iter_* folder" if os.path.isdir(folder) else "no such folder"
        if any(name.startswith("global_step") for name in names):
            hint = "; what is there is DeepSpeed's: its entry writes it in Megatron's format with --to-megatron DIR"
        raise UserError(f"there is no checkpoint in {folder}: {why}{hint}")
    if step is None:
        step = _latest(folder)
    if step not in saved:
        shown = ", ".join(map(str, saved[-10:]))
        raise UserError(
            f"there is no checkpoint of iteration {step} in {folder}: "
            f"give one of {'... ' if len(saved) > 10 else ''}{shown} as --ckpt-step"
        )
    return step


def _folder(checkpoints: str, iteration: int) -> str:
    return os.path.join(checkpoints, f"iter_{iteration:07d}")


def _latest(folder: str) -> int:
    path = os.path.join(folder, "latest_checkpointed_iteration.txt")
    try:
        with open(path, encoding="utf-8") as file:
            return int(file.read())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} does not name the latest iteration: name one with --ckpt-step") from error


def parse_saved(options: argparse.Namespace, iteration: int) -> argparse.Namespace:
    """Megatron's arguments for the model of a checkpoint, in one process. Sets Megatron's globals.

    Raises:
        UserError: the checkpoint cannot be read or has no text, or its tokenizer is not there.
    """
    folder = _folder(options.checkpoint, iteration)
    argv = ["--load", options.checkpoint, "--ckpt-step", str(iteration), "--no-load-optim", "--no-load-rng"]
    argv += ["--micro-batch-size", "1"]
    argv += ["--host"] * options.host + ["--verbose"] * options.verbose
    saved: dict[str, Any] = {}

    def extra(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        # Only here is the device chosen, so that Megatron may be imported. Called more than once.
        if not saved:
            saved.update(saved_defaults(folder, parser, options.tokenizer_model))
        parser.set_defaults(**saved)
        return parser

    try:
        return launch.parse(argv, extra)
    except UserError as error:
        tokenizer = saved.get("tokenizer_model")
        if tokenizer and tokenizer in str(error):
            raise _no_tokenizer(tokenizer) from error
        raise


def saved_defaults(folder: str, parser: argparse.ArgumentParser, tokenizer_model: str | None) -> dict[str, Any]:
    """What the arguments saved in a checkpoint say about the model, its tokenizer and its ProRes schedule.

    Args:
        folder: `iter_*`, of Megatron's format `torch_dist`.
        parser: with Megatron's flags.
        tokenizer_model: instead of the saved path.

    Raises:
        UserError: as `parse_saved()`.
    """
    from megatron_prores.megatron import guard

    saved = _read_arguments(folder)
    names = _model_flags(parser) & vars(saved).keys()
    defaults = {name: getattr(saved, name) for name in names} | guard.saved_settings(saved)
    defaults["prores_norm"] = guard.saved_norm(saved)
    if tokenizer_model:
        defaults["tokenizer_model"] = tokenizer_model
    if "Null" in str(defaults.get("tokenizer_type", "Null")):
        raise UserError(
            f"{folder} was trained on token ids without a text tokenizer ({defaults.get('tokenizer_type')}): "
            "there is no text"
        )
    _check_tokenizer(defaults, chosen=bool(tokenizer_model))
    return defaults


def _read_arguments(folder: str) -> argparse.Namespace:
    from megatron.core import dist_checkpointing

    try:
        return dist_checkpointing.load_common_state_dict(folder)["args"]
    except DAMAGE as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: str, error: BaseException) -> UserError:
    return UserError(f"{folder} cannot be read as a distributed checkpoint of Megatron ({reason(error)})")


def _model_flags(parser: argparse.ArgumentParser) -> set[str]:
    from dataclasses import fields

    from megatron.core.model_parallel_config import ModelParallelConfig

    groups = {group.title: {action.dest for action in group._group_actions} for group in parser._action_groups}
    flags = set().union(*(groups[title] for title in _GROUPS)) | _ALSO
    parallel = {field.name for field in fields(ModelParallelConfig)} - {"bf16", "fp16"}
    return {name for name in flags - parallel if not _NOT.match(name)}


def _check_tokenizer(defaults: dict[str, Any], chosen: bool) -> None:
    """Refuse a path that is not there, before Megatron starts. `chosen`: the user named the tokenizer."""
    path = defaults.get("tokenizer_model")
    if path and not os.path.exists(path):
        is_name = defaults["tokenizer_type"] == "HuggingFaceTokenizer" and path.count("/") < 2 and path[0] not in "./~"
        # A saved relative path could be taken for a name on the hub, and then be anyone's tokenizer: it is looked up
        # only among those that are on this machine.
        if not is_name or not (chosen or _is_downloaded(path)):
            raise _no_tokenizer(path)
    for flag in ("vocab_file", "merge_file"):
        path = defaults.get(flag)
        if path and not os.path.exists(path):
            raise UserError(f"the checkpoint's tokenizer needs {path}, which is not there: run where this path holds")


def _is_downloaded(name: str) -> bool:
    try:
        from huggingface_hub import try_to_load_from_cache

        return any(
            isinstance(try_to_load_from_cache(name, file), str) for file in ("tokenizer.json", "tokenizer_config.json")
        )
    except (ImportError, ValueError):  # not installed; not a possible name
        return False


def _no_tokenizer(path: str) -> UserError:
    return UserError(
        f"the tokenizer {path} is not there or cannot be loaded (a relative path counts from where training ran): "
        "name it with --tokenizer-model, as a path or as a Hugging Face name"
    )


def fitting_tokenizer(args: argparse.Namespace) -> Any:
    """The tokenizer of a checkpoint's model.

    Args:
        args: from `parse_saved()`.

    Raises:
        UserError: it has more tokens than the model.
    """
    from megatron.training.global_vars import get_tokenizer

    tokenizer = get_tokenizer()
    if tokenizer.vocab_size > args.padded_vocab_size:
        raise UserError(
            f"the tokenizer {args.tokenizer_model} has {tokenizer.vocab_size} tokens and the model "
            f"{args.padded_vocab_size}: it is not the one that the model was trained with"
        )
    return tokenizer


def load_model(args: argparse.Namespace) -> torch.nn.Module:
    """The checkpoint's model for evaluation, with alpha(l, N) of its iteration N.

    Args:
        args: from `parse_saved()`.

    Returns:
        `model(tokens [b, s], position_ids [b, s], None)` gives logits [b, s, padded vocabulary].

    Raises:
        UserError: the checkpoint does not fit or cannot be read.
    """
    from megatron.training import training

    from megatron_prores.megatron import driver

    model = build_model(args)
    args.iteration, _ = training.load_checkpoint(model, None, None)
    driver.bind(model)
    return model[0].eval()


def build_model(args: argparse.Namespace) -> list[torch.nn.Module]:
    """The model that validated arguments describe, in this process; its weights are yet to come.

    Raises:
        UserError: Megatron or this package does not accept the arguments.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import training
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    from megatron_prores.megatron import gpt
    from megatron_prores.megatron.arguments import validate_prores_arguments

    gpt.refuse_unsupported(args)
    validate_prores_arguments(args)
    launch.accepted(training.initialize_megatron, get_embedding_ranks=gpt.embedding_ranks)
    config = launch.accepted(gpt_config_from_args, args)
    launch.accepted(config.finalize)
    return launch.accepted(
        GPTModelBuilder(config).build_distributed_models,
        ProcessGroupCollection.use_mpu_process_groups(),
        wrap_with_ddp=False,
    )
