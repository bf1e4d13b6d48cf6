"""Text from a checkpoint: the model and its alphas as they were when it was saved, in one process.

What the model is comes from the arguments that Megatron saves in every checkpoint: they become the defaults of
Megatron's own parser, so that they go through the same validation as in training. Megatron's `--use-checkpoint-args`
restores a fixed list instead, which lacks, among others, the norm's epsilon, QK norms, RoPE scaling, sliding windows
and bf16.
"""

import argparse
import json
import math
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException  # not an Exception

from megatron_prores.errors import UserError
from megatron_prores.megatron import launch, screen

DEFAULT_PROMPT = "def "

# The groups of Megatron's parser that say what a model computes and how text becomes tokens; of two others, a few.
_GROUPS = (
    "transformer configuration",
    "network size",
    "moe",
    "mla",
    "experimental_attention_variant",
    "heterogeneous architecture",
    "tokenizer",
)
_ALSO = {"seq_length", "spec", "attention_softmax_in_fp32"}

# In those groups, what belongs to the training run or its machine and not to the model (and, at the end, older names
# that Megatron fills in itself and then refuses).
_NOT = re.compile(
    r"recompute_|distribute_saved_activations|cuda_graph|enable_cuda_graph|external_cuda_graph|inference_|offload_"
    r"|fine_grained_|delta_offload|min_offloaded|activation_offload|delay_offload|fp8|fp4|attention_backend"
    r"|flash_attention_version|init_model_with_meta_device|account_for_|config_logger_dir|batch_invariant_mode"
    r"|encoder_num_layers|decoder_num_layers"
)


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
        logits, tokens = torch.sort(logits / self.temperature, descending=True, stable=True)
        if self.top_k:
            logits = logits[: self.top_k]
        probabilities = torch.softmax(logits, dim=-1)
        # A token stays if those before it do not reach p yet; the first one always stays.
        before = probabilities.cumsum(-1) - probabilities
        kept = probabilities.where((before < self.top_p).index_fill(0, torch.zeros_like(tokens[:1]), True), 0.0)
        return int(tokens[torch.multinomial(kept, 1, generator=generator)])


def run(options: argparse.Namespace) -> None:
    """`prores generate`: print every prompt with its continuation. For the options see its `add_arguments`.

    Raises:
        UserError: an option is out of range, or the checkpoint or its tokenizer cannot be used.
    """
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.greedy)
    _check(options)
    iteration = find_iteration(options.checkpoint, options.ckpt_step)
    args = parse(options, iteration)
    try:
        records = list(_continuations(args, options, sampling))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if options.output:
        with _opened(options.output) as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        screen.say(f"\nwrote {options.output}")


def _continuations(args: argparse.Namespace, options: argparse.Namespace, sampling: Sampling) -> Iterator[dict]:
    """Print every prompt with its continuation as soon as it is there, and yield what --output is to hold."""
    from megatron.training.global_vars import get_tokenizer

    tokenizer = get_tokenizer()
    if tokenizer.vocab_size > args.padded_vocab_size:
        raise UserError(
            f"the tokenizer {args.tokenizer_model} has {tokenizer.vocab_size} tokens and the model "
            f"{args.padded_vocab_size}: it is not the one that the model was trained with"
        )
    model = load_model(args)
    prompts = options.prompt or [DEFAULT_PROMPT]
    for number, prompt in enumerate(prompts):
        start = time.perf_counter()
        text, tokens, ended_by = complete(
            model,
            tokenizer,
            prompt,
            max_new_tokens=options.max_new_tokens,
            context=args.seq_length,
            sampling=sampling,
            # A seed of its own, so that the same prompt given twice has two continuations.
            generator=torch.Generator(_device(model)).manual_seed(options.seed + number),
        )
        screen.say(f"\n--- prompt {number + 1} of {len(prompts)}: {prompt!r}")
        screen.say(prompt + text)
        screen.say(f"--- {tokens} tokens in {time.perf_counter() - start:.1f} s, ended by {ended_by}")
        yield {
            "prompt": prompt,
            "continuation": text,
            "tokens": tokens,
            "ended_by": ended_by,
            "iteration": args.iteration,
        }


def _device(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


def _check(options: argparse.Namespace) -> None:
    if options.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens must be at least 1, not {options.max_new_tokens}")
    if not 0 <= options.seed < 2**62:
        raise UserError(f"--seed must be 0 or more and below 2**62, not {options.seed}")
    if int(os.environ.get("WORLD_SIZE", "1")) != 1:
        raise UserError("prores generate runs in one process: start it without torchrun")
    if options.output:
        folder = os.path.dirname(os.path.abspath(options.output))
        if os.path.isdir(options.output) or not os.access(folder, os.W_OK):
            raise UserError(f"--output {options.output} cannot be written")


def _opened(path: str):
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {error.strerror}") from error


def find_iteration(folder: str, step: int | None = None) -> int:
    """The iteration of the checkpoint to load from what training was given as `--save`: `step`, or the latest.

    Raises:
        UserError: it is not there; names those that are.
    """
    names = os.listdir(folder) if os.path.isdir(folder) else []
    saved = sorted(int(match[1]) for name in names if (match := re.fullmatch(r"iter_(\d{7,})", name)))
    if not saved:
        inside = re.fullmatch(r"iter_0*(\d+)", os.path.basename(os.path.abspath(folder)))
        hint = f"; give the folder above it, with --ckpt-step {inside[1]}" if names and inside else ""
        why = "it holds no iter_* folder" if os.path.isdir(folder) else "no such folder"
        raise UserError(f"there is no checkpoint in {folder}: {why}{hint}")
    if step is None:
        step = _latest(folder)
    if step not in saved:
        shown = ", ".join(map(str, saved[-10:]))
        raise UserError(
            f"there is no checkpoint of iteration {step} in {folder}: "
            f"give one of {'... ' if len(saved) > 10 else ''}{shown} as --ckpt-step"
        )
    return step


def _folder(checkpoints: str, iteration: int) -> str:
    return os.path.join(checkpoints, f"iter_{iteration:07d}")


def _latest(folder: str) -> int:
    path = os.path.join(folder, "latest_checkpointed_iteration.txt")
    try:
        with open(path, encoding="utf-8") as file:
            return int(file.read())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} does not name the latest iteration: name one with --ckpt-step") from error


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
    device = _device(model)
    tokens = torch.tensor([ids], device=device)
    positions = torch.arange(len(ids), device=device)[None]
    return model(tokens, positions, None)[0, -1]  # without a mask attention is causal


def parse(options: argparse.Namespace, iteration: int) -> argparse.Namespace:
    """Megatron's arguments for the model of a checkpoint, in one process. Sets Megatron's globals.

    Raises:
        UserError: the checkpoint cannot be read or has no text, or its tokenizer is not there.
    """
    folder = _folder(options.checkpoint, iteration)
    argv = ["--load", options.checkpoint, "--ckpt-step", str(iteration), "--no-load-optim", "--no-load-rng"]
    argv += ["--micro-batch-size", "1"]
    argv += ["--host"] * options.host + ["--verbose"] * options.verbose
    saved: dict[str, Any] = {}

    def extra(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        # Only here is the device chosen, so that Megatron may be imported. Called more than once.
        if not saved:
            saved.update(saved_defaults(folder, parser, options.tokenizer_model))
        parser.set_defaults(**saved)
        return parser

    try:
        return launch.parse(argv, extra)
    except UserError as error:
        tokenizer = saved.get("tokenizer_model")
        if tokenizer and tokenizer in str(error):
            raise _no_tokenizer(tokenizer) from error
        raise


def saved_defaults(folder: str, parser: argparse.ArgumentParser, tokenizer_model: str | None) -> dict[str, Any]:
    """What the arguments saved in a checkpoint say about the model, its tokenizer and its ProRes schedule.

    Args:
        folder: `iter_*`, of Megatron's format `torch_dist`.
        parser: with Megatron's flags.
        tokenizer_model: instead of the saved path.

    Raises:
        UserError: as `parse()`.
    """
    from megatron_prores.megatron import guard

    saved = _read_arguments(folder)
    names = _model_flags(parser) & vars(saved).keys()
    defaults = {name: getattr(saved, name) for name in names} | guard.saved_settings(saved)
    if tokenizer_model:
        defaults["tokenizer_model"] = tokenizer_model
    if "Null" in str(defaults.get("tokenizer_type", "Null")):
        raise UserError(
            f"{folder} was trained on token ids without a text tokenizer ({defaults.get('tokenizer_type')}): "
            "there is no text to generate"
        )
    _check_tokenizer(defaults, chosen=bool(tokenizer_model))
    return defaults


def _read_arguments(folder: str) -> argparse.Namespace:
    from megatron.core import dist_checkpointing

    try:
        return dist_checkpointing.load_common_state_dict(folder)["args"]
    except (Exception, CheckpointException) as error:  # a file of any kind, cut off anywhere
        raise _unreadable(folder, error) from error


def _unreadable(folder: str, error: BaseException) -> UserError:
    while isinstance(error, CheckpointException):  # it carries what happened on each rank, with tracebacks
        error = next(iter(error.failures.values()))[0]
    reason = (str(error).strip().splitlines() or ["no reason given"])[0]
    return UserError(
        f"{folder} cannot be read as a distributed checkpoint of Megatron ({type(error).__name__}: {reason})"
    )


def _model_flags(parser: argparse.ArgumentParser) -> set[str]:
    from dataclasses import fields

    from megatron.core.model_parallel_config import ModelParallelConfig

    groups = {group.title: {action.dest for action in group._group_actions} for group in parser._action_groups}
    flags = set().union(*(groups[title] for title in _GROUPS)) | _ALSO
    parallel = {field.name for field in fields(ModelParallelConfig)} - {"bf16", "fp16"}
    return {name for name in flags - parallel if not _NOT.match(name)}


def _check_tokenizer(defaults: dict[str, Any], chosen: bool) -> None:
    """Refuse a path that is not there, before Megatron starts. `chosen`: the user named the tokenizer."""
    path = defaults.get("tokenizer_model")
    if path and not os.path.exists(path):
        is_name = defaults["tokenizer_type"] == "HuggingFaceTokenizer" and path.count("/") < 2 and path[0] not in "./~"
        # A saved relative path could be taken for a name on the hub, and then be anyone's tokenizer: it is looked up
        # only among those that are on this machine.
        if not is_name or not (chosen or _is_downloaded(path)):
            raise _no_tokenizer(path)
    for flag in ("vocab_file", "merge_file"):
        path = defaults.get(flag)
        if path and not os.path.exists(path):
            raise UserError(f"the checkpoint's tokenizer needs {path}, which is not there: run where this path holds")


def _is_downloaded(name: str) -> bool:
    try:
        from huggingface_hub import try_to_load_from_cache

        return any(
            isinstance(try_to_load_from_cache(name, file), str) for file in ("tokenizer.json", "tokenizer_config.json")
        )
    except (ImportError, ValueError):  # not installed; not a possible name
        return False


def _no_tokenizer(path: str) -> UserError:
    return UserError(
        f"the tokenizer {path} is not there or cannot be loaded (a relative path counts from where training ran): "
        "name it with --tokenizer-model, as a path or as a Hugging Face name"
    )


def load_model(args: argparse.Namespace) -> torch.nn.Module:
    """The checkpoint's model for evaluation, with alpha(l, N) of its iteration N.

    Args:
        args: from `parse()`.

    Returns:
        `model(tokens [b, s], position_ids [b, s], None)` gives logits [b, s, padded vocabulary].

    Raises:
        UserError: the checkpoint does not fit or cannot be read.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import training
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    from megatron_prores.megatron import driver, gpt
    from megatron_prores.megatron.arguments import validate_prores_arguments

    gpt.refuse_unsupported(args)
    validate_prores_arguments(args)
    launch.accepted(training.initialize_megatron, get_embedding_ranks=gpt.embedding_ranks)
    config = launch.accepted(gpt_config_from_args, args)
    launch.accepted(config.finalize)
    model = launch.accepted(
        GPTModelBuilder(config).build_distributed_models,
        ProcessGroupCollection.use_mpu_process_groups(),
        wrap_with_ddp=False,
    )
    try:
        args.iteration, _ = training.load_checkpoint(model, None, None)
    except CheckpointException as error:
        raise _unreadable(_folder(args.load, args.ckpt_step), error) from error
    driver.bind(model)
    return model[0].eval()
