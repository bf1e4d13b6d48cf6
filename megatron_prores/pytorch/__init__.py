"""ProRes for any model in torch, through hooks on the modules that write to its residual stream."""

from megatron_prores.pytorch.handle import ProRes, attach

__all__ = ["ProRes", "attach"]
