"""What pip builds from the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NO_NVCC = "/usr/bin:/bin"


@pytest.fixture
def source(tmp_path):
    """A copy of the checkout, since setuptools leaves a build folder."""
    folder = tmp_path / "source"
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("megatron_prores", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def build(source: Path, **environment: str) -> subprocess.CompletedProcess:
    """Build a wheel into the source's folder without build isolation, as on a cluster without network."""
    pip = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation"]
    command = [*pip, "--wheel-dir", str(source), str(source)]
    return subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_without_a_compiler_the_wheel_holds_every_module_and_nothing_else(source):
    built = build(source, CXX="no-such-compiler")
    assert built.returncode == 0, built.stdout
    assert built.stdout.count("no C++ compiler found") >= 1
    (wheel,) = source.glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    modules = [str(path.relative_to(ROOT)) for path in (ROOT / "megatron_prores").rglob("*.py")]
    assert sorted(names) == sorted(modules)
    assert "prores = megatron_prores.cli:main" in _read(wheel, "entry_points.txt")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"CXX": "no-such-compiler", "MEGATRON_PRORES_CUDA": "1"}, "needs a C++ compiler"),
        ({"CUDA_HOME": "/no/such", "PATH": NO_NVCC, "MEGATRON_PRORES_CUDA": "1"}, "there is no nvcc"),
        ({"MEGATRON_PRORES_CUDA": "yes"}, "MEGATRON_PRORES_CUDA is 0, 1 or unset, not 'yes'"),
        ({"MEGATRON_PRORES_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "hopper"}, "names no architecture"),
    ],
    ids=["no compiler", "no nvcc", "neither 0 nor 1", "architecture"],
)
@pytest.mark.skipif(not shutil.which("g++", path=NO_NVCC), reason="there is no g++ in a folder without nvcc")
def test_builds_that_cannot_be_are_refused(source, environment, message):
    if "hopper" in environment.values() and not shutil.which("nvcc"):
        pytest.skip("nvcc is not installed")
    built = build(source, **environment)
    assert built.returncode != 0
    assert message in built.stdout and "Traceback" not in built.stdout
    assert not list(source.glob("*.whl"))


def _read(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(next(entry for entry in archive.namelist() if entry.endswith(name))).decode()


def test_importing_the_package_imports_no_engine():
    code = (
        "import sys, megatron_prores, megatron_prores.cli, megatron_prores.megatron; "
        "print([m for m in ('torch', 'megatron.core', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
