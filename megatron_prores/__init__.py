"""Progressive Residual Warmup (ProRes, arXiv 2603.05369) for the engines that pretrain large language models."""

from megatron_prores.schedule import SCHEDULES, Schedule, alpha

__version__ = "0.1.0"
__all__ = ["SCHEDULES", "Schedule", "__version__", "alpha"]
