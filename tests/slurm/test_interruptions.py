"""A run that everything happens to ends where an undisturbed one does."""

import os
import shutil
import signal
from pathlib import Path

from cluster import Job, losses, submit, wait_until

SAVE_INTERVAL = 15


def test_interruptions(cluster, folder, site, config, undisturbed):
    flags = ("--config", str(config), "--host", "--save-interval", str(SAVE_INTERVAL))
    options = ("--nodes=2", "--time=1", "--signal=B:USR1@50")
    job = submit(cluster, folder / "a run", options, flags, PRORES_SITE=str(site))

    # The time limit. Slurm looks at the clock twice a minute; until then the run stands still, or it would be over.
    job.wait(lambda: job.starts.get(1, (0, 0))[1] >= 3 or is_warned(job), "steps")
    ranks = [pid for pid, command in cluster.processes_on("n1") if "-u -m megatron_prores" in command]
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    job.wait(lambda: is_warned(job), "warning")
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    job.wait_for_requeue()
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=30")
    assert steps_lost(job) == 0

    # A signal to the steps alone.
    job.wait_for_steps(3)
    cluster.run("scancel", "--signal=USR1", job.number)
    assert steps_lost(job) == 0

    # The administrator takes the job off the nodes.
    job.wait_for_steps(3)
    cluster.run("scontrol", "requeue", job.number)
    assert steps_lost(job) == 0

    # A job that matters more needs the nodes.
    job.wait_for_steps(3)
    urgent = cluster.run("sbatch", "--parsable", "-p", "urgent", "-N3", "--exclusive", "-o/dev/null", "--wrap=true")
    wait_until(lambda: cluster.job(urgent.strip())["JobState"] == "COMPLETED")
    assert steps_lost(job) == 0

    # A launcher dies; its ranks must not go on without it.
    job.wait_for_steps(3)
    launcher = next(pid for pid, command in cluster.processes_on("n2") if "torch.distributed.run" in command)
    os.kill(launcher, signal.SIGKILL)
    job.wait_for_requeue()
    assert not [command for node in ("n1", "n2") for _, command in cluster.processes_on(node) if "pretrain" in command]
    assert 0 <= steps_lost(job) < SAVE_INTERVAL

    # A node loses power while a checkpoint is being written.
    job.wait_for_steps(SAVE_INTERVAL + 3)
    cluster.lab("off", "n2")
    job.wait_for_requeue()
    leave_half_a_checkpoint(job.folder / "checkpoints")
    assert 0 <= steps_lost(job) < SAVE_INTERVAL

    job.finish()
    assert job.state["state"] == "complete" and int(job.state["requeued"]) >= 6
    assert losses(job.folder / "tensorboard") == undisturbed

    cluster.lab("on", "n2")
    cluster.wait_for_node("n2")


def is_warned(job: Job) -> bool:
    return "warned by Slurm" in job.text


def steps_lost(job: Job) -> int:
    """Between this start, which has been interrupted, and the next."""
    job.wait_for_requeue()
    starts = job.starts
    job.wait_for_start(max(starts) + 1)
    return starts[max(starts)][1] - job.starts[max(starts) + 1][0]


def leave_half_a_checkpoint(checkpoints: Path) -> None:
    """As a save leaves it that is cut off before its end, and the file that names the latest with it."""
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    latest = int(tracker.read_text())
    half = checkpoints / f"iter_{latest + 1:07}"
    shutil.copytree(checkpoints / f"iter_{latest:07}", half)
    (half / "metadata.json").unlink()
    (half / ".metadata").unlink()
    tracker.write_text("")
