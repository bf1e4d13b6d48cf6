"""Models of one's own under `megatron_prores.deepspeed.initialize`: Hugging Face's Llama, and a `PipelineModule`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import environment

SCRIPT = Path(__file__).with_name("deepspeed_models.py")


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("models")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(SCRIPT), str(folder)], env=environment(), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "measured.json").read_text())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_llama_trains_as_in_plain_pytorch(measured, zero):
    assert measured[f"zero {zero}"] == pytest.approx(measured["reference"], rel=1e-5)
    # alpha = 1 throughout is another curve, so that the comparison sees alpha.
    assert measured["none"][1:] != pytest.approx(measured["reference"][1:], rel=1e-4)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_resume_is_bit_identical(measured, zero):
    assert measured[f"resumed {zero}"] == measured[f"zero {zero}"][3:]
    assert measured[f"clocks {zero}"] == [0, 3]


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_compiles_once_while_alpha_changes(measured, zero):
    """The script makes a second compilation an error."""
    assert measured[f"compiled {zero}"] == pytest.approx(measured[f"zero {zero}"], rel=1e-5)


def test_a_pipeline_of_ones_own(measured):
    assert measured["pipeline 2"] == pytest.approx(measured["pipeline 1"], rel=1e-6)
    assert measured["pipeline compiled"] == pytest.approx(measured["pipeline 1"], rel=1e-6)


def test_what_is_scaled_can_be_looked_at(measured):
    lines = measured["table"].splitlines()
    assert lines[0] == "ProRes: linear, T = 2, W = 8 steps"
    assert [line.split()[-1] for line in lines[2:]] == ["1", "1", "1", "0.75"]
