"""The spike score, on series whose spikes are known and against a loop in exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_prores.spikes import find_spikes, spike_score


def noise(count, seed=0):
    values = np.random.default_rng(seed).normal(size=count)
    values[:20] = np.tile([-1, 1], 10)  # among the first few, noise alone may be seven standard deviations off
    return values


def with_spikes(places, count=3000, height=50.0):
    values = noise(count)
    values[list(places)] += height
    return np.arange(1, count + 1), values


@pytest.mark.parametrize("height", [50.0, -50.0])
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e9])
def test_spikes_are_found_up_and_down_and_on_any_offset(height, offset):
    places = [500, 501, 1700, 2400]
    steps, values = with_spikes(places, height=height)
    assert np.flatnonzero(find_spikes(steps, values + offset)).tolist() == places
    assert spike_score(steps, values + offset) == pytest.approx(4 / 2401)  # steps 300 to 2700


def test_only_the_middle_of_the_run_counts():
    steps, values = with_spikes([298, 299, 2699, 2700])  # steps 299 and 2701 are outside
    assert find_spikes(steps, values).sum() == 4
    assert spike_score(steps, values) == 2 / 2401
    assert spike_score(steps, values, span=(0.0, 1.0)) == 4 / 3000


def test_ends_that_are_no_binary_fractions_count():
    """0.1 * 70 is more than 7 in floating point."""
    values = np.tile([0.0, 1.0], 35)
    values[6] = 100.0
    assert spike_score(np.arange(1, 71), values) == 1 / 57


def test_a_constant_series_has_none_and_any_other_value_is_one():
    values = np.full(200, 0.1)
    assert not find_spikes(np.arange(200), values).any()
    values[[100, 150]] = np.nextafter(0.1, 1), 7.0
    assert np.flatnonzero(find_spikes(np.arange(200), values, window=20)).tolist() == [100, 150]


def test_exactly_seven_standard_deviations_are_enough():
    steps = np.arange(5)
    assert find_spikes(steps, [-1.0, 1.0, -1.0, 1.0, 7.0])[4]
    assert not find_spikes(steps, [-1.0, 1.0, -1.0, 1.0, np.nextafter(7.0, 0)])[4]


def test_with_fewer_than_two_points_before_it_nothing_is_one():
    assert not find_spikes([1, 2], [0.0, 1e9]).any()
    assert find_spikes([1, 2, 3], [0.0, 0.0, 1e9])[2]
    assert not find_spikes([1, 2, 3000], [0.0, 0.0, 1e9])[2]  # they are too long ago


def test_the_window_is_in_steps():
    """Logged every 100 steps: ten points are 1000 steps."""
    values = np.tile([-1.0, 1.0], 10)
    values[0], values[10] = 1e6, 20.0
    steps = np.arange(0, 2000, 100)
    assert not find_spikes(steps, values)[10]  # the point at step 0 is in the window
    assert find_spikes(steps, values, window=999)[10]


def test_what_follows_an_enormous_spike_is_seen_again_when_it_has_left_the_window():
    values = noise(400)
    values[100], values[300] = 1e30, 30.0
    assert np.flatnonzero(find_spikes(np.arange(400), values, window=150)).tolist() == [100, 300]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_a_spike_and_in_no_window(value):
    steps, values = with_spikes([1500])
    expected = find_spikes(np.delete(steps, [10, 1000]), np.delete(values, [10, 1000]))
    values[[10, 1000]] = value
    found = find_spikes(steps, values)
    assert found[[10, 1000]].all()
    np.testing.assert_array_equal(np.delete(found, [10, 1000]), expected)


def test_empty_series():
    assert math.isnan(spike_score([], []))
    assert math.isnan(spike_score([10], [1.0]))


def loop(steps, values, window, deviations):
    """(is a spike, is too close to tell in floating point)"""
    for step, value in zip(steps, values, strict=True):
        before = [Fraction(v) for s, v in zip(steps, values, strict=True) if step - window <= s < step]
        if len(before) < 2:
            yield False, False
            continue
        mean = sum(before) / len(before)
        variance = sum((v - mean) ** 2 for v in before) / len(before)
        distance, limit = (Fraction(value) - mean) ** 2, Fraction(deviations) ** 2 * variance
        yield distance > 0 and distance >= limit, abs(distance - limit) <= distance * Fraction(1, 10**6)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=30),
    st.data(),
    st.integers(1, 40),
    st.sampled_from([0.5, 1.0, 2.0, 7.0]),
)
def test_against_a_loop(gaps, data, window, deviations):
    number = st.floats(-1e6, 1e6, width=32, allow_subnormal=False) | st.sampled_from([0.0, 1.0, 2.0])
    steps = np.cumsum(gaps)
    values = data.draw(st.lists(number, min_size=len(gaps), max_size=len(gaps)))
    found = find_spikes(steps, values, window, deviations)
    for mine, (expected, unclear) in zip(found, loop(steps.tolist(), values, window, deviations), strict=True):
        assert mine == expected or unclear
