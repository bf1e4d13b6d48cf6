"""Seconds per training step with ProRes against stock Megatron, paired in one run.

    python benchmarks/overhead.py --config configs/megatron/quickstart.yaml --mock-data \
        --tokenizer-type NullTokenizer --vocab-size 4095 --train-iters 244 [--csv overhead.csv]

Megatron's own trainer trains one model and takes every step either with ProRes (alpha set, branches scaled) or as
stock Megatron does it (its bias-dropout-add, no driver), in the order A B B A, so that both see the same weights,
memory and drift of the machine. Takes all flags of the entry point; runs on the host, on a GPU, and under torchrun.
"""

import csv
import os
import platform
import statistics
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

from megatron_prores import __version__
from megatron_prores.errors import UserError
from megatron_prores.megatron import launch, pretrain_gpt, screen

WARM_UP_STEPS = 4
"""Left out: allocation and compilation."""


class PairedSteps:
    """Stands in for Megatron's `train_step` and times it in both ways."""

    def __init__(self, train_step):
        self.with_prores, self.stock = train_step, train_step.__wrapped__
        self.seconds: list[tuple[str, float]] = []
        self._prores_bda = None

    def __call__(self, forward_step, data, model, *args, **kwargs):
        which = "prores" if len(self.seconds) % 4 in (0, 3) else "stock"
        self._use(which, model)
        _synchronize()
        start = time.perf_counter()
        step = self.with_prores if which == "prores" else self.stock
        result = step(forward_step, data, model, *args, **kwargs)
        _synchronize()
        self.seconds.append((which, time.perf_counter() - start))
        return result

    def _use(self, which: str, model) -> None:
        from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

        from megatron_prores.megatron.layer import ProResTransformerLayer

        layers = [m for chunk in model for m in chunk.modules() if isinstance(m, ProResTransformerLayer)]
        if self._prores_bda is None:
            self._prores_bda = [(layer.self_attn_bda, layer.mlp_bda) for layer in layers]
        for layer, bda in zip(layers, self._prores_bda, strict=True):
            layer.self_attn_bda, layer.mlp_bda = (
                bda if which == "prores" else (get_bias_dropout_add, get_bias_dropout_add)
            )

    def ratios(self) -> list[float]:
        """ProRes over stock, for every two neighbouring steps of different kind."""
        timed = self.seconds[WARM_UP_STEPS:]
        pairs = [timed[i : i + 2] for i in range(0, len(timed) - 1, 2)]
        return [dict(pair)["prores"] / dict(pair)["stock"] for pair in pairs]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def report(steps: PairedSteps, csv_path: str | None) -> None:
    """Print medians and the ratio; append a row to the CSV file."""
    from megatron.training import get_args

    args = get_args()
    if args.rank != 0:
        return
    ratios = steps.ratios()
    if len(ratios) < 2:
        raise UserError(f"too few steps to compare: give --train-iters {WARM_UP_STEPS + 40} or more")
    medians = {
        which: statistics.median(s for kind, s in steps.seconds[WARM_UP_STEPS:] if kind == which)
        for which in ("prores", "stock")
    }
    low, middle, high = statistics.quantiles(ratios, n=4)
    screen.say(
        f"\nstock {medians['stock'] * 1e3:.2f} ms, ProRes {medians['prores'] * 1e3:.2f} ms a step (medians); "
        f"ratio {middle:.4f}, quartiles {low:.4f} to {high:.4f}, {len(ratios)} pairs"
    )
    row = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu(),
        "processes": args.world_size,
        "tensor_parallel": args.tensor_model_parallel_size,
        "pipeline_parallel": args.pipeline_model_parallel_size,
        "dtype": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        "layers": args.num_layers,
        "hidden": args.hidden_size,
        "sequence": args.seq_length,
        "micro_batch": args.micro_batch_size,
        "global_batch": args.global_batch_size,
        "pairs": len(ratios),
        "stock_ms": f"{medians['stock'] * 1e3:.3f}",
        "prores_ms": f"{medians['prores'] * 1e3:.3f}",
        "ratio_median": f"{middle:.4f}",
        "ratio_q1": f"{low:.4f}",
        "ratio_q3": f"{high:.4f}",
        "torch": torch.__version__,
        "megatron_core": version("megatron-core"),
        "megatron_prores": __version__,
        "python": platform.python_version(),
    }
    if csv_path:
        path = Path(csv_path)
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, row)
            if new:
                writer.writeheader()
            writer.writerow(row)
        screen.say(f"appended to {csv_path}")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':')[1].strip()} ({os.cpu_count()} cores)"
    return platform.processor()


def main() -> None:
    argv = sys.argv[1:]
    csv_path = None
    if "--csv" in argv:
        at = argv.index("--csv")
        csv_path = argv[at + 1]
        del argv[at : at + 2]
    parse = launch.parse
    steps = None

    def parse_and_time(*args, **kwargs):
        nonlocal steps
        parsed = parse(*args, **kwargs)
        from megatron.training import training  # only now may Megatron be imported

        steps = training.train_step = PairedSteps(training.train_step)
        return parsed

    launch.parse = parse_and_time
    pretrain_gpt.run([*argv, "--eval-iters", "0"])
    if steps:
        report(steps, csv_path)


if __name__ == "__main__":
    pretrain_gpt.exit_on_error(main)
