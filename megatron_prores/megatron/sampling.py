"""Token after token from a model's logits."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_prores.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits.

    Args:
        temperature: above 0; divides the logits.
        top_k: only the k likeliest tokens, 0 for all.
        top_p: only the likeliest tokens whose probabilities add up to p, in (0, 1].
        greedy: the likeliest token; the others are then ignored.

    Raises:
        UserError: a value out of range.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    greedy: bool = False

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise UserError(
                f"--temperature must be a number above 0, not {self.temperature:g}; --greedy takes the likeliest token"
            )
        if self.top_k < 0:
            raise UserError(f"--top-k must be 0 (all tokens) or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p must be above 0 and at most 1, not {self.top_p:g}")

    def choose(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        """A token from logits of shape [vocabulary].

        Raises:
            UserError: the logits are NaN or infinite.
        """
        logits = logits.float()
        if not torch.isfinite(logits).all():
            raise UserError("the model's logits are not finite: this checkpoint's weights have diverged")
        if self.greedy:
            return int(logits.argmax())
        # Shifted, so that a tiny temperature gives -inf and not NaN.
        logits, tokens = torch.sort((logits - logits.max()) / self.temperature, descending=True, stable=True)
        if self.top_k:
            logits = logits[: self.top_k]
        probabilities = torch.softmax(logits, dim=-1)
        # A token stays if those before it do not reach p yet; the first one always stays.
        before = probabilities.cumsum(-1) - probabilities
        kept = probabilities.where((before < self.top_p).index_fill(0, torch.zeros_like(tokens[:1]), True), 0.0)
        return int(tokens[torch.multinomial(kept, 1, generator=generator)])


def complete(
    model: torch.nn.Module,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int,
    context: int,
    sampling: Sampling,
    generator: torch.Generator,
) -> tuple[str, int, str]:
    """The continuation of a prompt, its number of tokens, and what ended it. Arguments as for `next_tokens()`."""
    ids = encode(tokenizer, prompt)
    new: list[int] = []
    ended_by = "--max-new-tokens"
    for token in next_tokens(model, ids, tokenizer.vocab_size, context, sampling, generator):
        if token == tokenizer.eod:
            ended_by = "the end of the document"
            break
        new.append(token)
        if len(new) == max_new_tokens:
            break
    return decode(tokenizer, ids, new), len(new), ended_by


def encode(tokenizer: Any, text: str) -> list[int]:
    """The ids of the beginning of a document; of no text, the id that stands between documents.

    Raises:
        UserError: no text, and a tokenizer that has no such id.
    """
    ids = list(tokenizer.tokenize(text))
    if len(ids) > 1 and ids[-1] == tokenizer.eod:  # some tokenizers end every text
        ids.pop()
    if not ids and tokenizer.eod is None:
        raise UserError("an empty prompt needs a tokenizer with an end-of-document token")
    return ids or [tokenizer.eod]


def decode(tokenizer: Any, ids: list[int], new: list[int]) -> str:
    """The text of the new ids. Decoded after the prompt, since some tokenizers drop a text's leading space."""
    before, text = tokenizer.detokenize(ids), tokenizer.detokenize(ids + new)
    return text[len(before) :] if text.startswith(before) else tokenizer.detokenize(new)


@torch.inference_mode()
def next_tokens(
    model: torch.nn.Module,
    ids: list[int],
    vocab_size: int,
    context: int,
    sampling: Sampling,
    generator: torch.Generator,
) -> Iterator[int]:
    """Token after token, without end. Each costs a full forward pass over at most `context` tokens.

    Args:
        model: returns logits of [1, s, padded vocabulary].
        ids: the prompt, not empty.
        vocab_size: without the ids that only pad the vocabulary; those are never chosen.
    """
    ids = list(ids)
    while True:
        ids.append(sampling.choose(last_logits(model, ids[-context:])[:vocab_size], generator))
        yield ids[-1]


def last_logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """The logits after the last id, of shape [padded vocabulary]."""
    device = next(model.parameters()).device
    tokens = torch.tensor([ids], device=device)
    positions = torch.arange(len(ids), device=device)[None]
    return model(tokens, positions, None)[0, -1]  # without a mask attention is causal
