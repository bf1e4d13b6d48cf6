"""What finished runs left, as numbers and as CSV files."""

import csv
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron_prores.compare.arms import Arm
from megatron_prores.compare.runs import FINISHED, read_curves
from megatron_prores.compare.statistics import Estimate, paired_difference, verdict
from megatron_prores.errors import UserError
from megatron_prores.report import GRAD_NORM_TAG, LOSS_TAG, VALIDATION_TAG, Scalars, Series
from megatron_prores.spikes import spike_score
from megatron_prores.whole_file import replacing

SECONDS_TAG = "iteration-time"


@dataclass(frozen=True)
class RunResult:
    """One finished run.

    Attributes:
        state: "finished" or "diverged".
        evaluation: of the last checkpoint on the whole held-out set; None without such a set.
        made_with: machine and versions.
    """

    seed: int
    state: str
    curves: Scalars
    evaluation: dict | None
    folder: Path
    made_with: dict[str, str]

    @property
    def loss(self) -> float:
        """Of the last checkpoint on held-out data, in nats per token; infinite if the run diverged."""
        if self.state != FINISHED:
            return math.inf
        return self.evaluation["loss"] if self.evaluation else float(self.curves[VALIDATION_TAG][1][-1])

    @property
    def bits_per_byte(self) -> float:
        if self.state != FINISHED:
            return math.inf
        return self.evaluation["bits_per_byte"] if self.evaluation else math.nan

    @property
    def tensorboard(self) -> Path:
        return self.folder / "tensorboard"

    @property
    def last_step(self) -> int:
        """The last one with a loss; 0 if there is none."""
        return int(self.curves[LOSS_TAG][0][-1]) if LOSS_TAG in self.curves else 0

    @property
    def seconds_per_step(self) -> float:
        """Median over the run; nan where it is too short to know."""
        return float(np.median(self.curves[SECONDS_TAG][1])) if SECONDS_TAG in self.curves else math.nan

    def spikes(self, tag: str) -> float:
        """Spike score (OLMo 2) of a curve."""
        return spike_score(*self.curves[tag]) if tag in self.curves else math.nan


@dataclass(frozen=True)
class ArmResult:
    """An arm and its finished runs, by seed. `baseline` is the result of the arm that it is compared with."""

    arm: Arm
    runs: tuple[RunResult, ...]
    baseline: "ArmResult | None" = None

    def estimate(self, value: Callable[[RunResult], float]) -> Estimate:
        """Over the seeds that did not diverge."""
        return Estimate(tuple(value(run) for run in self.runs if run.state == FINISHED))

    @cached_property
    def loss(self) -> Estimate:
        return self.estimate(lambda run: run.loss)

    @property
    def diverged(self) -> list[RunResult]:
        return [run for run in self.runs if run.state != FINISHED]

    @cached_property
    def difference(self) -> Estimate | None:
        """Loss minus the baseline's, seed by seed."""
        if self.baseline is None:
            return None
        ours, theirs = ({run.seed: run.loss for run in a.runs if run.state == FINISHED} for a in (self, self.baseline))
        return paired_difference(ours, theirs)

    @property
    def verdict(self) -> str:
        if self.arm.versus is not None and self.baseline is None:
            return f"nothing of {self.arm.versus} is finished"
        if not self.loss.values:
            return "diverged"
        return "baseline" if self.difference is None else verdict(self.difference)


def read_results(arms: Sequence[Arm], output: Path) -> list[ArmResult]:
    """The finished runs of every arm that has one.

    Raises:
        UserError: nothing is finished, or a result cannot be read.
    """
    results = {}
    for arm in arms:
        folders = (folder for folder in (output / arm.name).glob("seed-*") if (folder / "result.json").exists())
        runs = sorted((_read(folder) for folder in folders), key=lambda run: run.seed)
        if runs:
            results[arm.name] = ArmResult(arm, tuple(runs))
    if not results:
        raise UserError(f"nothing in {output} is finished yet: there is nothing to report")
    return [replace(result, baseline=results.get(result.arm.versus)) for result in results.values()]


def _read(folder: Path) -> RunResult:
    try:
        result = json.loads((folder / "result.json").read_text())
        curves = read_curves(folder / "curves.npz")
        seed = int(folder.name.removeprefix("seed-"))
        return RunResult(seed, result["state"], curves, result["evaluation"], folder, result.get("made_with", {}))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder} cannot be read ({error}): remove it to do this run again") from error


def write_tables(results: Sequence[ArmResult], output: Path) -> None:
    """runs.csv (a row for each run), arms.csv (for each arm) and curves.csv (for each logged point)."""
    _write(output / "runs.csv", _run_rows(results))
    _write(output / "arms.csv", _arm_rows(results))
    _write(output / "curves.csv", _curve_rows(results))


def _run_rows(results: Sequence[ArmResult]) -> Iterable[Sequence]:
    yield (
        *("arm", "seed", "state", "steps", "loss_nats_per_token", "perplexity", "bits_per_byte"),
        *("spike_score_loss", "spike_score_grad_norm", "seconds_per_step"),
    )
    for result in results:
        for run in result.runs:
            loss = _number(run.loss)
            yield (
                *(result.arm.name, run.seed, run.state, run.last_step, loss, _number(math.exp(min(run.loss, 700)))),
                *(_number(run.bits_per_byte), _number(run.spikes(LOSS_TAG)), _number(run.spikes(GRAD_NORM_TAG))),
                _number(run.seconds_per_step),
            )


def _arm_rows(results: Sequence[ArmResult]) -> Iterable[Sequence]:
    yield (
        *("arm", "versus", "seeds", "diverged", "loss_mean", "loss_ci95_half_width"),
        *("difference_mean", "difference_ci95_half_width", "verdict"),
    )
    for result in results:
        difference = result.difference
        pair = (difference.mean, difference.half_width) if difference else (math.nan, math.nan)
        yield (
            *(result.arm.name, result.arm.versus or "", len(result.runs), len(result.diverged)),
            *map(_number, (result.loss.mean, result.loss.half_width, *pair)),
            result.verdict,
        )


def _curve_rows(results: Sequence[ArmResult]) -> Iterable[Sequence]:
    yield ("arm", "seed", "curve", "step", "value")
    for result in results:
        for run in result.runs:
            for name, tag in (
                ("loss", LOSS_TAG),
                ("validation loss", VALIDATION_TAG),
                ("gradient norm", GRAD_NORM_TAG),
            ):
                for step, value in zip(*run.curves.get(tag, ((), ())), strict=True):
                    yield (result.arm.name, run.seed, name, step, f"{value:.6g}")


def common_steps(series: Sequence[Series]) -> tuple[np.ndarray, np.ndarray]:
    """The steps that all series have, [n], and their values, [series, n]."""
    steps = series[0][0]
    for other, _ in series[1:]:
        steps = np.intersect1d(steps, other)
    return steps, np.stack([values[np.isin(own, steps)] for own, values in series])


def _number(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else ""


def _write(path: Path, rows: Iterable[Sequence]) -> None:
    with replacing(path) as new, new.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
