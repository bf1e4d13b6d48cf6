"""The cluster that the tests in this folder share. Needs root, Debian's or Ubuntu's Slurm, and network namespaces."""

import fcntl
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from cluster import ROOT, Cluster, torchrun

_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare")

# One place, as there is one on the machine: what an earlier test run could not stop is stopped before the next.
_CLUSTER = Path("/tmp/prores-slurmlab")

# With dropout, so that the random states have to be right too.
SMALL = {
    "num-layers": 4,
    "hidden-size": 64,
    "num-attention-heads": 4,
    "ffn-hidden-size": 128,
    "seq-length": 32,
    "max-position-embeddings": 32,
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True,
    "attention-dropout": 0.1,
    "hidden-dropout": 0.1,
    "micro-batch-size": 2,
    "global-batch-size": 8,
    "lr": 1.0e-3,
    "lr-decay-style": "constant",
    "eval-iters": 0,
    "log-interval": 1,
    "save-interval": 1000,
    "prores-warmup-steps": 30,
    "mock-data": True,
    "tokenizer-type": "NullTokenizer",
    "vocab-size": 127,
    "pipeline-model-parallel-size": 2,
    "train-iters": 160,
    "seed": 7,
}


def _missing() -> str | None:
    if os.geteuid() != 0:
        return "a Slurm cluster on one machine needs root"
    if absent := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return (
            f"{', '.join(absent)} not found: "
            "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge iproute2"
        )
    if not Path("/sys/fs/cgroup/freezer").is_dir():
        return "proctrack/cgroup of this Slurm needs the cgroup v1 freezer"
    return None


@pytest.fixture(scope="module")
def cluster():
    """Three nodes, n1 to n3. Whoever else wants them waits."""
    if reason := _missing():
        pytest.skip(reason)
    lab = Cluster(_CLUSTER)
    with open(f"{_CLUSTER}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _CLUSTER.mkdir(exist_ok=True)
        try:
            lab.lab("up", "3")
            yield lab
        finally:
            lab.lab("down")
            shutil.rmtree(_CLUSTER)


@pytest.fixture(scope="session")
def folder():
    """For runs, with a space in its path, open to other users, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="prores slurm ", dir="/tmp"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def site(folder) -> Path:
    """A site file for nodes without GPUs: one process on each."""
    path = folder / "site.sh"
    activate = f"activate() {{ export PATH='{Path(sys.executable).parent}':$PATH PYTHONPATH='{ROOT}'; }}"
    path.write_text(f"{activate}\nprocesses_per_node=1\n")
    return path


@pytest.fixture(scope="session")
def config(folder) -> Path:
    """Of a small model on two pipeline stages; a job gives its length in the flags."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


@pytest.fixture(scope="session")
def undisturbed(folder, config) -> dict[int, float]:
    """Its losses in two processes under torchrun alone."""
    if reason := _missing():
        pytest.skip(reason)
    return torchrun(folder / "undisturbed", 2, "--config", str(config), "--host")
