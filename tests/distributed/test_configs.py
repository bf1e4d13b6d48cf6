"""Every file in configs/ parses, plans, has the size that it says, and trains two steps when shrunk."""

import json
import re
from pathlib import Path

import pytest
import yaml
from runs import PRETRAIN, outcomes

CONFIGS = Path(__file__).parents[2] / "configs" / "megatron"
SIZES = ("71m", "130m", "350m", "1b", "3b", "7b", "70b")
NORMS = ("post", "deepnorm", "sandwich", "lns")
DEPTHS = (24, 48, 72, 96, 120)

# The paper's peak learning rates by norm and size (section 4); others are the size's own.
LEARNING_RATES = {
    **{("post", "130m"): 1e-3, ("post", "350m"): 5e-4, ("post", "1b"): 3e-4},
    **{("deepnorm", "130m"): 1.5e-3, ("deepnorm", "1b"): 3e-4},
}

# What the README names: files after base.yaml.
NAMED = {
    **{size: [size] for size in SIZES},
    **{f"{size} {norm}": [size, f"norm/{norm}"] for size in SIZES for norm in NORMS},
    **{f"{size} {norm} lr": [size, f"norm/{norm}", f"norm/{norm}-{size}"] for norm, size in LEARNING_RATES},
    **{f"depth {depth}": ["71m", f"depth/{depth}"] for depth in DEPTHS},
}

SHRUNK = {
    **{"hidden-size": 64, "num-attention-heads": 8, "ffn-hidden-size": 128, "vocab-size": 127},
    **{"seq-length": 32, "max-position-embeddings": 32, "micro-batch-size": 1, "global-batch-size": 2},
    **{"tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1, "sequence-parallel": False},
    **{"train-iters": 2, "lr-warmup-iters": 0, "lr-wsd-decay-iters": 1, "eval-iters": 0, "log-interval": 1},
    **{"mock-data": True, "tokenizer-type": "NullTokenizer"},
}

# Every file, on two layers; the deepest once at its depth.
DEEPEST = "depth 120"
TRAINED = {name: NAMED[name] for name in (*SIZES, "3b lns", "350m sandwich", *(f"depth {depth}" for depth in DEPTHS))}
TRAINED |= {name: files for name, files in NAMED.items() if name.endswith("lr")}


def _flags(files: list[str]) -> list[str]:
    return [word for file in ("base", *files) for word in ("--config", str(CONFIGS / f"{file}.yaml"))]


@pytest.fixture(scope="module")
def plans(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("plans")
    quickstart = ["--config", str(CONFIGS / "quickstart.yaml"), "--vocab-size", "4096"]
    flags = {"quickstart": quickstart, **{name: _flags(files) for name, files in NAMED.items()}}
    lines = {name: (["plan", *words, "--json", f"{folder / name}.json"], 1) for name, words in flags.items()}
    planned = outcomes(folder, "megatron_prores.cli", lines)
    failed = {name: errors for name, (code, _, errors) in planned.items() if code or errors}
    assert not failed
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in flags}


def test_every_file_is_named():
    named = {f"{file}.yaml" for files in NAMED.values() for file in files} | {"base.yaml", "quickstart.yaml"}
    assert {str(file.relative_to(CONFIGS)) for file in CONFIGS.rglob("*.yaml")} == named
    trained = {f"{file}.yaml" for files in TRAINED.values() for file in files} | {"base.yaml", "quickstart.yaml"}
    assert trained == named  # the quick start's in its own test


@pytest.mark.parametrize("name", NAMED)
def test_size_and_settings(name, plans):
    plan, size = plans[name], NAMED[name][0]
    norm = next((norm for norm in NORMS if norm in name), "pre")
    if not name.startswith("depth"):
        said = re.search(r"([\d.]+)([MB]) parameters", (CONFIGS / f"{size}.yaml").read_text())
        assert plan["parameters"] == pytest.approx(float(said[1]) * {"M": 1e6, "B": 1e9}[said[2]], rel=1e-3)
    lr = LEARNING_RATES[norm, size] if name.endswith("lr") else plans[size]["lr"]
    assert (plan["norm"], plan["lr"]) == (norm, lr)
    assert plan["init"] == ("deepnorm" if norm == "deepnorm" else "default")
    lr_warmup = 0.1 if norm in ("post", "deepnorm") else 2000 / plan["iterations"]
    assert plan["lr_warmup"] == pytest.approx(lr_warmup)
    short = name in ("depth 96", "depth 120")
    assert plan["schedule"]["warmup_steps"] == (500 if short else 1000)
    assert plan["schedule"]["name"] == ("linear-square" if norm == "post" else "linear")
    assert plan["notes"] == []


def test_names(plans):
    """71M is within 1%; the other files and the README say how many parameters they have."""
    assert plans["71m"]["parameters"] == pytest.approx(71e6, rel=0.01)
    assert [plans[f"depth {depth}"]["num_layers"] for depth in DEPTHS] == list(DEPTHS)


def test_every_file_trains_two_steps(tmp_path):
    cases = {}
    for name, files in TRAINED.items():
        shrunk = tmp_path / f"{name}.yaml"
        layers = {} if name == DEEPEST else {"num-layers": 2, "num-layers-per-virtual-pipeline-stage": 2}
        shrunk.write_text(yaml.safe_dump({**SHRUNK, **layers}))
        cases[name] = ([*_flags(files), "--config", str(shrunk)], 1)
    for name, (code, output, errors) in outcomes(tmp_path, PRETRAIN, cases).items():
        assert code == 0, f"{name}: {errors[-2000:]}"
        assert re.search(r"step 2/2 \| loss \d", output), f"{name}: {output}"
