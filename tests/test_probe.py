"""When a run is probed, and which runs cannot be."""

from types import SimpleNamespace

import pytest
from megatron.training import training

from megatron_prores.errors import UserError
from megatron_prores.megatron import probe
from megatron_prores.megatron.arguments import validate_probe

SETUP, *LOOP = (
    "setup_model_and_optimizer",
    "build_train_valid_test_datasets",
    "train",
    "post_training_step_callbacks",
)


def arguments(**changes):
    """Of a run that can be probed, as Megatron would have parsed them."""
    fine = {
        "prores_probe_interval": 10,
        "tensorboard_dir": "logs",
        "eval_iters": 1,
        "full_validation": False,
        "context_parallel_size": 1,
        "cuda_graph_impl": "none",
        "use_megatron_fsdp": False,
        "use_torch_fsdp2": False,
        "hybrid_layer_pattern": None,
        "multiple_validation_sets": False,
        "dataloader_type": "single",
        "train_iters": 25,
    }
    return SimpleNamespace(**fine | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prores_probe_interval": -5}, r"must be 0 \(off\) or more, not -5"),
        ({"tensorboard_dir": None}, "needs --tensorboard-dir"),
        ({"eval_iters": 0}, "needs validation data: give --eval-iters 1 or more"),
        ({"context_parallel_size": 2}, "does not support --context-parallel-size above 1: remove one"),
        ({"cuda_graph_impl": "local"}, "does not support CUDA graphs"),
        ({"use_torch_fsdp2": True}, "does not support --use-torch-fsdp2"),
        ({"dataloader_type": "external"}, "does not support --dataloader-type external"),
    ],
)
def test_what_cannot_be_probed(changes, message):
    with pytest.raises(UserError, match=message):
        validate_probe(arguments(**changes))
    if changes.get("prores_probe_interval", 0) >= 0:
        validate_probe(arguments(**changes | {"prores_probe_interval": 0}))


def test_what_can_be_probed():
    validate_probe(arguments())
    validate_probe(SimpleNamespace())  # arguments without the flag


def test_when(monkeypatch):
    monkeypatch.setattr(probe, "get_args", arguments)
    assert [iteration for iteration in range(30) if probe._is_due(iteration)] == [0, 10, 20, 25]


@pytest.mark.parametrize("interval", [0, 10])
def test_only_a_run_that_asks_has_its_loop_wrapped(interval, monkeypatch):
    for name in (SETUP, *LOOP):
        monkeypatch.setattr(training, name, lambda: (["model"], "optimizer"))
    monkeypatch.setattr(probe, "get_args", lambda: arguments(prores_probe_interval=interval))
    probe.install()
    once = getattr(training, SETUP)
    probe.install()
    assert getattr(training, SETUP) is once
    before = [getattr(training, name) for name in LOOP]
    assert once() == (["model"], "optimizer")
    same = [getattr(training, name) is function for name, function in zip(LOOP, before, strict=True)]
    assert same == [interval == 0] * 3
