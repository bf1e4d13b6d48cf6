"""One compiled graph serves every step: alpha is a tensor that changes in place, not a constant."""

import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from torch._dynamo.utils import counters

from megatron_prores import Schedule
from megatron_prores.coefficients import LayerCoefficient, StageCoefficients
from megatron_prores.megatron.layer import scaled_bias_dropout_add
from megatron_prores.ops import scaled_residual

STEPS = 20

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="inductor needs a C++ compiler on the CPU"
)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def train(op):
    """The results and gradients of 20 steps of a linear warm-up, and the alphas."""
    coefficient = LayerCoefficient(2, "cpu")
    stage = StageCoefficients(Schedule("linear", num_layers=2, warmup_steps=STEPS / 4), [coefficient])
    generator = torch.Generator().manual_seed(0)
    results, alphas = [], []
    for step in range(STEPS):
        leaves = [torch.randn(*shape, generator=generator) for shape in ((5, 3, 17), (5, 3, 17), (17,))]
        x, residual, bias = (leaf.requires_grad_() for leaf in leaves)
        stage.set_step(step)
        out = op(x, residual, coefficient.read(), bias)
        out.backward(torch.randn(*out.shape, generator=generator))
        results.append([out.detach(), x.grad, residual.grad, bias.grad])
        alphas.append(coefficient.value.item())
    return results, alphas


def assert_one_graph():
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_twenty_alphas_are_one_graph():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    results, alphas = train(torch.compile(scaled_residual, backend=count))
    assert len(graphs) == 1
    assert_one_graph()
    assert len(set(alphas)) == STEPS / 2 + 1
    eager, _ = train(scaled_residual)
    for compiled, reference in zip(results, eager, strict=True):
        assert all(map(torch.equal, compiled, reference))


def test_a_whole_compiled_layer_is_one_graph():
    coefficient = LayerCoefficient(1, "cpu")
    stage = StageCoefficients(Schedule("linear", num_layers=1, warmup_steps=STEPS), [coefficient])
    add = scaled_bias_dropout_add(coefficient)(training=True, fused=False)
    branch = torch.nn.Linear(3, 3)
    layer = torch.compile(lambda x: add((branch(x), None), x, 0.0), backend="eager", fullgraph=True)
    x = torch.randn(2, 3)
    for step in range(STEPS):
        stage.set_step(step)
        torch.testing.assert_close(layer(x), x + step / STEPS * branch(x))
    assert_one_graph()


@needs_compiler
def test_inductor_compiles_once_and_agrees_with_eager():
    compiled, _ = train(torch.compile(scaled_residual))
    assert_one_graph()
    eager, _ = train(scaled_residual)
    for results, references in zip(compiled, eager, strict=True):
        for result, reference in zip(results, references, strict=True):
            torch.testing.assert_close(result, reference, atol=5e-7 * reference.abs().max().item(), rtol=0)


# Megatron decides at its import what compiles its fused functions: a process of its own, without the host backend.
SEAM = """
    import torch
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from torch._dynamo.utils import counters

    from megatron_prores import Schedule
    from megatron_prores.coefficients import LayerCoefficient, StageCoefficients
    from megatron_prores.megatron.layer import scaled_bias_dropout_add
    from megatron_prores.ops import use_op

    use_op("torch")  # the fused operators need no compiler
    layers = [LayerCoefficient(number, "cpu") for number in (1, 2, 3)]
    stage = StageCoefficients(Schedule("linear", num_layers=3, warmup_steps=5), layers)
    adds = [scaled_bias_dropout_add(layer)(training=True, fused=True) for layer in layers]
    megatron = get_bias_dropout_add(training=True, fused=True)
    torch.manual_seed(0)
    bias = torch.randn(17).bfloat16().requires_grad_()
    start = torch.randn(5, 3, 17).bfloat16().requires_grad_()
    x = torch.randn(5, 3, 17).bfloat16().requires_grad_()

    def run(add):
        torch.manual_seed(1)
        out = start
        for layer_add in add:
            out = layer_add((x, bias), out, 0.1)
        return [out, *torch.autograd.grad(out.float().square().sum(), (x, start, bias))]

    outputs = []
    for step in range(20):
        stage.set_step(step)
        outputs.append(run(adds))
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]
    assert not counters["graph_break"], counters["graph_break"]
    assert torch.equal(outputs[0][0], start) and not outputs[0][1].any() and not outputs[0][3].any()
    assert not any(torch.equal(outputs[step][0], outputs[step + 1][0]) for step in range(15))
    assert all(layer.value == 1 for layer in layers)
    for ours, theirs in zip(outputs[-1], run([megatron] * 3), strict=True):
        assert torch.equal(ours, theirs)
    assert counters["stats"]["unique_graphs"] == 2  # Megatron's own was compiled too
"""


@needs_compiler
def test_fused_seam_compiles_once_for_all_layers_and_steps():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SEAM)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
