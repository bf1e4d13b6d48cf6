"""Progressive Residual Warmup (ProRes, arXiv 2603.05369) for the engines that pretrain large language models."""

from megatron_prores.schedule import SCHEDULES, Schedule, alpha

__version__ = "0.1.0"
__all__ = ["SCHEDULES", "Schedule", "__version__", "alpha", "attach"]


def __getattr__(name: str):
    if name == "attach":  # imports torch
        from megatron_prores.pytorch import attach

        return attach
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
