"""What Megatron's `pretrain()` asks of a GPT: batches, the loss, datasets. Its wheel does not ship these."""

import argparse
from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from torch import Tensor

from megatron_prores.errors import UserError
from megatron_prores.megatron.damage import reason

_BATCH = ("tokens", "position_ids", "attention_mask", "labels", "loss_mask")

# Options of Megatron's own pretrain_gpt.py that need another kind of batch or of loss.
_UNSUPPORTED = {
    "sft": "--sft",
    "fim_data": "--fim-data",
    "dataloader_inter_document_masking": "--dataloader-inter-document-masking",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "logits_load_dir": "--logits-load-dir",
    "mtp_num_layers": "--mtp-num-layers",
    "hybrid_layer_pattern": "--hybrid-layer-pattern",
    "perform_rl_step": "--perform-rl-step",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm",
    "check_for_spiky_loss": "--check-for-spiky-loss",
    "per_dataset_sequences_path": "--per-dataset-sequences-path",
    "multiple_validation_sets": "--multiple-validation-sets",
    "full_validation": "--full-validation",
    "inprocess_restart": "--inprocess-restart",
    "log_straggler": "--log-straggler",
    "rampup_batch_size": "--rampup-batch-size (megatron-core 0.19 reads it nowhere)",
}


def refuse_unsupported(args: argparse.Namespace) -> None:
    """Refuse options that this entry point would otherwise ignore.

    Raises:
        UserError: names the flag.
    """
    for name, flag in _UNSUPPORTED.items():
        if getattr(args, name, None):
            raise UserError(
                f"{flag} is not supported by this entry point: remove it, or call megatron_prores.megatron.enable() "
                "in Megatron's own pretrain_gpt.py"
            )


def check_layout(args: argparse.Namespace) -> None:
    """Refuse sizes that do not divide and that Megatron notices only in the first iteration.

    Raises:
        UserError: says what has to divide what.
    """
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    if args.sequence_parallel and args.seq_length % tensor:
        raise UserError(
            f"--seq-length {args.seq_length} is not divisible by --tensor-model-parallel-size {tensor}, "
            "which --sequence-parallel needs"
        )
    if args.position_embedding_type == "rope" and args.kv_channels % 2:
        raise UserError(
            f"rotary embeddings need an even head size, and --hidden-size {args.hidden_size} over "
            f"--num-attention-heads {args.num_attention_heads} gives {args.kv_channels}"
        )
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    if args.virtual_pipeline_model_parallel_size and microbatches % pipeline:
        raise UserError(
            f"virtual pipeline stages need a number of microbatches that --pipeline-model-parallel-size {pipeline} "
            f"divides, and --global-batch-size {args.global_batch_size} gives {microbatches}"
        )


def forward_step(data_iterator, model, return_schedule_plan: bool = False):
    """One microbatch through one model chunk.

    Returns:
        The chunk's output (losses of shape [b, s] on the last stage, else hidden states) and the loss function.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = microbatch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss, batch["loss_mask"])


def microbatch(data_iterator, vp_stage: int | None = None) -> dict[str, Tensor | None]:
    """The tensors of [b, s] that this stage needs; all None in the middle of the pipeline."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(_BATCH)
    args = get_args()
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch = {}
    if tp_rank == 0:
        batch = {name: tensor for name, tensor in next(data_iterator).items() if isinstance(tensor, Tensor)}
        _check_tokens(batch["tokens"], args.padded_vocab_size or args.vocab_size)
        batch = {name: tensor.cuda(non_blocking=True) for name, tensor in batch.items()}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        # The other ranks have to know the shape before the tensor comes; evaluations run without gradients.
        micro_batch_size=args.micro_batch_size if torch.is_grad_enabled() else args.eval_micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    return {name: batch.get(name) for name in _BATCH}


def _check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """While they are still on the host; a lookup beyond the table would be a device-side assert on a GPU."""
    low, high = tokens.aminmax()
    if low < 0 or high >= vocab_size:
        token = int(low if low < 0 else high)
        raise UserError(
            f"the data hold token {token} and the model has {vocab_size}: they were made with another tokenizer "
            "or are damaged"
        )


def loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Masked sum of the token losses of a microbatch.

    Args:
        loss_mask: [b, s], 1 where a token counts.
        losses: cross-entropy per token in nats, [b, s].

    Returns:
        The sum, the number of tokens, and `{"lm loss": [sum, number of tokens]}` for Megatron to average.
    """
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(losses.reshape(-1).float() * mask)
    if get_args().check_for_nan_in_loss_and_grad:
        for rejected, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=total,
                rejection_func=rejected,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    tokens = mask.sum().detach().to(torch.int)
    return total, tokens, {"lm loss": torch.cat([total.detach().view(1), tokens.view(1)])}


def datasets(train_valid_test_num_samples, vp_stage: int | None = None):
    """Megatron's train, validation and test datasets, built on the ranks that read them."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )

    def is_built_on_rank() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(vp_stage)

    dataset = MockGPTDataset if args.mock_data else GPTDataset
    builder = BlendedMegatronDatasetBuilder(dataset, train_valid_test_num_samples, is_built_on_rank, config)
    try:
        return builder.build()
    except Exception as error:
        raise UserError(f"the data cannot be used: {reason(error)}") from error


datasets.is_distributed = True  # Megatron then calls it on every rank


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """The ranks of a pipeline that hold the word embeddings: the first, and the last where they are tied."""
    if len(pp_ranks) == 1 or get_args().untie_embeddings_and_output_weights:
        return [pp_ranks[0]]
    return [pp_ranks[0], pp_ranks[-1]]
