"""A Slurm cluster on this machine, and what the tests ask of it."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_prores.report import read_scalars

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "launch_scripts" / "slurm"
PRORES = [sys.executable, "-m", "megatron_prores.cli"]
_LAB = ["bash", str(Path(__file__).with_name("slurmlab.sh"))]


def wait_until(condition: Callable[[], object], timeout: float = 120.0) -> None:
    """Poll until the condition holds.

    Raises:
        TimeoutError: it did not within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.1)


def losses(tensorboard: Path) -> dict[int, float]:
    """Training loss by iteration, exactly as TensorBoard holds it (float32)."""
    steps, values = read_scalars(tensorboard)["lm loss"]
    return dict(zip(steps.tolist(), values.tolist(), strict=True))


def torchrun(folder: Path, processes: int, *flags: str, engine: str = "megatron") -> dict[int, float]:
    """The losses of a run under torchrun alone, on this machine."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    program = ["-m", f"megatron_prores.{engine}.pretrain_gpt", "--tensorboard-dir", str(folder), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *launcher, *program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return losses(folder)


@dataclass
class Cluster:
    """Nodes n1, n2, ... with 16 CPUs each, as Slurm believes.

    Attributes:
        folder: of the cluster's own files.
    """

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Of this checkout, and without what another Slurm or site may have set here."""
        kept = {name: value for name, value in os.environ.items() if not re.match("SLURM_|SBATCH_|PRORES_", name)}
        return {
            **kept,
            "PYTHONPATH": str(ROOT),
            "SLURM_CONF": str(self.folder / "etc" / "slurm.conf"),
            "SLURMLAB": str(self.folder),
            "SLURMLAB_PROGRAMS": f"{ROOT}:{sys.prefix}:{sys.base_prefix}",
        }

    def lab(self, *words: str) -> None:
        """Start or stop the cluster or a node."""
        subprocess.run([*_LAB, *words], check=True, env=self.environment, timeout=120)

    def run(self, *command: str, **extra: str) -> str:
        """stdout of a command of Slurm's.

        Args:
            extra: environment variables.
        """
        environment = {**self.environment, **extra}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, cwd=ROOT)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def run_as(self, user: str, *command: str) -> str:
        """stdout of a user's command on n3."""
        slurmd = (self.folder / "run" / "slurmd.n3.pid").read_text().strip()
        login = ["nsenter", f"--target={slurmd}", "--mount", "--net", "--uts"]
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        return self.run(*login, *become, *command, HOME=f"/home/{user}", USER=user)

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        shown = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def processes_on(self, node: str) -> list[tuple[int, str]]:
        """Process numbers and command lines."""
        found = []
        for pid in self.run("ip", "netns", "pids", f"slurmlab-{node}").split():
            try:
                found.append((int(pid), Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")))
            except OSError:
                continue
        return found

    def wait_for_node(self, node: str) -> None:
        wait_until(lambda: self.run("sinfo", "-h", "-p", "normal", "-n", node, "-o", "%T").strip() == "idle")


def submit(
    cluster: Cluster,
    folder: Path,
    options: tuple[str, ...],
    flags: tuple[str, ...],
    engine: str = "megatron",
    **extra: str,
) -> "Job":
    """A run in `folder` by the engine's batch script, as root.

    Args:
        extra: environment variables.
    """
    script = str(SCRIPTS / f"pretrain_{engine}.sbatch")
    output = Path(f"{folder}.out")
    command = ("sbatch", "--parsable", f"--output={output}", *options, script, str(folder), *flags)
    return Job(cluster, cluster.run(*command, **extra).strip(), folder, output)


@dataclass
class Job:
    """A submitted run.

    Attributes:
        number: 12, or 12_3 in an array.
    """

    cluster: Cluster
    number: str
    folder: Path
    output: Path

    @property
    def text(self) -> str:
        """All that the job has printed."""
        return self.output.read_text() if self.output.exists() else ""

    @property
    def slurm(self) -> dict[str, str]:
        return self.cluster.job(self.number)

    @property
    def state(self) -> dict[str, str]:
        """What the job says of itself."""
        return dict(line.split("=", 1) for line in (self.folder / "slurm.state").read_text().splitlines())

    @property
    def starts(self) -> dict[int, tuple[int, int]]:
        """By the number of the start: the iterations that it began and ended at."""
        parts = re.split(r"^prores: start (\d+): iteration (\d+) of", self.text, flags=re.MULTILINE)
        found = {}
        for number, begin, printed in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            steps = map(int, re.findall(r"step +(\d+)/\d+ \|", printed))
            found[int(number)] = (int(begin), max([int(begin), *steps]))
        return found

    def wait_for_start(self, number: int) -> None:
        self.wait(lambda: number in self._kept_going().starts, f"start {number}")

    def wait_for_steps(self, steps: int) -> None:
        """Until the latest start has trained so many."""

        def has_trained() -> bool:
            starts = self._kept_going().starts
            return bool(starts) and starts[max(starts)][1] - starts[max(starts)][0] >= steps

        self.wait(has_trained, f"{steps} steps")

    def wait_for_state(self, name: str) -> None:
        """Until Slurm calls the job so, and has nothing of it running any more."""
        self.wait(lambda: self.slurm["JobState"] == name and not self._is_completing(), name)

    def wait_for_requeue(self) -> None:
        """Until the latest start is over and the job back in the queue."""
        self.wait(lambda: self.slurm["Restarts"] == str(max(self.starts, default=1)), "requeue")
        self.wait_for_state("PENDING")

    def finish(self) -> None:
        """Until the job has completed, however often it starts."""
        self.wait(lambda: self._kept_going().slurm["JobState"] == "COMPLETED", "end")
        self.wait_for_state("COMPLETED")

    def _kept_going(self) -> "Job":
        """A job that is back in the queue starts soon, and not in the two minutes that Slurm lets it wait.

        Not at once either: within the same second the nodes take the new start for the old one, and refuse it. And once
        a node does not answer, Slurm repeats its last signals for a minute; they may end the next start as well.
        """
        if self.slurm["Reason"] == "BeginTime":
            self.cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now+2")
            self.wait(lambda: self.slurm["JobState"] != "PENDING", "start")
        return self

    def wait(self, condition: Callable[[], object], what: str) -> None:
        try:
            wait_until(condition)
        except TimeoutError as error:
            logs = [path.read_text()[-3000:] for path in sorted((self.cluster.folder / "log").glob("slurm*.log"))]
            told = [f"no {what}: {self.slurm}", self.text[-6000:], *logs]
            raise AssertionError("\n".join(told)) from error

    def _is_completing(self) -> bool:
        return bool(self.cluster.run("squeue", "-h", "-t", "COMPLETING", "-j", self.number, "-o", "%A").strip())
