"""`prores compare` on real runs: what is equal between arms, what a restart repeats, what its evaluation computes."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from runs import TINY, environment, outcomes

from megatron_prores.compare.runs import read_curves

COMPARE = [sys.executable, "-m", "megatron_prores.cli", "compare"]
STOCK = {"prores-schedule": "none"}
ARMS = {"stock": STOCK, "prores": {"prores-schedule": "linear", "prores-warmup-steps": 8}}

# Token by token, from logits: no labels, no batches, float64 after the model.
DIRECT = r"""
import argparse, json, sys
import numpy as np, torch
from megatron_prores.commands import evaluate as command
from megatron_prores.megatron import driver, evaluate, saved_model

checkpoint, data = sys.argv[1:]
parser = argparse.ArgumentParser()
command.add_arguments(parser)
options = parser.parse_args(["--checkpoint", checkpoint, "--data", data, "--host"])
args = saved_model.parse_saved(options, saved_model.find_iteration(checkpoint))
model = saved_model.load_model(args)
from megatron.core.datasets.indexed_dataset import IndexedDataset
dataset = IndexedDataset(data)
stream = torch.from_numpy(np.concatenate([np.asarray(dataset[i], dtype=np.int64) for i in range(len(dataset))]))
nats = 0.0
with torch.inference_mode():
    for start in range(0, len(stream) - 1, args.seq_length):
        window = stream[start : start + args.seq_length + 1]
        logits = model(window[None, :-1], torch.arange(len(window) - 1)[None], None)[0].double()
        for position, target in enumerate(window[1:]):
            nats -= float(logits[position, target] - torch.logsumexp(logits[position], 0))
alphas = [float(c.value) for c in driver.stage_coefficients().coefficients]
from megatron_prores.megatron import screen
screen.say("found" + json.dumps([nats, len(stream) - 1, alphas]))
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, data) -> tuple[Path, str]:
    """A config, and a small held-out set: other files than those that are trained on."""
    folder = tmp_path_factory.mktemp("inputs")
    text = Path(json.__file__).with_name("scanner.py").read_text()
    (folder / "held-out.txt").write_text(text)
    prepare = [sys.executable, "-m", "megatron_prores.cli", "prepare-data", "--input", str(folder / "held-out.txt")]
    prepare += ["--output", str(folder / "held-out"), "--tokenizer", data["tokenizer-model"]]
    subprocess.run(prepare, check=True, env=environment(), stdout=subprocess.DEVNULL)
    config = TINY | data | {"save-interval": 4, "num-layers": 2}
    del config["seed"], config["prores-warmup-steps"]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "arms.yaml").write_text(yaml.safe_dump(ARMS, sort_keys=False))
    return folder, text


def command(folder: Path, output: Path, *flags: str) -> list[str]:
    return [
        *(*COMPARE, "--arms", str(folder / "arms.yaml"), "--output", str(output)),
        *("--config", str(folder / "config.yaml"), "--evaluate-data", str(folder / "held-out"), *flags),
    ]


def results(output: Path) -> dict[Path, bytes]:
    """What runs leave behind when they are finished."""
    return {path: path.read_bytes() for path in sorted(output.glob("*/seed-*/result.json"))}


@pytest.fixture(scope="module")
def comparison(inputs, tmp_path_factory) -> tuple[Path, dict[Path, bytes], str]:
    """A comparison of two seeds that was killed when the first run was finished, and done to the end then."""
    folder, _ = inputs
    output = tmp_path_factory.mktemp("comparison") / "out"
    first = subprocess.Popen(command(folder, output, "--seeds", "2", "--jobs", "2"), env=environment())
    while first.poll() is None and not results(output):
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    finished = results(output)
    marks = {path: path.stat().st_mtime_ns for path in finished}
    deadline = time.monotonic() + 300
    while True:  # runs that the killed process left behind still hold their folders
        second = subprocess.run(
            command(folder, output, "--seeds", "2", "--jobs", "2"), env=environment(), capture_output=True, text=True
        )
        if second.returncode == 0:
            break
        assert "another process works on this run" in second.stdout and time.monotonic() < deadline, second
    assert {path: path.stat().st_mtime_ns for path in finished} == marks
    return output, finished, second.stdout


def curves(output: Path, arm: str, seed: int) -> dict:
    return read_curves(output / arm / f"seed-{seed}" / "curves.npz")


def test_a_restart_repeats_nothing_that_was_finished(comparison):
    output, finished, said = comparison
    assert re.search(r"^4 runs of 8 iterations, \d to do, up to 2 at a time$", said, re.MULTILINE)
    assert 1 <= len(finished) < 4 == len(results(output))
    assert finished.items() <= results(output).items()


def test_seeds_and_arms_differ(comparison):
    output, _, said = comparison
    losses = [curves(output, arm, seed)["lm loss"][1].tolist() for arm in ARMS for seed in (1, 2)]
    assert len({tuple(series) for series in losses}) == 4
    assert re.search(r"^prores: loss .* \d\.\d{4} (above|below) stock \(95%: ", said, re.MULTILINE)


def test_arms_share_data_and_weights_and_it_does_not_matter_how_runs_were_scheduled(comparison, inputs, tmp_path):
    output, *_ = comparison
    folder, _ = inputs
    arms = tmp_path / "arms.yaml"
    arms.write_text(yaml.safe_dump({"stock": STOCK, "also-stock": STOCK}))
    flags = ("--seeds", "1", "--jobs", "1", "--arms", str(arms))
    done = subprocess.run(
        command(folder, tmp_path / "out", *flags), env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done
    assert "stock: loss" in done.stdout and "no difference to " in done.stdout
    before = curves(output, "stock", 1)
    for arm in ("stock", "also-stock"):
        now = curves(tmp_path / "out", arm, 1)
        for tag in ("lm loss", "lm loss validation", "grad-norm"):
            np.testing.assert_array_equal(now[tag], before[tag])
        ours, theirs = (path / "seed-1" / "result.json" for path in (tmp_path / "out" / arm, output / "stock"))
        assert json.loads(ours.read_text()) == json.loads(theirs.read_text())


def test_the_evaluation_is_the_sum_over_every_token(comparison, inputs):
    output, *_ = comparison
    folder, text = inputs
    run = output / "prores" / "seed-1"
    direct = subprocess.run(
        [sys.executable, "-c", DIRECT, str(run / "checkpoints"), str(folder / "held-out")],
        env=environment(),
        check=True,
        capture_output=True,
        text=True,
    )
    nats, tokens, alphas = json.loads(re.search(r"^found(.*)$", direct.stdout, re.MULTILINE)[1])
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert alphas == [1.0, 0.5]  # of iteration 8, with T = 8
    assert evaluation["iteration"] == 8
    assert evaluation["tokens"] == tokens
    assert evaluation["bytes"] == len(text.encode())
    assert evaluation["nats"] == pytest.approx(nats, rel=1e-6)
    assert evaluation["loss"] == pytest.approx(nats / tokens, rel=1e-6)
    assert evaluation["perplexity"] == pytest.approx(np.exp(nats / tokens), rel=1e-6)
    assert evaluation["bits_per_byte"] == pytest.approx(nats / np.log(2) / len(text.encode()), rel=1e-6)


def test_the_report_is_there(comparison):
    output, *_ = comparison
    assert (output / "report.html").stat().st_size > 50_000
    assert {path.name for path in output.glob("*.csv")} == {"runs.csv", "arms.csv", "curves.csv"}


REFUSED = {
    "other settings": (["--lr", "2e-3"], "was made with other settings (lr was 0.001 and is 0.002)"),
    "an arm's flag": (["--prores-schedule", "equal"], "--prores-schedule on the command line would overrule the arm"),
    "no evaluation": (["--eval-iters", "0"], "give --eval-interval and --eval-iters"),
    "no layout": (["--num-attention-heads", "5"], "stock: "),
    "no flag": (["--sed", "5"], "unknown flag --sed"),
    "no seeds": (["--seeds", "0"], "must be 1 or more, not 0"),
    "a reserved flag": (["--seed", "5"], "leave out --seed: use --seeds"),
    "another warm-up": (
        ["--prores-warmup-fraction", "0.5"],
        "--prores-warmup-fraction on the command line would overrule",
    ),
    "an early end": (["--exit-interval", "4"], "leave out --exit-interval: every run is trained to its last step"),
    "no data": (["--data-path", "nowhere"], "nowhere is not there"),
    "no held-out set": (["--evaluate-data", "nowhere"], "the dataset nowhere is not there"),
}


@pytest.fixture(scope="module")
def refused(comparison, inputs, tmp_path_factory):
    output, *_ = comparison
    before = results(output)
    lines = {name: (command(inputs[0], output, *flags)[len(COMPARE) - 1 :], 1) for name, (flags, _) in REFUSED.items()}
    told = outcomes(tmp_path_factory.mktemp("refused"), "megatron_prores.cli", lines)
    assert results(output) == before
    return told


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_is_refused_before_anything_runs(refused, case):
    code, _, errors = refused[case]
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert code == 2 and lines and REFUSED[case][1] in lines[0], errors
    assert "Traceback" not in errors
