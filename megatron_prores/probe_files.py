"""What `--prores-probe-interval` leaves of a run: a file of layer outputs for every probed iteration.

A probe looks at every decoder layer l while the model, at iteration t and with alpha(l, t), reads one microbatch that
stays the same throughout the run. Two of the paper's measures come from it (arXiv 2603.05369, Figures 3 and 4):

- the activation norm of layer l: the root mean square over the hidden dimension of the layer's output, which is the
  residual stream, averaged over all tokens of the microbatch;
- the layer's residual output, F_attention + F_MLP before alpha, at some of the tokens, and from it the cosine between
  the residual output at iteration t and at the last probe.
"""

import re
import zipfile
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from megatron_prores.errors import UserError
from megatron_prores.whole_file import replacing

FOLDER = "prores-probe"
"""Beside the event files in `--tensorboard-dir`."""

_FILE = re.compile(r"iter_(\d+)\.npz")


@dataclass(frozen=True)
class Probe:
    """One file: L layers, n sampled tokens, hidden size h, microbatch of b sequences of s tokens.

    Attributes:
        layers: int64 [L], 1-based, increasing.
        norms: float32 [L], activation norms.
        directions: float16 [L, n, h], residual outputs over their own root mean square; 0 where that is 0. As they
            are, they could be beyond float16.
        magnitudes: float32 [L, n], that root mean square.
        sampled: int64 [n, 2], sequence and position of the sampled tokens.
        tokens: int64 [b, s], the microbatch.
    """

    layers: np.ndarray
    norms: np.ndarray
    directions: np.ndarray
    magnitudes: np.ndarray
    sampled: np.ndarray
    tokens: np.ndarray


@dataclass(frozen=True)
class Probes:
    """A run's probes.

    Attributes:
        steps: int64 [P], iterations, increasing.
        layers: int64 [L].
        norms: float64 [P, L], activation norms.
        cosines: float64 [P, L], mean over the sampled tokens of the cosine between a layer's residual output at a step
            and at the last one; NaN where either is 0 or not finite, or where the step read another microbatch.
    """

    steps: np.ndarray
    layers: np.ndarray
    norms: np.ndarray
    cosines: np.ndarray


def write_probe(tensorboard_dir: str | Path, iteration: int, probe: Probe) -> None:
    """Write or replace the file of an iteration, as a whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    folder = Path(tensorboard_dir, FOLDER)
    path = folder / f"iter_{iteration:07}.npz"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new, new.open("wb") as file:
            np.savez(file, **{field.name: getattr(probe, field.name) for field in fields(Probe)})
    except OSError as error:
        raise UserError(f"cannot write the probe {path}: {error.strerror or error}") from error


def probe_files(tensorboard_dir: str | Path) -> dict[int, Path]:
    """The files of a run by iteration, in order; empty for a run without probes."""
    folder = Path(tensorboard_dir, FOLDER)
    found = [(_FILE.fullmatch(path.name), path) for path in (folder.iterdir() if folder.is_dir() else ())]
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def read_probe(path: Path) -> Probe:
    """One file.

    Raises:
        UserError: it is damaged or not a probe.
    """
    try:
        with np.load(path) as arrays:
            return Probe(**{field.name: arrays[field.name] for field in fields(Probe)})
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not a probe or is damaged: {error}") from error


def read_probes(tensorboard_dir: str | Path) -> Probes:
    """All probes of a run.

    Raises:
        UserError: there are none, one is damaged, or they are of different models.
    """
    files = probe_files(tensorboard_dir)
    if not files:
        raise UserError(f"there are no probes in {tensorboard_dir}: train with --prores-probe-interval N")
    last = read_probe(files[max(files)])
    norms, cosines = [], []
    for path in files.values():  # one at a time: they are large
        probe = read_probe(path)
        if not np.array_equal(probe.layers, last.layers) or probe.directions.shape[2] != last.directions.shape[2]:
            raise UserError(f"{path} is of another model than {files[max(files)]}: use one --tensorboard-dir per run")
        norms.append(probe.norms.astype(np.float64))
        cosines.append(_mean_cosines(probe, last))
    return Probes(np.array(list(files), dtype=np.int64), last.layers, np.array(norms), np.array(cosines))


def _mean_cosines(probe: Probe, last: Probe) -> np.ndarray:
    same = np.array_equal(probe.tokens, last.tokens) and np.array_equal(probe.sampled, last.sampled)
    if not same:
        return np.full(len(last.layers), np.nan)
    now, then = probe.directions.astype(np.float64), last.directions.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):  # NaN is what is wanted there
        cosines = (now * then).sum(axis=2) / np.sqrt(np.square(now).sum(axis=2) * np.square(then).sum(axis=2))
    return cosines.mean(axis=1)
