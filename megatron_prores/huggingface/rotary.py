"""The rotary frequencies that a Hugging Face Llama's settings stand for.

Written out here, because transformers' models cannot be imported on the host backend.
"""

import math

import torch

from megatron_prores.errors import UserError


def rope_parameters(config: dict) -> dict:
    """From what transformers 5 writes, or older versions."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    return {"rope_theta": config.get("rope_theta", 10000.0), **parameters, "rope_type": kind}


def inverse_frequencies(head_size: int, parameters: dict) -> torch.Tensor:
    """Of the types "default", "linear" and "llama3": float32 [head size / 2].

    Args:
        parameters: `rope_type`, `rope_theta`, and what the type takes.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = 1.0 / parameters["rope_theta"] ** exponents
    if parameters["rope_type"] == "linear":
        return frequencies / parameters["factor"]
    if parameters["rope_type"] == "llama3":
        return _llama3(frequencies, parameters)
    return frequencies


def _llama3(frequencies: torch.Tensor, parameters: dict) -> torch.Tensor:
    """Long waves are stretched by the factor, short ones not, and those between partly."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / parameters["factor"]


def check_rotary(model: torch.nn.Module, config: dict) -> None:
    """Compare the rotary frequencies that `config.json` stands for with those of Megatron's model.

    Raises:
        UserError: they differ.
    """
    parameters = rope_parameters(config)
    theirs = inverse_frequencies(model.config.kv_channels, parameters)
    rotary = model.rotary_pos_emb
    ours = rotary.inv_freq.float().cpu() / (rotary.seq_len_interpolation_factor or 1)
    if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-5, atol=0.0):
        raise UserError(
            f"Megatron and transformers compute other rotary frequencies from {parameters}: the model cannot be "
            "converted (Megatron 0.19 stretches them by 8 whatever --rope-scaling-factor says)"
        )
