"""residual_scale * residual + alpha * dropout(x + bias) against float64 and against Megatron's own residual add."""

import pytest
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

from megatron_prores.ops import scaled_residual

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# (dtype of x and bias, dtype of the residual); the second of the mixed ones is --fp32-residual-connection.
DTYPE_PAIRS = [*((dtype, dtype) for dtype in DTYPES), (torch.bfloat16, torch.float32), (torch.float16, torch.float32)]
SHAPES = [(5, 123, 123), (7, 1, 33), (3,), (0, 2, 4), (2, 3, 0)]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def inputs(shape, dtypes, with_bias=True):
    """x, residual, bias (or None) and the gradient of the result, the same for every dtype up to rounding."""
    generator = torch.Generator().manual_seed(0)
    x_dtype, dtype = dtypes
    wide = [torch.randn(size, generator=generator, dtype=torch.float64) for size in (shape, shape, shape[-1:], shape)]
    x, residual, bias, grad = wide
    if x.numel():  # signed zeros show differences that values do not
        x.view(-1)[0], residual.view(-1)[0] = -0.0, -0.0
    leaves = [x.to(x_dtype), residual.to(dtype), bias.to(x_dtype) if with_bias else None]
    return [leaf if leaf is None else leaf.requires_grad_() for leaf in leaves], grad.to(dtype)


def forward_backward(function, leaves, grad):
    """The result and the gradients of the leaves that are there."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves if leaf is not None]
    out = function(*leaves, *[None] * (3 - len(leaves)))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def plain(x, residual, bias, alpha, residual_scale):
    """The formula in the residual's dtype, one torch operation after another."""
    x = x.to(residual.dtype)
    if bias is not None:
        x = x + bias.to(residual.dtype)
    return residual * residual_scale + x * alpha


def same_bits(a, b):
    bits = BITS[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


@pytest.mark.parametrize("residual_scale", [1.0, 1.7])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_float64(shape, dtypes, with_bias, residual_scale):
    alpha = torch.tensor(1 / 3)
    leaves, grad = inputs(shape, dtypes, with_bias)

    def op(x, residual, bias):
        return scaled_residual(x, residual, alpha, bias, residual_scale=residual_scale)

    def formula(x, residual, bias):
        return plain(x, residual, bias, alpha.item(), residual_scale)

    wide = [None if leaf is None else leaf.double() for leaf in leaves]
    exact = forward_backward(formula, wide, grad.double())
    plains = forward_backward(formula, leaves, grad)
    results = forward_backward(op, leaves, grad)
    assert results[0].dtype == dtypes[1] and results[0].shape == torch.Size(shape)
    for result, same_dtype, reference in zip(results, plains, exact, strict=True):
        assert result.dtype == same_dtype.dtype and result.shape == same_dtype.shape
        if result.numel():
            eps = 4 * torch.finfo(torch.promote_types(result.dtype, torch.float32)).eps * reference.abs().max()
            assert (result - reference).abs().max() <= 2 * (same_dtype - reference).abs().max() + eps


@pytest.mark.parametrize("prob", [0.0, 0.1])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_alpha_one_is_megatron_bit_for_bit(dtypes, with_bias, training, prob):
    leaves, grad = inputs((5, 123, 123), dtypes, with_bias)

    def op(x, residual, bias):
        return scaled_residual(x, residual, torch.tensor(1.0), bias, prob, training)

    def megatron(x, residual, bias):
        return get_bias_dropout_add(training, False)((x, bias), residual, prob)

    results = []
    for function in (op, megatron):
        torch.manual_seed(5)
        results.append(forward_backward(function, leaves, grad))
    for ours, theirs in zip(*results, strict=True):
        assert same_bits(ours, theirs)
    dropped = (results[0][1] == 0).float().mean().item()  # the gradient of x
    assert dropped == pytest.approx(prob if training else 0.0, abs=0.01)


@pytest.mark.parametrize("prob", [0.0, 0.1])
@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_alpha_zero_is_the_residual_with_zero_gradients(dtypes, prob):
    leaves, grad = inputs((5, 17, 33), dtypes)
    out, x_grad, residual_grad, bias_grad = forward_backward(
        lambda x, residual, bias: scaled_residual(x, residual, torch.tensor(0.0), bias, prob), leaves, grad
    )
    assert torch.equal(out, leaves[1])
    assert torch.equal(residual_grad, grad)
    assert not x_grad.any() and not bias_grad.any()


@pytest.mark.parametrize("dtypes", [pair for pair in DTYPE_PAIRS if pair[0].itemsize == 2], ids=str)
def test_alpha_is_not_rounded_to_half_precision(dtypes):
    alpha = torch.tensor(1 / 3)
    rounded = alpha.to(dtypes[0])
    assert rounded.double() != alpha.double()  # 0.333984 in bfloat16
    (x, residual, _), _ = inputs((5, 17, 33), dtypes)
    residual = torch.zeros_like(residual)

    def exact(value):
        return (x.double() * value.double()).to(dtypes[1])

    out, x_grad, _ = forward_backward(
        lambda x, residual, _: scaled_residual(x, residual, alpha), [x, residual], exact(alpha)
    )
    assert torch.equal(out, exact(alpha)) and not torch.equal(out, exact(rounded))
    assert torch.equal(x_grad, (out.double() * alpha.double()).to(dtypes[0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_scaled_sum_is_rounded_once(dtype):
    # Two exact products of half-precision numbers: only the last rounding is left.
    (x, residual, _), _ = inputs((5, 17, 33), (dtype, dtype))
    out = scaled_residual(x, residual, torch.tensor(0.75), residual_scale=1.125)
    assert torch.equal(out, (1.125 * residual.double() + 0.75 * x.double()).to(dtype))


def test_dropout_scales_what_it_keeps_and_stops_in_evaluation():
    x, residual, alpha = torch.ones(100, 100), torch.full((100, 100), 2.0), torch.tensor(0.5)
    torch.manual_seed(1)
    values = scaled_residual(x, residual, alpha, prob=0.5).unique(return_counts=True)
    assert values[0].tolist() == [2.0, 3.0]
    assert abs(values[1][0].item() - 5000) < 300
    state = torch.get_rng_state()
    assert torch.equal(scaled_residual(x, residual, alpha, prob=0.5, training=False), residual + 0.5)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 1 / 3, 1.0])
def test_gradcheck(alpha, with_bias):
    leaves, _ = inputs((3, 2, 5), (torch.float64, torch.float64), with_bias)
    value = torch.tensor(alpha)

    def op(x, residual, bias=None):
        return scaled_residual(x, residual, value, bias, residual_scale=1.5)

    assert torch.autograd.gradcheck(op, [leaf for leaf in leaves if leaf is not None])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_non_contiguous_inputs(dtype):
    (x, residual, bias), grad = inputs((6, 10, 14), (dtype, dtype))
    alpha = torch.tensor(0.3)
    views = [x.transpose(0, 1), residual[:, :, ::2].repeat(1, 1, 2).transpose(0, 1), bias.repeat_interleave(3)[::3]]
    assert not any(view.is_contiguous() for view in views)

    def op(x, residual, bias):
        return scaled_residual(x, residual, alpha, bias)

    grad = grad.transpose(0, 1)
    copies = [view.contiguous() for view in views]
    for view, copy in zip(
        forward_backward(op, views, grad), forward_backward(op, copies, grad.contiguous()), strict=True
    ):
        # The bias's gradient is a sum, whose order may follow the layout.
        torch.testing.assert_close(view, copy, atol=0 if view.ndim > 1 else None, rtol=0 if view.ndim > 1 else None)


def test_inputs_are_left_alone():
    (x, residual, bias), _ = inputs((3, 4), (torch.float32, torch.float32))
    before = [tensor.clone() for tensor in (x, residual, bias)]
    with torch.no_grad():
        scaled_residual(x, residual, torch.tensor(0.5), bias, training=False)
    assert all(map(torch.equal, (x, residual, bias), before))
