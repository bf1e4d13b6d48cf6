"""residual_scale * residual + alpha * dropout(x + bias) against float64 and against Megatron's own residual add.

The dropout mask itself is the matter of test_dropout_mask.py.
"""

import itertools

import pytest
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from op_cases import (
    ALPHAS,
    CONVERTED_PAIRS,
    DTYPE_PAIRS,
    DTYPES,
    INSTRUCTION_SETS,
    SHAPES,
    SPECIAL,
    assert_as_exact_as_torch,
    forward_backward,
    inputs,
    instruction_set,
    require_fused,
    same_bits,
    threads,
)

from megatron_prores.ops import scaled_residual


def plain(x, residual, bias, alpha, residual_scale=1.0):
    """The formula in the residual's dtype, one torch operation after another."""
    x = x.to(residual.dtype)
    if bias is not None:
        x = x + bias.to(residual.dtype)
    return residual * residual_scale + x * alpha


def assert_exact(shape, dtypes, with_bias, alpha, residual_scale, bias_dtype=None):
    (x, residual, bias), grad = inputs(shape, dtypes, with_bias)
    alpha = torch.tensor(alpha)
    assert_as_exact_as_torch(
        lambda x, residual, bias: scaled_residual(x, residual, alpha, bias, residual_scale=residual_scale),
        lambda x, residual, bias: plain(x, residual, bias, alpha.item(), residual_scale),
        [x, residual, bias if bias is None or bias_dtype is None else bias.to(bias_dtype)],
        grad,
        case=f"{shape}, bias {with_bias}, alpha {alpha}, residual_scale {residual_scale}",
    )


@pytest.mark.parametrize("residual_scale", [1.0, 1.7])
@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_agrees_with_float64(dtypes, residual_scale, op):
    for shape, alpha, with_bias in itertools.product(SHAPES, ALPHAS, [True, False]):
        assert_exact(shape, dtypes, with_bias, alpha, residual_scale)


@pytest.mark.parametrize("dtypes", CONVERTED_PAIRS, ids=str)
def test_types_without_a_kernel_are_converted(dtypes, op):
    (x, residual, bias), grad = inputs((5, 17, 33), dtypes)

    def run(x, bias):
        return forward_backward(
            lambda x, residual, bias: scaled_residual(x, residual, torch.tensor(1 / 3), bias), [x, residual, bias], grad
        )

    out, d_x, d_residual, d_bias = run(x.to(dtypes[1]), bias.to(dtypes[1]))
    expected = (out, d_x.to(dtypes[0]), d_residual, d_bias.to(dtypes[0]))
    assert all(map(same_bits, run(x, bias), expected))


@pytest.mark.parametrize("dtypes", [pair for pair in DTYPE_PAIRS if pair[0] != pair[1]], ids=str)
def test_a_bias_of_the_residuals_dtype(dtypes, op):
    assert_exact((5, 17, 33), dtypes, True, 1 / 3, 1.0, bias_dtype=dtypes[1])


def special_values(dtypes):
    """Every pair of special values as x and residual."""
    values = torch.tensor(SPECIAL, dtype=torch.float64)
    values = torch.cat([values, -values])
    x, residual = torch.cartesian_prod(values, values).unbind(-1)
    return x.to(dtypes[0]), residual.to(dtypes[1])


def assert_is_residual_plus_x(dtypes):
    (x, residual, _), grad = inputs((5, 123, 123), dtypes)
    special_x, special_residual = special_values(dtypes)
    for leaves, d_out in (([x, residual], grad), ([special_x, special_residual], special_residual)):
        out, d_x, d_residual = forward_backward(
            lambda x, residual: scaled_residual(x, residual, torch.tensor(1.0)), leaves, d_out
        )
        assert same_bits(out, leaves[1] + leaves[0].to(dtypes[1]))
        assert same_bits(d_x, d_out.to(dtypes[0]))
        assert same_bits(d_residual, d_out)


@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_alpha_one_is_residual_plus_x_bit_for_bit(dtypes, op):
    assert_is_residual_plus_x(dtypes)


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_every_instruction_set_is_exact_at_alpha_one(name):
    with instruction_set(name):
        for dtypes in DTYPE_PAIRS:
            assert_is_residual_plus_x(dtypes)


@pytest.mark.usefixtures("torch_op")
@pytest.mark.parametrize("prob", [0.0, 0.1])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_alpha_one_is_megatron_bit_for_bit(dtypes, with_bias, training, prob):
    leaves, grad = inputs((5, 123, 123), dtypes, with_bias)

    def ours(x, residual, bias):
        return scaled_residual(x, residual, torch.tensor(1.0), bias, prob, training)

    def megatron(x, residual, bias):
        return get_bias_dropout_add(training, False)((x, bias), residual, prob)

    results = []
    for function in (ours, megatron):
        torch.manual_seed(5)
        results.append(forward_backward(function, leaves, grad))
    assert all(map(same_bits, *results))
    dropped = (results[0][1] == 0).float().mean().item()  # the gradient of x
    assert dropped == pytest.approx(prob if training else 0.0, abs=0.01)


@pytest.mark.parametrize("prob", [0.0, 0.1])
@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_alpha_zero_is_the_residual_with_zero_gradients(dtypes, prob, op):
    leaves, grad = inputs((5, 17, 33), dtypes)
    out, x_grad, residual_grad, bias_grad = forward_backward(
        lambda x, residual, bias: scaled_residual(x, residual, torch.tensor(0.0), bias, prob), leaves, grad
    )
    assert torch.equal(out, leaves[1])
    assert torch.equal(residual_grad, grad)
    assert not x_grad.any() and not bias_grad.any()


@pytest.mark.parametrize("dtypes", [pair for pair in DTYPE_PAIRS if pair[0].itemsize == 2], ids=str)
def test_alpha_is_not_rounded_to_half_precision(dtypes, op):
    alpha = torch.tensor(1 / 3)
    rounded = alpha.to(dtypes[0])
    assert rounded.double() != alpha.double()  # 0.333984 in bfloat16
    (x, residual, _), _ = inputs((5, 17, 33), dtypes)
    residual = torch.zeros_like(residual)

    def exact(value):
        return (x.double() * value.double()).to(dtypes[1])

    out, x_grad, _ = forward_backward(
        lambda x, residual: scaled_residual(x, residual, alpha), [x, residual], exact(alpha)
    )
    assert torch.equal(out, exact(alpha)) and not torch.equal(out, exact(rounded))
    assert torch.equal(x_grad, (out.double() * alpha.double()).to(dtypes[0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_scaled_sum_is_rounded_once(dtype, op):
    # Two exact products of half-precision numbers: only the last rounding is left.
    (x, residual, _), _ = inputs((5, 17, 33), (dtype, dtype))
    out = scaled_residual(x, residual, torch.tensor(0.75), residual_scale=1.125)
    assert torch.equal(out, (1.125 * residual.double() + 0.75 * x.double()).to(dtype))


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_conversions_are_torchs(dtype, name):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    # float32 at, above and below every half-precision number and every tie between two.
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001])
    wide = (torch.arange(-(2**15), 2**15)[:, None] * 2**16 + low).to(torch.int32).view(torch.float32)
    minus_zero = torch.tensor(-0.0).expand(every.shape)  # adding it changes nothing, not even 0
    with instruction_set(name) as fused:
        assert same_bits(fused.scaled_residual(every, minus_zero, torch.tensor(1.0)), every.float())
        _, narrowed, _ = forward_backward(
            lambda x, residual: fused.scaled_residual(x, residual, torch.tensor(1.0)),
            [torch.zeros(wide.shape, dtype=dtype), torch.zeros(wide.shape)],
            wide,
        )
        assert same_bits(narrowed, wide.to(dtype))
        for alpha in (0.5, 0.75, 1.5, 1 / 3, 1 + 2**-9):  # ties, subnormal results, overflow
            out = fused.scaled_residual(every, minus_zero.to(dtype), torch.tensor(alpha))
            assert same_bits(out, (every.float() * alpha).to(dtype))


@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_a_scale_that_is_not_a_number_is_seen(dtypes, op):
    for bits in (0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -0x800000 + 1):  # every NaN rounds to a NaN
        alpha = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        (x, residual, bias), grad = inputs((3, 33), dtypes)
        out, d_x, d_residual, d_bias = forward_backward(
            lambda x, residual, bias, alpha=alpha: scaled_residual(x, residual, alpha, bias), [x, residual, bias], grad
        )
        assert out.isnan().all() and d_x.isnan().all() and d_bias.isnan().all() and torch.equal(d_residual, grad)
    every_bit = torch.tensor(2**63 - 1).view(torch.float64).item()
    out = scaled_residual(x, residual, torch.tensor(1.0), residual_scale=every_bit)
    assert out.isnan().all()


@pytest.mark.parametrize("prob", [0.0, 0.3])
def test_gradcheck(prob, op):
    for with_bias, alpha, residual_scale in ((True, 1 / 3, 1.5), (True, 0.0, 1.0), (False, 1.0, 1.0)):
        leaves, _ = inputs((2, 5), (torch.float64, torch.float64), with_bias)
        scaling = torch.tensor(alpha), residual_scale

        def function(x, residual, bias=None, scaling=scaling):
            torch.manual_seed(2)
            return scaled_residual(x, residual, scaling[0], bias, prob, residual_scale=scaling[1])

        assert torch.autograd.gradcheck(function, [leaf.requires_grad_() for leaf in leaves if leaf is not None])


def test_forward_mode_and_function_transforms(op):
    """Linear in x and residual, so that every derivative is known; an operator without rules would give 0."""
    x, residual, alpha = torch.randn(4, 8), torch.randn(4, 8), torch.tensor(0.5)

    def f(x, residual):
        return scaled_residual(x, residual, alpha)

    ones = torch.ones_like(x)
    assert torch.equal(torch.func.jvp(f, (x, residual), (ones, ones))[1], 1.5 * ones)
    compiled = torch.compile(lambda x, r: torch.func.jvp(f, (x, r), (ones, ones))[1], backend="aot_eager")
    assert torch.equal(compiled(x, residual), 1.5 * ones)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, ones)
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(f(dual, residual)).tangent, 0.5 * ones)
    assert torch.equal(torch.func.grad(lambda x: f(x, residual).sum())(x), 0.5 * ones)
    torch.testing.assert_close(torch.func.vmap(f)(x, residual), residual + 0.5 * x)


def test_a_second_derivative_is_right_or_refused(op):
    x = torch.randn(3, 4, requires_grad=True)
    out = scaled_residual(x, torch.zeros(3, 4), torch.tensor(0.5))
    try:
        (d_x,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)  # x / 2
        (second,) = torch.autograd.grad(d_x.square().sum(), x)
    except RuntimeError:
        return
    torch.testing.assert_close(second, x.detach() / 2)


@pytest.mark.parametrize(
    ("dtypes", "with_bias", "with_dropout", "residual_scale"),
    [((torch.float32, torch.float32), False, False, 1.0), ((torch.bfloat16, torch.float32), True, True, 1.5)],
    ids=["least", "most"],
)
def test_opcheck(dtypes, with_bias, with_dropout, residual_scale):
    require_fused()
    (x, residual, bias), grad = inputs((3, 2, 5), dtypes, with_bias)
    rng = torch.tensor([1, 2]) if with_dropout else None
    alpha, scaling = torch.tensor(0.3), (rng, 0.4, residual_scale)
    torch.library.opcheck(torch.ops.prores.scaled_residual_backward, (grad, alpha, *scaling, x.dtype, with_bias))
    x, residual, bias = (leaf if leaf is None else leaf.requires_grad_() for leaf in (x, residual, bias))
    torch.library.opcheck(torch.ops.prores.scaled_residual, (x, residual, alpha, bias, *scaling))


def test_the_residuals_gradient_is_the_incoming_one():
    fused = require_fused()
    for dtypes in DTYPE_PAIRS:
        leaves, grad = inputs((3, 4), dtypes)
        for d_out in (grad, grad.t().contiguous().t(), grad[:1].expand(3, 4)):
            d_residual = forward_backward(
                lambda x, residual, bias: fused.scaled_residual(x, residual, torch.tensor(0.5), bias), leaves, d_out
            )[2]
            assert d_residual.data_ptr() == d_out.data_ptr() and torch.equal(d_residual, d_out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_non_contiguous_inputs_and_gradients(dtype, op):
    (x, residual, bias), grad = inputs((6, 10, 14), (dtype, dtype))
    alpha = torch.tensor(0.3)
    views = [x.transpose(0, 1), residual[:, :, ::2].repeat(1, 1, 2).transpose(0, 1), bias.repeat_interleave(3)[::3]]
    broadcast = [x[:1].expand(10, 10, 14), residual[0, 0].expand(10, 10, 14), bias[:1].expand(14)]

    def function(x, residual, bias):
        return scaled_residual(x, residual, alpha, bias, residual_scale=1.5)

    for leaves, d_out in ((views, grad.transpose(0, 1)), (broadcast, grad[0, 0, 0].expand(10, 10, 14))):
        assert not any(tensor.is_contiguous() for tensor in (*leaves, d_out))
        results = forward_backward(function, leaves, d_out)
        copies = forward_backward(function, [leaf.contiguous() for leaf in leaves], d_out.contiguous())
        for result, copy in zip(results, copies, strict=True):
            # The bias's gradient is a sum, whose order may follow the layout.
            exact = {} if result.ndim == 1 else {"atol": 0, "rtol": 0}
            torch.testing.assert_close(result, copy, **exact)


def test_inputs_are_left_alone(op):
    (x, residual, bias), _ = inputs((3, 4), (torch.float32, torch.float32))
    before = [tensor.clone() for tensor in (x, residual, bias)]
    scaled_residual(x, residual, torch.tensor(0.5), bias, training=False)
    assert all(map(torch.equal, (x, residual, bias), before))


def test_alpha_is_read_when_the_operator_runs(op):
    alphas = torch.tensor([0.25, 0.5, 0.75])  # of a stage
    x, residual = torch.ones(2, 3), torch.zeros(2, 3)
    for value in (0.125, 1.0):
        alphas[1].fill_(value)
        for alpha in (alphas[1], alphas[1:2]):
            out, x_grad, _ = forward_backward(
                lambda x, residual, alpha=alpha: scaled_residual(x, residual, alpha), [x, residual], torch.ones(2, 3)
            )
            assert torch.equal(out, x * value) and torch.equal(x_grad, x * value)


def test_alpha_that_changes_before_backward_is_an_error(op):
    alphas = torch.tensor([0.25, 0.5])
    x = torch.ones(2, 3, requires_grad=True)
    out = scaled_residual(x, torch.zeros(2, 3), alphas[0])
    alphas.fill_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


X, ALPHA = torch.ones(4, 3), torch.tensor(1.0)


@pytest.mark.parametrize(
    "args",
    [
        (X, torch.ones(4, 4), ALPHA),
        (X, torch.ones(3, 4), ALPHA),
        (X, X, torch.ones(2)),
        (X, X, ALPHA.double()),
        (X, torch.ones(1, 3), ALPHA),
        (X, X, ALPHA, torch.ones(1, 3)),
        (X, X, ALPHA, torch.ones(4)),
        (X, X, ALPHA, None, 1.5),
        (X, X, ALPHA, None, float("nan")),
        (X, X, 0.5),
        (X, X, ALPHA.to("meta")),
        (X, X.to("meta"), ALPHA),
    ],
    ids=[
        *("residual's size", "residual's shape", "two alphas", "alpha's type", "a residual to broadcast"),
        *("a bias to broadcast", "bias's size", "probability", "no probability"),
        *("a number as alpha", "alpha elsewhere", "residual elsewhere"),
    ],
)
def test_wrong_arguments_are_errors(args, op):
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        scaled_residual(*args)


def test_arguments_that_only_kernels_mind():
    fused = require_fused()
    for x, alpha in ((X.long(), ALPHA), (X, ALPHA.double()), (torch.tensor(1.0), ALPHA)):
        with pytest.raises(RuntimeError, match="prores: "):
            fused.scaled_residual(x, x, alpha)
    for rng in (torch.ones(2), torch.ones(1, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match="prores: rng"):
            torch.ops.prores.scaled_residual(X, X, ALPHA, None, rng, 0.5, 1.0)


def run_fused(shape, dtypes):
    """Results and gradients with everything there is: bias, dropout, scaled residual."""
    fused = require_fused()
    leaves, grad = inputs(shape, dtypes)
    torch.manual_seed(4)
    return forward_backward(
        lambda x, residual, bias: fused.scaled_residual(x, residual, torch.tensor(1 / 3), bias, 0.3, True, 1.5),
        leaves,
        grad,
    )


@pytest.mark.parametrize("shape", [(130, 1025), (7, 20001)], ids=str)
def test_one_and_two_threads_agree_bit_for_bit(shape):
    for dtypes in DTYPE_PAIRS:
        with threads(1):
            one = run_fused(shape, dtypes)
        with threads(2):
            assert all(map(same_bits, run_fused(shape, dtypes), one))


@pytest.mark.parametrize("name", INSTRUCTION_SETS[1:])
def test_instruction_sets_agree(name):
    for dtypes, shape in itertools.product(DTYPE_PAIRS, SHAPES):
        with instruction_set("base"):
            base = run_fused(shape, dtypes)
        with instruction_set(name):
            results = run_fused(shape, dtypes)
        assert torch.equal(results[1] == 0, base[1] == 0)  # the mask
        for result, other in zip(results, base, strict=True):
            eps = 4 * torch.finfo(result.dtype).eps
            assert result.numel() == 0 or (result - other).abs().max() <= eps * other.abs().max()


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_results_that_bypass_the_caches(name):
    """32 MiB and more, in rows that begin anywhere; the same rows a few at a time do not bypass them."""
    fused = require_fused()
    alpha = torch.tensor(1 / 3)
    for dtype, hidden in ((torch.float32, 4099), (torch.bfloat16, 8191)):
        generator = torch.Generator().manual_seed(0)
        x, residual, grad = (torch.randn(2100, hidden, generator=generator).to(dtype) for _ in range(3))
        bias = torch.randn(hidden, generator=generator).to(dtype)

        def results(rows, leaves=(x, residual, bias), grad=grad):
            x, residual, bias = leaves
            leaves = [leaf.detach().requires_grad_() for leaf in (x[rows], residual[rows], bias)]
            out = fused.scaled_residual(leaves[0], leaves[1], alpha, leaves[2], residual_scale=1.5)
            stream, normed = fused.scaled_residual_rms_norm(leaves[0], leaves[1], alpha, leaves[2], 1e-5)
            grads = torch.autograd.grad([out, stream, normed], leaves[:2], [grad[rows]] * 3)
            return [out.detach(), stream.detach(), normed.detach(), *grads]

        with instruction_set(name):
            whole = results(slice(None))
            for rows in (slice(0, 3), slice(1049, 1052), slice(2097, 2100)):
                assert all(same_bits(a[rows], b) for a, b in zip(whole, results(rows), strict=True))
