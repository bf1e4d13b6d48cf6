"""DeepSpeed's checkpoints of a Megatron run: what is saved beside the engine's state, and the way back."""

import argparse
import os
import re
from typing import Any

import deepspeed
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.training import get_args

from megatron_prores.deepspeed.engine import STATE
from megatron_prores.errors import UserError
from megatron_prores.megatron import guard
from megatron_prores.megatron.screen import is_first_rank, say
from megatron_prores.whole_file import replacing

_SAVED = (
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "swiglu"),
    *("max_position_embeddings", "position_embedding_type", "normalization", "untie_embeddings_and_output_weights"),
    "prores_norm",
)


def latest(folder: str | None, universal: bool) -> str | None:
    """The name of the newest checkpoint in a folder, where there is one; DeepSpeed writes the file with it last."""
    try:
        with open(os.path.join(folder or "", "latest_universal" if universal else "latest")) as file:
            return file.read().strip()
    except OSError:
        return None


def is_universal(config: dict[str, Any], folder: str | None) -> bool:
    """Whether to load a universal checkpoint: where the config says so, and nothing was saved since it was made."""
    if not (config.get("checkpoint") or {}).get("load_universal"):
        return False
    universal, plain = latest(folder, True), latest(folder, False)
    if universal is None or plain is None or _step(plain) <= _step(universal):
        return True
    if is_first_rank():
        say(f"note: {plain} was saved after {universal} was made universal: continuing from {plain}")
    return False


def _step(name: str) -> int:
    """Of global_step12 and of global_step12_universal."""
    number = re.search(r"\d+", name)
    return int(number[0]) if number else -1


def leave_out_empty_states(model: torch.nn.Module) -> None:
    """Keep Megatron's `_extra_state`, which is None in its linear layers, out of checkpoints: `ds_to_universal` takes
    everything there for a tensor.
    """
    for module in _with_extra_state(model):
        module.register_state_dict_post_hook(_drop_empty_state)


def miss_no_empty_states(model: torch.nn.Module) -> None:
    """Load what was saved without them."""
    for module in _with_extra_state(model):
        module.register_load_state_dict_pre_hook(_expect_empty_state)


def _with_extra_state(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [m for m in model.modules() if type(m).get_extra_state is not torch.nn.Module.get_extra_state]


def _drop_empty_state(module: torch.nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    if state.get(f"{prefix}_extra_state", 0) is None:
        del state[f"{prefix}_extra_state"]


def _expect_empty_state(module: torch.nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    state.setdefault(f"{prefix}_extra_state", None)


def save(engine: deepspeed.DeepSpeedEngine, iteration: int, floating_point_operations: float) -> None:
    """Save the engine, where the data stand, the random states, and what `ds_to_universal` needs to know."""
    args = get_args()
    tag = f"global_step{iteration}"
    engine.save_checkpoint(
        args.save,
        tag=tag,
        save_latest=False,
        client_state={
            # One key, the same on every rank: after a change of stages ranks read each other's.
            STATE: {
                "iteration": iteration,
                "consumed_train_samples": args.consumed_train_samples,
                "consumed_valid_samples": args.consumed_valid_samples,
                "floating_point_operations": floating_point_operations,
                "arguments": {name: getattr(args, name) for name in _SAVED},
                "random_states": _gathered(_random_state()),
            },
            "universal_checkpoint_info": _universal_info(engine.module),
        },
    )
    # DeepSpeed would name it before the other ranks have written theirs, and in a file that a kill can cut off.
    torch.distributed.barrier()
    if args.rank == 0:
        with replacing(os.path.join(args.save, "latest")) as new:
            new.write_text(tag)


def load(engine: deepspeed.DeepSpeedEngine, universal: bool) -> None:
    """Continue from `--load`, if there is a checkpoint: fills the engine, and Megatron's counters of what was done.

    Raises:
        UserError: there is a checkpoint, and it cannot be loaded or is another model's.
    """
    args = get_args()
    if args.load is None:
        return
    tag = _tag(args, universal)
    if tag is None:
        return
    try:
        _, state = engine.load_checkpoint(args.load, tag=tag, load_module_only=args.finetune)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"the checkpoint {tag} in {args.load} cannot be loaded ({_advice(error, args, tag)}") from error
    saved = (state or {}).get(STATE)
    if saved is None:
        raise UserError(f"the checkpoint {tag} in {args.load} was not saved by this entry")
    _compare(saved["arguments"], args)
    if args.finetune:
        return
    args.iteration = saved["iteration"]
    args.consumed_train_samples = saved["consumed_train_samples"]
    args.consumed_valid_samples = saved["consumed_valid_samples"]
    args.num_floating_point_operations_so_far = saved["floating_point_operations"]
    if is_first_rank():
        say(f"loaded checkpoint of iteration {args.iteration} from {args.load}")
    if not args.no_load_rng:
        _restore_random_state(saved["random_states"])


def _tag(args: argparse.Namespace, universal: bool) -> str | None:
    """The checkpoint to load from `--load`; None where there is none yet."""
    suffix = "_universal" if universal else ""
    tag = f"global_step{args.ckpt_step}{suffix}" if args.ckpt_step else latest(args.load, universal)
    if tag and os.path.isdir(os.path.join(args.load, tag)):
        return tag
    if os.path.exists(os.path.join(args.load, "latest_checkpointed_iteration.txt")):
        raise UserError(f"the checkpoint in {args.load} is of Megatron's trainer: DeepSpeed's has another format")
    others = _steps(args.load)
    if tag is not None or universal or others or args.exit_on_missing_checkpoint:
        missing = f"it has no {tag}" if tag else f"it has no file latest{suffix}"
        there = f"; there is {', '.join(others)}, see --ckpt-step" if others else ""
        raise UserError(f"there is no checkpoint to load in {args.load}: {missing}{there}")
    if is_first_rank():
        say(f"no checkpoint in {args.load} yet: starting from the initial weights")
    return None


def _steps(folder: str) -> list[str]:
    """The checkpoints in a folder, oldest first."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted((name for name in names if re.fullmatch(r"global_step\d+(_universal)?", name)), key=_step)


def _advice(error: Exception, args: argparse.Namespace, tag: str) -> str:
    """Why a checkpoint does not load, and what may be done."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "OptimizerParamScheduler" in reason:
        return f"{reason}); --override-opt-param-scheduler takes this run's learning-rate schedule"
    before = [name for name in _steps(args.load) if _step(name) < _step(tag) and "_" not in name.split("step")[1]]
    earlier = f" If it is damaged: --ckpt-step {_step(before[-1])} loads the one before." if before else ""
    return (
        f"{reason}). For another number of processes or stages make it universal first: ds_to_universal, and "
        f'"checkpoint": {{"load_universal": true}}.{earlier}'
    )


def _compare(saved: dict[str, Any], args: argparse.Namespace) -> None:
    guard.check_norm(argparse.Namespace(**saved), args)
    for name, value in saved.items():
        if getattr(args, name) != value:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"the checkpoint in {args.load} has {flag} {value}, this run {getattr(args, name)}")


def _layout() -> tuple[int, int, int]:
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    )


def _random_state() -> dict[str, Any]:
    return {
        "layout": _layout(),
        "host": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _gathered(value: Any) -> list[Any]:
    values: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def _restore_random_state(states: list[dict[str, Any]]) -> None:
    if states[0]["layout"] != _layout():
        return  # other ranks; Megatron seeds them anew
    state = states[torch.distributed.get_rank()]
    torch.set_rng_state(state["host"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def _universal_info(model: torch.nn.Module) -> dict[str, Any]:
    """How tensor parallelism cuts each parameter, as patterns of names, and how large the vocabulary is.
    `ds_to_universal` insists that every pattern fits a parameter, so they are made of the names.
    """
    args = get_args()
    kinds: dict[str, set[str]] = {}
    for name, parameter in model.named_parameters():
        kinds.setdefault(_kind(name, parameter, args.swiglu), set()).add(_pattern(name))
    merged: dict[str, set[str]] = {}
    for stage in _gathered(kinds):
        for kind, patterns in stage.items():
            merged.setdefault(kind, set()).update(patterns)
    info: dict[str, Any] = {kind: sorted(patterns) for kind, patterns in merged.items() if kind}
    info["universal_checkpoint_version"] = 0.2
    info["original_vocab_size"] = args.padded_vocab_size  # the softmax counts the padding too, and it is trained
    return info


def _pattern(name: str) -> str:
    """The name with any layer number."""
    return r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in name.split(".")) + "$"


def _kind(name: str, parameter: torch.nn.Parameter, gated: bool) -> str:
    """The list of DeepSpeed's in which a parameter belongs; "" is a cut along the first dimension."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return "tp_replicated_parameter_patterns"
    if "word_embeddings" in name or "output_layer" in name:
        return "vocabulary_parameter_patterns"
    if parameter.partition_dim == 1:
        return "parameter_with_row_parallelism_patterns"
    return "parameter_with_2_sub_params_cat_dim_0" if gated and "linear_fc1" in name else ""
