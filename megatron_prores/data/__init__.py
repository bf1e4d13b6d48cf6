"""Text to Megatron's indexed dataset. Importing this package imports neither torch nor Megatron."""

from megatron_prores.data.prepare import Part, Report, prepare_data

__all__ = ["Part", "Report", "prepare_data"]
