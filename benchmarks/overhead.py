"""Seconds per training step with ProRes against stock Megatron, in turns within one run.

    python benchmarks/overhead.py --config configs/megatron/quickstart.yaml --mock-data \
        --tokenizer-type NullTokenizer --vocab-size 4095 --train-iters 244 [--csv overhead.csv]
    python benchmarks/overhead.py --config benchmarks/gpt_12x512.yaml --ops fused,torch --train-iters 90

Megatron's own trainer trains one model and takes every step either as stock Megatron does it (its bias-dropout-add, no
driver) or with ProRes (alpha set, branches scaled) by one of --ops, which default to --prores-op; in the order
A B C C B A, so that all see the same weights, memory and drift of the machine. Takes all flags of the entry point; runs
on the host, on a GPU, and under torchrun. With --deepspeed_config the engine is DeepSpeed's.
"""

import statistics
import sys
import time
from collections.abc import Callable

import results
import torch

from megatron_prores.errors import UserError
from megatron_prores.megatron import pretrain_gpt, screen
from megatron_prores.ops.choice import use_op

WARM_UP_SWEEPS = 2
"""Left out: allocation and compilation."""
STOCK = "stock"


class StepsInTurns:
    """Stands in for Megatron's `train_step` and times it in every way."""

    def __init__(self, train_step, ops: list[str]):
        self.with_prores, self.stock = train_step, getattr(train_step, "__wrapped__", train_step)
        self.ways = [STOCK, *ops]
        self.seconds: list[dict[str, float]] = []  # of each way, sweep by sweep
        self._prores_bda = None
        self.engine = None  # DeepSpeed's

    def __call__(self, forward_step, data, model, *args, **kwargs):
        if not self.seconds or len(self.seconds[-1]) == len(self.ways):
            self.seconds.append({})
        sweep = self.seconds[-1]
        order = self.ways if len(self.seconds) % 2 else self.ways[::-1]
        way = order[len(sweep)]
        self._use(way, model)
        _synchronize()
        start = time.perf_counter()
        step = self.stock if way == STOCK else self.with_prores
        result = step(forward_step, data, model, *args, **kwargs)
        _synchronize()
        sweep[way] = time.perf_counter() - start
        return result

    def _use(self, way: str, model) -> None:
        from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

        from megatron_prores.megatron.layer import ProResTransformerLayer

        layers = [m for chunk in model for m in chunk.modules() if isinstance(m, ProResTransformerLayer)]
        if self._prores_bda is None:
            self._prores_bda = [(layer.self_attn_bda, layer.mlp_bda) for layer in layers]
        for layer, bda in zip(layers, self._prores_bda, strict=True):
            layer.self_attn_bda, layer.mlp_bda = (get_bias_dropout_add, get_bias_dropout_add) if way == STOCK else bda
        if way != STOCK:
            use_op(way)
        if self.engine is not None:
            self.engine.lr_scheduler = self.engine.prores.inner if way == STOCK else self.engine.prores

    def timed(self) -> list[dict[str, float]]:
        """The sweeps that count."""
        return [sweep for sweep in self.seconds[WARM_UP_SWEEPS:] if len(sweep) == len(self.ways)]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def report(steps: StepsInTurns, csv_path: str | None) -> None:
    """Print medians and ratios; append a row for each of --ops to the CSV file."""
    from megatron.training import get_args

    args = get_args()
    if args.rank != 0:
        return
    timed = steps.timed()
    if len(timed) < 2:
        raise UserError(f"too few steps to compare: give --train-iters {22 * len(steps.ways)} or more")
    machine = results.machine("cuda" if torch.cuda.is_available() else "cpu")
    medians = {way: statistics.median(sweep[way] for sweep in timed) * 1e3 for way in steps.ways}
    screen.say(f"\nstock {medians[STOCK]:.2f} ms a step (median of {len(timed)})")
    rows = []
    for op in steps.ways[1:]:
        low, middle, high = results.quartiles([sweep[op] / sweep[STOCK] for sweep in timed])
        screen.say(
            f"ProRes, {op}: {medians[op]:.2f} ms; ratio {middle:.4f}, quartiles {low:.4f} to {high:.4f}, "
            f"{len(timed)} pairs"
        )
        rows.append(
            {
                "date": machine["date"],
                "device": machine["device"],
                "engine": "megatron"
                if steps.engine is None
                else f"deepspeed ZeRO-{steps.engine.zero_optimization_stage()}",
                "processes": args.world_size,
                "tensor_parallel": args.tensor_model_parallel_size,
                "pipeline_parallel": args.pipeline_model_parallel_size,
                "dtype": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
                "layers": args.num_layers,
                "hidden": args.hidden_size,
                "sequence": args.seq_length,
                "micro_batch": args.micro_batch_size,
                "global_batch": args.global_batch_size,
                "hidden_dropout": args.hidden_dropout,
                "op": op,
                "pairs": len(timed),
                "stock_ms": f"{medians[STOCK]:.3f}",
                "prores_ms": f"{medians[op]:.3f}",
                "ratio_median": f"{middle:.4f}",
                "ratio_q1": f"{low:.4f}",
                "ratio_q3": f"{high:.4f}",
                "torch": machine["torch"],
                "megatron_core": machine["megatron_core"],
                "megatron_prores": machine["megatron_prores"],
                "python": machine["python"],
            }
        )
    if csv_path:
        results.append(csv_path, rows)
        screen.say(f"appended to {csv_path}")


def _take(argv: list[str], flag: str) -> str | None:
    """Remove an own flag and its value from the command line."""
    if flag not in argv:
        return None
    at = argv.index(flag)
    if at + 1 == len(argv):
        raise UserError(f"{flag} needs a value")
    value = argv[at + 1]
    del argv[at : at + 2]
    return value


def _run_deepspeed(argv: list[str], time_steps: Callable, steps: Callable) -> None:
    from megatron_prores.deepspeed import pretrain_gpt as entry

    def use_engine(args, config) -> None:
        from megatron_prores.deepspeed import trainer

        entry.use_deepspeed(args, config)
        time_steps(args)
        switch_on = trainer.switch_on

        def switch_on_and_tell(engine, *rest, **kwargs):
            steps().engine = engine
            return switch_on(engine, *rest, **kwargs)

        trainer.switch_on = switch_on_and_tell

    entry.run(argv, use_engine)


def main() -> None:
    argv = sys.argv[1:]
    csv_path, ops = _take(argv, "--csv"), _take(argv, "--ops")
    for op in ops.split(",") if ops else []:
        use_op(op)  # says what it cannot use
    steps = None

    def time_steps(args) -> None:
        nonlocal steps
        from megatron.training import training  # only now may Megatron be imported

        steps = StepsInTurns(training.train_step, ops.split(",") if ops else [args.prores_op])
        training.train_step = steps

    argv += ["--eval-iters", "0"]
    if "--deepspeed_config" in argv:
        _run_deepspeed(argv, time_steps, lambda: steps)
    else:
        pretrain_gpt.run(argv, use_engine=time_steps)
    if steps:
        report(steps, csv_path)


if __name__ == "__main__":
    pretrain_gpt.exit_on_error(main)
