"""The residual add and the RMSNorm after it, in one operator, against float64 and against the two one by one."""

import itertools

import pytest
import torch
from op_cases import (
    ALPHAS,
    CONVERTED_PAIRS,
    DTYPE_PAIRS,
    INSTRUCTION_SETS,
    SHAPES,
    assert_as_exact_as_torch,
    forward_backward,
    instruction_set,
    norm_inputs,
    require_fused,
    same_bits,
    threads,
)
from torch.nn import functional as F

from megatron_prores.ops import scaled_residual, scaled_residual_rms_norm

EPS = 1e-5


def plain(x, residual, bias, weight, alpha, residual_scale=1.0):
    """The formulas in the residual's dtype, one torch operation after another; the norm in the weight's."""
    x = x.to(residual.dtype)
    if bias is not None:
        x = x + bias.to(residual.dtype)
    stream = residual * residual_scale + x * alpha
    return stream, F.rms_norm(stream, weight.shape, weight.to(stream.dtype), EPS).to(weight.dtype)


def assert_exact(leaves, grads, alpha, residual_scale=1.0, case=""):
    alpha = torch.tensor(alpha)
    assert_as_exact_as_torch(
        lambda x, residual, bias, weight: scaled_residual_rms_norm(
            x, residual, alpha, weight, EPS, bias, residual_scale=residual_scale
        ),
        lambda x, residual, bias, weight: plain(x, residual, bias, weight, alpha.item(), residual_scale),
        leaves,
        *grads,
        case=f"{tuple(leaves[0].shape)}, alpha {alpha}, bias {leaves[2] is not None} {case}",
    )


@pytest.mark.parametrize("residual_scale", [1.0, 1.7])
@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_agrees_with_float64(dtypes, residual_scale, op):
    for shape, alpha, with_bias in itertools.product(SHAPES, ALPHAS, [True, False]):
        assert_exact(*norm_inputs(shape, dtypes, with_bias), alpha, residual_scale)


@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_a_row_of_a_million(dtypes, op):
    assert_exact(*norm_inputs((2, 2**20 + 3), dtypes, with_bias=False), 1 / 3)


@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_gradients_of_one_result_only(dtypes, op):
    for shape in SHAPES:
        if shape[-1] == 1:  # the norm of one number is its sign: what is left of its gradient is rounding
            continue
        leaves, (d_stream, d_normed) = norm_inputs(shape, dtypes)
        assert_exact(leaves, [d_stream, None], 1 / 3, case="d_stream")
        assert_exact(leaves, [None, d_normed], 1 / 3, case="d_normed")


@pytest.mark.parametrize("dtypes", [*DTYPE_PAIRS, *CONVERTED_PAIRS], ids=str)
def test_types_without_a_kernel_are_the_add_and_torchs_norm(dtypes, op):
    (x, residual, bias, weight), grads = norm_inputs((5, 17, 33), dtypes)
    if dtypes in DTYPE_PAIRS:  # the others' weight has another dtype than x once it is converted
        weight = weight.to(torch.bfloat16 if dtypes[0] == torch.float32 else torch.float32)
    alpha = torch.tensor(1 / 3)

    def one_by_one(x, residual, bias, weight):
        stream = scaled_residual(x, residual, alpha, bias)
        return stream, F.rms_norm(stream, weight.shape, weight.to(stream.dtype), EPS).to(weight.dtype)

    results = [
        forward_backward(function, [x, residual, bias, weight], grads[0], grads[1].to(weight.dtype))
        for function in (
            lambda *leaves: scaled_residual_rms_norm(*leaves[:2], alpha, leaves[3], EPS, leaves[2]),
            one_by_one,
        )
    ]
    assert all(map(same_bits, *results))


@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_rows_of_zeros_and_of_large_and_small_numbers(dtypes, op):
    leaves, grads = norm_inputs((6, 33), dtypes)
    rows = torch.tensor([0.0, 1.0, 1e-3, 1e-8, 50.0, 100.0], dtype=torch.float64)[:, None]
    leaves = [*((leaf * rows).to(leaf.dtype) for leaf in leaves[:2]), None, leaves[3]]
    for row in range(len(rows)):  # by itself: the gradients of the small ones are large
        one = [leaf if leaf is None or leaf.ndim == 1 else leaf[row : row + 1] for leaf in leaves]
        assert_exact(one, [grad[row : row + 1] for grad in grads], 0.5, case=f"row {row}")


@pytest.mark.parametrize("prob", [0.0, 0.3])
@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_the_stream_is_that_of_the_add(dtypes, prob, op):
    for shape in SHAPES:
        x, residual, bias, weight = norm_inputs(shape, dtypes)[0]
        alpha = torch.tensor(1 / 3)
        torch.manual_seed(3)
        stream, normed = scaled_residual_rms_norm(x, residual, alpha, weight, EPS, bias, prob)
        torch.manual_seed(3)
        assert same_bits(stream, scaled_residual(x, residual, alpha, bias, prob))
        assert normed.dtype == dtypes[0] and normed.shape == x.shape


@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_alpha_one_passes_one_gradient_to_both(dtypes, op):
    leaves, grads = norm_inputs((5, 123, 123), dtypes, with_bias=False)
    stream, _, d_x, d_residual, _ = forward_backward(
        lambda x, residual, bias, weight: scaled_residual_rms_norm(x, residual, torch.tensor(1.0), weight, EPS),
        leaves,
        *grads,
    )
    assert same_bits(stream, leaves[1] + leaves[0].to(dtypes[1]))
    assert same_bits(d_x, d_residual.to(dtypes[0]))


@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_nan_and_infinity_stay_in_their_rows(dtypes, op):
    leaves, grads = norm_inputs((4, 33), dtypes)

    def run(x):
        return forward_backward(
            lambda x, residual, bias, weight: scaled_residual_rms_norm(
                x, residual, torch.tensor(0.5), weight, EPS, bias
            ),
            [x, *leaves[1:]],
            *grads,
        )

    x = leaves[0].clone()
    x[1, 7], x[2, 3] = float("nan"), float("inf")
    for result, clean in zip(run(x)[:4], run(leaves[0])[:4], strict=True):  # not the sums over rows
        assert same_bits(result[[0, 3]], clean[[0, 3]])
    stream, normed, d_x, d_residual = run(x)[:4]
    assert stream[1].isnan().sum() == 1 and stream[2, 3] == float("inf")
    assert normed[1].isnan().all() and normed[2, 3].isnan() and not normed[2, :3].any()
    assert d_x[1].isnan().all() and d_residual[1].isnan().all()


@pytest.mark.parametrize("prob", [0.0, 0.3])
def test_gradcheck(prob, op):
    for with_bias, alpha, residual_scale in ((True, 1 / 3, 1.5), (True, 0.0, 1.0), (False, 1.0, 1.0)):
        leaves, _ = norm_inputs((2, 5), (torch.float64, torch.float64), with_bias)
        scaling = torch.tensor(alpha), residual_scale

        def function(x, residual, weight, bias=None, scaling=scaling):
            torch.manual_seed(2)
            return scaled_residual_rms_norm(x, residual, scaling[0], weight, EPS, bias, prob, residual_scale=scaling[1])

        x, residual, bias, weight = leaves
        leaves = [x, residual, weight] if bias is None else [x, residual, weight, bias]
        assert torch.autograd.gradcheck(function, [leaf.requires_grad_() for leaf in leaves])


@pytest.mark.parametrize(
    ("dtypes", "with_bias", "with_dropout"),
    [((torch.float32, torch.float32), False, False), ((torch.bfloat16, torch.float32), True, True)],
    ids=["least", "most"],
)
def test_opcheck(dtypes, with_bias, with_dropout):
    require_fused()
    (x, residual, bias, weight), grads = norm_inputs((3, 2, 5), dtypes, with_bias)
    rng = torch.tensor([1, 2]) if with_dropout else None
    scaling = (rng, 0.4, 1.5)
    forward, backward = (getattr(torch.ops.prores, f"scaled_residual_rms_norm{end}") for end in ("", "_backward"))
    alpha = torch.tensor(0.3)
    stream, _, rstd = forward(x, residual, alpha, bias, rng, weight, *scaling[1:], EPS)
    torch.library.opcheck(backward, (*grads, stream, rstd, weight, alpha, *scaling, with_bias))
    x, residual, bias, weight = (
        leaf if leaf is None else leaf.requires_grad_() for leaf in (x, residual, bias, weight)
    )
    # Its third result is for the backward pass only and has no gradient, which the last check would ask for.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(forward, (x, residual, alpha, bias, rng, weight, *scaling[1:], EPS), test_utils=checks)


@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_non_contiguous_inputs_and_gradients(dtypes, op):
    (x, residual, bias, weight), (d_stream, d_normed) = norm_inputs((6, 10, 14), dtypes)
    views = [tensor.transpose(0, 1) for tensor in (x, residual, d_stream, d_normed)]
    broadcast = [tensor[:1].expand(10, 10, 14) for tensor in (x, residual, d_stream[0, 0], d_normed[0, 0])]

    def run(x, residual, d_stream, d_normed, bias):
        return forward_backward(
            lambda x, residual, bias, weight: scaled_residual_rms_norm(
                x, residual, torch.tensor(0.3), weight, EPS, bias
            ),
            [x, residual, bias, weight],
            d_stream,
            d_normed,
        )

    for tensors in ((*views, bias.repeat_interleave(3)[::3]), (*broadcast, bias[:1].expand(14))):
        assert not any(tensor.is_contiguous() for tensor in tensors)
        for result, copy in zip(run(*tensors), run(*(t.contiguous() for t in tensors)), strict=True):
            # Sums may follow the layout, and torch's norm takes them in the forward pass too.
            exact = {"atol": 0, "rtol": 0} if op == "fused" else {}
            torch.testing.assert_close(result, copy, **exact)


def test_a_non_contiguous_weight(op):
    leaves, grads = norm_inputs((5, 14), DTYPE_PAIRS[0])
    weight = leaves[3].repeat_interleave(3)[::3]
    assert not weight.is_contiguous()
    assert_exact([*leaves[:3], weight], grads, 1 / 3)
    assert_exact([*leaves[:3], weight[:1].expand(14)], grads, 1 / 3)


def test_alpha_is_read_when_the_operator_runs(op):
    alphas = torch.tensor([0.25, 0.5])  # of a stage
    x, residual = torch.ones(2, 3), torch.zeros(2, 3)
    for value in (0.125, 1.0):
        alphas[1].fill_(value)
        stream, normed, d_x, _, _ = forward_backward(
            lambda x, residual, weight: scaled_residual_rms_norm(x, residual, alphas[1], weight, 0.0),
            [x, residual, torch.ones(3)],
            torch.ones(2, 3),
            torch.zeros(2, 3),
        )
        assert torch.equal(stream, x * value) and torch.equal(d_x, x * value)
        torch.testing.assert_close(normed, x)


def test_alpha_that_changes_before_backward_is_an_error(op):
    alphas = torch.tensor([0.25, 0.5])
    x = torch.ones(2, 3, requires_grad=True)
    stream, normed = scaled_residual_rms_norm(x, torch.zeros(2, 3), alphas[0], torch.ones(3), EPS)
    alphas.fill_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (stream + normed).sum().backward()


def test_a_stream_that_changes_before_backward_is_an_error():
    fused = require_fused()  # its backward pass reads the stream, which is a result as well
    x = torch.ones(2, 3, requires_grad=True)
    stream, normed = fused.scaled_residual_rms_norm(x, torch.zeros(2, 3), torch.tensor(0.5), torch.ones(3), EPS)
    with torch.no_grad():
        stream.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        normed.sum().backward()


def test_wrong_arguments_are_errors(op):
    x, alpha, weight = torch.ones(4, 3), torch.tensor(1.0), torch.ones(3)
    for args in ((x, torch.ones(4, 4), alpha, weight), (x, x, torch.ones(2), weight), (x, x, alpha, torch.ones(4))):
        with pytest.raises(RuntimeError):
            scaled_residual_rms_norm(*args, EPS)


def run_fused(shape, dtypes):
    """Results and gradients with everything there is: bias, dropout, scaled residual."""
    fused = require_fused()
    leaves, grads = norm_inputs(shape, dtypes)
    torch.manual_seed(4)
    return forward_backward(
        lambda x, residual, bias, weight: fused.scaled_residual_rms_norm(
            x, residual, torch.tensor(1 / 3), weight, EPS, bias, 0.3, True, 1.5
        ),
        leaves,
        *grads,
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
        for result, other in zip(results, base, strict=True):
            eps = 16 * torch.finfo(result.dtype).eps
            assert result.numel() == 0 or (result - other).abs().max() <= eps * other.abs().max()
