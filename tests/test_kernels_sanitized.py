"""The CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [ROOT / "csrc/cpu.cpp", ROOT / "tests/csrc/sanitize.cpp"]


# One at a time: the compiler takes longer for both together than for one after the other.
@pytest.mark.parametrize("sanitizer", ["address", "undefined"])
def test_kernels_run_clean(sanitizer, tmp_path):
    compiler = shutil.which("g++")
    if not compiler:
        pytest.skip("no g++")
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-std=c++20", "-O1", "-fopenmp-simd", "-g1"]
    flags += ["-DPRORES_STREAMED_BYTES=4096"]  # shapes on either side
    empty = tmp_path / "empty.cpp"
    empty.write_text("int main() {}")
    if subprocess.run([compiler, *flags, empty, "-o", tmp_path / "empty"], capture_output=True).returncode:
        pytest.skip(f"g++ has no library for -fsanitize={sanitizer}")
    program = tmp_path / "sanitize"
    subprocess.run([compiler, *flags, f"-I{ROOT / 'csrc'}", *SOURCES, "-o", program], check=True)
    # A preloaded allocator would come before the sanitizer's.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run([program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("base: ")
