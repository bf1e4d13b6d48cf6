"""Files of probes: what is read back, what is refused, and the pictures drawn from them."""

import os
from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter

from megatron_prores import Schedule
from megatron_prores.cli import run as prores
from megatron_prores.errors import UserError
from megatron_prores.heat_map import alpha_of_layers, colour_scale, draw_heat_map, draw_layers
from megatron_prores.probe_files import FOLDER, Probe, Probes, probe_files, read_probe, read_probes, write_probe
from megatron_prores.report import LOSS_TAG

TOKENS = np.arange(8).reshape(2, 4)
SAMPLED = np.array([[0, 1], [1, 2]])


def probe(directions, norms=(1.0, 2.0), **changes):
    """Of layers 1 and 2, two sampled tokens and a hidden size of 2."""
    directions = np.asarray(directions, dtype=np.float16)
    made = Probe(
        layers=np.array([1, 2]),
        norms=np.array(norms, dtype=np.float32),
        directions=directions,
        magnitudes=np.ones(directions.shape[:2], dtype=np.float32),
        sampled=SAMPLED,
        tokens=TOKENS,
    )
    return replace(made, **changes)


UP, RIGHT, DIAGONAL = (0, 1), (1, 0), (1, 1)
LAST = probe([[UP, UP], [RIGHT, RIGHT]])


def test_norms_and_cosines(tmp_path):
    write_probe(tmp_path, 20, LAST)
    write_probe(tmp_path, 0, probe([[RIGHT, UP], [(-1, 0), (-3, 0)]], norms=(0.5, 0.25)))
    write_probe(tmp_path, 10, probe([[DIAGONAL, DIAGONAL], [RIGHT, (0, 0)]]))
    found = read_probes(tmp_path)
    assert found.steps.tolist() == [0, 10, 20] and found.layers.tolist() == [1, 2]
    assert found.norms.tolist() == [[0.5, 0.25], [1, 2], [1, 2]]
    expected = [[0.5, -1.0], [np.sqrt(0.5), np.nan], [1.0, 1.0]]
    np.testing.assert_allclose(found.cosines, expected, rtol=1e-12)


def test_another_microbatch_has_no_cosine(tmp_path):
    """A run that was made longer reads its validation data in another order."""
    write_probe(tmp_path, 0, replace(LAST, tokens=TOKENS + 1))
    write_probe(tmp_path, 5, LAST)
    found = read_probes(tmp_path)
    assert np.isnan(found.cosines[0]).all() and (found.cosines[1] == 1).all()
    assert found.norms.tolist() == [[1, 2], [1, 2]]


def test_a_file_is_replaced_as_a_whole_and_the_same_probe_is_the_same_bytes(tmp_path):
    write_probe(tmp_path, 7, probe([[RIGHT, UP], [RIGHT, UP]]))
    write_probe(tmp_path, 7, LAST)
    (path,) = probe_files(tmp_path).values()
    assert path == tmp_path / FOLDER / "iter_0000007.npz"
    before = path.read_bytes()
    write_probe(tmp_path, 7, LAST)
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]
    np.testing.assert_array_equal(read_probe(path).directions, LAST.directions)


def test_what_cannot_be_written_or_read(tmp_path):
    with pytest.raises(UserError, match=r"there are no probes in .*--prores-probe-interval"):
        read_probes(tmp_path)
    write_probe(tmp_path, 1, LAST)
    write_probe(tmp_path, 2, replace(LAST, layers=np.array([1, 3])))
    with pytest.raises(UserError, match=r"iter_0000001\.npz is of another model"):
        read_probes(tmp_path)
    path = probe_files(tmp_path)[2]
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"text"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"iter_0000002\.npz is not a probe or is damaged"):
            read_probes(tmp_path)
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / FOLDER).write_text("")
    with pytest.raises(UserError, match="cannot write the probe"):
        write_probe(tmp_path / "file", 1, LAST)


def many(num_layers, steps, **changes):
    """Probes as a run might have them."""
    steps, layers = np.array(steps), np.arange(1, num_layers + 1)
    norms = 1 + layers * steps[:, None] / (1 + steps[-1])
    return Probes(steps, layers, norms, np.linspace(0, 1, norms.size).reshape(norms.shape), **changes)


@pytest.mark.parametrize("num_layers", [1, 2, 24, 120])
@pytest.mark.parametrize("steps", [[0], [0, 5], [0, 100, 200, 300, 350]])
def test_pictures(tmp_path, num_layers, steps):
    draw_layers(many(num_layers, steps), tmp_path / "layers.png")
    assert min(matplotlib.image.imread(tmp_path / "layers.png").shape[:2]) > 400


def test_a_heat_map_shows_every_value_at_its_step_and_layer():
    axes = Figure().subplots()
    values = np.array([[1.0, 2.0], [3.0, np.nan], [5.0, 6.0]])
    draw_heat_map(axes, np.array([0, 10, 40]), values, "value (unit)")
    (mesh,) = axes.collections
    np.testing.assert_array_equal(mesh.get_coordinates()[0, :, 0], [-5, 5, 25, 55])
    np.testing.assert_array_equal(mesh.get_coordinates()[:, 0, 1], [0.5, 1.5, 2.5])
    shown = mesh.get_array()
    assert shown[1, 1] is np.ma.masked
    assert shown[0].tolist() == [1, 3, 5] and shown[1].tolist() == [2, None, 6]
    assert axes.figure.axes[1].get_ylabel() == "value (unit)"


@pytest.mark.parametrize("step", [0, 25_000])
def test_a_single_step_is_numbered_once(step):
    axes = Figure().subplots()
    draw_heat_map(axes, np.array([step]), np.array([[1.0, 2.0]]), "value (unit)")
    axes.figure.canvas.draw()
    low, high = axes.get_xlim()
    labels = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
    assert [label.get_text() for tick, label in labels if low <= tick <= high] == [f"{step:,}"]


def test_more_steps_than_pixels():
    axes = Figure().subplots()
    steps = np.arange(20000)
    draw_heat_map(axes, steps, steps[:, None] / [1, 2], "value (unit)")
    (mesh,) = axes.collections
    assert mesh.get_array().shape == (2, 1000)
    assert mesh.get_array()[0, [0, -1]].tolist() == [0, 19999]


def test_scales():
    values = [np.array([1.0, np.nan]), np.array([[3.0]])]
    shared = colour_scale(values)
    assert (type(shared).__name__, shared.vmin, shared.vmax) == ("Normalize", 1, 3)
    assert isinstance(colour_scale([np.array([0.1, 10.0])]), LogNorm)
    assert not isinstance(colour_scale([np.array([-1.0, 10.0])]), LogNorm)
    nothing = colour_scale([np.full(3, np.nan)], high=1.0)
    assert (nothing.vmin, nothing.vmax) == (0, 1)
    assert colour_scale(values, low=0, high=1).vmin == 0


def test_alpha_from_the_scalars():
    series = {"prores/alpha/layer_002": ([1, 3], [0.1, 0.2]), "prores/alpha/layer_001": ([1, 2, 3], [0.5, 0.6, 0.7])}
    steps, layers, alphas = alpha_of_layers(
        {"lm loss": (np.arange(3), np.arange(3))} | {tag: tuple(map(np.array, pair)) for tag, pair in series.items()}
    )
    assert steps.tolist() == [1, 2, 3] and layers.tolist() == [1, 2]
    np.testing.assert_array_equal(alphas, [[0.5, 0.1], [0.6, np.nan], [0.7, 0.2]])
    assert alpha_of_layers({"lm loss": (np.arange(3), np.arange(3))}) is None


def test_command(tmp_path, capsys):
    schedule, png = Schedule("linear", 2, 10), tmp_path / "layers.png"
    with SummaryWriter(tmp_path / "run") as writer:
        for step in range(1, 41):
            writer.add_scalar(LOSS_TAG, 8.0 if step == 20 else 1.0, step)
            writer.add_scalar("grad-norm", 1.0, step)
            writer.add_scalar("prores/alpha/layer_001", schedule.alpha(step)[0], step)
    command = ["report", "--tensorboard-dir", str(tmp_path / "run"), "--layers-png", str(png)]
    with pytest.raises(UserError, match="there are no probes"):
        prores(command)
    for step in (0, 20, 40):
        write_probe(tmp_path / "run", step, LAST)
    capsys.readouterr()
    prores(command)
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / 'run'}: 40 steps, loss of step 40 1.0000",
        "spike score (share of steps 7 standard deviations off the 1000 before): loss 3.03%, gradient norm 0%",
        f"{png}: 2 layers, 3 probes from step 0 to 40",
    ]
    assert min(matplotlib.image.imread(png).shape[:2]) > 400
    with pytest.raises(UserError, match=r"must end in \.png"):
        prores([*command[:-1], "layers.jpg"])
