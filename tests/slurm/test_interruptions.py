"""A run that everything happens to ends where an undisturbed one does."""

import os
import shutil
import signal
from pathlib import Path

from cluster import losses, submit, wait_until

SAVE_INTERVAL = 15


def test_interruptions(cluster, folder, site, config, undisturbed):
    flags = ("--config", str(config), "--host", "--save-interval", str(SAVE_INTERVAL))
    options = ("--nodes=2", "--time=1", "--signal=B:USR1@50")
    job = submit(cluster, folder / "a run", options, flags, PRORES_SITE=str(site))

    # The time limit.
    job.wait_for_requeue(1)
    assert "warned by Slurm" in job.text
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=30")
    job.start_again()

    # A signal to the steps alone.
    job.wait_for_steps(start=2, steps=3)
    cluster.run("scancel", "--signal=USR1", job.number)
    job.wait_for_requeue(2)
    job.start_again()

    # The administrator takes the job off the nodes.
    job.wait_for_steps(start=3, steps=3)
    cluster.run("scontrol", "requeue", job.number)
    job.wait_for_requeue(3)
    job.start_again()

    # A job that matters more needs the nodes.
    job.wait_for_steps(start=4, steps=3)
    urgent = cluster.run("sbatch", "--parsable", "-p", "urgent", "-N3", "--exclusive", "-o/dev/null", "--wrap=true")
    job.wait_for_requeue(4)
    wait_until(lambda: cluster.job(urgent.strip())["JobState"] == "COMPLETED")
    job.start_again()

    # A launcher dies; its ranks must not go on without it.
    job.wait_for_steps(start=5, steps=3)
    launcher = next(pid for pid, command in cluster.processes_on("n2") if "torch.distributed.run" in command)
    os.kill(launcher, signal.SIGKILL)
    job.wait_for_requeue(5)
    assert not [command for node in ("n1", "n2") for _, command in cluster.processes_on(node) if "pretrain" in command]
    job.start_again()

    # A node loses power while a checkpoint is being written.
    job.wait_for_steps(start=6, steps=SAVE_INTERVAL + 3)
    cluster.lab("off", "n2")
    job.wait_for_requeue(6)
    leave_half_a_checkpoint(job.folder / "checkpoints")
    job.start_again()

    job.finish()
    assert job.state["state"] == "complete" and int(job.state["requeued"]) >= 6
    assert losses(job.folder / "tensorboard") == undisturbed
    begins, ends = zip(*job.starts, strict=True)
    lost = [end - begin for begin, end in zip(begins[1:], ends[:-1], strict=True)]
    assert [start for start, steps in enumerate(lost, start=1) if steps > 0 and start not in (5, 6)] == []
    assert all(steps < SAVE_INTERVAL for steps in lost)

    cluster.lab("on", "n2")
    cluster.wait_for_node("n2")


def leave_half_a_checkpoint(checkpoints: Path) -> None:
    """As a save leaves it that is cut off before its end, and the file that names the latest with it."""
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    latest = int(tracker.read_text())
    half = checkpoints / f"iter_{latest + 1:07}"
    shutil.copytree(checkpoints / f"iter_{latest:07}", half)
    (half / "metadata.json").unlink()
    (half / ".metadata").unlink()
    tracker.write_text("")
