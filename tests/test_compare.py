import contextlib
import csv
import fcntl
import json
import math
import re
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from megatron_prores import cli
from megatron_prores.compare.arms import Arm, check_trained, groups, read_arms, write_settings
from megatron_prores.compare.page import write_report
from megatron_prores.compare.plan import check_flags
from megatron_prores.compare.pool import train_all
from megatron_prores.compare.results import common_steps, read_results
from megatron_prores.compare.runs import Run, RunFailed, carry_out, claim, read_curves, stop, write_curves
from megatron_prores.compare.statistics import Estimate, paired_difference, verdict
from megatron_prores.compare.wording import sentences
from megatron_prores.errors import UserError


def arms_file(tmp_path, text):
    path = tmp_path / "arms.yaml"
    path.write_text(text)
    return str(path)


def test_arms_are_compared_with_the_one_they_name(tmp_path):
    arms = read_arms(
        arms_file(
            tmp_path,
            """
            pre: {prores-schedule: none}
            pre+prores: {versus: pre, prores-schedule: linear}
            post: {prores-norm: post, prores-schedule: none}
            post+prores: {versus: post, prores-norm: post}
            """,
        )
    )
    assert [arm.versus for arm in arms] == [None, "pre", None, "post"]
    assert arms[1].settings == {"prores-schedule": "linear"}
    assert [[arm.name for arm in group] for group in groups(arms)] == [["pre", "pre+prores"], ["post", "post+prores"]]


def test_without_versus_all_are_compared_with_the_first(tmp_path):
    arms = read_arms(arms_file(tmp_path, "a: {lr: 1}\nb: {lr: 2}\nc:\n"))
    assert [arm.versus for arm in arms] == [None, "a", "a"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: {lr: 1}", "needs two arms or more, not 1"),
        ("[a, b]", "must be a mapping of names to values, not a list"),
        ("a: {lr: 1}\na: {lr: 2}", "a is given twice"),
        ("a: {lr: 1}\nb: 3", "b must be a mapping of flag names to values, not a int"),
        ("a: {lr: 1}\nb: {versus: aa}", r"b is compared with aa, which is no other arm"),
        ("base: {lr: 1}\nb: {versus: bse}", r"no other arm \(did you mean base\?\)"),
        ("a: {}\nb: {versus: b}", "b is compared with b, which is no other arm"),
        ("a: {}\nb: {versus: a}\nc: {versus: b}", "c is compared with b, which is compared with a itself"),
        ("a: {}\nb/c: {lr: 1}", "'b/c' cannot be a folder's name"),
        ("a: {}\n../x: {lr: 1}", "cannot be a folder's name"),
        ("a: {}\nruns.csv: {lr: 1}", "the name runs.csv is the comparison's own"),
        ("a: {}\n" + "b" * 101 + ": {lr: 1}", "has more than 100 letters"),
        ("no: {}\nb: {lr: 1}", "an arm's name is read as false: put it in quotes"),
        ("a: {}\nb: {seed: 3}", "b cannot set seed: prores compare gives each run its own"),
        ("a: {}\nb: {tensorboard_dir: x}", "b cannot set tensorboard_dir"),
    ],
)
def test_arms_that_cannot_be_used_are_one_line(tmp_path, text, message):
    with pytest.raises(UserError, match=message) as caught:
        read_arms(arms_file(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_report_is_of_what_was_trained(tmp_path):
    path = arms_file(tmp_path, "a: {lr: 1}\nb: {lr: 2}\nc: {}")
    arms = read_arms(path)
    write_settings(arms[0], tmp_path)
    write_settings(arms[2], tmp_path)
    check_trained(path, arms, tmp_path)
    with pytest.raises(UserError, match="a was trained with other settings"):
        check_trained(path, [Arm("a", {"lr": 3}, None)], tmp_path)


def test_an_arm_whose_baseline_is_not_there_says_so(tmp_path):
    finished(tmp_path / "pre+prores", 1, 3.0)
    [result] = read_results(ARMS, tmp_path)
    assert result.verdict == "nothing of pre is finished"
    assert next(iter(sentences([result]))).endswith("; nothing of pre is finished")
    assert write_report([result], tmp_path).exists()


def test_a_command_that_is_not_text_is_refused():
    with pytest.raises(UserError, match=r"'.udcff' is not UTF-8 text"):
        cli.run(["compare", "--arms", "arms.yaml", "--output", "\udcff"])


def test_flags_that_the_comparison_sets_are_refused():
    check_flags(["--config", "a.yaml", "--lr", "1"])
    for flag in ("--seed=3", "--save", "--load", "--tensorboard-dir", "--tensorboard_dir"):
        with pytest.raises(UserError, match=f"leave out --{flag.split('=')[0][2:].replace('_', '-')}: "):
            check_flags(["--lr", "1", flag, "x"])


def test_intervals_are_students():
    # 2.919986 / 4.302653 are the 0.95 and 0.975 quantiles of t with 2 degrees of freedom (any table).
    estimate = Estimate((1.0, 2.0, 3.0))
    assert estimate.mean == 2.0
    assert estimate.half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert Estimate((1.0,)).half_width == math.inf
    assert not Estimate((1.0,)).excludes_zero
    assert math.isnan(Estimate(()).mean)


def test_the_difference_is_paired_by_seed():
    noisy = {1: 3.0, 2: 5.0, 3: 9.0}
    better = {seed: loss - 0.1 - 0.001 * seed for seed, loss in noisy.items()}
    difference = paired_difference(better | {4: 100.0}, noisy)
    assert difference.values == pytest.approx((-0.101, -0.102, -0.103))
    assert verdict(difference) == "lower loss"
    assert verdict(paired_difference(noisy, better)) == "higher loss"
    assert verdict(paired_difference({1: 1.0, 2: 3.0}, {1: 2.0, 2: 2.0})) == "within the seeds' noise"
    assert verdict(paired_difference({1: 1.0}, {1: 2.0})) == "one seed: its noise is unknown"
    assert verdict(paired_difference({1: 1.0}, {2: 2.0})) == "no seed has both"


def test_curves_come_back_bit_for_bit(tmp_path):
    curves = {
        "lm loss": (np.arange(3), np.array([1.0, np.nan, 1 / 3])),
        "prores/alpha/layer_001": (np.ones(1), np.ones(1)),
    }
    write_curves(tmp_path / "curves.npz", curves)
    read = read_curves(tmp_path / "curves.npz")
    assert read.keys() == curves.keys()
    for tag, series in curves.items():
        for wrote, got in zip(series, read[tag], strict=True):
            np.testing.assert_array_equal(wrote, got)
    assert [path.name for path in tmp_path.iterdir()] == ["curves.npz"]


def test_seeds_are_averaged_where_all_have_a_point():
    steps, values = common_steps([(np.array([1, 2, 3]), np.array([1.0, 2.0, 3.0])), (np.array([2, 3, 4]), np.ones(3))])
    np.testing.assert_array_equal(steps, [2, 3])
    np.testing.assert_array_equal(values, [[2.0, 3.0], [1.0, 1.0]])


def run_of(tmp_path, program, evaluation=None) -> Run:
    """A run whose trainer is a line of Python, for how runs end."""
    folder = tmp_path / "arm" / "seed-1"
    folder.mkdir(parents=True, exist_ok=True)
    return Run(Arm("arm", {}, None), 1, folder, 10, (sys.executable, "-c", program), evaluation)


def end(run: Run) -> None:
    carry_out(run, {}, lambda process: None)


def test_a_run_that_fails_says_why_and_can_be_done_again(tmp_path):
    run = run_of(tmp_path, "import sys; print('error: there is no data'); sys.exit(2)")
    with pytest.raises(RunFailed, match=r"arm, seed 1: ended with exit code 2: there is no data \(see .*log.txt\)"):
        end(run)
    assert not run.is_finished()
    failures = train_all([run, run_of(tmp_path / "other", "raise SystemExit(3)")], [{}], lambda line: None)
    assert len(failures) == 2 and "exit code 3: see " in failures[1]


def test_a_run_that_ends_early_is_not_finished(tmp_path):
    run = run_of(tmp_path, "print('exiting after 8 iterations')")
    (run.folder / "checkpoints").mkdir()
    (run.folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("8")
    with pytest.raises(RunFailed, match="arm, seed 1: ended at iteration 8 of 10"):
        end(run)
    assert not run.is_finished()


def test_the_reason_of_a_failure_is_that_of_the_last_attempt(tmp_path):
    with pytest.raises(RunFailed, match="the first mistake"):
        end(run_of(tmp_path, "import sys; print('error: the first mistake'); sys.exit(2)"))
    with pytest.raises(RunFailed, match="exit code -9: see "):
        end(run_of(tmp_path, "import os; os.kill(os.getpid(), 9)"))


def test_interrupted_processes_are_all_ended(tmp_path):
    """Also where they take their time and the interrupt is repeated."""
    program = "import signal, time; signal.signal(15, lambda *_: time.sleep(1) or exit(1)); print('up', flush=True)\n"
    program += "time.sleep(99)"
    runs = [run_of(tmp_path / name, program) for name in ("one", "other")]
    interrupting = f"""
import os, signal, sys, threading, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_compare import run_of
from megatron_prores.compare.pool import train_all
runs = [run_of(Path(folder), {program!r}) for folder in sys.argv[1:]]
def interrupt():
    while not all((run.folder / "log.txt").exists() and (run.folder / "log.txt").read_text() for run in runs):
        time.sleep(0.05)
    for _ in range(4):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
threading.Thread(target=interrupt, daemon=True).start()
signal.signal(signal.SIGINT, signal.default_int_handler)
train_all(runs, [{{}}, {{}}], print)
"""
    done = subprocess.run(
        [sys.executable, "-c", interrupting, str(tmp_path / "one"), str(tmp_path / "other")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "KeyboardInterrupt" in done.stderr and done.returncode != 0
    for run in runs:  # nobody holds its lock any more
        with open(run.folder / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("said, code", [("", 16), ("", 17), ("the loss is NaN or infinite (exit code 16)", 1)])
def test_a_run_that_diverges_is_finished(tmp_path, said, code):
    run = run_of(tmp_path, f"import sys; print({said!r}); sys.exit({code})")
    end(run)
    result = json.loads((run.folder / "result.json").read_text())
    assert result["state"] == "diverged" and result["evaluation"] is None
    end(run_of(tmp_path, "raise SystemExit('it is not run again')"))
    (run.folder / "settings.json").write_text("{}")
    [read] = read_results([run.arm], tmp_path)
    assert list(sentences([read])) == ["arm, seed 1: diverged after step 0; not in the means"]
    assert write_report([read], tmp_path).exists()


def test_a_run_is_not_started_twice_at_a_time(tmp_path):
    run = run_of(tmp_path, "import time; time.sleep(60)")
    processes = []
    thread = threading.Thread(target=_quiet, args=(run, processes))
    thread.start()
    while not processes:
        time.sleep(0.01)
    with pytest.raises(RunFailed, match="another process works on this run"):
        end(run)
    stop(processes[0])
    thread.join(10)
    assert not thread.is_alive() and not run.is_finished()


def _quiet(run: Run, processes: list) -> None:
    with contextlib.suppress(RunFailed):
        carry_out(run, {}, processes.append)


def test_a_folder_belongs_to_its_settings(tmp_path):
    run = run_of(tmp_path, "")
    claim(run, {"lr": 0.001, "seed": 1})
    claim(run, {"lr": 0.001, "seed": 1})
    with pytest.raises(UserError, match=r"seed-1 was made with other settings \(lr was 0.001 and is 0.002\)"):
        claim(run, {"lr": 0.002, "seed": 1})
    (run.folder / "settings.json").write_text("{")
    with pytest.raises(UserError, match=r"settings.json is damaged"):
        claim(run, {"lr": 0.001, "seed": 1})


ARMS = [
    Arm("pre", {"prores-schedule": "none"}, None),
    Arm("pre+prores", {"prores-schedule": "linear"}, "pre"),
]


def finished(folder, seed, loss, state="finished", evaluated=True):
    """What a run leaves behind, made by hand."""
    folder = folder / f"seed-{seed}"
    folder.mkdir(parents=True)
    steps = np.arange(1, 41)
    curves = {
        "lm loss": (steps, loss + 3.0 / steps),
        "lm loss validation": (steps[9::10], loss + 2.0 / steps[9::10]),
        "grad-norm": (steps, 1.0 + 1.0 / steps),
        "iteration-time": (steps, np.full(40, 0.25)),
    }
    write_curves(folder / "curves.npz", curves)
    evaluation = {"loss": loss, "bits_per_byte": loss / 2} if evaluated and state == "finished" else None
    (folder / "result.json").write_text(json.dumps({"state": state, "evaluation": evaluation}))
    (folder / "settings.json").write_text(json.dumps({"num_layers": 24, "lr": 3e-3}))


@pytest.fixture
def comparison(tmp_path):
    for seed, loss in ((1, 3.0), (2, 3.2), (3, 3.1)):
        finished(tmp_path / "pre", seed, loss)
        finished(tmp_path / "pre+prores", seed, loss - 0.1 - 0.001 * seed)
    return tmp_path


def test_the_report_says_what_came_out(comparison):
    (comparison / "command.txt").write_text("prores compare --arms <arms>")
    results = read_results(ARMS, comparison)
    lines = list(sentences(results))
    assert lines[0] == "pre: loss 3.1000 ± 0.2484, perplexity 22.20 (17.32 to 28.46)"
    assert lines[1].endswith("0.1020 below pre (95%: -0.1045 to -0.0995), in each of 3 seeds")

    page = write_report(results, comparison).read_text()
    assert "http" not in page.replace("http-equiv", "")  # opens offline
    assert "prores compare --arms &lt;arms&gt;" in page
    assert page.count("<img") == page.count("data:image/png;base64,") == 5
    assert {path.stem for path in comparison.glob("*.png")} == {
        *("validation-loss-pre", "training-loss-pre", "gradient-norm-pre", "final-loss", "differences")
    }
    HTMLParser(convert_charrefs=False).feed(page)
    cells = re.findall(r'data-label="verdict">([^<]*)<', page)
    assert cells == ["baseline", "lower loss"]


def test_the_tables_hold_every_run(comparison):
    write_report(read_results(ARMS, comparison), comparison)
    runs = list(csv.DictReader((comparison / "runs.csv").open()))
    assert [(row["arm"], row["seed"], row["loss_nats_per_token"]) for row in runs][:2] == [
        ("pre", "1", "3"),
        ("pre", "2", "3.2"),
    ]
    assert len(runs) == 6 and {row["spike_score_loss"] for row in runs} == {"0"}
    assert {row["seconds_per_step"] for row in runs} == {"0.25"}
    arms = {row["arm"]: row for row in csv.DictReader((comparison / "arms.csv").open())}
    assert arms["pre+prores"]["versus"] == "pre"
    assert float(arms["pre+prores"]["difference_mean"]) == pytest.approx(-0.102)
    curves = list(csv.DictReader((comparison / "curves.csv").open()))
    assert len(curves) == 6 * (40 + 4 + 40)


def test_a_run_that_diverged_is_named_and_not_averaged(comparison):
    finished(comparison / "pre+prores", 4, 9.0, state="diverged")
    results = read_results(ARMS, comparison)
    assert list(sentences(results))[1] == "pre+prores, seed 4: diverged after step 40; not in the means"
    assert results[1].loss.values == pytest.approx((2.899, 3.098, 2.997))
    assert "4 (1 diverged)" in write_report(results, comparison).read_text()


def test_a_report_of_what_is_there_so_far(tmp_path):
    finished(tmp_path / "pre", 1, 3.0, evaluated=False)
    finished(tmp_path / "pre+prores", 1, 2.5, evaluated=False)
    results = read_results(ARMS, tmp_path)
    assert results[0].loss.values == pytest.approx((3.05,))  # the last validation
    assert list(sentences(results))[1].endswith("0.5000 below pre from one seed, whose noise is unknown")
    assert write_report(results, tmp_path).exists()
    with pytest.raises(UserError, match="is finished yet"):
        read_results(ARMS, tmp_path / "elsewhere")
