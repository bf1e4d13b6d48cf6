"""Megatron's process groups under the names that DeepSpeed asks a "model parallelism unit" for."""

from megatron.core import parallel_state

get_data_parallel_rank = parallel_state.get_data_parallel_rank
get_data_parallel_world_size = parallel_state.get_data_parallel_world_size
get_data_parallel_group = parallel_state.get_data_parallel_group

# "Model parallel" is tensor parallel here: with pipeline stages DeepSpeed brings groups of its own.
get_model_parallel_rank = get_tensor_model_parallel_rank = parallel_state.get_tensor_model_parallel_rank
get_model_parallel_world_size = get_tensor_model_parallel_world_size = (
    parallel_state.get_tensor_model_parallel_world_size
)
get_model_parallel_group = get_tensor_model_parallel_group = parallel_state.get_tensor_model_parallel_group
get_tensor_model_parallel_src_rank = parallel_state.get_tensor_model_parallel_src_rank


def get_data_parallel_group_ranks() -> list[int]:
    return parallel_state.get_data_parallel_group_ranks()


def get_pipeline_model_parallel_rank() -> int:
    return 0


def get_pipeline_model_parallel_world_size() -> int:
    return 1
