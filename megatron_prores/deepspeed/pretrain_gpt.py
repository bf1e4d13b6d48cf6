"""Pretrain a GPT with ProRes: Megatron's layers, data and trainer, with DeepSpeed as the engine.

    torchrun --nproc-per-node 2 -m megatron_prores.deepspeed.pretrain_gpt \\
        --deepspeed_config configs/deepspeed/zero1.json --config configs/megatron/quickstart.yaml

Also under `deepspeed --module`. Takes the flags of `megatron_prores.megatron.pretrain_gpt`; ZeRO, precision and
offload are in the DeepSpeed config. Tensor parallelism is Megatron's, pipeline stages are DeepSpeed's.
"""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_prores.deepspeed import arguments
from megatron_prores.megatron import pretrain_gpt


def use_deepspeed(args: argparse.Namespace, config: dict[str, Any]) -> None:
    """Put DeepSpeed into Megatron's trainer."""
    settled = arguments.reconcile(args, config)

    from megatron_prores.deepspeed import faults, to_megatron, trainer

    to_megatron.check(args)
    faults.skip_shared_memory_kernel()
    trainer.install(settled)


def run(argv: list[str], use_engine: Callable[[argparse.Namespace, dict[str, Any]], None] = use_deepspeed) -> None:
    """Train as the command line says.

    Raises:
        UserError: the command line, the data, the DeepSpeed config or a checkpoint cannot be used.
    """
    config, flags = ({}, []) if {"-h", "--help"} & set(argv) else arguments.read(argv)
    pretrain_gpt.run(argv, arguments.add_deepspeed_arguments, flags, lambda args: use_engine(args, config))


def leave() -> None:
    """End the process without the interpreter's exit, in which ZeRO-3 at times aborts on the host."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    try:
        pretrain_gpt.exit_on_error(lambda: run(sys.argv[1:]))
    except SystemExit as end:  # how Megatron's trainer ends after a signal or a time limit
        if end.code:
            raise
    leave()


if __name__ == "__main__":
    main()
