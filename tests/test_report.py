"""Reading TensorBoard files that real writers wrote, and the pictures made from them."""

import os

import matplotlib.image
import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from megatron_prores import Schedule
from megatron_prores.cli import run as prores
from megatron_prores.errors import UserError
from megatron_prores.report import LOSS_TAG, VALIDATION_TAG, draw_run, draw_schedule, read_scalars


def write(directory, series, *, start, name=None):
    """One event file, as one process of a run leaves it; `start` is its clock at the first point, in seconds."""
    with SummaryWriter(directory) as writer:
        for tag, points in series.items():
            for offset, (step, value) in enumerate(points):
                writer.add_scalar(tag, value, step, walltime=start + offset)
    if name:
        (newest,) = directory.glob("events.out.tfevents.*")
        newest.rename(directory / f"{name}.tfevents")


def a_run(num_layers, steps=50):
    schedule = Schedule("linear", num_layers, 10)
    series = {LOSS_TAG: [(step, 10.0 / step) for step in range(1, steps + 1)]}
    for layer in range(1, num_layers + 1):
        series[f"prores/alpha/layer_{layer:03d}"] = [
            (step, schedule.alpha(step)[layer - 1]) for step in range(1, steps + 1)
        ]
    return series


def picture_size(path):
    height, width, _ = matplotlib.image.imread(path, format="png").shape
    return height, width


def test_every_point_is_read(tmp_path):
    """TensorBoard itself keeps a sample of 10000 points."""
    write(tmp_path, {LOSS_TAG: [(step, step / 2) for step in range(12000)]}, start=0)
    steps, values = read_scalars(tmp_path)[LOSS_TAG]
    np.testing.assert_array_equal(steps, np.arange(12000))
    np.testing.assert_array_equal(values, np.arange(12000) / 2)


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_resumed_run(tmp_path, names):
    """Killed at step 9 and resumed from step 5: steps 5 to 9 are in both files. The later clock wins, whatever the
    order in which the files are read."""
    write(tmp_path, {LOSS_TAG: [(step, 1.0) for step in range(10)]}, start=1000, name=names[0])
    write(tmp_path, {LOSS_TAG: [(step, 2.0) for step in range(5, 15)]}, start=2000, name=names[1])
    steps, values = read_scalars(tmp_path)[LOSS_TAG]
    np.testing.assert_array_equal(steps, np.arange(15))
    np.testing.assert_array_equal(values, [1.0] * 5 + [2.0] * 10)


def test_resumed_run_that_is_not_there_yet(tmp_path):
    """Resumed from step 5 and only at step 6: the first run's steps 7 to 9 stay."""
    write(tmp_path, {LOSS_TAG: [(step, 1.0) for step in range(10)]}, start=1000, name="a")
    write(tmp_path, {LOSS_TAG: [(5, 2.0), (6, 2.0)]}, start=2000, name="b")
    _, values = read_scalars(tmp_path)[LOSS_TAG]
    np.testing.assert_array_equal(values, [1.0] * 5 + [2.0] * 2 + [1.0] * 3)


def test_file_cut_off_by_a_kill(tmp_path):
    write(tmp_path, {LOSS_TAG: [(step, 1.0) for step in range(10)]}, start=0)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    steps, _ = read_scalars(tmp_path)[LOSS_TAG]
    np.testing.assert_array_equal(steps, np.arange(9))


def test_alpha_adds_a_panel(tmp_path):
    write(tmp_path / "run", {**a_run(4), VALIDATION_TAG: [(25, 0.5), (50, 0.3)]}, start=0)
    scalars = read_scalars(tmp_path / "run")
    draw_run(scalars, tmp_path / "both.png")
    draw_run({LOSS_TAG: scalars[LOSS_TAG]}, tmp_path / "loss.png")
    both, loss = picture_size(tmp_path / "both.png"), picture_size(tmp_path / "loss.png")
    assert both[1] == loss[1]
    assert both[0] > loss[0] > 400


def test_command(tmp_path, capsys):
    write(tmp_path / "run", a_run(24), start=0)
    png = tmp_path / "run.png"
    prores(["report", "--tensorboard-dir", str(tmp_path / "run"), "--png", str(png)])
    spikes = "spike score (share of steps 7 standard deviations off the 1000 before): loss 0%"
    assert capsys.readouterr().out == f"{png}: 50 steps, loss of step 50 0.2000\n{spikes}\n"
    assert min(picture_size(png)) > 400
    prores(["report", "--tensorboard-dir", str(tmp_path / "run")])
    assert capsys.readouterr().out == f"{tmp_path / 'run'}: 50 steps, loss of step 50 0.2000\n{spikes}\n"
    assert sorted(os.listdir(tmp_path)) == ["run", "run.png"]


def test_command_refuses(tmp_path):
    def error(directory, png="run.png"):
        with pytest.raises(UserError) as caught:
            prores(["report", "--tensorboard-dir", str(tmp_path / directory), "--png", str(tmp_path / png)])
        return str(caught.value)

    (tmp_path / "empty").mkdir()
    write(tmp_path / "other", {"learning-rate": [(1, 0.1)]}, start=0)
    assert error("missing") == f"there is no directory {tmp_path / 'missing'}"
    assert error("empty") == f"there are no TensorBoard event files in {tmp_path / 'empty'}"
    assert error("other").endswith("no scalar named 'lm loss', only: learning-rate")
    assert "must end in .png" in error("other", "run.jpg")
    assert f"there is no directory {tmp_path / 'gone'}" in error("other", "gone/run.png")
    assert not list(tmp_path.glob("*.png"))


def test_failed_write_keeps_the_old_picture(tmp_path, monkeypatch):
    png = tmp_path / "alpha.png"
    png.write_bytes(b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron_prores.report.os.replace", full)
    with pytest.raises(UserError, match="No space left on device"):
        draw_schedule(Schedule("linear", 2), None, png)
    assert png.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["alpha.png"]
