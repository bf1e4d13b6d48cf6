"""`prores schedule` as a user runs it."""

import json
import os
import subprocess
import sys

import matplotlib.image
import pytest

from megatron_prores import Schedule
from megatron_prores.warmup_summary import describe_progress, format_alpha


def prores(*args, columns=100):
    return subprocess.run(
        [sys.executable, "-m", "megatron_prores.cli", "schedule", *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": str(columns)},
        check=False,
    )


def ok(*args, **kwargs):
    done = prores(*args, **kwargs)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_json_is_all_of_stdout():
    answer = json.loads(ok("--num-layers", 4, "--at", "0,500,1500", "--json"))
    assert answer == {
        "schedule": "linear",
        "alpha": {
            "0": [0.0, 0.0, 0.0, 0.0],
            "500": [0.5, 0.25, pytest.approx(1 / 6, rel=1e-15), 0.125],
            "1500": [1.0, 0.75, 0.5, 0.375],
        },
    }


def test_json_with_notes(tmp_path):
    """A sentence for people and the picture's name go to stderr then."""
    png = tmp_path / "alpha.png"
    done = prores("--num-layers", 120, "--train-iters", 10, "--at", "120000", "--json", "--png", png)
    assert done.returncode == 0
    assert json.loads(done.stdout)["alpha"] == {"120000": [1.0] * 120}
    assert "outlasts the run" in done.stderr
    assert str(png) in done.stderr


def test_table():
    lines = ok("--num-layers", 4, "--schedule", "stagewise-L", "--total-warmup-steps", 400).splitlines()
    assert lines[0] == "ProRes stagewise-L, T = 100, W = 400 steps, 4 layers"
    assert lines[1].split() == ["step", "l=1", "l=2", "l=3", "l=4"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert rows == {
        "0": ["0.250", "0.250", "0.250", "0.250"],
        "100": ["1", "0.250", "0.250", "0.250"],
        "200": ["1", "1", "0.250", "0.250"],
        "300": ["1", "1", "1", "0.250"],
        "400": ["1", "1", "1", "1"],
    }


@pytest.mark.parametrize("columns", [80, 100, 300])
def test_table_fits(columns):
    lines = ok("--num-layers", 120, columns=columns).splitlines()
    assert max(map(len, lines)) <= min(columns, 100)
    header = lines[1].split()
    assert (header[1], header[-1]) == ("l=1", "l=120")
    assert {len(line.split()) for line in lines[2:-1]} == {len(header)}
    assert lines[-1] == f"({len(header) - 1} of 120 layers; --json prints all)"


def test_list():
    lines = ok("--list").splitlines()
    assert len(lines) == 13
    assert lines[0].split(maxsplit=1) == ["linear", "min(t/(T l), 1): the paper's default"]


def test_short_run_is_reported():
    expected = (
        "the warm-up (24000 steps) outlasts the run (10000): at its end layers 1-10 are at 1, layer 11 at 0.909, ..., "
        "layer 24 at 0.417"
    )
    short = ("--num-layers", 24, "--train-iters", 10000)
    assert ok(*short).splitlines()[-1] == expected
    done = prores(*short, "--strict")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {expected}; ")
    assert "outlasts" not in ok("--num-layers", 24, "--train-iters", 24000, "--strict")


@pytest.mark.parametrize(
    ("name", "num_layers", "train_iters", "end"),
    [
        ("linear", 1, 500, "layer 1 is at 0.500"),
        ("linear", 4, 2500, "layers 1-2 are at 1, layer 3 at 0.833, layer 4 at 0.625"),
        ("linear", 4, 3999, "layers 1-3 are at 1, layer 4 at >0.999"),
        ("equal", 24, 500, "all layers are at 0.500"),
        ("reverse", 24, 10000, "layers 15-24 are at 1, layer 1 at 0.417, ..., layer 14 at 0.909"),
        ("stagewise-0", 24, 10000, "layers 1-10 are at 1, layers 11-24 at 0"),
        ("delayed", 24, 10000, "layer 1 is at 0.417, ..., layers 11-24 at 0"),
    ],
)
def test_progress(name, num_layers, train_iters, end):
    sentence = describe_progress(Schedule(name, num_layers), train_iters)
    assert sentence.endswith(f"outlasts the run ({train_iters}): at its end {end}")


def test_no_progress_to_report():
    assert describe_progress(Schedule("linear", 4), 4000) is None
    assert describe_progress(Schedule("fix-L", 4), 1) is None
    # One layer that starts at 1/L = 1.
    assert describe_progress(Schedule("stagewise-L", 1), 1) is None


def test_only_zero_and_one_look_like_it():
    assert [format_alpha(value) for value in (0.0, 1e-9, 0.25, 1 - 1e-9, 1.0)] == [
        "0",
        "<0.001",
        "0.250",
        ">0.999",
        "1",
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--num-layers 4 --schedule linaer", "unknown ProRes schedule 'linaer' (did you mean linear?)"),
        ("--num-layers 4 --warmup-steps 0", "T must be a positive number of steps, not 0"),
        ("--num-layers 4 --warmup-steps -5", "T must be a positive number of steps, not -5"),
        ("--num-layers 4 --warmup-steps nan", "T must be a positive number of steps, not nan"),
        ("--num-layers 4 --warmup-steps 5 --total-warmup-steps 20", "give the ProRes warm-up once"),
        ("--num-layers 4 --warmup-fraction 0.1", "run's length"),
        ("--num-layers 4 --at -1", "--at: a step must be >= 0, not -1"),
        ("--num-layers 4 --at 0,0.5", "--at: '0.5' is not a whole number"),
        ("--num-layers 4 --at 0,,1", "--at: '' is not a whole number"),
        ("--num-layers 4 --at " + "9" * 400, "too large"),
        ("--num-layers 4 --train-iters 0", "--train-iters must be at least 1"),
        ("--num-layers 4 --strict", "--strict"),
        ("--num-layers 999999999999", "--num-layers must be at most"),
        ("--num-layers four", "--num-layers: 'four' is not a whole number"),
        ("", "--num-layers"),
        ("--num-layers 4 --png no/such/place/alpha.png", "there is no directory no/such/place"),
        ("--num-layers 4 --png alpha.pdf", "must end in .png: alpha.pdf"),
    ],
)
def test_bad_input_is_one_line(args, message):
    done = prores(*args.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_path_that_is_not_text(tmp_path):
    """Its bytes are printed as they were given, also where Python would rather fail."""
    png = os.fsencode(tmp_path) + b"/\xff.png"
    command = [sys.executable, "-m", "megatron_prores.cli", "schedule", "--num-layers", "4", "--png", png]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"wrote " + png + b"\n") and os.path.exists(png)


@pytest.mark.parametrize(
    "args",
    [
        "--num-layers 1",
        "--num-layers 120 --train-iters 500",
        "--num-layers 24 --schedule fix-L",
        "--num-layers 100000 --schedule stagewise-0",  # more lines than memory holds
    ],
)
def test_png(tmp_path, args):
    png = tmp_path / "alpha.png"
    assert ok(*args.split(), "--png", png).splitlines()[-1] == f"wrote {png}"
    picture = matplotlib.image.imread(png, format="png")
    height, width, _ = picture.shape
    assert 400 < height < width < 3000
    # Something is drawn: a blank page has one colour.
    assert picture[..., :3].std() > 0.01
    # The temporary file is gone.
    assert os.listdir(tmp_path) == ["alpha.png"]


def test_needs_neither_torch_nor_megatron():
    code = (
        "import sys, megatron_prores.commands.schedule, megatron_prores.commands.report;"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'megatron', 'deepspeed'}))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
