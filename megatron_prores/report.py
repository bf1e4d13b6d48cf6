"""Pictures of a schedule before training and of a run after it, as PNG files."""

import os
import re
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megatron_prores.errors import UserError
from megatron_prores.schedule import Schedule
from megatron_prores.whole_file import replacing

LOSS_TAG = "lm loss"
VALIDATION_TAG = "lm loss validation"
GRAD_NORM_TAG = "grad-norm"

Series = tuple[np.ndarray, np.ndarray]
"""Steps and values, of the same length."""

Scalars = dict[str, Series]
"""TensorBoard tag -> its series."""

# Without its yellow end, which is hard to see on white. Shallow layers are dark.
_COLOURS = ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0.0, 0.92, 256)))
_ONE_COLOUR = _COLOURS(0.0)

_MOST_LINES = _COLOURS.N
"""Of more layers an even selection is drawn."""


def check_png_path(path: str | Path) -> None:
    """Find out before the work, not after it, that a picture cannot be written.

    Raises:
        UserError: the name does not end in .png, is a directory's, or its directory is missing or read-only.
    """
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise UserError(f"the picture's name must end in .png: {path}")
    if path.is_dir():
        raise UserError(f"cannot write the picture {path}: it is a directory")
    if not path.parent.is_dir():
        raise UserError(f"cannot write the picture {path}: there is no directory {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"cannot write the picture {path}: no permission to write in {path.parent}")


def read_scalars(tensorboard_dir: str | Path) -> Scalars:
    """Every scalar of a run, from all event files that the run and its resumes left in one directory.

    Where a resumed run repeats steps, the point written last counts. Steps that a killed run reached and the resumed
    one has not repeated yet stay.

    Returns:
        tag -> (steps, values): int64 and float64 arrays of the same length, steps strictly increasing.

    Raises:
        UserError: the directory is missing or holds no event files.
    """
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    directory = Path(tensorboard_dir)
    if not directory.is_dir():
        raise UserError(f"there is no directory {directory}")
    if not any("tfevents" in entry.name for entry in directory.iterdir() if entry.is_file()):
        raise UserError(f"there are no TensorBoard event files in {directory}")
    # Size 0 keeps every point; TensorBoard would keep a sample.
    events = EventAccumulator(str(directory), size_guidance={SCALARS: 0}).Reload()
    scalars = {}
    for tag in events.Tags()[SCALARS]:
        last = {event.step: event.value for event in sorted(events.Scalars(tag), key=lambda event: event.wall_time)}
        steps = sorted(last)
        scalars[tag] = (np.array(steps, dtype=np.int64), np.array([last[step] for step in steps], dtype=np.float64))
    return scalars


def training_loss(scalars: Scalars) -> Series:
    """Steps and losses of a run.

    Raises:
        UserError: it logged none.
    """
    if LOSS_TAG not in scalars:
        found = ", ".join(sorted(scalars)[:5]) or "nothing"
        raise UserError(f"the event files hold no scalar named {LOSS_TAG!r}, only: {found}")
    return scalars[LOSS_TAG]


def layer_series(scalars: Scalars, name: str) -> dict[int, Series]:
    """What a run logged as `prores/<name>/layer_NNN`, by layer: "alpha" or "activation_norm"."""
    matches = ((re.fullmatch(rf"prores/{name}/layer_(\d+)", tag), series) for tag, series in scalars.items())
    return {int(match[1]): series for match, series in matches if match}


def draw_schedule(schedule: Schedule, train_iters: int | None, path: str | Path) -> None:
    """alpha of every layer over the optimizer steps, with marks at W and at the end of the run.

    Args:
        train_iters: the run's length in steps, if it is known.
        path: the PNG file; replaced as a whole or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    check_png_path(path)
    total = float(schedule.total_steps)
    end = _last_step_shown(total, train_iters)
    layers = _selection(np.arange(1, schedule.num_layers + 1))
    # Besides an even grid, each layer's corners, or short ramps would look cut off.
    corners = np.concatenate([layers - 1, layers]) * float(schedule.warmup_steps)
    steps = np.unique(np.concatenate([np.linspace(0.0, end, 801), corners[corners <= end]]))

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    # Step by step: every layer at every step may be more than fits in memory.
    values = np.array([schedule.alpha(step)[layers - 1] for step in steps])
    _alpha_lines(axes, {int(layer): (steps, column) for layer, column in zip(layers, values.T, strict=True)})
    if total > 0:
        axes.axvline(total, color="0.5", linestyle=":", linewidth=1.2, label="W: the warm-up ends")
    if train_iters is not None and train_iters <= end:
        axes.axvline(train_iters, color="tab:red", linestyle="--", linewidth=1.2, label="the run ends")
    if axes.get_legend_handles_labels()[0]:
        # Above the axes, so that it never hides a line.
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False, fontsize="small")
    count = "1 layer" if schedule.num_layers == 1 else f"{schedule.num_layers} layers"
    drawn = "" if len(layers) == schedule.num_layers else f", {len(layers)} of them drawn"
    axes.set_title(f"ProRes {schedule}, {count}{drawn}", pad=26)
    axes.set_xlim(0.0, end)
    step_axis(axes)
    save_figure(figure, path)


def draw_run(scalars: Scalars, path: str | Path) -> None:
    """The losses of a run and, below them on the same step axis, alpha of every layer if it was logged.

    Args:
        scalars: from `read_scalars`.
        path: the PNG file; replaced as a whole or not at all.

    Raises:
        UserError: the run logged no training loss, or the file cannot be written.
    """
    check_png_path(path)
    training_loss(scalars)
    alphas = layer_series(scalars, "alpha")

    figure = Figure(figsize=(9, 7 if alphas else 4.5), layout="constrained")
    panels = figure.subplots(2 if alphas else 1, 1, sharex=True, squeeze=False)[:, 0]
    _losses(panels[0], scalars)
    if alphas:
        _alpha_lines(panels[1], alphas)
    step_axis(panels[-1])
    save_figure(figure, path)


def _losses(axes: Axes, scalars: Scalars) -> None:
    axes.plot(*scalars[LOSS_TAG], color="tab:blue", linewidth=1.0, marker=_marker(scalars[LOSS_TAG]), label="training")
    if VALIDATION_TAG in scalars:
        axes.plot(*scalars[VALIDATION_TAG], color="tab:orange", marker="o", markersize=4, label="validation")
    axes.set_ylabel("loss (nats per token)")
    axes.legend()
    axes.grid(alpha=0.3)


def _last_step_shown(total: float, train_iters: int | None) -> float:
    """Enough to see the whole warm-up and that it ends, but not a run so long that the warm-up becomes a sliver."""
    if total == 0:
        return float(train_iters or 1000)
    end = 1.1 * total
    if train_iters is not None:
        end = max(end, min(1.02 * train_iters, 3 * total))
    return end


def _selection(layers: np.ndarray) -> np.ndarray:
    """All of them, or as many as can be told apart, the first and the last among them."""
    return layers[np.unique(np.linspace(0, len(layers) - 1, min(_MOST_LINES, len(layers))).round().astype(int))]


def _marker(series: Series) -> str | None:
    """A line needs two points; what was logged once becomes a dot."""
    return "o" if len(series[0]) == 1 else None


def _alpha_lines(axes: Axes, series: dict[int, Series]) -> None:
    """One line per layer, the deep ones on top; the key is the layer's number."""
    layers = _selection(np.array(sorted(series))).tolist()
    first = series[layers[0]]
    together = all(all(map(np.array_equal, first, series[layer])) for layer in layers)
    if together:
        # Lines on top of each other would show the deepest layer's colour only.
        axes.plot(*first, color=_ONE_COLOUR, linewidth=2.0, marker=_marker(first))
        text = f"layer {layers[0]}" if len(layers) == 1 else f"all {layers[-1]} layers"
        axes.set_ylabel(f"alpha of {text} (no unit)")
    else:
        norm = Normalize(layers[0], layers[-1])
        width = float(np.clip(30.0 / len(layers), 0.8, 2.0))
        for layer in layers:
            colour = _COLOURS(norm(layer))
            axes.plot(*series[layer], color=colour, linewidth=width, marker=_marker(series[layer]))
        bar = axes.figure.colorbar(ScalarMappable(norm, _COLOURS), ax=axes, label="layer (1 = next to the embedding)")
        bar.set_ticks(np.unique(np.linspace(layers[0], layers[-1], min(len(layers), 6)).round().astype(int)))
        axes.set_ylabel("alpha (no unit)")
    axes.set_ylim(-0.03, 1.05)
    axes.grid(alpha=0.3)


def step_axis(axes: Axes) -> None:
    """Name and number an x axis of optimizer steps."""
    axes.set_xlabel("optimizer steps")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    # Plain numbers up to where they would run into each other.
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}" if step < 1e8 else f"{step:.3g}"))


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a PNG file; it is replaced as a whole or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        with replacing(path) as new:
            # A Figure made without pyplot draws PNGs with Agg, whatever the display and MPLBACKEND are.
            figure.savefig(new, format="png", dpi=150)
    except OSError as error:
        raise UserError(f"cannot write the picture {path}: {error.strerror or error}") from error
