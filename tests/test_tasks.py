"""`prores evaluate --tasks`: lm-evaluation-harness on a Hugging Face model, with data from a file and no network."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_prores.errors import UserError
from megatron_prores.huggingface import tasks

TASKS = Path(__file__).parent / "lm_eval_tasks"
CHOICES = (")", "]", "}")
PROGRAM = (
    "import argparse, json, sys\n"
    "from megatron_prores.errors import run_and_exit\n"
    "from megatron_prores.huggingface import tasks\n"
    "run_and_exit(lambda: tasks.run(argparse.Namespace(**json.loads(sys.argv[1]))))\n"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    pytest.importorskip("lm_eval")
    transformers = pytest.importorskip("transformers")
    from megatron_prores.data.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("tasks") / "model"
    tokenizer = train_tokenizer(["def f(x):\n    return [x, {1: 2}]\n"] * 20, 300)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        eos_token_id=tokenizer.eos_token_id,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def evaluate(model: Path, **options) -> subprocess.CompletedProcess:
    defaults = {"tasks": "closing_bracket", "include_path": str(TASKS), "limit": None, "batch_size": 4, "output": None}
    options = {"model": str(model), "host": True, "verbose": False, **defaults, **options}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(options)],
        cwd=TASKS,  # the file of the task's data is named from there
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(model.parent / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )


@torch.inference_mode()
def accuracy(model: Path) -> tuple[float, int]:
    """By the definition: how often the right choice is the likeliest."""
    import transformers

    network = transformers.LlamaForCausalLM.from_pretrained(model).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    documents = [json.loads(line) for line in (TASKS / "closing_bracket.jsonl").read_text().splitlines()]
    right = 0
    for document in documents:
        scores = []
        for choice in document["choices"]:
            ids = torch.tensor([tokenizer(document["line"] + choice).input_ids])
            start = len(tokenizer(document["line"]).input_ids)
            predicted = network(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])
            scores.append(float(predicted[start - 1 :].sum()))
        right += scores.index(max(scores)) == document["answer"]
    return right / len(documents), len(documents)


def test_the_score_is_what_the_task_defines(model, tmp_path):
    expected, documents = accuracy(model)
    result = evaluate(model, output=str(tmp_path / "scores.json"))
    assert result.returncode == 0, result.stderr
    assert f"closing_bracket: acc {expected:.4f} (standard error " in result.stdout
    written = json.loads((tmp_path / "scores.json").read_text())
    scores = written["tasks"]["closing_bracket"]
    assert scores["metrics"] == {"acc": pytest.approx(expected)}
    assert (scores["documents"], scores["shots"], scores["version"]) == (documents, 0, 1.0)
    assert written["exported"] is None and written["lm_eval_version"]


def test_a_task_without_its_data_is_one_line(model):
    result = evaluate(model, tasks="arc_easy")
    assert result.returncode == 2, result.stderr
    said = "error: the task arc_easy cannot be loaded, and nothing is downloaded unless"
    assert [line.startswith(said) for line in result.stderr.splitlines() if "error" in line] == [True]
    assert "Traceback" not in result.stderr


def test_an_unknown_task_is_one_line():
    with pytest.raises(UserError, match=r"no task closing_brackets \(did you mean closing_bracket\?\)"):
        tasks._check_tasks(argparse.Namespace(all_tasks=["arc_easy", "closing_bracket"]), ["closing_brackets"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tasks": ","}, "--tasks names no task"),
        ({"limit": 0}, "--limit must be 1 or more"),
        ({"batch_size": 0}, "--batch-size must be 1 or more"),
        ({"model": "/no/such"}, "holds no config.json"),
        ({"include_path": "/no/such"}, "--include-path /no/such: no such folder"),
        ({"output": "/no/such/file"}, "--output /no/such/file cannot be written"),
    ],
)
def test_options_are_checked_first(options, said, tmp_path):
    pytest.importorskip("lm_eval")
    (tmp_path / "config.json").touch()
    defaults = {"model": str(tmp_path), "tasks": "x", "include_path": None, "limit": None, "batch_size": 1}
    with pytest.raises(UserError, match=said):
        tasks.run(argparse.Namespace(**{**defaults, "output": None, "host": True, "verbose": False, **options}))
