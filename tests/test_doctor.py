"""`prores doctor` as a user runs it, and that its self-check finds wrong operators."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_prores import __version__
from megatron_prores.ops import choice, plain
from megatron_prores.ops.self_check import DTYPES, check

WITHOUT_EXTENSION = "sys.modules['megatron_prores._C'] = None"
WRONG_NORM = """
from megatron_prores.ops import plain
right = plain.rms_norm
plain.rms_norm = lambda stream, weight, eps: right(stream, weight, 10 * eps)
"""


def doctor(*args, first=""):
    """The command in an interpreter of its own, in which `first` was run."""
    code = f"import sys\n{first}\nfrom megatron_prores.cli import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", code, "doctor", *args], capture_output=True, text=True, check=False, timeout=300
    )


def sections(text):
    """{title: {label: rest of the line}}"""
    blocks = [block.splitlines() for block in text.split("\n\n")]
    return {
        title: {line[2:24].strip(): line[24:] for line in lines if not line.startswith(" " * 24) or ":" not in line}
        for title, *lines in blocks
    }


def test_report():
    done = doctor()
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) < 90
    report = sections(done.stdout)
    assert report["versions"]["megatron_prores"].startswith(__version__)
    assert torch.__version__.startswith(report["versions"]["torch"])
    assert "thread" in report["devices"]["cpu"]
    if choice.why_not_fused("cpu") is None:
        assert report["extension"]["torch headers"]
        assert report["operators with --prores-op auto"]["bfloat16 on float32"].startswith("fused (")
    *_, (title, checks) = report.items()
    assert title.startswith("self-check")
    assert set(DTYPES) <= set(checks)
    assert {word for name in DTYPES for word in checks[name].split()} == {"OK"}


def test_without_the_extension():
    done = doctor(first=WITHOUT_EXTENSION)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) < 90
    report = sections(done.stdout)
    assert report["extension"]["loaded"].startswith("no: the extension was not built")
    assert set(map(report["operators with --prores-op auto"].get, DTYPES)) == {"torch"}
    assert "cpu runs in plain torch: the extension was not built" in done.stdout
    assert "fused" not in done.stdout.split("self-check")[1]


def test_a_failed_self_check_is_exit_code_1():
    done = doctor(first=f"{WITHOUT_EXTENSION}{WRONG_NORM}")
    assert (done.returncode, done.stderr) == (1, "")
    assert "FAILED: cpu, torch, float32: add_norm: the norm is off by " in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 90


def test_bad_flag_is_one_line():
    done = doctor("--fix")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: prores doctor: unrecognized arguments: --fix; see prores doctor --help\n"


def test_does_not_import_the_engine():
    code = (
        "import sys, megatron_prores.commands.doctor, megatron_prores.ops.self_check;"
        "print([name for name in sys.modules if name.split('.')[0] in ('megatron', 'deepspeed')])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({}, None),
        (
            {"scaled_residual": lambda x, *rest, **kwargs: plain.scaled_residual(x * 1.1, *rest, **kwargs)},
            "add: the out",
        ),
        ({"scaled_residual_rms_norm": lambda x, r, a, w, *rest, **kwargs: (r, x)}, "add_norm: the output is off by"),
        ({"scaled_residual": lambda *args, prob=0.0, **kwargs: plain.scaled_residual(*args, **kwargs)}, "dropout: "),
        ({"scaled_residual": lambda *args, **kwargs: 1 / 0}, "ZeroDivisionError: division by zero"),
        ({"scaled_residual": lambda x, *args, **kwargs: x * float("nan")}, "add: the output is off by nan"),
    ],
)
def test_self_check_finds(wrong, found, dtypes):
    right = {"scaled_residual": plain.scaled_residual, "scaled_residual_rms_norm": plain.scaled_residual_rms_norm}
    state = torch.get_rng_state()
    said = check(SimpleNamespace(**{**right, **wrong}), "cpu", dtypes)
    assert said is None if found is None else said.startswith(found)
    assert torch.equal(torch.get_rng_state(), state)


def test_self_check_knows_a_mask_that_the_backward_pass_does_not_repeat():
    class Forgets(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * torch.randint(0, 2, x.shape) * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.randint(0, 2, grad.shape) * 2

    def scaled_residual(x, residual, alpha, bias=None, prob=0.0, **kwargs):
        return plain.scaled_residual(Forgets.apply(x) if prob else x, residual, alpha, bias, **kwargs)

    wrong = SimpleNamespace(scaled_residual=scaled_residual, scaled_residual_rms_norm=plain.scaled_residual_rms_norm)
    said = check(wrong, "cpu", DTYPES["float32"])
    assert said == "dropout: the backward pass has another mask than the forward pass"
