"""`--prores-probe-interval` in real runs: what is recorded, the same in every layout, and nothing else changes."""

import json
import subprocess
import sys

import numpy as np
import pytest
from runs import environment, pretrain

from megatron_prores.probe_files import FOLDER, probe_files, read_probe, read_probes
from megatron_prores.report import layer_series, read_scalars

PROBES = ("--prores-probe-interval", "3")
TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
WITH_DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")

LAYOUTS = {
    "tp2 pp2 sequence parallel": (4, (*TP2, *PP2, "--sequence-parallel")),
    "pp2 virtual stages": (2, (*PP2, "--num-layers-per-virtual-pipeline-stage", "1")),
    "dp2 distributed optimizer": (
        2,
        ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    ),
}


@pytest.fixture(scope="module")
def probed(tmp_path_factory, data, from_initial, one_process):
    """Logs of a run in one process, which is otherwise that of `one_process`."""
    folder = tmp_path_factory.mktemp("probed")
    straight = pretrain(folder, *from_initial, *PROBES, config=data)
    assert straight.losses == one_process.losses and straight.evaluations == one_process.evaluations
    return folder / "logs"


def residuals(logs, step):
    probe = read_probe(probe_files(logs)[step])
    return probe.directions.astype(np.float64) * probe.magnitudes[..., None]


def test_what_is_there(probed):
    probes = read_probes(probed)
    assert probes.steps.tolist() == [0, 3, 6, 8] and probes.layers.tolist() == [1, 2, 3, 4, 5, 6]
    assert (probes.norms > 0).all()
    np.testing.assert_allclose(probes.cosines[-1], 1.0, rtol=1e-12)
    assert (probes.cosines[:-1] < 0.9999).all() and (probes.cosines[0] < probes.cosines[2]).all()
    # At step 0 every alpha is 0: no layer changes the stream, and what it would add is recorded all the same.
    np.testing.assert_allclose(probes.norms[0], probes.norms[0, 0], rtol=1e-7)
    assert (np.linalg.norm(residuals(probed, 0), axis=2) > 0).all()
    logged = layer_series(read_scalars(probed), "activation_norm")
    for layer, (steps, values) in logged.items():
        np.testing.assert_array_equal(steps, probes.steps)
        np.testing.assert_array_equal(values, probes.norms[:, layer - 1])


@pytest.mark.parametrize("name", LAYOUTS)
def test_probes_do_not_depend_on_the_layout(name, tmp_path, data, from_initial, one_process, probed):
    processes, flags = LAYOUTS[name]
    losses = pretrain(tmp_path, *from_initial, *flags, *PROBES, processes=processes, config=data).losses
    assert losses == pytest.approx(one_process.losses, rel=1e-5)
    here, there = read_probes(tmp_path / "logs"), read_probes(probed)
    np.testing.assert_array_equal(here.steps, there.steps)
    np.testing.assert_allclose(here.norms, there.norms, rtol=1e-5)
    np.testing.assert_allclose(here.cosines, there.cosines, atol=1e-5)
    for step in here.steps:
        expected = residuals(probed, step)
        np.testing.assert_allclose(residuals(tmp_path / "logs", step), expected, atol=2e-3 * np.abs(expected).max())
        tokens = [read_probe(probe_files(logs)[step]).tokens for logs in (tmp_path / "logs", probed)]
        np.testing.assert_array_equal(*tokens)


def test_dropout_resume_and_a_model_that_is_loaded(tmp_path, data):
    """Probes change no loss; a run that resumes at step 4 writes those of steps 6 and 8 again; and the last of them
    is what the model of the last checkpoint computes."""
    checkpoint = str(tmp_path / "checkpoint")
    plain = pretrain(tmp_path / "plain", *WITH_DROPOUT, config=data)
    straight = pretrain(
        tmp_path / "straight", *WITH_DROPOUT, *PROBES, "--save", checkpoint, "--save-interval", "4", config=data
    )
    assert straight.losses == plain.losses and straight.evaluations == plain.evaluations
    assert not (tmp_path / "plain" / "logs" / FOLDER).exists()
    assert not layer_series(read_scalars(tmp_path / "plain" / "logs"), "activation_norm")
    assert "probes" not in plain.output

    at_four = ("--load", checkpoint, "--ckpt-step", "4")
    resumed = pretrain(tmp_path / "resumed", *WITH_DROPOUT, *PROBES, *at_four, config=data)
    assert resumed.losses == {step: straight.losses[step] for step in (5, 6, 7, 8)}
    again, before = probe_files(tmp_path / "resumed" / "logs"), probe_files(tmp_path / "straight" / "logs")
    assert list(again) == [6, 8] and list(before) == [0, 3, 6, 8]
    assert all(again[step].read_bytes() == before[step].read_bytes() for step in again)

    program = [sys.executable, "-c", LOADED, checkpoint, str(before[8])]
    result = subprocess.run(program, check=True, env=environment(), capture_output=True, text=True)
    norms, branches = json.loads(result.stdout.splitlines()[-1])
    np.testing.assert_allclose(read_probe(before[8]).norms, norms, rtol=1e-6)
    np.testing.assert_allclose(residuals(tmp_path / "straight" / "logs", 8), branches, rtol=2e-3, atol=1e-5)


LOADED = r"""
import argparse, json, sys
import torch
from megatron_prores.megatron import saved_model
from megatron_prores.probe_files import read_probe
from pathlib import Path

checkpoint, file = sys.argv[1:]  # Megatron's arguments take their place
options = argparse.Namespace(checkpoint=checkpoint, host=True, verbose=True, tokenizer_model=None)
model = saved_model.load_model(saved_model.parse_saved(options, 8))
probe = read_probe(Path(file))
outputs, branches = {}, {}
for number, layer in enumerate(model.decoder.layers, 1):
    layer.register_forward_hook(lambda *call, number=number: outputs.update({number: call[2][0]}))
    for name in ("self_attention", "mlp"):
        getattr(layer, name).register_forward_hook(
            lambda *call, key=(number, name): branches.update({key: call[2][0].transpose(0, 1)})
        )
tokens = torch.from_numpy(probe.tokens)
with torch.no_grad():
    model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
norms = [float((outputs[l] ** 2).mean(2).sqrt().mean()) for l in range(1, 7)]
sums = [branches[l, "self_attention"] + branches[l, "mlp"] for l in range(1, 7)]
print(json.dumps([norms, [[x[sequence, position].tolist() for sequence, position in probe.sampled] for x in sums]]))
"""


def test_stock_layers_and_mock_data(tmp_path, data):
    mock = {"mock-data": True, "tokenizer-type": "NullTokenizer", "vocab-size": 500, "train-iters": 2}
    mock |= dict.fromkeys(("tokenizer-model", "data-path", "split"))
    pretrain(tmp_path, "--prores-schedule", "none", *PROBES, config={**data, **mock})
    probes = read_probes(tmp_path / "logs")
    assert probes.steps.tolist() == [0, 2] and probes.norms.shape == (2, 6)
    assert np.isfinite(probes.norms).all() and np.isfinite(probes.cosines).all()
    assert (np.diff(probes.norms[0]) > 0).all()  # every layer adds to the stream
