"""The fused operators against what else computes them, forward and backward, in turns within one process.

    python benchmarks/scaled_residual.py [--shape 2048,4,2048] [--dtype bf16] [--csv scaled_residual.csv]

Competitors of the scaled residual add: eager torch in the fastest of three spellings, torch.compile of the plain
operator (alpha a tensor: one graph for all values), and Megatron's bias_dropout_add, unfused and as its jit_fuser
compiles it, which knows no alpha. Of the add with RMSNorm: eager and torch.compile. The floor is the time that a plain
copy takes to move as many bytes as the operator has to. Runs on the GPU if there is one, else on the CPU; cases are
left out where the time is up (--budget).
"""

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import results
import timing
import torch
from torch.nn import functional as F

from megatron_prores.errors import UserError, run_and_exit
from megatron_prores.ops import choice, plain

# The branch's dtype and the residual stream's.
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "bf16-fp32": (torch.bfloat16, torch.float32),
}
SHAPES = [(2048, 4, 2048), (4096, 1, 1024), (2048, 4, 4096)]
# (op, with bias, dropout probability): what matters most comes first, the last may find the time to be up.
SETTINGS = [
    ("add", True, 0.0),
    ("add_norm", False, 0.0),
    ("add", False, 0.0),
    ("add", True, 0.1),
    ("add_norm", True, 0.0),
    ("add", False, 0.1),
]
EPS = 1e-5
OURS = "fused"
ALPHAS = [0.1 + 0.01 * step for step in range(90)]  # a new one for every round, as in a warm-up
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int]
    dtype: str
    op: str
    with_bias: bool
    prob: float

    def __str__(self) -> str:
        what = "add" if self.op == "add" else "add + RMSNorm"
        return f"{what}, {list(self.shape)} {self.dtype}, {'bias' if self.with_bias else 'no bias'}, p = {self.prob:g}"

    def bytes_moved(self) -> int:
        """At least: every input read and every output written once, forward and backward."""
        x, stream = (dtype.itemsize for dtype in DTYPES[self.dtype])
        s, b, h = self.shape
        return s * b * h * (2 * x + 3 * stream if self.op == "add" else 4 * x + 5 * stream)


class Alpha:
    """The same value as a tensor that never moves and as a Python number."""

    def __init__(self, device: str):
        self.tensor, self.number = torch.zeros((), device=device), 0.0

    def fill(self, value: float) -> None:
        self.tensor.fill_(value)
        self.number = value


def _branch(x, bias, prob):
    if bias is not None:
        x = x + bias
    return F.dropout(x, prob) if prob else x


def _eager(alpha: Alpha) -> dict[str, Callable]:
    """The spellings of the add."""
    return {
        "add(alpha=)": lambda x, r, bias, prob: torch.add(r, _branch(x, bias, prob), alpha=alpha.number),
        "addcmul": lambda x, r, bias, prob: torch.addcmul(r, _branch(x, bias, prob), alpha.tensor),
        "r + a * x": lambda x, r, bias, prob: r + alpha.tensor * _branch(x, bias, prob),
    }


def _then_norm(add: Callable) -> Callable:
    def add_norm(x, residual, bias, prob, weight):
        stream = add(x, residual, bias, prob)
        # The norm is in the stream's dtype, and the linear after it wants the weight's.
        return stream, F.rms_norm(stream, weight.shape, weight.to(stream.dtype), EPS).to(weight.dtype)

    return add_norm


def _operator(implementation, op: str, alpha: Alpha) -> Callable:
    if op == "add":
        return lambda x, r, bias, prob: implementation.scaled_residual(x, r, alpha.tensor, bias, prob)
    return lambda x, r, bias, prob, weight: implementation.scaled_residual_rms_norm(
        x, r, alpha.tensor, weight, EPS, bias, prob
    )


def _megatron(compiled: bool) -> Callable:
    with warnings.catch_warnings():  # about packages that are not there
        warnings.simplefilter("ignore")
        from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    add = get_bias_dropout_add(True, compiled)
    return lambda x, residual, bias, prob: add((x, bias), residual, prob)


class Inputs:
    """The leaves of one case and the gradients of its outputs."""

    def __init__(self, case: Case, device: str):
        generator = torch.Generator(device).manual_seed(0)
        x_dtype, dtype = DTYPES[case.dtype]

        def randn(shape, dtype):
            return torch.randn(shape, device=device, dtype=dtype, generator=generator)

        hidden, norm = case.shape[-1:], case.op == "add_norm"
        x, residual = randn(case.shape, x_dtype), randn(case.shape, dtype)
        bias = randn(hidden, x_dtype) if case.with_bias else None
        weight = [randn(hidden, x_dtype)] if norm else []
        self.leaves = [tensor.requires_grad_() for tensor in (x, residual, bias, *weight) if tensor is not None]
        self.arguments = (x, residual, bias, case.prob, *weight)
        self.grads = [randn(case.shape, dtype), *([randn(case.shape, x_dtype)] if norm else [])]

    def run(self, function: Callable) -> list[torch.Tensor]:
        """Forward and backward; outputs and gradients. Nothing is accumulated into leaves."""
        outputs = function(*self.arguments)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return [*outputs, *torch.autograd.grad(outputs, self.leaves, self.grads)]


def candidates(case: Case, alpha: Alpha, inputs: Inputs, device: str) -> dict[str, Callable]:
    """What is compared in this case, ours first."""
    from megatron_prores.ops import fused

    spellings = _eager(alpha)
    if case.op == "add_norm":
        spellings = {name: _then_norm(add) for name, add in spellings.items()}
    tried = timing.time_in_turns({name: partial(inputs.run, f) for name, f in spellings.items()}, device, 0.0)
    fastest = min(tried, key=lambda name: results.quartiles(tried[name])[1])
    found = {
        OURS: _operator(fused, case.op, alpha),
        f"eager: {fastest}": spellings[fastest],
        "torch.compile": torch.compile(_operator(plain, case.op, alpha), dynamic=False, fullgraph=True),
    }
    if case.op == "add":
        found |= {"Megatron, unfused*": _megatron(False), "Megatron, jit-fused*": _megatron(True)}
    return found


def check(case: Case, alpha: Alpha, inputs: Inputs, functions: dict[str, Callable]) -> dict[str, str]:
    """Compile, warm up, and compare every competitor with ours; what a competitor that cannot run here says.

    Raises:
        UserError: one computes something else.
    """
    unusable = {}
    for name, function in functions.items():
        # Megatron's has no alpha; with dropout every mask is another one, and only how much it drops can be compared.
        alpha.fill(1.0 if name.endswith("*") else 1 / 3)
        expected = inputs.run(functions[OURS])
        try:
            found = inputs.run(function)
        except Exception as error:
            if name == OURS:
                raise
            unusable[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
            continue
        if case.prob:
            dropped = (found[len(inputs.grads)] == 0).double().mean().item()  # of x's gradient
            if abs(dropped - case.prob) > 0.01:
                raise UserError(f"{case}: {name} drops {dropped:.3f} of the elements")
            continue
        for ours, theirs in zip(expected, found, strict=True):
            off = ((theirs.double() - ours.double()).norm() / ours.double().norm()).item()
            if not off < max(_TOLERANCES[ours.dtype], _TOLERANCES[inputs.leaves[0].dtype]):
                raise UserError(f"{case}: {name} is off by {off:.1g} of what {OURS} gives")
    for value in ALPHAS[:2]:
        alpha.fill(value)
        for name in functions.keys() - unusable.keys():
            inputs.run(functions[name])
    return unusable


def measure(case: Case, device: str, seconds: float, copy: timing.Copy) -> list[results.Row]:
    """Print one case's table; its rows for the CSV file."""
    torch._dynamo.reset()
    alpha, inputs = Alpha(device), Inputs(case, device)
    alpha.fill(0.5)
    functions = candidates(case, alpha, inputs, device)
    unusable = check(case, alpha, inputs, functions)
    calls = {name: partial(inputs.run, function) for name, function in functions.items() if name not in unusable}
    watch = timing.Watch()
    times = timing.time_in_turns(
        {**calls, "copy": copy}, device, seconds, lambda number: alpha.fill(ALPHAS[number % len(ALPHAS)])
    )
    others = watch.others()
    bandwidth = copy.bandwidth(results.quartiles(times.pop("copy"))[1])
    floor = case.bytes_moved() / bandwidth
    rows = []
    for name, taken in times.items():
        low, median, high = results.quartiles(taken)
        over_ours = results.quartiles([a / b for a, b in zip(taken, times[OURS], strict=True)])
        rows.append(
            {
                "op": case.op,
                "shape": "x".join(map(str, case.shape)),
                "dtype": case.dtype,
                "bias": int(case.with_bias),
                "dropout": case.prob,
                "candidate": name,
                "ms": f"{median * 1e3:.4f}",
                "ms_q1": f"{low * 1e3:.4f}",
                "ms_q3": f"{high * 1e3:.4f}",
                "gb_per_s": f"{case.bytes_moved() / median / 1e9:.1f}",
                "over_floor": f"{median / floor:.3f}",
                "over_fused": f"{over_ours[1]:.3f}",
                "over_fused_q1": f"{over_ours[0]:.3f}",
                "over_fused_q3": f"{over_ours[2]:.3f}",
                "rounds": len(taken),
                "copy_gb_per_s": f"{bandwidth / 1e9:.1f}",
                "others_busy": f"{max(others.values(), default=0.0):.2f}",
            }
        )
    _print(case, rows, floor, unusable, others)
    return rows


def _print(case: Case, rows: list[results.Row], floor: float, unusable: dict[str, str], others: dict[str, float]):
    first = rows[0]
    print(f"\n{case}: floor {floor * 1e3:.3f} ms at {first['copy_gb_per_s']} GB/s, {first['rounds']} rounds")
    print(f"  {'':<22}{'ms':>10}{'quartiles':>20}{'GB/s':>8}{'x floor':>9}{'x fused':>9}{'quartiles':>14}")
    for row in rows:
        quarters = f"{float(row['ms_q1']):.3f} - {float(row['ms_q3']):.3f}"
        against = [f"{float(row[name]):.2f}" for name in ("over_floor", "over_fused", "over_fused_q1", "over_fused_q3")]
        ratio, spread = (against[1], f"{against[2]} - {against[3]}") if row["candidate"] != OURS else ("", "")
        print(
            f"  {row['candidate']:<22}{float(row['ms']):>10.3f}{quarters:>20}{row['gb_per_s']:>8}{against[0]:>9}"
            f"{ratio:>9}{spread:>14}".rstrip()
        )
    for name, reason in unusable.items():
        print(f"  {name:<22}cannot run here: {reason}")
    if others:
        busy = ", ".join(f"{name} {share:.0%}" for name, share in others.items())
        print(f"  noisy: other processes were busy meanwhile ({busy} of a core)")
    sys.stdout.flush()


def _progress(text: str) -> None:
    """One line that the next one overwrites, where someone looks."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(map(int, text.split(",")))
    except ValueError:
        shape = ()
    if len(shape) != 3 or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not S,B,H: sequence, batch and hidden size")
    return shape


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}; see --help")


def _arguments() -> argparse.Namespace:
    parser = _Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: the GPU if there is one")
    parser.add_argument("--shape", type=_shape, action="append", metavar="S,B,H", help="repeat it for several")
    parser.add_argument("--dtype", choices=list(DTYPES), action="append", help="repeat it; default: fp32 and bf16")
    parser.add_argument("--op", choices=["add", "add_norm"], help="default: both")
    parser.add_argument("--bias", choices=["yes", "no"], help="default: both")
    parser.add_argument("--dropout", type=float, metavar="P", help="default: 0 and 0.1")
    parser.add_argument("--threads", type=int, metavar="N", help="of the CPU; default: all cores")
    parser.add_argument("--seconds", type=float, metavar="X", help="timing per case; default: 3, on a GPU 0.5")
    parser.add_argument("--budget", type=float, default=170, metavar="X", help="seconds for all (default: 170)")
    parser.add_argument("--csv", metavar="FILE", help="append the results there")
    args = parser.parse_args()
    if args.threads is not None and args.threads < 1:
        raise UserError(f"--threads must be 1 or more, not {args.threads}")
    if args.dropout is not None and not 0 <= args.dropout < 1:
        raise UserError(f"--dropout must be 0 or more and below 1, not {args.dropout:g}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no GPU is visible")
    args.device = args.device or choice.default_device_type()
    args.seconds = args.seconds or (0.5 if args.device == "cuda" else 3.0)
    if why := choice.why_not_fused(args.device):
        raise UserError(f"there is nothing to measure: {why}; see `prores doctor`")
    return args


def _cases(args: argparse.Namespace) -> list[Case]:
    settings = [
        (op, with_bias, prob)
        for op, with_bias, prob in SETTINGS
        if args.op in (None, op) and args.bias in (None, "yes" if with_bias else "no")
    ]
    if args.dropout is not None:
        settings = list(dict.fromkeys((op, with_bias, args.dropout) for op, with_bias, _ in settings))
    return [
        Case(shape, dtype, *setting)
        for shape in args.shape or SHAPES
        for setting in settings
        for dtype in args.dtype or ["fp32", "bf16"]
    ]


def main() -> None:
    started = time.perf_counter()
    args = _arguments()
    if args.device == "cpu":
        timing.restart_with_steady_allocator()
        torch.set_num_threads(args.threads or len(os.sched_getaffinity(0)))
    torch._dynamo.config.error_on_recompile = True
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it misses a GPU
    machine = results.machine(args.device)
    print(f"{machine['device']}, {machine['instruction_set'] or 'CUDA ' + machine['nvcc']}", end="")
    print(f", {machine['threads']} threads" if args.device == "cpu" else "", end="")
    print(f"; torch {machine['torch']}, megatron-core {machine['megatron_core']}; * has no alpha")
    copy, cases, longest = timing.Copy(args.device), _cases(args), 0.0
    for done, case in enumerate(cases):
        begin = time.perf_counter()
        if done and begin - started + longest > args.budget:
            print(
                f"\nthe time is up: {len(cases) - done} of {len(cases)} cases are left out (--budget, --shape, --dtype)"
            )
            break
        _progress(f"{done + 1} of {len(cases)}, {begin - started:.0f} s: {case}")
        rows = [{**machine, **row} for row in measure(case, args.device, args.seconds, copy)]
        _progress("")
        if args.csv:
            results.append(args.csv, rows)
        longest = max(longest, time.perf_counter() - begin)
    if args.csv:
        print(f"\nappended to {args.csv}")


if __name__ == "__main__":
    run_and_exit(main)
