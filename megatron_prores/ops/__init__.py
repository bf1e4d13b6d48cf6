"""The scaled residual add."""

from megatron_prores.ops.scaled_residual import scaled_residual

__all__ = ["scaled_residual"]
