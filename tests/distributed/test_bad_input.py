"""What a person sees after a mistake: one line that names it, exit code 2, no traceback."""

import subprocess
import sys

import pytest
from runs import PRETRAIN, arguments, environment, outcomes, run

# name: (flags after a config that works, config changes, what the line must say)
MISTAKES = {
    "unknown schedule": (["--prores-schedule", "lineer"], {}, ["lineer", "did you mean linear?"]),
    "T = 0": (["--prores-warmup-steps", "0"], {}, ["warm-up T", "positive", "0"]),
    "T < 0": (["--prores-warmup-steps=-5"], {}, ["warm-up T", "positive", "-5"]),
    "T = NaN": (["--prores-warmup-steps", "nan"], {}, ["warm-up T", "nan"]),
    "T = infinity": (["--prores-warmup-steps", "inf"], {}, ["warm-up T", "inf"]),
    "T is no number": (["--prores-warmup-steps", "many"], {}, ["--prores-warmup-steps", "many"]),
    "W = 0": (["--prores-total-warmup-steps", "0"], {}, ["warm-up W", "0"]),
    "T and W": (
        ["--prores-warmup-steps", "2", "--prores-total-warmup-steps", "12"],
        {},
        ["--prores-total-warmup-steps", "--prores-warmup-steps", "not allowed with"],
    ),
    "fraction above 1": (["--prores-warmup-fraction", "1.5"], {}, ["fraction", "1.5"]),
    "warm-up outlasts the run": (["--prores-strict", "--prores-warmup-steps", "1000"], {}, ["6000", "outlasts", "8"]),
    "unknown flag": (
        ["--prores-warmup-step", "3"],
        {},
        ["--prores-warmup-step", "did you mean --prores-warmup-steps?"],
    ),
    "unknown key": ([], {"num-layer": 3}, ["config.yaml", "num-layer", "did you mean num-layers?"]),
    "value of the wrong type": ([], {"num-layers": "six"}, ["--num-layers", "six"]),
    "missing config": (["--config", "nowhere.yaml"], {}, ["nowhere.yaml", "No such file"]),
    "missing data": ([], {"data-path": ["nowhere/corpus"]}, ["nowhere/corpus", "prores prepare-data"]),
    "no data": ([], {"data-path": None, "split": None}, ["no data", "--data-path"]),
    "missing tokenizer": ([], {"tokenizer-model": "/nowhere/tokenizer"}, ["/nowhere/tokenizer"]),
    "mistyped tokenizer": (
        [],
        {"tokenizer-model": "/none"},
        ["--tokenizer-model /none: there is none in /"],
    ),
    "layers do not divide": (
        ["--pipeline-model-parallel-size", "4"],
        {"world": 4},
        ["layers", "divisible", "pipeline"],
    ),
    "processes do not divide": (["--tensor-model-parallel-size", "2"], {}, ["world size (1)", "not divisible"]),
    "heads do not divide": (["--num-attention-heads", "5"], {}, ["hidden_size % args.num_attention_heads"]),
    "odd head size": (["--hidden-size", "60", "--num-attention-heads", "4"], {}, ["head size", "15"]),
    "batch does not divide": (["--global-batch-size", "7"], {}, ["7", "divisible"]),
    "sequence does not divide": (
        ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--seq-length", "31"],
        {"world": 2},
        ["--seq-length 31", "--tensor-model-parallel-size 2"],
    ),
    "microbatches do not divide": (
        ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"],
        {"world": 2, "global-batch-size": 6},
        ["microbatches", "gives 3"],
    ),
    "another layer spec": (
        ["--spec", "megatron.core.models.gpt.gpt_layer_specs", "get_gpt_layer_local_spec"],
        {},
        ["--spec megatron.core.models.gpt.gpt_layer_specs", "enable()"],
    ),
    "no Transformer Engine": (["--transformer-impl", "transformer_engine"], {}, ["Transformer Engine", "local"]),
    "multi-token prediction": (["--mtp-num-layers", "1"], {}, ["--mtp-num-layers"]),
    "save without interval": (["--save", "checkpoint"], {}, ["--save-interval is missing"]),
    "unwritable folder": (["--save", "/proc/checkpoint", "--save-interval", "2"], {}, ["--save /proc/checkpoint"]),
    "no length": ([], {"train-iters": None}, ["--train-iters"]),
    "interval of 0": (["--log-interval", "0"], {}, ["--log-interval", "0"]),
    "seed below 0": (["--seed=-1"], {}, ["--seed", "-1"]),
    "no validation data": ([], {"split": "1,0,0"}, ["no data to evaluate on", "--eval-iters 0"]),
    "no validation document": ([], {"split": "99,1,0"}, ["--split 99,1,0", "no validation document of the"]),
    "only validation data": (
        [],
        {"data-path": None, "split": None, "valid-data-path": ["x"]},
        ["no data to train on", "--train-data-path"],
    ),
    "probes without validation data": (
        ["--prores-probe-interval", "2", "--eval-iters", "0"],
        {},
        ["--prores-probe-interval needs validation data", "--eval-iters 1 or more"],
    ),
    "probe interval below 0": (["--prores-probe-interval=-1"], {}, ["--prores-probe-interval must be 0", "-1"]),
    "batch-size ramp-up": (["--rampup-batch-size", "2", "2", "16"], {}, ["--rampup-batch-size", "not supported"]),
    "key that acts too early": ([], {"verbose": True}, ["verbose", "command line"]),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory, data):
    """(exit code, stdout, stderr) of every mistake."""
    folder = tmp_path_factory.mktemp("mistakes")
    cases = {}
    for number, (name, (flags, change, _)) in enumerate(MISTAKES.items()):
        change = dict(change)
        world = change.pop("world", 1)
        cases[name] = (arguments(folder / str(number), *flags, config={**data, **change}), world)
    return outcomes(folder, PRETRAIN, cases)


@pytest.mark.parametrize("name", MISTAKES)
def test_one_line_and_exit_code_two(name, told):
    code, _, errors = told[name]
    lines = errors.strip().splitlines()
    assert code == 2, errors
    assert len(lines) == 1 and lines[0].startswith("error: "), errors
    for part in MISTAKES[name][2]:
        assert part in lines[0]


def test_a_process_of_its_own(tmp_path, data):
    result = run(tmp_path, "--prores-schedule", "lineer", config=data, fresh=True)
    assert (result.returncode, len(result.error_lines)) == (2, 1)
    assert "Traceback" not in result.errors and not result.losses


def test_one_rank_speaks(tmp_path, data):
    """Under torchrun every rank fails; the line is printed once. torchrun itself turns the exit code into 1."""
    flags = ("--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "7")
    result = run(tmp_path, *flags, processes=2, config=data, fresh=True)
    assert result.returncode == 1
    assert len(result.error_lines) == 1
    assert "[1, 2, 3, 4, 5, 6, 7]" in result.error_lines[0] and "1..6" in result.error_lines[0]


def test_a_note_where_the_warmup_outlasts_the_run(tmp_path, data):
    result = run(tmp_path, "--prores-warmup-steps", "4", config=data)
    assert result.returncode == 0
    assert "note: the warm-up (24 steps) outlasts the run (8)" in result.output


def test_help_shows_our_flags_first():
    line = [sys.executable, "-m", "megatron_prores.megatron.pretrain_gpt", "--help"]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--config FILE" in done.stdout and done.stdout.index("--prores-schedule") < 4000
    assert "--tensor-model-parallel-size" in done.stdout


def test_the_hubs_retries_for_a_tokenizer_are_not_shown():
    """In a process of its own: the library sets its level when it is first imported."""
    level = "logging.getLogger('huggingface_hub').getEffectiveLevel()"
    program = (
        "import logging; from megatron_prores.megatron import screen; screen.hush()\n"
        f"import transformers; print({level} >= logging.ERROR)"
    )
    unset = {name: value for name, value in environment().items() if name != "HF_HUB_VERBOSITY"}
    done = subprocess.run([sys.executable, "-c", program], env=unset, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
