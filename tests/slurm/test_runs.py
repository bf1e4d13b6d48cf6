"""Runs that nothing happens to: layouts, users, arrays, and errors."""

import re
import subprocess

import pytest
from cluster import PRORES, ROOT, Job, losses, submit, torchrun

USER = "prores-slurmlab"


def test_two_nodes_with_two_processes_each(cluster, folder, site, config):
    """PP2 x DP2, a process per GPU that Slurm gives: the same losses as torchrun's on one machine."""
    flags = ("--config", str(config), "--host", "--train-iters", "12")
    of_gpus = folder / "site of gpus.sh"
    of_gpus.write_text(site.read_text().replace("processes_per_node=1", ""))
    options = ("--nodes=2", "--gpus-per-node=2")
    job = submit(cluster, folder / "2 x 2", options, flags, PRORES_SITE=str(of_gpus))
    job.wait_for_state("COMPLETED")
    assert losses(job.folder / "tensorboard") == torchrun(folder / "2 x 2 alone", 4, *flags)
    ranks = {line.split("]")[0] for line in job.text.splitlines() if "[rank" in line}
    assert ranks == {"0: [rank 0", "1: [rank 3"}
    assert len(list((job.folder / "logs").glob("*/*/attempt_0/*/stdout.log"))) == 4


def test_a_run_that_always_fails_ends(cluster, folder, site, config):
    flags = ("--config", str(config), "--host", "--pipeline-model-parallel-size", "1")
    impatient = folder / "impatient site.sh"
    impatient.write_text(site.read_text() + "max_stalled=2\nexport GLOO_SOCKET_IFNAME=nowhere\n")
    job = submit(cluster, folder / "failing", ("--nodes=1",), flags, PRORES_SITE=str(impatient))
    job.wait_for_start(2)
    job.wait_for_state("FAILED")
    assert job.slurm["ExitCode"] == "1:0"
    reason = "exit code 1; 2 starts in a row without a new checkpoint"
    assert f"error: stopped at iteration 0: {reason}" in job.text
    assert (job.state["state"], job.state["reason"]) == ("failed", reason)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--save", "elsewhere"), "leave out --save"),
        (("--pipeline-model-parallel-size", "1", "--num-attention-heads", "3"), "num_attention_heads"),
    ],
)
def test_flags_that_cannot_be_used_end_a_job_at_once(cluster, folder, site, config, flags, said):
    flags = ("--config", str(config), "--host", *flags)
    job = submit(cluster, folder / f"refused {said}", ("--nodes=1",), flags, PRORES_SITE=str(site))
    job.wait_for_state("FAILED")
    assert job.slurm["ExitCode"] == "2:0" and job.state["requeued"] == "0"
    assert re.search(f"error: .*{said}", job.text)


def test_a_network_interface_that_is_not_there_ends_a_job_at_once(cluster, folder, site, config):
    elsewhere = folder / "site of another cluster.sh"
    elsewhere.write_text(site.read_text() + "network_interface=nowhere\n")
    flags = ("--config", str(config), "--host")
    job = submit(cluster, folder / "no interface", ("--nodes=2",), flags, PRORES_SITE=str(elsewhere))
    job.wait_for_state("FAILED")
    assert job.slurm["ExitCode"] == "2:0" and job.state["requeued"] == "0"
    assert "network_interface=nowhere is not on n" in job.state["reason"]
    assert "Traceback" not in job.text


@pytest.fixture
def user():
    """Who is not root."""
    subprocess.run(["userdel", "--remove", USER], stderr=subprocess.DEVNULL)
    subprocess.run(["useradd", "--create-home", USER], check=True)
    yield USER
    subprocess.run(["userdel", "--remove", USER], check=True, stderr=subprocess.DEVNULL)


def test_an_array_of_another_user_without_its_environment(cluster, folder, site, config, undisturbed, user):
    """Two runs on the same two nodes at the same time; one continues after a signal, the other is cancelled."""
    runs = folder / "of a user"
    where = ("--nodes=2", "--processes-per-node=1", f"--site={site}", "--sbatch=--export=NONE")
    flags = ("--config", str(config), "--host", "--train-iters", "100")
    told = cluster.run_as(user, *PRORES, "submit", "--run", str(runs), *where, "--array", "seed=8,7", *flags)
    number = re.search(r"submitted array (\d+): 2 runs", told)[1]
    jobs = [
        Job(cluster, f"{number}_{index}", runs / f"seed-{seed}", runs / f"slurm-{number}_{index}.out")
        for index, seed in enumerate((8, 7))
    ]
    for job in jobs:
        job.wait_for_steps(1)
    assert [job.slurm["NodeList"] for job in jobs] == ["n[1-2]"] * 2
    assert [job.slurm["JobState"] for job in jobs] == ["RUNNING"] * 2

    # The array's number is also that of its last run, and must not stand for all of them.
    cancelled, continued = jobs
    assert continued.slurm["JobId"] == number
    cluster.run("scancel", "--signal=USR1", continued.number)
    cluster.run("scancel", cancelled.number)
    continued.wait_for_requeue()
    waiting = cluster.run_as(user, *PRORES, "status", str(continued.folder)).splitlines()[1]
    assert "pending (BeginTime)" in waiting and f"{continued.starts[1][1]}/100" in waiting
    cancelled.wait_for_state("CANCELLED")
    tracker = cancelled.folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert tracker.exists(), cancelled.text
    assert int(tracker.read_text()) >= cancelled.starts[1][1]

    continued.finish()
    assert cancelled.slurm["JobState"] == "CANCELLED"
    curves = [losses(job.folder / "tensorboard") for job in jobs]
    assert curves[1] == {step: undisturbed[step] for step in range(1, 101)}
    assert curves[0][1] != curves[1][1]

    header, second, first = cluster.run_as(user, *PRORES, "status", str(runs)).splitlines()
    assert header.split() == ["run", "job", "state", "iteration", "loss", "validation", "alpha", "left", "requeued"]
    row = [
        str(continued.folder),
        f"{number}_1",
        "complete",
        "100/100",
        f"{curves[1][100]:.4f}",
        "-",
        "1..0.833",
        "-",
        "1",
    ]
    assert re.split("  +", second) == row
    row = [str(cancelled.folder), f"{number}_0", "ended by Slurm: submit it again", f"{tracker.read_text()}/100"]
    assert re.split("  +", first)[:4] == row


def test_deepspeed_continues(cluster, folder, site, config):
    """ZeRO-1 over two nodes."""
    pytest.importorskip("deepspeed")
    engine = ("--deepspeed_config", str(ROOT / "configs" / "deepspeed" / "zero1.json"))
    layout = ("--config", str(config), "--host", "--pipeline-model-parallel-size", "1", "--train-iters", "60")
    undisturbed = torchrun(folder / "deepspeed alone", 2, *engine, *layout, engine="deepspeed")
    options = ("--nodes=2",)
    job = submit(cluster, folder / "deepspeed", options, (*engine, *layout), engine="deepspeed", PRORES_SITE=str(site))
    job.wait_for_steps(3)
    cluster.run("scancel", "--signal=USR1", "--batch", job.number)
    job.finish()
    assert job.starts[2][0] == job.starts[1][1] > 0
    assert losses(job.folder / "tensorboard") == undisturbed
