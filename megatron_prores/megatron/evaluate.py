"""`prores evaluate`: the exact loss of a checkpoint on a held-out set, with the alphas of its iteration."""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
from tqdm import tqdm

from megatron_prores.errors import UserError
from megatron_prores.megatron import screen
from megatron_prores.megatron.saved_model import find_iteration, load_model, parse_saved
from megatron_prores.options import check_output, refuse_torchrun


@dataclass(frozen=True)
class Evaluation:
    """What a checkpoint scores on a held-out set.

    Attributes:
        iteration: of the checkpoint; its alphas were alpha(l, iteration).
        nats: sum of the cross-entropies of all predicted tokens.
        tokens: how many were predicted: all of the set but its first.
        bytes: of the set's text in UTF-8, without the tokens that end documents.
    """

    iteration: int
    nats: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Nats per token: a quotient of sums and not a mean of batch means."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers."""
        return self.nats / math.log(2.0) / self.bytes

    def as_json(self) -> dict:
        derived = {name: getattr(self, name) for name in ("loss", "perplexity", "bits_per_byte")}
        return asdict(self) | derived


def run(options: argparse.Namespace) -> None:
    """`prores evaluate --checkpoint`: print loss, perplexity and bits per byte.

    Raises:
        UserError: an option is out of range, or the checkpoint, its tokenizer or the data cannot be used.
    """
    _check(options)
    iteration = find_iteration(options.checkpoint, options.ckpt_step)
    args = parse_saved(options, iteration)
    try:
        from megatron.training.global_vars import get_tokenizer

        # Before the model is built: reading the data takes seconds, and may be refused.
        tokens, size = read_tokens(options.data, get_tokenizer(), options.max_tokens)
        _check_fits(tokens, options.data, args.padded_vocab_size)
        model = load_model(args)
        nats = total_loss(model, tokens, args.seq_length, options.batch_size)
        result = Evaluation(args.iteration, nats, len(tokens) - 1, size)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    screen.say(
        f"iteration {result.iteration} on {options.data}: loss {result.loss:.4f} nats per token, "
        f"perplexity {result.perplexity:.3f}, {result.bits_per_byte:.4f} bits per byte "
        f"({result.tokens:,} tokens, {result.bytes:,} bytes)"
    )
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump(result.as_json(), file, indent=2)


def read_tokens(prefix: str, tokenizer, limit: int | None = None) -> tuple[np.ndarray, int]:
    """All documents of a Megatron dataset one after another, as training reads them.

    Args:
        prefix: without .bin and .idx.
        limit: use whole documents until there are so many tokens.

    Returns:
        Token ids as int64 of shape [n], and the bytes of their text.

    Raises:
        UserError: the dataset is not there, is damaged, or holds fewer than two tokens.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    from megatron_prores.megatron.data_check import count_documents

    count_documents(prefix)
    dataset = IndexedDataset(prefix)
    documents, length, size = [], 0, 0
    for index in range(len(dataset)):
        document = np.asarray(dataset[index], dtype=np.int64)
        documents.append(document)
        length += len(document)
        text = document[document != tokenizer.eod].tolist()
        size += len(tokenizer.detokenize(text).encode("utf-8")) if text else 0
        if limit and length >= limit:
            break
    if length < 2 or not size:
        raise UserError(f"{prefix} holds {length} token{'s' * (length != 1)}: too few to evaluate on")
    return np.concatenate(documents), size


@torch.inference_mode()
def total_loss(model: torch.nn.Module, tokens: np.ndarray, context: int, batch_size: int) -> float:
    """Sum of -ln p(token | the tokens before it in its window), over every token but the first.

    The stream is cut into windows of `context` tokens that do not overlap; each token is predicted once. A window's
    first token is predicted from the last one of the window before it alone.

    Args:
        model: `model(tokens, positions, None, labels=labels)` gives cross-entropies of [b, s] in nats.
        tokens: int64 [n], n >= 2.
    """
    device = next(model.parameters()).device
    total = 0.0
    bar = tqdm(total=len(tokens) - 1, unit="token", unit_scale=True, desc="evaluating", disable=None, leave=False)
    with bar:
        for inputs, labels in _batches(torch.from_numpy(tokens), context, batch_size):
            positions = torch.arange(inputs.shape[1], device=device).expand_as(inputs)
            losses = model(inputs.to(device), positions, None, labels=labels.to(device))
            total += float(losses.double().sum())
            bar.update(labels.numel())
    return total


def _batches(tokens: torch.Tensor, context: int, batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and labels of [b, s]: batches of whole windows, then what is left as one shorter window."""
    inputs, labels = tokens[:-1], tokens[1:]
    whole = len(inputs) // context
    for start in range(0, whole, batch_size):
        rows = slice(start * context, min(start + batch_size, whole) * context)
        yield inputs[rows].view(-1, context), labels[rows].view(-1, context)
    if whole * context < len(inputs):
        yield inputs[whole * context :][None], labels[whole * context :][None]


def _check(options: argparse.Namespace) -> None:
    for name in ("batch_size", "max_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be 1 or more, not {value}")
    refuse_torchrun("prores evaluate")
    check_output(options.output)


def _check_fits(tokens: np.ndarray, prefix: str, vocabulary: int) -> None:
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise UserError(
            f"{prefix} holds token {int(tokens.max())} and the model has {vocabulary}: "
            "it was made with another tokenizer"
        )
