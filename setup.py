"""Package metadata lives in pyproject.toml; this file is where the C++/CUDA extension in csrc/ is built."""

from setuptools import setup

setup()
