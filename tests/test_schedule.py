"""alpha(l, t) against the paper's formulas, written out here once more in plain Python."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prores import SCHEDULES, Schedule, alpha
from megatron_prores.errors import UserError
from megatron_prores.schedule import describe, format_steps

# Table 5 of the paper; `delayed` is the form that summaries of it give, over the total warm-up W = T L.


def linear(t, l, L, T):
    return min(t / (T * l), 1.0)


def linear_sqrt(t, l, L, T):
    return min(t / (T * l), 1.0) ** 0.5


def linear_square(t, l, L, T):
    return min(t / (T * l), 1.0) ** 2


def equal(t, l, L, T):
    return min(t / T, 1.0)


def reverse(t, l, L, T):
    return min(t / (T * (L - l + 1)), 1.0)


def stagewise(t, l, T, m):
    window = (t - T * (l - 1)) / T
    return min(max(window, 0.0), 1.0) * (1.0 - m) + m


def stagewise_0(t, l, L, T):
    return stagewise(t, l, T, 0.0)


def stagewise_L(t, l, L, T):
    return stagewise(t, l, T, 1.0 / L)


def stagewise_sqrt_l(t, l, L, T):
    return stagewise(t, l, T, 1.0 / math.sqrt(l))


def fix_L(t, l, L, T):
    return 1.0 / L


def fix_sqrt_L(t, l, L, T):
    return 1.0 / math.sqrt(L)


def fix_sqrt_l(t, l, L, T):
    return 1.0 / math.sqrt(l)


def delayed(t, l, L, T):
    W = T * L
    start = (l - 1) / L * W
    return min(max((t - start) / (W - start), 0.0), 1.0)


def none(t, l, L, T):
    return 1.0


FORMULAS = {
    "linear": linear,
    "linear-sqrt": linear_sqrt,
    "linear-square": linear_square,
    "equal": equal,
    "reverse": reverse,
    "stagewise-0": stagewise_0,
    "stagewise-L": stagewise_L,
    "stagewise-sqrt-l": stagewise_sqrt_l,
    "fix-L": fix_L,
    "fix-sqrt-L": fix_sqrt_L,
    "fix-sqrt-l": fix_sqrt_l,
    "delayed": delayed,
    "none": none,
}
CONSTANT = {"fix-L", "fix-sqrt-L", "fix-sqrt-l", "none"}
WARMING_UP = sorted(set(FORMULAS) - CONSTANT)


def test_names():
    assert set(SCHEDULES) == set(FORMULAS)
    assert len({describe(name) for name in SCHEDULES}) == len(SCHEDULES)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("L", [1, 2, 24, 120])
@pytest.mark.parametrize("T", [1000, 7])
def test_formula(name, L, T):
    W = T * L
    steps = [0, 1, T - 1, T, T + 1, W // 2, T * (L // 2) + T // 3, W - 1, W, W + 1, 10 * W]
    expected = [[FORMULAS[name](t, l, L, T) for l in range(1, L + 1)] for t in steps]
    # 1e-12: the formulas above round differently, most of all where delayed and stagewise subtract.
    np.testing.assert_allclose(Schedule(name, L, T).alpha(steps), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "step", "expected"),
    [
        ("linear", 1500, [1.0, 0.75, 0.5, 0.375]),
        ("linear-sqrt", 1000, [1.0, 0.5**0.5, (1 / 3) ** 0.5, 0.5]),
        ("linear-square", 1000, [1.0, 0.25, 1 / 9, 0.0625]),
        ("equal", 250, [0.25, 0.25, 0.25, 0.25]),
        ("reverse", 1500, [0.375, 0.5, 0.75, 1.0]),
        ("stagewise-0", 1500, [1.0, 0.5, 0.0, 0.0]),
        ("stagewise-L", 1500, [1.0, 0.625, 0.25, 0.25]),
        ("stagewise-sqrt-l", 3500, [1.0, 1.0, 1.0, 0.75]),
        ("fix-L", 1500, [0.25, 0.25, 0.25, 0.25]),
        ("fix-sqrt-L", 1500, [0.5, 0.5, 0.5, 0.5]),
        ("fix-sqrt-l", 1500, [1.0, 0.5**0.5, (1 / 3) ** 0.5, 0.5]),
        ("delayed", 2000, [0.5, 1 / 3, 0.0, 0.0]),
        ("none", 0, [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_by_hand(name, step, expected):
    """Four layers, T = 1000: numbers that can be checked in one's head."""
    np.testing.assert_allclose(alpha(name, step=step, num_layers=4), expected, rtol=1e-15)


def test_shapes():
    schedule = Schedule("linear", 3, 10)
    assert schedule.alpha(4).shape == (3,)
    assert schedule.alpha([[0, 1], [2, 3]]).shape == (2, 2, 3)
    assert schedule.alpha(4).dtype == np.float64
    np.testing.assert_array_equal(schedule.alpha(np.arange(5))[4], schedule.alpha(4))
    # A result belongs to the caller: writing to it is allowed, and changes nothing else.
    mine = schedule.alpha(4)
    mine[:] = 0.0
    assert schedule.alpha(4).min() > 0.0


# No time limit per example: the machine may be busy with something else.
no_deadline = settings(deadline=None)

names = st.sampled_from(SCHEDULES)
depths = st.integers(1, 150)
warmups = st.fractions(min_value=Fraction(1, 100), max_value=10**6, max_denominator=1000)


@st.composite
def points(draw):
    """A schedule, and a step from its start to a little past its end."""
    schedule = Schedule(draw(names), draw(depths), draw(warmups))
    longest = schedule.warmup_steps * schedule.num_layers
    return schedule, draw(st.integers(0, math.ceil(longest * Fraction(11, 10))))


@no_deadline
@given(points())
def test_between_zero_and_one(point):
    schedule, step = point
    values = schedule.alpha(step)
    assert np.all((values >= 0.0) & (values <= 1.0))


@no_deadline
@given(points(), st.integers(1, 1000))
def test_never_falls_over_time(point, later):
    schedule, step = point
    assert np.all(schedule.alpha(step + later) >= schedule.alpha(step))


@no_deadline
@given(points())
def test_order_of_the_layers(point):
    schedule, step = point
    differences = np.diff(schedule.alpha(step))
    assert np.all(differences >= 0.0 if schedule.name == "reverse" else differences <= 0.0)


@no_deadline
@given(st.sampled_from(WARMING_UP), st.integers(2, 150), st.integers(1, 10**7))
def test_exactly_one_at_the_end_and_not_before(name, L, W):
    schedule = Schedule.resolve(name, L, total_warmup_steps=W)
    assert schedule.total_steps == W
    assert np.all(schedule.alpha(W) == 1.0)
    assert schedule.alpha(W - 1).min() < 1.0


@no_deadline
@given(st.sampled_from(sorted(CONSTANT)), depths, st.integers(0, 10**9))
def test_constant(name, L, step):
    schedule = Schedule(name, L)
    assert schedule.total_steps == 0
    np.testing.assert_array_equal(schedule.alpha(step), schedule.alpha(0))


@pytest.mark.parametrize(("L", "W"), [(24, 1000), (7, 100), (120, 1), (3, 10**12 + 1)])
def test_total_that_the_layers_do_not_divide(L, W):
    """Layer l reaches 1 at W l / L, not at the nearest multiple of W // L."""
    schedule = Schedule.resolve("linear", L, total_warmup_steps=W)
    for l in range(1, L + 1):
        end = -(-W * l // L)  # the first whole step that is not before W l / L
        assert schedule.alpha(end)[l - 1] == 1.0
        assert schedule.alpha(end - 1)[l - 1] < 1.0


def test_warmup_given_three_ways():
    assert Schedule.resolve("linear", 24).warmup_steps == 1000
    assert Schedule.resolve("linear", 24, warmup_steps=7).total_steps == 168
    assert Schedule.resolve("linear", 24, total_warmup_steps=1000).warmup_steps == Fraction(125, 3)
    assert Schedule.resolve("equal", 24, total_warmup_steps=1000).warmup_steps == 1000
    assert Schedule.resolve("linear", 4, warmup_fraction=0.1, train_iters=999).total_steps == 100
    assert Schedule.resolve("linear", 4, warmup_fraction=1e-6, train_iters=999).total_steps == 1
    assert Schedule.resolve("fix-L", 4, total_warmup_steps=1000).total_steps == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": 10, "total_warmup_steps": 100}, "T=10 and W=100"),
        ({"warmup_steps": 10, "warmup_fraction": 0.5, "train_iters": 100}, "T=10 and fraction=0.5"),
        ({"total_warmup_steps": 10, "warmup_fraction": 0.5, "train_iters": 100}, "W=10 and fraction=0.5"),
        ({"warmup_fraction": 0.5}, "run's length"),
        ({"warmup_fraction": 0.5, "train_iters": 0}, "run's length"),
        ({"warmup_fraction": 0.5, "train_iters": -5}, "run's length"),
        ({"warmup_fraction": 0.0, "train_iters": 100}, "above 0 and at most 1"),
        ({"warmup_fraction": 1.1, "train_iters": 100}, "above 0 and at most 1"),
        ({"warmup_fraction": math.nan, "train_iters": 100}, "above 0 and at most 1"),
        ({"total_warmup_steps": 0}, "total ProRes warm-up W"),
        ({"total_warmup_steps": -1}, "total ProRes warm-up W"),
        ({"total_warmup_steps": "100"}, "total ProRes warm-up W"),
    ],
)
def test_resolve_refuses(settings, message):
    with pytest.raises(UserError, match=message):
        Schedule.resolve("linear", 4, **settings)


@pytest.mark.parametrize("T", [0, -1, math.nan, math.inf, -math.inf, 1e300, None, "1000", True])
def test_bad_warmup(T):
    with pytest.raises(UserError, match="warm-up T must be a positive number"):
        Schedule("linear", 4, T)


@pytest.mark.parametrize("L", [0, -1, 1.5, math.nan, math.inf, None, "4", True])
def test_bad_number_of_layers(L):
    with pytest.raises(UserError, match="number of layers must be a whole number"):
        Schedule("linear", L)


@pytest.mark.parametrize("step", [-1, math.nan, [0, 1, -1], np.arange(2000) - 1])
def test_bad_step(step):
    with pytest.raises(UserError, match="step must be >= 0") as caught:
        Schedule("linear", 4).alpha(step)
    assert "\n" not in str(caught.value)


def test_unknown_name():
    with pytest.raises(UserError, match=r"'linaer' \(did you mean linear\?\).*stagewise-sqrt-l"):
        Schedule("linaer", 4)


@pytest.mark.parametrize("T", [np.int64(1000), np.float32(1000), np.float64(1000), 1000.0, Fraction(1000)])
def test_any_kind_of_number(T):
    assert Schedule("linear", np.int32(4), T) == Schedule("linear", 4, 1000)


def test_text():
    assert str(Schedule("linear", 24)) == "linear, T = 1000, W = 24000 steps"
    assert str(Schedule.resolve("linear", 24, total_warmup_steps=1000)) == "linear, T = 41.6667, W = 1000 steps"
    assert str(Schedule("fix-L", 24)) == "fix-L"
    assert format_steps(Fraction(12345678)) == "12345678"
