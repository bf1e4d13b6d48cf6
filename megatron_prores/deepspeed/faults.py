"""Faults of DeepSpeed 0.19 that a run would otherwise meet as a traceback, an abort, or wrong numbers."""

from typing import Any

import deepspeed.ops
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.activation_checkpointing import checkpointing

from megatron_prores.errors import UserError


def skip_shared_memory_kernel() -> None:
    """On the host DeepSpeed compiles a kernel at every first start, for which it insists on ninja and minutes.

    Without it the same collectives run through gloo. Call this before DeepSpeed starts its communication.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def refuse(model: torch.nn.Module, config: dict[str, Any]) -> None:
    """Refuse what DeepSpeed fails at later or computes wrongly, and say what to do instead.

    Args:
        model: what will be given to `deepspeed.initialize`.
        config: the DeepSpeed config.

    Raises:
        UserError: names the setting or the parameter.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise UserError(
                f"DeepSpeed cannot broadcast the parameter {name}, which has no dimension: give it the shape (1,)"
            )
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    half = [name for name in ("bf16", "fp16") if (config.get(name) or {}).get("enabled")]
    if stage == 0 and half:
        raise UserError(
            f"DeepSpeed computes other updates in {half[0]} without ZeRO, and loses the loss scale: "
            'set "zero_optimization": {"stage": 1}'
        )
    if isinstance(model, PipelineModule):
        _refuse_in_pipeline(model, stage, config)


def _refuse_in_pipeline(model: PipelineModule, stage: int, config: dict[str, Any]) -> None:
    clips = float(config.get("gradient_clipping") or 0) > 0
    if stage > 1:
        raise UserError(
            f'DeepSpeed\'s pipeline does not work with ZeRO stage {stage}: set "stage": 1 in "zero_optimization"'
        )
    if stage == 0 and clips and model.tied_comms:
        raise UserError(
            "DeepSpeed's pipeline without ZeRO counts a tied weight once per stage when it clips gradients: "
            'set "zero_optimization": {"stage": 1}, or untie the weights'
        )
    interval = (config.get("pipeline") or {}).get("activation_checkpoint_interval", 0)
    interval = interval or model.activation_checkpoint_interval
    reentrant = model.activation_checkpoint_func is checkpointing.checkpoint
    if interval and reentrant and model.checkpointable_layers is None:
        raise UserError(
            "DeepSpeed's activation checkpoints would include the first layer, whose token input has no gradient: give "
            "PipelineModule checkpointable_layers=[the name of your layer class], or "
            "activation_checkpoint_func=deepspeed.checkpointing.non_reentrant_checkpoint"
        )
