"""Batch scripts, written by hand and by `prores submit`, before they are in a queue."""

import argparse
import os
import re
import shutil
import subprocess
import sys

import pytest
from cluster import PRORES, ROOT, SCRIPTS

from megatron_prores.commands import status, submit
from megatron_prores.errors import UserError
from megatron_prores.slurm import checks, node, prepare, queue, script, state

BATCH = [SCRIPTS / "pretrain_megatron.sbatch", SCRIPTS / "pretrain_deepspeed.sbatch"]
ON_HOST = ("--nodes=2", "--processes-per-node=2", "--host")


def check_script(path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-x", path], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    "path", [*BATCH, SCRIPTS / "job.sh", SCRIPTS / "site.example.sh", ROOT / "tests" / "slurm" / "slurmlab.sh"], ids=str
)
def test_scripts_are_sound(path):
    check_script(path)


@pytest.mark.parametrize("path", BATCH, ids=str)
def test_slurm_takes_the_scripts(path, cluster):
    cluster.run("sbatch", "--test-only", "--nodes=2", "--time=1:00:00", str(path), "run")


@pytest.fixture(scope="module")
def dry_run(config, folder):
    """The script of an array, for a folder whose name the shell would take apart."""
    array = ("--array=prores-schedule=linear,none", "--array=seed=1,2", "--at-once=2")
    options = ("--run", str(folder / "it's a $RUN"), *ON_HOST, *array, "--time=30", "--sbatch=--exclusive")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*PRORES, "submit", *options, "--config", str(config), "--dry-run"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_dry_run(dry_run, folder, cluster):
    path = folder / "dry-run.sbatch"
    path.write_text(dry_run)
    check_script(path)
    cluster.run("sbatch", "--test-only", str(path))
    directives = {line.removeprefix("#SBATCH ") for line in dry_run.splitlines() if line.startswith("#SBATCH")}
    asked = {"--nodes=2", "--ntasks-per-node=1", "--array=0-3%2", "--time=30", "--exclusive", "--requeue"}
    assert asked < directives and "--open-mode=append" in directives
    assert not (folder / "it's a $RUN").exists()

    # What bash makes of it.
    stub = f"run_job() {{ printf '<%s>' \"$@\"; }}\nSLURM_ARRAY_TASK_ID=2\n{_without_job_sh(dry_run)}"
    words = subprocess.run(["bash", "-c", stub], capture_output=True, text=True, check=True).stdout
    run = folder / "it's a $RUN" / "schedule-none_seed-1"
    assert words.startswith(f"<megatron_prores.megatron.pretrain_gpt><{run}><--host><--config><{folder}/config.yaml>")
    assert words.endswith("<--prores-schedule=none><--seed=1>")


def _without_job_sh(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("source "))


def test_a_layout_that_does_not_fit_is_refused(config, folder):
    """Before Slurm hears of it; the line is that of `prores plan`."""
    run = folder / "does not fit"
    options = ("--run", str(run), "--nodes=1", "--processes-per-node=3", "--host", "--array=seed=1,2")
    done = subprocess.run([*PRORES, "submit", *options, "--config", str(config)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: seed-1: 3 processes are not divisible by") and done.stderr.count("\n") == 1
    assert not run.exists()


@pytest.mark.parametrize(
    "flags, said",
    [
        (("--tensor-model-parallel-size=3",), "4 processes are not divisible by tensor 3"),
        (
            ("--sequence-parallel", "--tensor-model-parallel-size=2"),
            "--sequence-parallel is not supported under DeepSpeed",
        ),
    ],
)
def test_deepspeeds_layout_is_checked_too(config, folder, flags, said):
    options = ("--run", str(folder / "deepspeed"), "--nodes=1", "--processes-per-node=4", "--host", "--dry-run")
    engine = ("--engine=deepspeed", "--deepspeed_config", str(ROOT / "configs" / "deepspeed" / "zero1.json"))
    done = subprocess.run(
        [*PRORES, "submit", *options, *engine, "--config", str(config), *flags],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes=2",), "--run"),
        (("--run=r", "--nodes=0"), "must be 1 or more"),
        (("--run=r", "--nodes=2"), "give --gpus-per-node"),
        (("--run=r", *ON_HOST, "--gpus-per-node=2"), "give --gpus-per-node"),
        (("--run=r", *ON_HOST, "--array=seed"), "--array seed is not NAME=VALUE,VALUE"),
        (("--run=r", *ON_HOST, "--array=seed=1,1"), "a value twice"),
        (("--run=r", *ON_HOST, "--array=seed=1", "--array=seed=2"), "a flag twice"),
        (("--run=r", *ON_HOST, "--at-once=2"), "--at-once"),
        (("--run=50%", *ON_HOST), "Slurm cannot write"),
        (("--run=\udcff", *ON_HOST), "a path that is not UTF-8"),
        (("--run=r", *ON_HOST, "--site=nowhere.sh"), "--site nowhere.sh"),
        (("--run=r", *ON_HOST), "--train-iters"),
        (("--run=r", *ON_HOST, "--time=5"), "--time 5 leaves no time to train: Slurm warns 300 s before the limit"),
        (("--run=r", *ON_HOST, "--time=0-00:05"), "leaves no time"),
        (("--run=r", *ON_HOST, "--time=4:59"), "leaves no time"),
        (("--run=r", *ON_HOST, "--time=60", "--sbatch=--time=5"), "--sbatch=--time=5 leaves no time"),
        (("--run=r", *ON_HOST, "--sbatch=-t 0:4:59"), "--sbatch=-t 0:4:59 leaves no time"),
        (("--run=r", "--nodes=two"), "must be 1 or more, not two"),
        (("--run=r", *ON_HOST, "--train-iters=5", "--load=x"), "leave out --load"),
    ],
)
def test_mistakes_are_one_line(words, said):
    with pytest.raises(UserError, match=said) as error:
        submit.main(list(words))
    assert "\n" not in str(error.value)


def test_the_script_holds_flags_that_are_not_text_as_they_are(config, tmp_path):
    """With an sbatch that takes anything."""
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 7\n")
    (tmp_path / "sbatch").chmod(0o755)
    words = (f"--run={tmp_path}/run", *ON_HOST, f"--config={config}", b"--wandb-project=\xff")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([*PRORES, "submit", *words], capture_output=True, env=environment)
    assert done.returncode == 0 and done.stdout.startswith(b"submitted job 7; "), done
    assert b"\xff" in (tmp_path / "run" / "job.sbatch").read_bytes()


@pytest.mark.parametrize("limit", ["6", "5:01", "1:00:00", "1-0", "0", "UNLIMITED", "12:30"])
def test_time_limits_that_leave_time_to_train(limit):
    checks.refuse_short(limit, ())


def test_a_warning_or_limit_among_sbatchs_options_wins():
    checks.refuse_short("2", ("--signal=B:USR1@30",))
    checks.refuse_short("2", ("--time=60",))
    checks.refuse_short(None, ("--time=2", "--signal=B:USR1@30"))
    checks.refuse_short(None, ("--test-only", "--time=soon"))


def test_the_other_engines_folder_is_refused(tmp_path):
    def job(engine: str) -> script.Job:
        return script.Job("j", engine, tmp_path, tmp_path, None, "out", 1, 1, (), (), (script.Run(tmp_path / "run"),))

    assert not list(checks.check_folders(job("megatron")))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "latest").write_text("global_step60")
    with pytest.raises(UserError, match="run holds checkpoints of --engine deepspeed: give another --run"):
        list(checks.check_folders(job("megatron")))
    [note] = checks.check_folders(job("deepspeed"))
    assert note.endswith("holds a checkpoint (global_step60): the job continues from it")


def test_run_length(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("train-iters: 10\nglobal-batch-size: 4\n")
    second.write_text("train_iters: 20\n")
    configs = ["--config", str(first), "--config", str(second)]
    assert prepare.run_length(configs) == 20
    assert prepare.run_length([*configs, "--train-iters=30", "--lr", "-1"]) == 30
    second.write_text("lr: 1.0\n")
    assert prepare.run_length(["--config", str(second), "--train-samples", "48", "--global-batch-size", "4"]) == 12
    for flags in (["--train-iters", "0"], ["--train-iters", "x"], ["--train-samples=8"], ["--config", "nowhere"]):
        with pytest.raises(UserError):
            prepare.run_length(flags)


def test_repair_of_a_tracker_that_was_cut_off(tmp_path):
    assert prepare.repair_tracker(tmp_path / "none yet") is None
    for iteration in (5, 10, 15):
        (tmp_path / f"iter_{iteration:07}").mkdir()
    (tmp_path / "iter_0000005" / "metadata.json").write_text("{}")
    (tmp_path / "iter_0000010" / "metadata.json").write_text("{}")
    (tmp_path / "iter_0000015" / "metadata.json").write_text("")
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("5")
    assert prepare.repair_tracker(tmp_path) is None and tracker.read_text() == "5"
    tracker.write_text("")
    assert "10" in prepare.repair_tracker(tmp_path) and tracker.read_text() == "10"


def test_a_node_without_the_network_interface(tmp_path):
    """A line on the screen, and in the logs, where job.sh looks for it; torchrun does not start."""
    command = [sys.executable, "-m", "megatron_prores.slurm.node", "--endpoint=n1:10000", "--processes=1"]
    words = [f"--logs={tmp_path}/logs", "--interface=nowhere", "--", "-m", "this"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SLURMD_NODENAME": "n1"}
    done = subprocess.run([*command, *words], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: network_interface=nowhere is not on n1: set it in the site file to one of ")
    assert (tmp_path / "logs" / "n1.log").read_text() == done.stderr and done.stderr.count("\n") == 1
    for there in ("", "lo", "l", "=lo", "^docker"):
        node.check_interface(there, str(tmp_path))


def test_status_asks_slurm_about_what_has_not_ended(tmp_path, capsys, monkeypatch):
    state.write(tmp_path, state.State("running", job="5", requeued=2, target=30))
    parser = argparse.ArgumentParser()
    status.add_arguments(parser)
    here = parser.parse_args([str(tmp_path)])
    for jobs, said in (
        ({"5": "pending (BeginTime)"}, "pending (BeginTime)"),
        ({}, "ended by Slurm: submit it again"),
        (None, "running"),
    ):
        monkeypatch.setattr(queue, "jobs", lambda jobs=jobs: jobs)
        status.run(here)
        row = capsys.readouterr().out.splitlines()[1]
        assert re.split("  +", row) == [str(tmp_path), "5", said, "0/30", "-", "-", "-", "-", "2"]
    with pytest.raises(UserError, match="no run under Slurm"):
        status.run(parser.parse_args([str(SCRIPTS)]))
