"""What this machine is."""

import os
import platform
from pathlib import Path


def cpu_name() -> str:
    """As the processor calls itself, and the number of its cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.processor() or platform.machine())} ({os.cpu_count()} cores)"
