"""A small real corpus and the weights that all layouts start from, made once."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from runs import environment, pretrain

# Initial weights depend on the layout (Megatron seeds each rank), so every layout loads the same ones.
FROM_SAME_WEIGHTS = ("--finetune", "--no-load-optim", "--no-load-rng")


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> dict:
    """Config entries for part of the standard library's source, tokenized."""
    prefix = tmp_path_factory.mktemp("data") / "corpus"
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))[:40]
    program = [sys.executable, "-m", "megatron_prores.cli", "prepare-data"]
    options = ["--output", str(prefix), "--train-tokenizer", "500", "--workers", "2"]
    subprocess.run(
        [*program, "--input", *map(str, sources), *options], check=True, env=environment(), stdout=subprocess.DEVNULL
    )
    return {
        "tokenizer-type": "HuggingFaceTokenizer",
        "tokenizer-model": f"{prefix}-tokenizer",
        "data-path": [str(prefix)],
        "split": "90,10,0",
        "make-vocab-size-divisible-by": 64,
    }


@pytest.fixture(scope="session")
def initial(tmp_path_factory, data) -> Path:
    """A checkpoint of six layers after one iteration in one process."""
    folder = tmp_path_factory.mktemp("initial")
    pretrain(folder, "--save", str(folder / "checkpoint"), "--save-interval", "1", "--train-iters", "1", config=data)
    return folder / "checkpoint"


@pytest.fixture(scope="session")
def from_initial(initial) -> tuple[str, ...]:
    """Flags that start a run from the shared weights."""
    return ("--load", str(initial), *FROM_SAME_WEIGHTS)


@pytest.fixture(scope="session")
def one_process(tmp_path_factory, data, from_initial):
    """The run that every layout is compared with."""
    return pretrain(tmp_path_factory.mktemp("one"), *from_initial, config=data)
