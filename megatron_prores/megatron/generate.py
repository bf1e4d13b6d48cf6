"""`prores generate`: text from a checkpoint of any layout, with the alphas of its iteration."""

import argparse
import json
import time
from collections.abc import Iterator

import torch

from megatron_prores.errors import UserError, is_text
from megatron_prores.megatron import screen
from megatron_prores.megatron.sampling import Sampling, complete
from megatron_prores.megatron.saved_model import find_iteration, fitting_tokenizer, load_model, parse_saved
from megatron_prores.options import check_output, refuse_torchrun

DEFAULT_PROMPT = "def "


def run(options: argparse.Namespace) -> None:
    """`prores generate`: print every prompt with its continuation. For the options see its `add_arguments`.

    Raises:
        UserError: an option is out of range, or the checkpoint or its tokenizer cannot be used.
    """
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.greedy)
    _check(options)
    iteration = find_iteration(options.checkpoint, options.ckpt_step)
    args = parse_saved(options, iteration)
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
    tokenizer = fitting_tokenizer(args)
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
            generator=torch.Generator(next(model.parameters()).device).manual_seed(options.seed + number),
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


def _check(options: argparse.Namespace) -> None:
    if options.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens must be at least 1, not {options.max_new_tokens}")
    if not 0 <= options.seed < 2**62:
        raise UserError(f"--seed must be 0 or more and below 2**62, not {options.seed}")
    for prompt in options.prompt:
        if not is_text(prompt):
            raise UserError(f"--prompt {prompt!r} is not UTF-8 text: give it in UTF-8")
    refuse_torchrun("prores generate")
    check_output(options.output)


def _opened(path: str):
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {error.strerror}") from error
