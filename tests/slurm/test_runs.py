"""Runs that nothing happens to: layouts, users, arrays, and errors."""

import re
import subprocess

import pytest
from cluster import PRORES, Job, losses, submit, torchrun

USER = "prores-slurmlab"


def test_two_nodes_with_two_processes_each(cluster, folder, site, config):
    """PP2 x DP2: the same losses as torchrun's on one machine."""
    flags = ("--config", str(config), "--host", "--train-iters", "12")
    job = submit(cluster, folder / "2 x 2", ("--nodes=2",), flags, PRORES_SITE=str(site), PRORES_PROCESSES="2")
    job.wait_for_state("COMPLETED")
    assert losses(job.folder / "tensorboard") == torchrun(folder / "2 x 2 alone", 4, *flags)
    ranks = {line.split("]")[0] for line in job.text.splitlines() if "[rank" in line}
    assert ranks == {"0: [rank 0", "1: [rank 3"}
    assert len(list((job.folder / "logs").glob("*/*/attempt_0/*/stdout.log"))) == 4


def test_a_run_that_always_fails_ends(cluster, folder, site, config):
    flags = ("--config", str(config), "--host", "--num-attention-heads", "3")
    job = submit(cluster, folder / "failing", ("--nodes=2",), flags, PRORES_SITE=str(site))
    job.wait_for_requeue(1)
    job.start_again()
    job.wait_for_state("FAILED")
    assert job.slurm["ExitCode"] == "1:0"
    reason = "exit code 1; 2 starts in a row without a new checkpoint"
    assert f"error: stopped at iteration 0: {reason}" in job.text
    assert (job.state["state"], job.state["reason"]) == ("failed", reason)


def test_flags_that_cannot_be_used_end_a_job_at_once(cluster, folder, site, config):
    flags = ("--config", str(config), "--host", "--save", "elsewhere")
    job = submit(cluster, folder / "refused", ("--nodes=1",), flags, PRORES_SITE=str(site))
    job.wait_for_state("FAILED")
    assert job.slurm["ExitCode"] == "2:0"
    assert "error: leave out --save" in job.text


@pytest.fixture
def user():
    """Who is not root."""
    subprocess.run(["userdel", "--remove", USER], stderr=subprocess.DEVNULL)
    subprocess.run(["useradd", "--create-home", USER], check=True)
    yield USER
    subprocess.run(["userdel", "--remove", USER], check=True, stderr=subprocess.DEVNULL)


def test_an_array_of_another_user_without_its_environment(cluster, folder, site, config, undisturbed, user):
    """Two runs on the same two nodes at the same time; one of them has to continue."""
    runs = folder / "of a user"
    where = ("--nodes=2", "--processes-per-node=1", f"--site={site}", "--sbatch=--export=NONE")
    flags = ("--config", str(config), "--host", "--train-iters", "60")
    told = cluster.run_as(user, *PRORES, "submit", "--run", str(runs), *where, "--array", "seed=7,8", *flags)
    number = re.search(r"submitted array (\d+): 2 runs", told)[1]
    jobs = {
        seed: Job(cluster, f"{number}_{index}", runs / f"seed-{seed}", runs / f"slurm-{number}_{index}.out")
        for index, seed in enumerate((7, 8))
    }
    for job in jobs.values():
        job.wait_for_steps(start=1, steps=1)
    assert [job.slurm["NodeList"] for job in jobs.values()] == ["n[1-2]"] * 2
    assert [job.slurm["JobState"] for job in jobs.values()] == ["RUNNING"] * 2

    # The one whose number stands for the whole array as well.
    seed, continued = next((seed, job) for seed, job in jobs.items() if job.slurm["JobId"] == number)
    cluster.run("scancel", "--signal=USR1", continued.number)
    continued.wait_for_requeue(1)
    waiting = cluster.run_as(user, *PRORES, "status", str(continued.folder)).splitlines()[1]
    assert "pending (BeginTime)" in waiting and f"{continued.starts[0][1]}/60" in waiting
    continued.start_again()
    for job in jobs.values():
        job.wait_for_state("COMPLETED")
    restarts = {name: job.slurm["Restarts"] for name, job in jobs.items()}
    assert restarts == {7: "0", 8: "0", seed: "1"}

    by_seed = {seed: losses(job.folder / "tensorboard") for seed, job in jobs.items()}
    assert by_seed[7] == {step: undisturbed[step] for step in range(1, 61)} != by_seed[8]
    header, *rows = cluster.run_as(user, *PRORES, "status", str(runs)).splitlines()
    assert header.split() == ["run", "job", "state", "iteration", "loss", "validation", "alpha", "left", "requeued"]
    for (seed, job), row in zip(jobs.items(), rows, strict=True):
        expected = [job.number, "complete", "60/60", f"{by_seed[seed][60]:.4f}", "-", "1..0.500", "-", restarts[seed]]
        assert row.removeprefix(str(job.folder)).split() == expected


def test_a_cancelled_run_is_saved_and_does_not_come_back(cluster, folder, site, config):
    job = submit(
        cluster, folder / "cancelled", ("--nodes=2",), ("--config", str(config), "--host"), PRORES_SITE=str(site)
    )
    job.wait_for_steps(start=1, steps=3)
    cluster.run("scancel", job.number)
    job.wait_for_state("CANCELLED")
    assert job.slurm["Restarts"] == "0" and job.state["state"] == "ending"
    saved = (job.folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text()
    assert int(saved) == job.starts[0][1]
