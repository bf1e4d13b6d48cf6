"""The pictures of a comparison. Small ones, so that they can be read on a phone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_prores.compare.results import ArmResult, common_steps
from megatron_prores.heat_map import alpha_of_layers, colour_scale, draw_heat_map
from megatron_prores.probe_files import probe_files, read_probes
from megatron_prores.report import GRAD_NORM_TAG, LOSS_TAG, VALIDATION_TAG, Series

ACTIVATION_NORMS = "Activation norms"
COSINES = "Residual outputs against those of the last step"

_BASELINE = "0.35"
_COLOURS = matplotlib.colormaps["tab10"].colors


@dataclass(frozen=True)
class Picture:
    """A figure, its file's name without suffix, what is below it, and under which heading it stands."""

    section: str
    name: str
    caption: str
    figure: Figure


def pictures(results: Sequence[ArmResult]) -> Iterator[Picture]:
    """Everything that is to be shown, section by section."""
    section = "Last checkpoints"
    caption = "Loss on held-out data: a dot for each seed, bars are 95% intervals"
    yield Picture(section, "final-loss", caption, _finals(results))
    if any(result.difference for result in results):
        yield Picture(section, "differences", "The same, less the baseline's of the same seed", _differences(results))
    for group in grouped(results):
        base = group[0].arm.name
        section = f"{base} and what is compared with it" if len(group) > 1 else base
        yield Picture(section, f"validation-loss-{base}", "Validation loss", _validation(group))
        yield Picture(section, f"training-loss-{base}", "Training loss, mean over 1% of the run", _training(group))
        yield Picture(section, f"gradient-norm-{base}", "Gradient norm before clipping", _gradients(group))
    yield from _alphas(results)
    yield from _probes(results)


def _alphas(results: Sequence[ArmResult]) -> Iterator[Picture]:
    for result in results:
        if alphas := alpha_of_layers(result.runs[0].curves):
            steps, layers, values = alphas
            figure, axes = _new()
            draw_heat_map(axes, steps, values, "alpha (no unit)", layers, colour_scale([values], 0.0, 1.0))
            yield Picture("alpha(l, t)", f"alpha-{result.arm.name}", result.arm.name, figure)


def _probes(results: Sequence[ArmResult]) -> Iterator[Picture]:
    """The measures of the probes, where the runs made some; of the first seed."""
    runs = {result.arm.name: result.runs[0] for result in results}
    probed = {name: read_probes(run.tensorboard) for name, run in runs.items() if probe_files(run.tensorboard)}
    if not probed:
        return
    for section, name, label, values, high in (
        (ACTIVATION_NORMS, "activation-norm", "RMS (no unit)", lambda probes: probes.norms, None),
        (COSINES, "cosine", "cosine (no unit)", lambda probes: probes.cosines, 1.0),
    ):
        # One scale for all arms, so that colours can be compared.
        scale = colour_scale(map(values, probed.values()), high=high, logarithmic=high is None)
        for arm, probes in probed.items():
            figure, axes = _new()
            draw_heat_map(axes, probes.steps, values(probes), label, probes.layers, scale)
            yield Picture(section, f"{name}-{arm}", f"{arm}, seed {runs[arm].seed}", figure)


def grouped(results: Sequence[ArmResult]) -> list[list[ArmResult]]:
    """Each baseline with what is compared with it; arms whose baseline has no result yet stand alone."""
    groups = {result.arm.name: [result] for result in results if result.baseline is None}
    for result in results:
        if result.baseline is not None:
            groups[result.baseline.arm.name].append(result)
    return list(groups.values())


def _new() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(4.8, 3.4), layout="constrained")
    return figure, figure.add_subplot()


def _validation(group: Sequence[ArmResult]) -> Figure:
    return _curves(group, VALIDATION_TAG, "validation loss (nats per token)")


def _training(group: Sequence[ArmResult]) -> Figure:
    return _curves(group, LOSS_TAG, "training loss (nats per token)", _smoothed)


def _gradients(group: Sequence[ArmResult]) -> Figure:
    figure = _curves(group, GRAD_NORM_TAG, "gradient norm (no unit)")
    figure.axes[0].set_yscale("log")
    return figure


def _curves(
    group: Sequence[ArmResult], tag: str, label: str, prepare: Callable[[Series], Series] = lambda series: series
) -> Figure:
    """Means over the seeds, in bands from the lowest to the highest."""
    figure, axes = _new()
    for index, result in enumerate(group):
        series = [prepare(run.curves[tag]) for run in result.runs if tag in run.curves]
        if not series:
            continue
        steps, values = common_steps(series)
        colour = _colour(index)
        axes.plot(steps, values.mean(axis=0), color=colour, linewidth=1.4, label=_short(result.arm.name))
        axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.25, linewidth=0)
    axes.set(xlabel="optimizer steps", ylabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize="small")
    return figure


def _smoothed(series: Series) -> Series:
    """Means over 1% of the points, each at the last of its points."""
    steps, values = series
    width = max(1, len(values) // 100)
    return steps[width - 1 :], np.convolve(values, np.full(width, 1 / width), mode="valid")


def _finals(results: Sequence[ArmResult]) -> Figure:
    return _rows(results, lambda result: result.loss, "loss (nats per token)")


def _differences(results: Sequence[ArmResult]) -> Figure:
    compared = [result for result in results if result.difference is not None]
    figure = _rows(compared, lambda result: result.difference, "loss minus baseline (nats per token)")
    figure.axes[0].axvline(0.0, color=_BASELINE, linewidth=1.0)
    return figure


def _rows(results: Sequence[ArmResult], estimate: Callable, label: str) -> Figure:
    """A row for each arm: a dot for each seed, and the mean with its interval."""
    figure = Figure(figsize=(4.8, 1.1 + 0.36 * len(results)), layout="constrained")
    axes = figure.add_subplot()
    for row, result in enumerate(results):
        values = estimate(result)
        if not values.values:
            continue
        colour = _BASELINE if result.arm.versus is None else _COLOURS[0]
        axes.plot(values.values, [row] * len(values.values), "o", color=colour, markersize=3.5, alpha=0.5)
        bar = values.half_width if np.isfinite(values.half_width) else None
        axes.errorbar(values.mean, row, xerr=bar, fmt="|", color=colour, markersize=11, capsize=3)
    axes.set_yticks(range(len(results)), [_short(result.arm.name) for result in results])
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.grid(alpha=0.3, axis="x")
    return figure


def _short(name: str) -> str:
    """A name that leaves room for what it names; both ends, since names that are alike differ in either."""
    return name if len(name) <= 24 else f"{name[:11]}…{name[-12:]}"


def _colour(index: int):
    return _BASELINE if index == 0 else _COLOURS[(index - 1) % len(_COLOURS)]
