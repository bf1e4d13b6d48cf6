"""`prores generate`, on a checkpoint that pipeline-parallel training wrote in the middle of the warm-up."""

import argparse
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_prores import cli
from megatron_prores.errors import UserError
from megatron_prores.megatron.sampling import Sampling, decode, encode, next_tokens
from megatron_prores.megatron.saved_model import find_iteration

TRAINING = {
    "num-layers": 4,
    "hidden-size": 32,
    "num-attention-heads": 4,
    "ffn-hidden-size": 64,
    "seq-length": 32,
    "max-position-embeddings": 32,
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
    "norm-epsilon": 1e-3,  # not in what Megatron restores
    "swiglu": "true",
    "disable-bias-linear": "true",
    "untie-embeddings-and-output-weights": "true",
    "init-method-std": 0.1,
    "micro-batch-size": 2,
    "global-batch-size": 8,
    "train-iters": 10,
    "lr": 1e-2,
    "tokenizer-type": "HuggingFaceTokenizer",
    "tokenizer-model": "tokenizer",  # relative to where training runs
    "data-path": "text",
    "split": "90,10,0",
    "eval-iters": 2,
    "eval-interval": 5,
    "save": "checkpoints",
    "save-interval": 5,
    "make-vocab-size-divisible-by": 64,
    "pipeline-model-parallel-size": 2,
    "prores-schedule": "linear-sqrt",
    "prores-warmup-fraction": 1.0,  # W = 10, T = 2.5
}

# What needs Megatron runs in one process of its own: Megatron's globals and the host backend are for good.
PROBE = r"""
import argparse, json, sys
import torch
from megatron_prores.commands import generate as command
from megatron_prores.megatron import driver, sampling, saved_model
from megatron_prores.errors import UserError

parser = argparse.ArgumentParser()
command.add_arguments(parser)
options = parser.parse_args(["--checkpoint", "checkpoints", "--host"])
found = {}

args = saved_model.parse_saved(options, 5)
model = saved_model.load_model(args)
found["args"] = [args.iteration, args.padded_vocab_size, args.layernorm_epsilon, args.prores_schedule]
found["alpha"] = [float(c.value) for c in driver.stage_coefficients().coefficients]

# The samples of training's first evaluation, which were 2 batches of 8.
from megatron_prores.megatron import gpt
args.data_path, args.split, args.full_validation = ["text"], "90,10,0", False
_, validation, _ = gpt.datasets([80, 48, 16])

@torch.inference_mode()
def loss():
    total = count = 0
    for number in range(16):
        sample = {name: tensor[None] for name, tensor in validation[number].items()}
        logits = model(sample["tokens"], sample["position_ids"], None)
        losses = torch.nn.functional.cross_entropy(logits[0].float(), sample["labels"][0], reduction="none")
        total, count = total + (losses * sample["loss_mask"][0]).sum(), count + sample["loss_mask"].sum()
    return float(total / count)

found["loss"] = {}
for step in (5, 4, 0, 1000):
    driver.set_step(step)
    found["loss"][step] = loss()
driver.set_step(5)

# The last token's logits without padding ids are the same as inside a longer batch of positions.
ids = [int(token) for token in validation[0]["tokens"]][:9]
with torch.inference_mode():
    whole = model(torch.tensor([ids]), torch.arange(9)[None], None)[0]
    found["causal"] = float((whole[5] - sampling.last_logits(model, ids[:6])).abs().max())

# Text, as the command makes it.
from megatron.training.global_vars import get_tokenizer
def complete(prompt, count, seed, **choice):
    return sampling.complete(
        model, get_tokenizer(), prompt, max_new_tokens=count, context=32,
        sampling=sampling.Sampling(**choice), generator=torch.Generator().manual_seed(seed),
    )
found["sampled"] = [complete("def f", 12, seed)[0] for seed in (1234, 1235)]
found["greedy"] = [complete("\n", 20, seed, greedy=True) for seed in (1, 2)]

# --use-checkpoint-args
from megatron.training import arguments, checkpointing
found["restored"] = {}
for flags in ("", "--prores-warmup-steps 7", "--prores-schedule equal", "--prores-schedule equal --prores-override"):
    sys.argv[1:] = ["--load", "checkpoints", "--ckpt-step", "5", *flags.split()]
    restored, _ = checkpointing.load_args_from_checkpoint(arguments.parse_args())
    found["restored"][flags] = [
        restored.prores_schedule, restored.prores_warmup_steps, restored.prores_total_warmup_steps,
        restored.prores_warmup_fraction,
    ]

from megatron_prores.megatron import guard
found["stock"] = guard.saved_settings(argparse.Namespace(num_layers=4))

# Checkpoints that cannot be used.
saved = saved_model._read_arguments("checkpoints/iter_0000005")
known = arguments.add_megatron_arguments(argparse.ArgumentParser())
found["errors"] = {}
def refused(name, folder="x", override=None, **changes):
    if changes:
        saved_model._read_arguments = lambda folder: argparse.Namespace(**{**vars(saved), **changes})
    try:
        saved_model.saved_defaults(folder, known, override)
    except UserError as error:
        found["errors"][name] = str(error)

open("checkpoints/iter_0000010/.metadata", "r+b").truncate(100)
refused("damaged", "checkpoints/iter_0000010")
refused("null", tokenizer_type="NullTokenizer", tokenizer_model=None)
refused("moved", tokenizer_model="/gone/tokenizer")
refused("overridden", override="tokenizer", tokenizer_model="/gone/tokenizer")
refused("override", override="/gone/too", tokenizer_model="tokenizer")
json.dump(found, open("found.json", "w"))
"""


def environment():
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return environment | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def start(command, folder):
    result = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=200)
    return result


def generate(folder, *flags):
    return start([sys.executable, "-m", "megatron_prores.cli", "generate", "--host", *flags], folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with `tokenizer/`, `text.*`, `checkpoints/` of iterations 5 and 10, and training's output."""
    pytest.importorskip("transformers")
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    from megatron_prores.data.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("generate")
    draw = random.Random(0).randrange
    texts = ["".join(f"def f{draw(9)}(x):\n    return x + {draw(9)}\n" for _ in range(4)) for _ in range(100)]
    tokenizer = train_tokenizer(texts, 300)
    tokenizer.save_pretrained(folder / "tokenizer")
    builder = IndexedDatasetBuilder(str(folder / "text.bin"), dtype=np.int32)
    for text in texts:
        ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
        builder.add_document(ids, [len(ids)])
    builder.finalize(str(folder / "text.idx"))
    (folder / "training.yaml").write_text("".join(f"{key}: {value}\n" for key, value in TRAINING.items()))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = ["-m", "megatron_prores.megatron.pretrain_gpt", "--host", "--config", "training.yaml"]
    result = start([*launcher, *flags], folder)
    assert result.returncode == 0, result.stderr
    (folder / "training.txt").write_text(result.stdout)
    return folder


@pytest.fixture(scope="module")
def found(trained):
    result = start([sys.executable, "-c", PROBE], trained)
    assert result.returncode == 0, result.stderr
    return json.loads((trained / "found.json").read_text())


def test_the_command_prints_and_writes_text(trained, found):
    flags = ["--checkpoint", "checkpoints", "--ckpt-step", "5", "--max-new-tokens", "12", "--output", "text.jsonl"]
    result = generate(trained, *flags, "--prompt", "def f", "--prompt", "def f")
    assert result.returncode == 0, result.stderr
    assert "ProRes linear-sqrt, T = 2.5, W = 10 steps; alpha at iteration 5:" in result.stdout
    first, second = (json.loads(line) for line in (trained / "text.jsonl").read_text().splitlines())
    for record in (first, second):
        assert record["prompt"] + record["continuation"] in result.stdout
        assert record["iteration"] == 5
        assert 0 < record["tokens"] <= 12
    assert first["continuation"] != second["continuation"]  # one prompt given twice is not continued alike
    # The same seed in another process.
    assert found["sampled"][0] == first["continuation"]
    assert found["sampled"][1] == second["continuation"]


def test_greedy_is_the_likeliest_text_whatever_the_seed(found):
    first, second = found["greedy"]
    assert first == second
    assert "def" in first[0]


def test_the_checkpoint_s_settings_are_restored(found):
    assert found["args"] == [5, 320, 1e-3, "linear-sqrt"]
    expected = [min(5 / (2.5 * layer), 1) ** 0.5 for layer in range(1, 5)]
    assert found["alpha"] == pytest.approx(expected, abs=1e-7)


def test_the_loaded_model_has_the_loss_that_training_saw(trained, found):
    printed = re.search(r"evaluation at iteration 5: loss ([\d.]+)", (trained / "training.txt").read_text())
    assert found["loss"]["5"] == pytest.approx(float(printed[1]), abs=2e-4)
    # The alphas of any other step would have shown.
    for step in ("4", "0", "1000"):
        assert abs(found["loss"][step] - float(printed[1])) > 2e-3


def test_attention_is_causal(found):
    assert found["causal"] < 1e-5


def test_use_checkpoint_args_restores_the_schedule(found):
    assert found["restored"] == {
        "": ["linear-sqrt", None, 10.0, None],
        "--prores-warmup-steps 7": ["linear-sqrt", 7.0, None, None],  # as given; the resume check refuses it
        "--prores-schedule equal": ["linear-sqrt", None, 10.0, None],
        "--prores-schedule equal --prores-override": ["equal", None, None, None],
    }
    assert found["stock"]["prores_schedule"] == "none"


def test_unusable_checkpoints_are_named(found):
    errors = found["errors"]
    assert "iter_0000010 cannot be read" in errors["damaged"]
    assert "NullTokenizer" in errors["null"]
    assert "/gone/tokenizer" in errors["moved"] and "--tokenizer-model" in errors["moved"]
    assert "overridden" not in errors
    assert "/gone/too" in errors["override"]


def test_a_tokenizer_at_a_relative_path_is_asked_for(trained, tmp_path):
    result = generate(tmp_path, "--checkpoint", str(trained / "checkpoints"), "--ckpt-step", "5")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: the tokenizer tokenizer is not there")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--temperature", "0"], "--greedy"),
        (["--temperature", "nan"], "--temperature"),
        (["--top-p", "0"], "--top-p"),
        (["--top-p", "1.5"], "--top-p"),
        (["--top-k", "-1"], "--top-k"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--seed", "-1"], "--seed"),
        (["--output", "/no/such/folder/x"], "--output"),
        (["--prompt", os.fsdecode(b"\xff")], "--prompt '\\udcff' is not UTF-8 text"),
        (["--ckpt-step", "7"], "give one of 5, 10"),
        (["--checkpoint", "/no/such/folder"], "/no/such/folder"),
        (["--checkpoint", "{}"], "no iter_"),
        (["--checkpoint", "{}/checkpoints/iter_0000005"], "--ckpt-step 5"),
    ],
)
def test_bad_options_are_refused_before_megatron_starts(tmp_path, flags, word):
    folder = tmp_path / "checkpoints"
    for iteration in (5, 10):
        (folder / f"iter_{iteration:07d}").mkdir(parents=True)
    (folder / "iter_0000005" / "metadata.json").touch()
    flags = [flag.replace("{}", str(tmp_path)) for flag in flags]
    with pytest.raises(UserError, match=re.escape(word)):
        cli.run(["generate", "--checkpoint", str(folder), *flags])


def test_the_latest_checkpoint_is_the_tracker_s(tmp_path):
    (tmp_path / "iter_0000005").mkdir()
    (tmp_path / "iter_0000010").mkdir()
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    with pytest.raises(UserError, match="--ckpt-step"):
        find_iteration(str(tmp_path))
    tracker.write_text("5\n")
    assert find_iteration(str(tmp_path)) == 5
    assert find_iteration(str(tmp_path), 10) == 10


def test_a_folder_of_deepspeeds_checkpoints_is_told_from_an_empty_one(tmp_path):
    (tmp_path / "global_step5").mkdir()
    with pytest.raises(UserError, match="DeepSpeed's: its entry writes it in Megatron's format with --to-megatron"):
        find_iteration(str(tmp_path))


LOGITS = torch.tensor([0.1, 2.0, 1.0, -1.0, 1.5])


def sampled(sampling, count=300, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [sampling.choose(LOGITS, generator) for _ in range(count)]


def test_sampling_keeps_to_its_tokens():
    assert set(sampled(Sampling(greedy=True))) == {1}
    assert set(sampled(Sampling(temperature=5.0))) == {0, 1, 2, 3, 4}
    assert set(sampled(Sampling(temperature=5.0, top_k=2))) == {1, 4}
    assert set(sampled(Sampling(temperature=1e-4))) == {1}
    probabilities = torch.softmax(LOGITS, -1)
    second = float(probabilities[1] + probabilities[4])
    assert set(sampled(Sampling(temperature=1.0, top_p=second - 1e-3))) == {1, 4}
    assert set(sampled(Sampling(temperature=1.0, top_p=second + 1e-3))) == {1, 4, 2}
    assert set(sampled(Sampling(temperature=1.0, top_p=1e-12))) == {1}


def test_sampling_follows_the_probabilities_and_the_seed():
    tokens = sampled(Sampling(temperature=1.0, top_k=0), count=4000)
    shares = np.bincount(tokens, minlength=5) / 4000
    np.testing.assert_allclose(shares, torch.softmax(LOGITS, -1), atol=0.03)
    assert sampled(Sampling(), seed=3) == sampled(Sampling(), seed=3)
    assert sampled(Sampling(), seed=3) != sampled(Sampling(), seed=4)


def test_logits_that_are_not_finite_are_an_error():
    with pytest.raises(UserError, match="diverged"):
        Sampling().choose(torch.tensor([0.0, torch.nan]), torch.Generator())


class Successor(torch.nn.Module):
    """Token n is followed by n + 1, of 8, and the padding id 8 is likelier than any of them."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.lengths = []

    def forward(self, tokens, position_ids, attention_mask):
        assert position_ids.tolist() == [list(range(tokens.shape[1]))]
        self.lengths.append(tokens.shape[1])
        logits = torch.nn.functional.one_hot((tokens + 1) % 8, 9).float()
        logits[..., 8] = 9.0
        return logits


def test_the_loop_crops_the_context_and_leaves_padding_alone():
    model = Successor()
    tokens = next_tokens(model, [3, 4], 8, 4, Sampling(greedy=True), torch.Generator())
    assert [next(tokens) for _ in range(6)] == [5, 6, 7, 0, 1, 2]
    assert model.lengths == [2, 3, 4, 4, 4, 4]


def test_text_to_ids_and_back():
    class Letters:
        """a = 1, b = 2, ..., end of document = 0, which ends every text; a text's first space is dropped."""

        eod = 0

        def tokenize(self, text):
            return [ord(letter) - 96 if letter != " " else 27 for letter in text] + [0]

        def detokenize(self, ids):
            return "".join(" " if number == 27 else chr(96 + number) for number in ids).removeprefix(" ")

    assert encode(Letters(), "ab") == [1, 2]
    assert encode(Letters(), "") == [0]
    assert decode(Letters(), [1], [27, 2]) == " b"
    with pytest.raises(UserError, match="empty prompt"):
        encode(argparse.Namespace(tokenize=lambda text: [], eod=None), "")


def test_importing_the_command_does_not_import_torch():
    code = "import sys, megatron_prores.commands.generate; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
