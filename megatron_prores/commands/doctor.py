"""`prores doctor`: what is installed and built, which operators run here, and whether they compute what they should."""

import argparse
import platform
import sys
import textwrap
import time
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron_prores import __version__
from megatron_prores.machine import cpu_name

# Distributions whose versions matter here; read, not imported: that takes seconds and prints.
_PACKAGES = ("torch", "megatron-core", "numpy", "deepspeed", "transformers", "lm_eval", "transformer-engine", "apex")
_WIDTH = 88
_LABEL = 22


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> None:
    """Print the report, section by section; exit code 1 if a self-check fails."""
    _section("versions")
    _row("megatron_prores", f"{__version__} ({Path(__file__).parents[1]})")
    _row("python", f"{platform.python_version()} on {platform.platform(terse=True)}")
    for name in _PACKAGES:
        _row(name, _version(name))

    import torch  # only now: if this fails, the versions are there to say why

    from megatron_prores.ops import choice, plain

    notes: list[str] = []
    devices = ["cpu", "cuda"] if _sees_a_gpu(notes) else ["cpu"]
    reasons = {device: choice.why_not_fused(device) for device in devices}
    fused = None
    if reasons["cpu"] is None:
        from megatron_prores.ops import fused

    _section("extension")
    if fused is None:
        _row("loaded", f"no: {reasons['cpu']}")
    else:
        info = fused.build_info()
        _row("compiler", info["compiler"])
        _row("torch headers", info["torch_headers"])
        _row("CPU", f"{info['instruction_set']}, chosen at run time")
        without = "not built: no nvcc was found, or MEGATRON_PRORES_CUDA=0 was set"
        _row("CUDA", f"{info['cuda_version']} for {info['cuda_architectures']}" if info["cuda_version"] else without)

    _section("devices")
    threads = torch.get_num_threads()
    _row("cpu", f"{cpu_name()}, {threads} thread{'s' * (threads > 1)}")
    _row("CUDA of torch", torch.version.cuda or "none: a CPU build of torch")
    for line in notes:
        _row("", line)
    if "cuda" not in devices:
        _row("GPU", "none visible")
    for index in range(torch.cuda.device_count() if "cuda" in devices else 0):
        _row(f"cuda:{index}", _gpu(index, info["cuda_architectures"] if fused else "", choice.runs_on))

    table = {device: _path(reasons[device], device, fused) for device in devices}
    _section("operators with --prores-op auto")
    _table({device: [table[device]] * len(_dtypes()) for device in devices})
    for device, reason in reasons.items():
        if reason:
            _wrapped(f"{device} runs in plain torch: {reason}")

    started = time.perf_counter()
    columns, failures = _self_checks(
        [(device, op) for device in devices for op in ([fused] if reasons[device] is None else []) + [plain]]
    )
    _section(f"self-check, forward and backward against float64 ({time.perf_counter() - started:.1f} s)")
    _table(columns)
    for failure in failures:
        _wrapped(f"FAILED: {failure}")
    if failures:
        sys.exit(1)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _sees_a_gpu(notes: list[str]) -> bool:
    """torch warns where there is a GPU that it cannot use; its reason goes into the report."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        visible = torch.cuda.is_available()
    notes += [str(warning.message).strip().splitlines()[0] for warning in caught]
    return visible


def _gpu(index: int, built: str, runs_on) -> str:
    import torch

    capability = torch.cuda.get_device_capability(index)
    memory = torch.cuda.get_device_properties(index).total_memory / 2**30
    runs = "the built code runs on it" if runs_on(built, capability) else "no code built for it"
    number = ".".join(map(str, capability))
    return f"{torch.cuda.get_device_name(index)}, compute capability {number}, {memory:.0f} GiB; {runs}"


def _path(reason: str | None, device: str, fused) -> str:
    if reason:
        return "torch"
    return f"fused ({fused.build_info()['instruction_set']})" if device == "cpu" else "fused"


def _dtypes() -> dict:
    from megatron_prores.ops.self_check import DTYPES

    return DTYPES


def _self_checks(paths: list) -> tuple[dict[str, list[str]], list[str]]:
    """A column of OK and FAILED for each path, and what failed."""
    from megatron_prores.ops.self_check import check

    columns, failures = {}, []
    for device, implementation in paths:
        name = f"{device}, {'torch' if implementation.__name__.endswith('plain') else 'fused'}"
        wrong = {dtype: check(implementation, device, dtypes) for dtype, dtypes in _dtypes().items()}
        columns[name] = ["FAILED" if reason else "OK" for reason in wrong.values()]
        for reason in dict.fromkeys(filter(None, wrong.values())):
            dtypes = [dtype for dtype in wrong if wrong[dtype] == reason]
            failures.append(f"{name}, {'all' if len(dtypes) == len(wrong) else ', '.join(dtypes)}: {reason}")
    return columns, failures


def _section(title: str) -> None:
    print(f"{title}" if title == "versions" else f"\n{title}", flush=True)


def _row(label: str, text: str) -> None:
    _wrapped(f"{label:<{_LABEL}}{text}", _LABEL)


def _table(columns: dict[str, list[str]]) -> None:
    """One row for each pair of dtypes."""
    rows = [["", *columns], *map(list, zip(_dtypes(), *columns.values(), strict=True))]
    width = 2 + max(len(cell) for row in rows for cell in row[1:])
    for first, *cells in rows:
        print(f"  {first:<{_LABEL}}{''.join(f'{cell:<{width}}' for cell in cells)}".rstrip())


def _wrapped(text: str, indent: int = 0) -> None:
    # Labels end in blanks, which must stay.
    wrap = textwrap.TextWrapper(
        _WIDTH,
        initial_indent="  ",
        subsequent_indent=" " * (indent + 2),
        break_on_hyphens=False,
        break_long_words=False,
    )
    print(wrap.fill(text), flush=True)
