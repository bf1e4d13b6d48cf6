"""What every layer does at every step, as a picture: steps to the right, layers upwards, the value as a colour."""

import itertools
from collections.abc import Iterable
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FormatStrFormatter, LogLocator

from megatron_prores.probe_files import Probes
from megatron_prores.report import Scalars, check_png_path, layer_series, save_figure, step_axis

_MOST_COLUMNS = 1000
"""More steps than a picture has pixels are thinned out."""

_LOGARITHMIC = 10.0
"""Values that span more than this factor are drawn on a logarithmic scale."""

_COLOURS = matplotlib.colormaps["viridis"].with_extremes(bad="0.85")


def draw_heat_map(
    axes: Axes,
    steps: np.ndarray,
    values: np.ndarray,
    label: str,
    layers: np.ndarray | None = None,
    scale: Normalize | None = None,
) -> None:
    """Draw values of layers over steps into axes, with a colour bar.

    A column is as wide as the steps for which its step is the nearest. What is not finite is grey.

    Args:
        steps: int [P], increasing, with gaps of any size.
        values: float [P, L].
        label: of the colour bar, with the unit.
        layers: int [L], increasing; None is 1..L.
        scale: from `colour_scale`, where several pictures share one; None is this picture's own.
    """
    steps, values = np.asarray(steps), np.ma.masked_invalid(values)
    layers = np.arange(1, values.shape[1] + 1) if layers is None else np.asarray(layers)
    if len(steps) > _MOST_COLUMNS:
        kept = np.unique(np.linspace(0, len(steps) - 1, _MOST_COLUMNS).round().astype(int))
        steps, values = steps[kept], values[kept]
    scale = colour_scale([values]) if scale is None else scale
    mesh = axes.pcolormesh(
        _edges(steps), _edges(layers), values.T, cmap=_COLOURS, norm=scale, rasterized=True, linewidth=0
    )
    bar = axes.figure.colorbar(mesh, ax=axes, label=label)
    if isinstance(scale, LogNorm):
        bar.minorticks_off()
        bar.locator = LogLocator(subs=(1, 2, 5) if scale.vmax < 1000 * scale.vmin else (1,))
        bar.formatter = FormatStrFormatter("%g")
        bar.update_ticks()
    axes.set_ylabel("layer (1 = next to the embedding)")
    axes.yaxis.set_major_locator(FixedLocator(_ticks(layers)))
    step_axis(axes)
    if len(steps) > 1:
        axes.set_xlim(steps[0], steps[-1])  # the outer columns would reach beyond the run


def colour_scale(
    values: Iterable[np.ndarray], low: float | None = None, high: float | None = None, logarithmic: bool = True
) -> Normalize:
    """One scale for all the values, logarithmic where they are above 0 and span more than a factor of 10.

    Args:
        low, high: ends of the scale that do not depend on the values.
        logarithmic: False for a linear scale whatever the values are.
    """
    finite = np.concatenate([np.empty(0), *(np.ma.masked_invalid(some).compressed() for some in values)])
    if low is None:
        low = finite.min() if finite.size else 0.0
    if high is None:
        high = finite.max() if finite.size else 1.0
    return (LogNorm if logarithmic and low > 0 and high > _LOGARITHMIC * low else Normalize)(low, high)


def alpha_of_layers(scalars: Scalars) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """alpha as `draw_heat_map` takes it, from a run's scalars; None where alpha was not logged.

    Returns:
        steps int64 [P], layers int64 [L], alphas float64 [P, L]; NaN where a step has no alpha of a layer.
    """
    series = layer_series(scalars, "alpha")
    if not series:
        return None
    steps = np.unique(np.concatenate([layer_steps for layer_steps, _ in series.values()]))
    alphas = np.full((len(steps), len(series)), np.nan)
    for column, layer in enumerate(sorted(series)):
        layer_steps, values = series[layer]
        alphas[np.searchsorted(steps, layer_steps), column] = values
    return steps, np.array(sorted(series), dtype=np.int64), alphas


def draw_layers(probes: Probes, path: str | Path) -> None:
    """Activation norms of a run and, below them, the cosines of the residual outputs to the last ones.

    Args:
        path: the PNG file; replaced as a whole or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    check_png_path(path)
    figure = Figure(figsize=(9, 8), layout="constrained")
    norms, cosines = figure.subplots(2, 1, sharex=True)
    draw_norms(norms, probes)
    draw_cosines(cosines, probes)
    norms.set_xlabel("")
    save_figure(figure, path)


def draw_norms(axes: Axes, probes: Probes, scale: Normalize | None = None) -> None:
    """The paper's Figure 3."""
    draw_heat_map(axes, probes.steps, probes.norms, "RMS (no unit)", probes.layers, scale)
    axes.set_title("activation norm: RMS of the layer's output")


def draw_cosines(axes: Axes, probes: Probes, scale: Normalize | None = None) -> None:
    """The paper's Figure 4."""
    scale = colour_scale([probes.cosines], high=1.0, logarithmic=False) if scale is None else scale
    draw_heat_map(axes, probes.steps, probes.cosines, "cosine (no unit)", probes.layers, scale)
    axes.set_title(f"cosine of the layer's residual output to that of step {probes.steps[-1]:,}")


def _edges(centres: np.ndarray) -> np.ndarray:
    """Half-way between neighbours; the outer ones have their neighbour's width."""
    if len(centres) == 1:
        return centres[0] + np.array([-0.5, 0.5])
    middles = (centres[1:] + centres[:-1]) / 2
    return np.concatenate([[1.5 * centres[0] - 0.5 * centres[1]], middles, [1.5 * centres[-1] - 0.5 * centres[-2]]])


def _ticks(layers: np.ndarray) -> np.ndarray:
    """The first layer, and round numbers, at most eight of them."""
    every = next(step for step in itertools.count(1) if len(layers) <= 8 * step and step not in (3, 6, 7, 9))
    if every > 10:
        every = -(-every // 10) * 10
    return layers[(layers == layers[0]) | (layers % every == 0)]
