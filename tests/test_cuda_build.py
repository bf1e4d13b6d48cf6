"""The CUDA kernels as compiled, which needs no GPU: nothing in local memory, and vector accesses where they are due."""

import os
import re
import shutil
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "csrc" / "cuda.cu"
ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
OPERATIONS = ["add_forward", "add_backward", "norm_forward", "norm_backward"]
TYPE_PAIRS = 6

# What else than tensors a kernel reads and writes, number by number: alpha, seed and offset, and a row's rstd.
SCALARS = {"add_forward": (3, 0), "add_backward": (3, 0), "norm_forward": (3, 1), "norm_backward": (4, 0)}


def _compile(nvcc: str, architecture: str, folder: Path) -> tuple[str, str]:
    """What the compiler says, and the PTX."""
    command = [nvcc, "-O3", "-std=c++17", f"-arch={architecture}", "-cubin", "-Xptxas", "-v,-warn-spills", "--keep"]
    result = subprocess.run([*command, str(SOURCE)], cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stderr, (folder / "cuda.ptx").read_text()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin")
    if not nvcc:
        pytest.skip("nvcc is not installed")
    with ThreadPoolExecutor(2) as pool:
        jobs = {name: pool.submit(_compile, nvcc, name, tmp_path_factory.mktemp(name)) for name in ARCHITECTURES}
    return {name: job.result() for name, job in jobs.items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills_registers_or_has_a_stack(compiled, architecture):
    log, _ = compiled[architecture]
    assert "warning" not in log
    memory = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    kernels = 2 * len(OPERATIONS) * TYPE_PAIRS  # vector and scalar, and the sums over chunks beside them
    assert log.count("Compiling entry function") > kernels
    assert len(memory) > kernels and set(memory) == {("0", "0", "0")}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_vector_kernels_read_and_write_tensors_in_16_bytes(compiled, architecture, operation):
    _, ptx = compiled[architecture]
    # Lb1: vector is true.
    kernels = re.findall(rf"\.entry \w+?\d{operation}I\w*?Lb1E\w*\(.*?\n}}\n", ptx, flags=re.DOTALL)
    assert len(kernels) == TYPE_PAIRS
    for kernel in kernels:
        accesses = re.findall(r"^\s*(?:@\S+\s+)?(ld|st)\.(?!param|shared)(\S+)", kernel, flags=re.MULTILINE)
        vectors = Counter(which for which, kind in accesses if re.search(r"\.(v4\.[buf]32|v2\.[buf]64)$", kind))
        scalars = Counter(which for which, _ in accesses) - vectors
        assert vectors["ld"] and vectors["st"]
        assert (scalars["ld"], scalars["st"]) == SCALARS[operation], accesses
