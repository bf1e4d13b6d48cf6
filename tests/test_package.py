"""What pip builds from the checkout."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_wheel_holds_every_module_and_nothing_else(tmp_path):
    """Without build isolation, as on a cluster without network. From a copy, since setuptools leaves a build folder."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "megatron_prores", source / "megatron_prores", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    modules = [str(path.relative_to(ROOT)) for path in (ROOT / "megatron_prores").rglob("*.py")]
    assert sorted(names) == sorted(modules)
    assert "prores = megatron_prores.cli:main" in _read(wheel, "entry_points.txt")


def _read(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(next(entry for entry in archive.namelist() if entry.endswith(name))).decode()


def test_importing_the_package_imports_no_engine():
    code = (
        "import sys, megatron_prores, megatron_prores.cli, megatron_prores.megatron; "
        "print([m for m in ('torch', 'megatron.core', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
