"""Builds megatron_prores._C from csrc/: the CPU kernels where a C++ compiler is found, the CUDA kernels where nvcc is.

MEGATRON_PRORES_CUDA=1 makes missing CUDA an error, =0 leaves it out; TORCH_CUDA_ARCH_LIST names other GPUs ("8.0;9.0").
Torch gives its headers only: the extension uses its stable ABI, and one build works with every torch from 2.10 on.
Without a compiler the package installs all the same and computes in plain torch. The rest is in pyproject.toml.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

OLDEST_TORCH = "2.10"
STABLE_ABI = ["-DTORCH_STABLE_ONLY", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
ARCHITECTURES = "8.0;9.0;10.0+PTX"  # A100, H100/H200, B200; PTX for what comes after


def torch_folder() -> Path | None:
    """The torch to compile against; pip's isolated builds hide it from `import`, but not from the eye."""
    spec = importlib.util.find_spec("torch")
    places = [Path(spec.origin).parent] if spec and spec.origin else []
    places += [Path(sysconfig.get_path(name)) / "torch" for name in ("platlib", "purelib")]
    return next((place for place in places if (place / "include/torch/csrc/stable/ops.h").is_file()), None)


def cxx() -> str | None:
    named = os.environ.get("CXX")
    return shutil.which(named.split()[0]) if named else shutil.which("g++") or shutil.which("c++")


def nvcc() -> str | None:
    """nvcc, unless it is not wanted."""
    wanted = os.environ.get("MEGATRON_PRORES_CUDA", "")
    if wanted not in ("", "0", "1"):
        sys.exit(f"error: MEGATRON_PRORES_CUDA is 0, 1 or unset, not {wanted!r}")
    if wanted == "0":
        return None
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("nvcc", path=f"{home}/bin") or shutil.which("nvcc")
    if not found and wanted == "1":
        sys.exit("error: MEGATRON_PRORES_CUDA=1, but there is no nvcc in $CUDA_HOME/bin or on PATH")
    return found


class BuildExtension(build_ext):
    """Compiles csrc/cuda.cu with nvcc first and hands the object to the C++ linker."""

    def build_extension(self, ext: Extension) -> None:
        self.force = True  # nvcc, compiler or torch may have changed where no source has
        compiler, what = nvcc(), "CPU"
        if compiler:
            architectures = self._compile_cuda(ext, compiler)
            what += f" and CUDA ({architectures})"
        print(f"megatron_prores: building the fused operators for {what}", file=sys.stderr)
        super().build_extension(ext)

    def _compile_cuda(self, ext: Extension, compiler: str) -> str:
        architectures = os.environ.get("TORCH_CUDA_ARCH_LIST") or ARCHITECTURES
        flags = []
        for number, ptx in re.findall(r"(\d+\.\d+[a-z]?)(\+PTX)?", architectures):
            name = number.replace(".", "")
            flags += ["-gencode", f"arch=compute_{name},code=sm_{name}"]
            if ptx:
                flags += ["-gencode", f"arch=compute_{name},code=compute_{name}"]
        if not flags:
            sys.exit(
                f"error: TORCH_CUDA_ARCH_LIST={architectures!r} names no architecture: use, for example, '8.0;9.0'"
            )
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / "cuda.o"
        command = [compiler, "-O3", "-std=c++17", "-Xcompiler=-fPIC", "--threads=0", *flags]
        subprocess.run([*command, "-c", "csrc/cuda.cu", "-o", str(target)], check=True)
        said = subprocess.run([compiler, "--dryrun", "-c", "csrc/cuda.cu"], capture_output=True, text=True).stderr
        top = re.search(r"TOP=(.*)", said)[1].strip()
        version = re.search(r"release ([\d.]+)", subprocess.check_output([compiler, "--version"], text=True))[1]
        ext.extra_objects.append(str(target))
        ext.library_dirs += [f"{top}/lib64", f"{top}/lib", *re.findall(r'"-L([^"]+)"', said)]
        ext.libraries += ["cudart_static", "dl", "rt", "pthread"]
        ext.define_macros += [
            ("PRORES_CUDA", None),
            ("PRORES_CUDA_VERSION", f'"{version}"'),
            ("PRORES_CUDA_ARCHITECTURES", f'"{architectures}"'),
        ]
        return architectures


def extension(torch: Path, compiler: str) -> Extension:
    """megatron_prores._C."""
    try:
        import pybind11
    except ImportError:
        sys.exit("error: a build without isolation needs pybind11: pip install pybind11")
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout.splitlines()
    version = re.search(r"__version__ = ['\"](.*)['\"]", (torch / "version.py").read_text())[1]
    return Extension(
        "megatron_prores._C",
        ["csrc/cpu.cpp", "csrc/register.cpp", "csrc/module.cpp"],
        depends=[str(path) for path in sorted(Path("csrc").iterdir())],
        include_dirs=[str(torch / "include"), pybind11.get_include()],
        define_macros=[
            ("PRORES_COMPILER", f'"{said[0] if said else compiler}"'),
            ("PRORES_TORCH_VERSION", f'"{version}"'),
        ],
        # fopenmp-simd reads the pragmas and links no OpenMP: the threads are torch's.
        extra_compile_args=["-std=c++20", "-O3", "-g0", "-fopenmp-simd", "-fvisibility=hidden", *STABLE_ABI],
        # libtorch.so brings in libtorch_cuda where there is one; no symbol of its own would keep it.
        extra_link_args=[f"-L{torch / 'lib'}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu"],
        optional=True,  # a compiler that fails is reported and leaves the plain-torch path
    )


compiler, torch = cxx(), torch_folder()
if not compiler:
    if os.environ.get("MEGATRON_PRORES_CUDA") == "1":
        sys.exit("error: MEGATRON_PRORES_CUDA=1 needs a C++ compiler: install g++ or set CXX")
    print("megatron_prores: no C++ compiler found (g++, c++ or $CXX): plain torch only", file=sys.stderr)
setup(
    ext_modules=[extension(torch, compiler)] if compiler and torch else [],
    cmdclass={"build_ext": BuildExtension},
    # An isolated build in an environment without torch asks for it; where there is one, its headers do.
    setup_requires=[] if torch or not compiler else [f"torch>={OLDEST_TORCH}"],
)
