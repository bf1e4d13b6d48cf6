"""What the benchmarks write down: one row for each measurement, with the versions and the machine."""

import csv
import platform
import statistics
from datetime import date
from importlib.metadata import version

import torch

from megatron_prores import __version__
from megatron_prores.errors import UserError
from megatron_prores.machine import cpu_name
from megatron_prores.ops.choice import why_not_fused

Row = dict[str, object]


def machine(device: str) -> Row:
    """The columns that say where and with what a row was measured."""
    built = {"compiler": "", "instruction_set": "", "cuda_version": ""}
    if why_not_fused("cpu") is None:
        from megatron_prores.ops import fused

        built |= fused.build_info()
    return {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "instruction_set": built["instruction_set"] if device == "cpu" else "",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "megatron_core": version("megatron-core"),
        "megatron_prores": __version__,
        "compiler": built["compiler"],
        "nvcc": built["cuda_version"],
        "python": platform.python_version(),
    }


def quartiles(values: list[float]) -> list[float]:
    """First quartile, median and third quartile."""
    return statistics.quantiles(values, n=4)


def append(path: str, rows: list[Row]) -> None:
    """Add rows to a CSV file, with a header where it is new.

    Raises:
        UserError: the file has another header, or cannot be written.
    """
    columns = list(rows[0])
    try:
        with open(path, "a+", newline="") as file:
            file.seek(0)
            header = next(csv.reader(file), None)
            if header not in (None, columns):
                raise UserError(f"--csv {path} has other columns than this benchmark writes: give a new file")
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            if header is None:
                writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise UserError(f"--csv {path} cannot be written ({error.strerror})") from error
