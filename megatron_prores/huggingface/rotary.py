"""The rotary frequencies that a Hugging Face Llama's settings stand for.

Written out here, because transformers' models cannot be imported on the host backend.
"""

import math

import torch


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
