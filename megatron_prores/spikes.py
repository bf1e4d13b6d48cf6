"""Spikes in a loss or a gradient norm, counted as OLMo 2 counts them (arXiv 2501.00656)."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

_BLOCK = 1 << 22
"""Numbers in the windows that are looked at together: 32 MiB."""


def spike_score(
    steps: np.ndarray,
    values: np.ndarray,
    window: int = 1000,
    deviations: float = 7.0,
    span: tuple[float, float] = (0.1, 0.9),
) -> float:
    """Share of the logged points in the middle of a run that are spikes; see `find_spikes`.

    Args:
        steps: int [n], strictly increasing; the run goes from step 0 to the last one.
        values: float [n], the loss or the gradient norm of each step.
        window: in steps.
        deviations: in standard deviations.
        span: the part of the run that is counted, as fractions of its last step, both ends included. Windows reach
            back before it.

    Returns:
        From 0 to 1; NaN where no point lies in the span.
    """
    steps = np.asarray(steps)
    if not len(steps):
        return float("nan")
    first, last = (round(part * float(steps[-1]), 6) for part in span)  # 0.1 * 70 is more than 7
    counted = (steps >= first) & (steps <= last)
    return float(find_spikes(steps, values, window, deviations)[counted].mean()) if counted.any() else float("nan")


def find_spikes(steps: np.ndarray, values: np.ndarray, window: int = 1000, deviations: float = 7.0) -> np.ndarray:
    """Which points are at least `deviations` standard deviations, up or down, from the mean of the steps before them.

    Mean and standard deviation (of the population) are those of the points logged in the `window` steps before a
    point, without the point itself. Where they are all equal, any other value is a spike. With fewer than two of them
    nothing is. NaN and infinity are always spikes, and are left out of the windows of later points.

    Args:
        steps: int [n], strictly increasing, with gaps where not every step was logged.
        values: float [n].

    Returns:
        bool [n].
    """
    steps, values = np.asarray(steps), np.asarray(values, dtype=np.float64)
    finite = np.isfinite(values)
    known_steps, known = steps[finite], values[finite]
    first = np.searchsorted(known_steps, steps - window)
    counts = np.searchsorted(known_steps, steps) - first
    spikes = ~finite
    # Window by window and not from running sums, in which one spike would drown what is summed after it.
    for count in np.unique(counts[finite & (counts >= 2)]):
        windows = sliding_window_view(known, count)
        points = np.flatnonzero(finite & (counts == count))
        for some in np.array_split(points, -(-len(points) * count // _BLOCK)):
            # Differences from the window's first value: exactly 0 in a constant one, and without a common offset.
            base = windows[first[some], 0]
            around = windows[first[some]] - base[:, None]
            distance = np.abs(values[some] - base - around.mean(axis=1))
            spikes[some] = (distance >= deviations * around.std(axis=1)) & (distance > 0)
    return spikes
