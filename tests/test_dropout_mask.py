"""The fused operators' dropout mask: what is drawn, from which random state, and that every pass draws the same."""

import itertools

import numpy as np
import pytest
import torch
from megatron.core import tensor_parallel
from op_cases import (
    DTYPE_PAIRS,
    INSTRUCTION_SETS,
    SHAPES,
    assert_as_exact_as_torch,
    forward_backward,
    inputs,
    instruction_set,
    norm_inputs,
    require_fused,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megatron_prores.megatron import host
from megatron_prores.ops import scaled_residual, scaled_residual_rms_norm

RNGS = [(0, 0), (1, 2), (-1, -1), (2**62 + 12345, -(2**61) - 54321)]
ONE = torch.tensor(1.0)


def philox(counter, seed):
    """Philox4x32-10 as Salmon et al. (2011) describe it: counters [n, 4] and a key of 64 bits to words [n, 4]."""
    low = 2**32 - 1
    words = [counter[:, i].astype(np.uint64) for i in range(4)]
    key = [seed & low, seed >> 32 & low]
    for _ in range(10):
        product_0, product_1 = np.uint64(0xD2511F53) * words[0], np.uint64(0xCD9E8D57) * words[2]
        words = [
            (product_1 >> np.uint64(32)) ^ words[1] ^ np.uint64(key[0]),
            product_1 & np.uint64(low),
            (product_0 >> np.uint64(32)) ^ words[3] ^ np.uint64(key[1]),
            product_0 & np.uint64(low),
        ]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return np.stack(words, -1).astype("<u4")


def kept(shape, rng, prob):
    """Where an element stays: as csrc/philox.h describes it."""
    count = torch.Size(shape).numel()
    counter = np.zeros((-(-count // 8), 4), np.uint64)
    counter[:, 0] = np.arange(len(counter))
    counter[:, 2], counter[:, 3] = rng[1] & 2**32 - 1, rng[1] >> 32 & 2**32 - 1
    bits = philox(counter, rng[0]).view("<u2").reshape(-1)[:count]
    return torch.from_numpy(bits.astype(np.int64) >= np.floor(prob * 65536 + 0.5)).view(shape)


def keep_scale(prob):
    """What keeps the expectation; the probability is a multiple of 1/65536."""
    return 65536 / (65536 - int(prob * 65536 + 0.5))


def drawn(shape, prob, **kwargs):
    """Where an element stays, as the operator draws it from torch's generator now."""
    return scaled_residual(torch.ones(shape), torch.zeros(shape), ONE, prob=prob, **kwargs) != 0


def assert_independent(first, second):
    """No correlation beyond 4 sigma."""
    first, second = (mask.double().flatten() - mask.double().mean() for mask in (first, second))
    correlation = (first @ second / (first.norm() * second.norm())).item()
    assert abs(correlation) < 4 / len(first) ** 0.5


def test_the_reference_gives_the_published_numbers():
    # From the paper's library Random123 (kat_vectors): zeros, ones, and digits of pi.
    for counter, key, expected in (
        ([0] * 4, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], 0x299F31D0A4093822, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ):
        words = philox(np.array([counter], np.uint64), key)[0]
        assert " ".join(f"{word:08x}" for word in words) == expected


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_the_mask_is_philox(name):
    with instruction_set(name):
        for rng, shape, prob in itertools.product(RNGS, [*SHAPES, (3, 4099), (9000,)], [0.1, 0.5, 0.9]):
            mask = kept(shape, rng, prob)
            for dtypes in DTYPE_PAIRS if rng == RNGS[-1] and prob == 0.5 else DTYPE_PAIRS[:1]:
                x, residual = torch.ones(shape, dtype=dtypes[0]), torch.zeros(shape, dtype=dtypes[1])
                scaling = ONE, torch.tensor(rng), prob, 1.5
                out = torch.ops.prores.scaled_residual(x, residual, ONE, None, *scaling[1:])
                assert torch.equal(out != 0, mask)
                d_x, _, d_bias = torch.ops.prores.scaled_residual_backward(
                    torch.ones_like(residual), *scaling, dtypes[0], True
                )
                assert torch.equal(d_x != 0, mask)
                if x.numel():
                    sums = keep_scale(prob) * mask.double().view(-1, shape[-1]).sum(0)
                    rtol = 1e-5 if dtypes[0].itemsize > 2 else 0.01
                    torch.testing.assert_close(d_bias.double(), sums, rtol=rtol, atol=0)
                weight = torch.ones(shape[-1], dtype=dtypes[0])
                stream, _, rstd = torch.ops.prores.scaled_residual_rms_norm(
                    x, residual, ONE, None, scaling[1], weight, prob, 1.5, 1e-5
                )
                assert torch.equal(stream, out)
                d_x = torch.ops.prores.scaled_residual_rms_norm_backward(
                    torch.ones_like(stream), torch.zeros_like(x), stream, rstd, weight, *scaling, True
                )[0]
                assert torch.equal(d_x != 0, mask)


@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_agrees_with_float64_and_the_same_mask(dtypes):
    require_fused()
    prob, rng, alpha, eps = 0.3, RNGS[-1], torch.tensor(1 / 3), 1e-5
    scale = keep_scale(prob)

    def fused(x, residual, bias, weight):
        return torch.ops.prores.scaled_residual(x, residual, alpha, bias, torch.tensor(rng), prob, 1.0)

    def fused_norm(x, residual, bias, weight):
        args = x, residual, alpha, bias, torch.tensor(rng), weight, prob, 1.0, eps
        return torch.ops.prores.scaled_residual_rms_norm(*args)[:2]

    def formula(x, residual, bias, weight):
        x = x.to(residual.dtype)
        if bias is not None:
            x = x + bias.to(residual.dtype)
        return residual + torch.where(mask, x * scale, 0) * alpha.item()

    def norm_formula(x, residual, bias, weight):
        stream = formula(x, residual, bias, weight)
        return stream, F.rms_norm(stream, weight.shape, weight.to(stream.dtype), eps).to(weight.dtype)

    for shape, with_bias in itertools.product([(5, 123, 123), (7, 1, 33), (2, 1025)], [True, False]):
        mask = kept(shape, rng, prob)
        leaves, grads = norm_inputs(shape, dtypes, with_bias)
        assert_as_exact_as_torch(fused, formula, leaves, grads[0], case=f"{shape}")
        assert_as_exact_as_torch(fused_norm, norm_formula, leaves, *grads, case=f"{shape}, norm")


@pytest.mark.parametrize("prob", [1e-3, 0.1, 0.5, 0.9, 1 - 1e-3])
def test_rate_and_expectation(prob, op):
    torch.manual_seed(1)
    shape = (1024, 1025)
    count = shape[0] * shape[1]
    out = scaled_residual(torch.ones(shape), torch.zeros(shape), ONE, prob=prob)
    sigma = (prob * (1 - prob) / count) ** 0.5
    rate = (out == 0).double().mean().item()
    assert abs(rate - prob) < 4 * sigma + 0.5 / 65536  # fused: a multiple of 1/65536
    assert abs(out.double().mean().item() - 1) < 4 * sigma / (1 - prob)
    values = out.unique()
    assert len(values) == 2 and values[1].item() == pytest.approx(1 / (1 - prob), rel=0.01)


@pytest.mark.parametrize("prob", [0.0, 1e-9, 1.0])
@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_nothing_or_everything_is_dropped(dtypes, prob, op):
    (x, residual, bias), grad = inputs((5, 123, 33), dtypes)
    torch.manual_seed(1)
    out, d_x, d_residual, d_bias = forward_backward(
        lambda x, residual, bias: scaled_residual(x, residual, torch.tensor(0.5), bias, prob), [x, residual, bias], grad
    )
    if prob == 1:
        assert torch.equal(out, residual) and not d_x.any() and not d_bias.any()
    else:
        expected = scaled_residual(x, residual, torch.tensor(0.5), bias)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(d_x, (grad / 2).to(d_x.dtype))
    assert torch.equal(d_residual, grad)


def test_evaluation_drops_nothing_and_draws_nothing(op):
    x, residual = torch.ones(10, 33), torch.full((10, 33), 2.0)
    state = torch.get_rng_state()
    for kwargs in ({"prob": 0.5, "training": False}, {"prob": 0.0}):
        assert torch.equal(scaled_residual(x, residual, torch.tensor(0.5), **kwargs), residual + 0.5)
        stream, _ = scaled_residual_rms_norm(x, residual, torch.tensor(0.5), torch.ones(33), 1e-5, **kwargs)
        assert torch.equal(stream, residual + 0.5)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_dropped_is_zero_whatever_it_was():
    fused = require_fused()
    for dtypes in DTYPE_PAIRS:
        for value in (float("nan"), float("inf")):
            x, residual = torch.full((40, 33), value, dtype=dtypes[0]), torch.full((40, 33), 2.0, dtype=dtypes[1])
            weight, mask = torch.ones(33, dtype=dtypes[0]), kept((40, 33), (1, 2), 0.5)
            scaling = torch.tensor(0.5), torch.tensor((1, 2)), 0.5
            out = torch.ops.prores.scaled_residual(x, residual, scaling[0], None, *scaling[1:], 1.0)
            stream = torch.ops.prores.scaled_residual_rms_norm(
                x, residual, scaling[0], None, scaling[1], weight, 0.5, 1.0, 1e-5
            )[0]
            d_x, _, _ = torch.ops.prores.scaled_residual_backward(
                torch.full_like(residual, value), *scaling, 1.0, dtypes[0], False
            )
            for result, left in ((out, 2.0), (stream, 2.0), (d_x, 0.0)):
                assert (result[~mask] == left).all() and not result[mask].isfinite().any()
            assert (fused.scaled_residual(x, residual, torch.tensor(0.5), prob=1.0) == 2).all()


def test_masks_of_layers_and_microbatches_are_independent(op):
    torch.manual_seed(1)
    masks = [drawn((64, 1025), 0.5) for _ in range(6)]
    for first, second in itertools.combinations(masks, 2):
        assert_independent(first, second)
    # Nor do the elements of a mask follow each other: neighbours, the words of a counter, rows.
    for distance in (1, 2, 4, 7, 8, 16, 64, 1024, 1025):
        flat = masks[0].flatten()
        assert_independent(flat[distance:], flat[:-distance])


def test_neighbouring_seeds_give_independent_masks():
    require_fused()
    rngs = [(7, 7), (8, 7), (7, 8), (7 + 2**32, 7), (7, 7 + 2**32)]

    def mask(rng):
        args = torch.ones(64, 1025), torch.zeros(64, 1025), ONE, None
        return torch.ops.prores.scaled_residual(*args, torch.tensor(rng), 0.5, 1.0) != 0

    for first, second in itertools.combinations(map(mask, rngs), 2):
        assert_independent(first, second)


def test_one_seed_gives_one_mask(op):
    masks = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        masks.append([drawn((4, 33), 0.5) for _ in range(2)])
    assert all(map(torch.equal, masks[0], masks[1]))
    assert not any(map(torch.equal, masks[0], masks[2])) and not torch.equal(*masks[0])


@pytest.fixture
def megatron():
    """Megatron's random states on the host."""
    host.install()
    yield
    host.uninstall()


def test_tensor_parallel_ranks(megatron, op):
    ranks = []
    for rank in range(2):
        tensor_parallel.model_parallel_cuda_manual_seed(1, tp_rank=rank, ep_rank=0, etp_rank=rank, force_reset_rng=True)
        whole = drawn((64, 1025), 0.5)
        with tensor_parallel.get_cuda_rng_tracker().fork():  # as Megatron does under sequence parallelism
            parts = [drawn((64, 1025), 0.5) for _ in range(2)]
        ranks.append((whole, *parts, drawn((64, 1025), 0.5)))
    # Every rank has all of the stream: the same mask. A part of it each: another mask.
    assert torch.equal(ranks[0][0], ranks[1][0]) and torch.equal(ranks[0][3], ranks[1][3])
    for first, second in itertools.combinations([*ranks[0], *ranks[1][1:3]], 2):
        assert_independent(first, second)


def block(x, residual, bias, weight):
    """Two adds with dropout, the first with its norm."""
    stream, normed = scaled_residual_rms_norm(x, residual, torch.tensor(0.5), weight, 1e-5, bias, 0.3)
    return scaled_residual(normed * x, stream, torch.tensor(0.25), None, 0.4)


def sequence_parallel_block(*leaves):
    with tensor_parallel.get_cuda_rng_tracker().fork():
        return block(*leaves)


@pytest.mark.parametrize("kind", ["torch, reentrant", "torch", "Megatron", "Megatron, sequence parallel"])
def test_recomputation_repeats_the_mask(megatron, kind, op):
    plain = sequence_parallel_block if "sequence" in kind else block

    def recomputed(*leaves):
        if "Megatron" in kind:
            return tensor_parallel.checkpoint(plain, False, *leaves)
        return checkpoint(plain, *leaves, use_reentrant="reentrant" in kind)

    results = []
    for function in (plain, recomputed):
        tensor_parallel.model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True)
        # Leaves of their own: gradients that add up would do so in another order.
        leaves = [[leaf.requires_grad_() for leaf in norm_inputs((5, 33), DTYPE_PAIRS[0])[0]] for _ in range(2)]
        outs = [function(*own) for own in leaves]
        after = drawn((5, 33), 0.5)
        (outs[0] * outs[1]).sum().backward()
        results.append([*(out.detach() for out in outs), *(leaf.grad for own in leaves for leaf in own), after])
    assert not torch.equal(*results[0][:2])
    assert all(map(torch.equal, *results))
