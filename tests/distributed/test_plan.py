"""`prores plan`: the same stages and sizes as a run that trains, and everything that is wrong, before it starts."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from runs import TINY, environment, outcomes, pretrain
from test_layouts import LAYOUTS, PP2, TP2

from megatron_prores import Schedule

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "megatron"

CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "1")
TIED = {"untie-embeddings-and-output-weights": False}
GROUPS = ("--group-query-attention", "--num-query-groups", "2")

# name: (flags, what the one `error:` line or lines say, line by line)
ERRORS = {
    "world": (
        ["--world-size", "1000", *TP2, "--pipeline-model-parallel-size", "3"],
        ["1000 processes.* 6: .*996 or 1002"],
    ),
    "batch": (["--world-size", "3"], ["--global-batch-size 8 .*--micro-batch-size 2 x data-parallel size 3 = 6"]),
    "layers": (["--pipeline-model-parallel-size", "4"], ["--num-layers 6 .*--pipeline-model-parallel-size 4"]),
    "layers of chunks": (
        [*PP2, "--num-layers-per-virtual-pipeline-stage", "2"],
        ["the 3 layers .*--num-layers-per-virtual-pipeline-stage 2"],
    ),
    "layers of uneven stages": (
        ["--pipeline-model-parallel-size", "3", "--decoder-first-pipeline-num-layers", "1"],
        ["of --num-layers 6, 5 are left for 2 pipeline stages"],
    ),
    "layers of a layout": (
        [*PP2, "--pipeline-model-parallel-layout", "Ett|tttL"],
        ["Megatron does not accept"],
    ),
    "heads and feed-forward over tensor": (
        ["--tensor-model-parallel-size", "8", "--num-attention-heads", "4", "--ffn-hidden-size", "132"],
        ["--num-attention-heads 4 .*size 8", "--ffn-hidden-size 132 .*size 8"],
    ),
    "heads of the width": (["--num-attention-heads", "5"], ["--hidden-size 64 .*--num-attention-heads 5"]),
    "query groups": (
        ["--group-query-attention", "--num-query-groups", "3"],
        ["--num-attention-heads 4 .*--num-query-groups 3"],
    ),
    "query groups over tensor": (
        [
            *TP2,
            "--num-attention-heads",
            "12",
            "--hidden-size",
            "96",
            "--group-query-attention",
            "--num-query-groups",
            "3",
        ],
        ["--num-query-groups 3 neither divides"],
    ),
    "sequence over tensor": ([*TP2, "--sequence-parallel", "--seq-length", "31"], ["--seq-length 31"]),
    "sequence over context": (["--context-parallel-size", "3"], ["--seq-length 32 .*2 x --context-parallel-size 3"]),
    "positions": (["--seq-length", "64"], ["--max-position-embeddings 32 is below --seq-length 64"]),
    "microbatches of chunks": ([*PP2, *CHUNKS, "--global-batch-size", "6"], ["microbatches .*gives 3"]),
    "strict": (["--prores-strict", "--prores-warmup-steps", "4"], ["24 steps.*outlasts the run"]),
    "schedule": (["--prores-schedule", "lineer"], ["lineer.*did you mean linear"]),
    "learning-rate warm-up": (["--lr-warmup-iters", "8"], ["--lr-warmup-iters 8 must be shorter"]),
    "WSD without a decay": (["--lr-decay-style", "WSD"], ["--lr-wsd-decay-iters"]),
    "vocabulary of 0": (["--vocab-size", "0"], ["--vocab-size must be 1 or more"]),
    "post with fused norms": (
        ["--prores-norm", "post", "--transformer-impl", "transformer_engine"],
        ["--prores-norm post .*--transformer-impl local"],
    ),
    "size of 0": (["--tensor-model-parallel-size", "0"], ["--tensor-model-parallel-size must be 1 or more, not 0"]),
    "world of 0": (["--world-size", "0"], ["--world-size must be 1 or more"]),
    "unknown flag": (["--world-sizes", "1"], ["--world-sizes.*did you mean --world-size"]),
    "experts": (["--num-experts", "4"], ["--num-experts"]),
    "unsupported": (["--sft"], ["--sft is not supported"]),
    "another spec": (["--spec", "some.module", "spec"], ["--spec some.module"]),
    "unwritable json": (["--json", "/nowhere/plan.json"], ["--json /nowhere/plan.json"]),
    "several": (
        ["--world-size", "7", *PP2, "--num-layers", "7", "--seed=-1", "--prores-schedule", "lineer"],
        ["7 processes", "--num-layers 7", "--seed", "lineer"],
    ),
}

# name: (flags, what the notes say, one by one)
BF16 = ("--bf16",)
NOTES = {
    "nothing": (BF16, []),
    "warm-up outlasts the run": ([*BF16, "--prores-warmup-steps", "4"], ["24 steps.*outlasts the run"]),
    "fp32": ([], ["fp32, and Megatron's estimate of memory assumes bf16"]),
    "post with linear": (
        [*BF16, "--prores-norm", "post", "--lr-warmup-fraction", "0.1"],
        ["norm post with schedule linear .*linear-square"],
    ),
    "post with a short learning-rate warm-up": (
        [*BF16, "--prores-norm", "post", "--prores-schedule", "linear-square", "--lr-warmup-fraction", "0.05"],
        ["warms up over 5.0% of the run; norm post takes 10%"],
    ),
    "deepnorm with a short learning-rate warm-up": (
        [*BF16, "--prores-norm", "deepnorm"],
        ["warms up over 0.0% of the run; norm deepnorm takes 10%"],
    ),
    "deepnorm with another initialisation": (
        [*BF16, "--prores-norm", "deepnorm", "--lr-warmup-iters", "1", "--prores-init", "scaled"],
        ["--prores-init scaled replaces"],
    ),
    "post as it should be": (
        [*BF16, "--prores-norm", "post", "--prores-schedule", "stagewise-L", "--lr-warmup-iters", "1"],
        [],
    ),
    "sequence parallel alone": ([*BF16, "--sequence-parallel"], ["--sequence-parallel does nothing"]),
    "fewer microbatches than stages": (
        [*BF16, *PP2, "--global-batch-size", "2"],
        ["fewer microbatches .1. than pipeline stages .2."],
    ),
    "context": (
        [*BF16, "--context-parallel-size", "2"],
        ["needs Transformer Engine", "estimate of activations knows no context parallelism"],
    ),
    "Transformer Engine": ([*BF16, "--transformer-impl", "transformer_engine"], []),
    "full recompute": (
        [*BF16, "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"],
        ["estimate of activations knows no full recompute"],
    ),
}


def _command_lines(folder: Path, cases: dict[str, list[str]]) -> dict:
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({**TINY, "prores-warmup-steps": 1, "vocab-size": 512}))
    return {name: (["plan", "--config", str(config), *flags], 1) for name, flags in cases.items()}


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict:
    """(exit code, stdout, stderr) of every plan of this file's tables."""
    folder = tmp_path_factory.mktemp("plans")
    cases = {name: flags for name, (flags, _) in {**ERRORS, **NOTES}.items()}
    return outcomes(folder, "megatron_prores.cli", _command_lines(folder, cases))


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_a_line(name, told):
    code, output, errors = told[name]
    lines = errors.splitlines()
    assert (code, output) == (2, "")
    assert len(lines) == len(ERRORS[name][1]), errors
    for line, pattern in zip(lines, ERRORS[name][1], strict=True):
        assert line.startswith("error: ") and re.search(pattern, line), errors


@pytest.mark.parametrize("name", NOTES)
def test_notes(name, told):
    code, output, errors = told[name]
    assert (code, errors) == (0, "")
    lines = output.splitlines()
    notes = [line for line in lines if line.startswith("note: ")]
    assert len(notes) == len(NOTES[name][1]), output
    for note, pattern in zip(notes, NOTES[name][1], strict=True):
        assert re.search(pattern, note), output
    assert max(len(line) for line in lines if line not in notes) < 100


# name: (processes, flags, config changes)
RUNS = {
    "one process, tied": (1, (), TIED),
    "tp2 pp2, chunks, grouped queries": (4, (*TP2, *PP2, *CHUNKS, *GROUPS), {}),
    "pp2, tied, uneven": (2, (*PP2, "--decoder-first-pipeline-num-layers", "2"), TIED),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_the_sizes_and_stages_of_its_plan(name, tmp_path, data):
    """Megatron prints each rank's number of parameters, also in a fork, and the run its stages."""
    processes, flags, change = RUNS[name]
    config = {**data, **change, "train-iters": 1, "eval-iters": 0}
    run = pretrain(tmp_path, *flags, "--verbose", processes=processes, config=config, fresh=False)
    line = ["plan", "--config", str(tmp_path / "config.yaml"), *flags, "--json", str(tmp_path / "plan.json")]
    [(code, _, errors)] = outcomes(tmp_path, "megatron_prores.cli", {name: (line, 1)}).values()
    assert (code, errors) == (0, "")
    plan = json.loads((tmp_path / "plan.json").read_text())
    pattern = r"number of parameters on \(tensor, .*pipeline\) +model parallel rank \((\d+), .*?(\d+)\): (\d+)"
    held = {(int(m[1]), int(m[2])): int(m[3]) for m in re.finditer(pattern, run.output)}
    assert len(held) == processes
    assert {rank: plan["parameters_per_rank"][rank[1]] for rank in held} == held
    assert [stage["layers"] for stage in plan["stages"]] == [_numbers(layers) for _, layers, _ in run.stages()]


def test_stages_of_every_layout(tmp_path):
    """test_layouts.py compares runs with the same table."""
    cases = {
        name: [*flags, "--world-size", str(processes), "--json", f"{tmp_path / name}.json"]
        for name, (processes, flags, _) in LAYOUTS.items()
    }
    outcomes(tmp_path, "megatron_prores.cli", _command_lines(tmp_path, cases))
    plans = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in LAYOUTS}
    stages = {name: [stage["layers"] for stage in plan["stages"]] for name, plan in plans.items()}
    assert stages == {name: [_numbers(span) for span in spans] for name, (_, _, spans) in LAYOUTS.items()}
    assert len({plan["parameters"] for plan in plans.values()}) == 1


def _numbers(span: str) -> list[int]:
    ends = [int(number) for number in span.split("-") if number]
    return list(range(ends[0], ends[-1] + 1)) if ends else []


def test_what_is_missing(tmp_path):
    """Without any flags, with sizes alone, and for a run that is given in samples."""
    sizes = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 4 --max-position-embeddings 4"
    samples = "--micro-batch-size 1 --global-batch-size 2 --train-samples 100 --lr-warmup-samples 10 --eval-iters 0"
    cases = {
        "nothing": (["plan"], 1),
        "sizes": (["plan", *sizes.split()], 1),
        "no learning rate": (["plan", *sizes.split(), *samples.split(), "--vocab-size", "16"], 1),
        "no vocabulary": (["plan", *sizes.split(), *samples.split(), "--lr", "1"], 1),
        "samples": (["plan", *sizes.split(), *samples.split(), "--lr", "1", "--vocab-size", "16"], 1),
    }
    told = outcomes(tmp_path, "megatron_prores.cli", cases)
    flags = ["num-layers", "hidden-size", "num-attention-heads", "seq-length", "max-position-embeddings"]
    assert told["nothing"][2].splitlines() == [f"error: --{flag} is missing" for flag in flags]
    assert told["sizes"][2] == "error: the run has no length: give --train-iters or --train-samples\n"
    assert told["no learning rate"][2] == "error: --lr is missing\n"
    assert "--vocab-size" in told["no vocabulary"][2]
    assert "50 iterations, 400 tokens" in told["samples"][1] and "over 10.0% of the run" in told["samples"][1]


def _seconds_of_children() -> float:
    """Processor time, which other users of the machine do not stretch."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_thousand_ranks_in_seconds(tmp_path):
    flags = ["--config", str(CONFIGS / "base.yaml"), "--config", str(CONFIGS / "70b.yaml"), "--world-size", "1024"]
    line = [sys.executable, "-m", "megatron_prores.cli", "plan", *flags, "--json", str(tmp_path / "plan.json")]
    before = _seconds_of_children()
    done = subprocess.run(line, env=environment(), capture_output=True, text=True)
    assert _seconds_of_children() - before < 20
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    # Llama 2 70B: h = 8192, 80 layers, feed-forward 28672, 64 heads and 8 groups, 32000 tokens, untied.
    width, ffn, vocabulary = 8192, 28672, 32000
    layer = 2 * width * width + 2 * width * width // 8 + 3 * width * ffn + 2 * width
    assert plan["parameters"] == 80 * layer + 2 * vocabulary * width + width
    norms = 2 * width
    assert plan["parameters_per_rank"][3] == 10 * ((layer - norms) // 8 + norms)
    assert plan["parameters_per_rank"][0] - plan["parameters_per_rank"][3] == vocabulary * width // 8
    # Two chunks of five layers each on eight stages.
    assert [(stage["rank"], stage["chunk"]) for stage in plan["stages"]] == [(r, c) for c in (0, 1) for r in range(8)]
    assert [layer for stage in plan["stages"] for layer in stage["layers"]] == list(range(1, 81))
    assert (plan["data_parallel"], plan["microbatches"], plan["bubble"]) == (16, 64, 7 / 128)
    assert plan["tokens"] == 1024 * 4096 * 480_000
    # 6 N per token for the weights (the embedding has no product), and attention's 6 s h L more.
    products = plan["parameters"] - vocabulary * width
    per_token = 6 * products + 6 * 4096 * width * 80
    assert plan["flops_per_iteration"] == pytest.approx(per_token * 1024 * 4096, rel=1e-3)
    # bf16 weights and fp32 gradients on every rank, the optimizer's 12 bytes over 16 of them.
    assert plan["memory"]["weights_and_optimizer"] == pytest.approx(plan["parameters_per_rank"][0] * 6.75, rel=1e-3)
    assert plan["schedule"] == {"name": "linear", "warmup_steps": 1000, "total_steps": 80000}
    alphas = Schedule("linear", 80).alpha(40_000)
    row = next(line for line in done.stdout.splitlines() if "66-70" in line)
    assert f"{alphas[65]:.3f}..{alphas[69]:.3f}" in row
    assert "all layers at 1 after 16.7% of the run" in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 100
