"""How far the warm-up gets within a run, in words."""

from itertools import groupby

from megatron_prores.schedule import Schedule, format_steps

# More unfinished groups of layers than this, and the sentence names only the first and the last.
_MOST_GROUPS = 3


def format_alpha(value: float) -> str:
    """alpha with three decimals in at most six characters; `0` and `1` only if it is exactly that."""
    if value in (0.0, 1.0):
        return f"{value:.0f}"
    text = f"{value:.3f}"
    return {"0.000": "<0.001", "1.000": ">0.999"}.get(text, text)


def describe_progress(schedule: Schedule, train_iters: int) -> str | None:
    """Where every layer stands at the end of a run that is shorter than the warm-up.

    Args:
        schedule: the run's schedule.
        train_iters: the run's length in optimizer steps.

    Returns:
        One line without a full stop, or None if every layer gets as far as it ever will.
    """
    if train_iters >= schedule.total_steps:
        return None
    groups = _groups([float(value) for value in schedule.alpha(train_iters)])
    finished = [group for group in groups if group[2] == 1.0]
    unfinished = [group for group in groups if group[2] != 1.0]
    if not unfinished:
        return None
    parts = [_part(group, schedule.num_layers) for group in finished + unfinished]
    if len(unfinished) > _MOST_GROUPS:
        parts[len(finished) + 1 : -1] = ["..."]
    # Only the first part has a verb: "layers 1-10 are at 1, layer 11 at 0.909".
    verb = "is" if parts[0].startswith("layer ") else "are"
    parts[0] = parts[0].replace(" at ", f" {verb} at ", 1)
    warmup = format_steps(schedule.total_steps)
    return f"the warm-up ({warmup} steps) outlasts the run ({train_iters}): at its end {', '.join(parts)}"


def _groups(values: list[float]) -> list[tuple[int, int, float]]:
    """Neighbouring layers with the same alpha, as (first layer, last layer, alpha)."""
    groups = []
    for value, members in groupby(enumerate(values, start=1), key=lambda item: item[1]):
        layers = [layer for layer, _ in members]
        groups.append((layers[0], layers[-1], value))
    return groups


def _part(group: tuple[int, int, float], num_layers: int) -> str:
    first, last, value = group
    if first == last:
        return f"layer {first} at {format_alpha(value)}"
    if last - first + 1 == num_layers:
        return f"all layers at {format_alpha(value)}"
    return f"layers {first}-{last} at {format_alpha(value)}"
