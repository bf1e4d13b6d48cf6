"""Megatron checkpoints as Hugging Face models, and back."""
