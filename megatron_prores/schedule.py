"""alpha(l, t): how far layer l's residual branch is switched on after t optimizer steps.

Every schedule is a pure function of the step t = 0, 1, ..., the 1-based layer l = 1..L and the first layer's
warm-up T, from Table 5 of the ProRes paper (arXiv 2603.05369). Nothing here is state, and nothing needs torch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational, Real

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_prores.errors import UserError, did_you_mean

Array = NDArray[np.float64]


def _ramp(t: Array, T: Fraction, start: Array | int, length: Array | int) -> Array:
    """0 before step T * start, 1 from step T * (start + length) on, linear between.

    Multiplied out by T's denominator, so that both ends are exact for every rational T.
    """
    n, d = float(T.numerator), float(T.denominator)
    return np.clip((t * d - n * start) / (n * length), 0.0, 1.0)


def _stagewise(t: Array, l: Array, T: Fraction, floor: Array | float) -> Array:
    """Layer l warms up from `floor` to 1 during the l-th window of T steps."""
    return _ramp(t, T, l - 1, 1) * (1.0 - floor) + floor


@dataclass(frozen=True)
class _Rule:
    """One row of the table. `windows` is the warm-up's total length in multiples of T."""

    summary: str
    windows: Callable[[int], int]
    formula: Callable[[Array, Array, int, Fraction], Array | float]


def _per_layer(num_layers: int) -> int:
    return num_layers


def _one(num_layers: int) -> int:
    return 1


def _constant(num_layers: int) -> int:
    return 0


# formula(t, l, L, T) with t of shape [..., 1] and l of shape [L]; the result is broadcast to [..., L].
_RULES: dict[str, _Rule] = {
    "linear": _Rule("min(t/(T l), 1): the paper's default", _per_layer, lambda t, l, L, T: _ramp(t, T, 0, l)),
    "linear-sqrt": _Rule("square root of linear", _per_layer, lambda t, l, L, T: np.sqrt(_ramp(t, T, 0, l))),
    "linear-square": _Rule("square of linear: a gentler start", _per_layer, lambda t, l, L, T: _ramp(t, T, 0, l) ** 2),
    "equal": _Rule("min(t/T, 1): all layers together", _one, lambda t, l, L, T: _ramp(t, T, 0, 1)),
    "reverse": _Rule(
        "min(t/(T (L-l+1)), 1): deep layers first", _per_layer, lambda t, l, L, T: _ramp(t, T, 0, L - l + 1)
    ),
    "stagewise-0": _Rule("one layer after another, from 0", _per_layer, lambda t, l, L, T: _stagewise(t, l, T, 0.0)),
    "stagewise-L": _Rule(
        "one layer after another, from 1/L", _per_layer, lambda t, l, L, T: _stagewise(t, l, T, 1.0 / L)
    ),
    "stagewise-sqrt-l": _Rule(
        "one layer after another, from 1/sqrt(l)",
        _per_layer,
        lambda t, l, L, T: _stagewise(t, l, T, 1.0 / np.sqrt(l)),
    ),
    "fix-L": _Rule("constant 1/L", _constant, lambda t, l, L, T: 1.0 / L),
    "fix-sqrt-L": _Rule("constant 1/sqrt(L)", _constant, lambda t, l, L, T: 1.0 / math.sqrt(L)),
    "fix-sqrt-l": _Rule("constant 1/sqrt(l)", _constant, lambda t, l, L, T: 1.0 / np.sqrt(l)),
    # Not in the paper: the form that summaries of it often give.
    "delayed": _Rule(
        "layer l waits T (l-1) steps, then ramps until T L",
        _per_layer,
        lambda t, l, L, T: _ramp(t, T, l - 1, L - l + 1),
    ),
    "none": _Rule("1: ProRes switched off", _constant, lambda t, l, L, T: 1.0),
}

SCHEDULES: tuple[str, ...] = tuple(_RULES)
"""The name of every schedule, as flags, configs, plots and `alpha()` spell it."""

DEFAULT_WARMUP_STEPS = 1000
"""T of the paper's main runs, in optimizer steps."""


# Far outside any run, and inside what a float's numerator and denominator can hold.
_SHORTEST, _LONGEST = 1e-9, 1e15


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _exact(value: Real) -> Fraction:
    """The same number as a fraction of Python integers, for NumPy's numbers too (they would overflow, or not fit)."""
    if isinstance(value, Rational):
        return Fraction(int(value.numerator), int(value.denominator))
    return Fraction(float(value))


def describe(name: str) -> str:
    """One line that says what the schedule does."""
    return _RULES[name].summary


@dataclass(frozen=True)
class Schedule:
    """A schedule with its settings: `Schedule("linear", num_layers=24, warmup_steps=1000)`.

    Args:
        name: one of `SCHEDULES`.
        num_layers: L, the number of decoder layers of the whole model.
        warmup_steps: T, the warm-up of the first layer in optimizer steps. Kept as a fraction, so that a T that
            came from a total length (W / L) gives alpha exactly 1 at step W.

    Raises:
        UserError: unknown name, L not a positive whole number, or T not a positive finite number.
    """

    name: str
    num_layers: int
    warmup_steps: Fraction

    def __init__(self, name: str, num_layers: int, warmup_steps: Real = DEFAULT_WARMUP_STEPS):
        if name not in _RULES:
            raise UserError(
                f"unknown ProRes schedule {name!r}{did_you_mean(name, SCHEDULES)}; choose one of {', '.join(SCHEDULES)}"
            )
        # NaN and infinity leave a remainder of NaN, which is not 0 either.
        if not _is_number(num_layers) or num_layers % 1 != 0 or num_layers < 1:
            raise UserError(f"the number of layers must be a whole number >= 1, not {num_layers!r}")
        if not _is_number(warmup_steps) or not _SHORTEST <= warmup_steps <= _LONGEST:
            raise UserError(f"the ProRes warm-up T must be a positive number of steps, not {warmup_steps!r}")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "num_layers", int(num_layers))
        object.__setattr__(self, "warmup_steps", _exact(warmup_steps))

    @classmethod
    def resolve(
        cls,
        name: str,
        num_layers: int,
        *,
        warmup_steps: Real | None = None,
        total_warmup_steps: int | None = None,
        warmup_fraction: float | None = None,
        train_iters: int | None = None,
    ) -> "Schedule":
        """Build a schedule from T, or from the total warm-up W, or from W as a fraction of the run.

        Raises:
            UserError: two of the three are given, or a fraction without the run's length.
        """
        given = {"T": warmup_steps, "W": total_warmup_steps, "fraction": warmup_fraction}
        given = {key: value for key, value in given.items() if value is not None}
        if len(given) > 1:
            raise UserError(
                "give the ProRes warm-up once: the first layer's warm-up T, the total length W, or a fraction of "
                f"the run, not {' and '.join(f'{key}={value}' for key, value in given.items())}"
            )
        schedule = cls(name, num_layers, DEFAULT_WARMUP_STEPS if warmup_steps is None else warmup_steps)
        if warmup_fraction is not None:
            if not 0 < warmup_fraction <= 1:
                raise UserError(f"the ProRes warm-up fraction must be above 0 and at most 1, not {warmup_fraction}")
            if train_iters is None or train_iters <= 0:
                raise UserError(
                    "a ProRes warm-up given as a fraction of the run needs the run's length: --train-iters, 1 or more"
                )
            total_warmup_steps = max(1, round(warmup_fraction * train_iters))
        if total_warmup_steps is not None:
            if not _is_number(total_warmup_steps) or not _SHORTEST <= total_warmup_steps <= _LONGEST:
                raise UserError(
                    f"the total ProRes warm-up W must be a positive number of steps, not {total_warmup_steps!r}"
                )
            multiple = _RULES[name].windows(schedule.num_layers) or 1
            schedule = cls(name, num_layers, _exact(total_warmup_steps) / multiple)
        return schedule

    @property
    def total_steps(self) -> Fraction:
        """W: the first step at which no alpha changes any more; 0 for a constant schedule."""
        return self.warmup_steps * _RULES[self.name].windows(self.num_layers)

    def alpha(self, step: ArrayLike) -> Array:
        """alpha(l, t) in float64, of shape [*step.shape, L], after `step` = t completed optimizer steps.

        Raises:
            UserError: a step is negative or NaN.
        """
        t = np.asarray(step, dtype=np.float64)[..., None]
        bad = t[~(t >= 0)]
        if bad.size:
            raise UserError(f"the step must be >= 0, not {bad[0]:g}")
        layers = np.arange(1, self.num_layers + 1, dtype=np.float64)
        values = _RULES[self.name].formula(t, layers, self.num_layers, self.warmup_steps)
        return np.broadcast_to(values, np.broadcast_shapes(t.shape, layers.shape)).copy()

    def __str__(self) -> str:
        if self.total_steps == 0:
            return self.name
        return f"{self.name}, T = {format_steps(self.warmup_steps)}, W = {format_steps(self.total_steps)} steps"


def format_steps(value: Fraction) -> str:
    """A number of steps for people: all digits if it is whole, else six significant ones."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def alpha(schedule: str, *, step: ArrayLike, num_layers: int, warmup_steps: Real = DEFAULT_WARMUP_STEPS) -> Array:
    """The residual scale of every layer after `step` optimizer steps.

    Args:
        schedule: one of `SCHEDULES`.
        step: t, the number of completed optimizer steps; a number or an array of them.
        num_layers: L.
        warmup_steps: T, the warm-up of the first layer in steps.

    Returns:
        float64 array of shape [L] (or [*step.shape, L]); entry l-1 belongs to layer l.

    Raises:
        UserError: an argument is out of range or the schedule is unknown.
    """
    return Schedule(schedule, num_layers, warmup_steps).alpha(step)
