"""Which implementation of the operators runs: the fused one where it is built for the device, else plain torch."""

import re
from pathlib import Path

import torch

from megatron_prores.errors import UserError

OPS = ("auto", "fused", "torch")

_op = "auto"
_reasons: dict[str, str | None] = {}


def use_op(name: str) -> None:
    """Choose for this process: `fused`, `torch`, or `auto` (fused where it was built for the device).

    Raises:
        UserError: no such choice, or `fused` where the extension was not built.
    """
    global _op
    if name not in OPS:
        raise UserError(f"--prores-op {name}: choose one of {', '.join(OPS)}")
    if name == "fused" and (why := why_not_fused(default_device_type())):
        raise UserError(f"--prores-op fused: {why}; use --prores-op auto, or see `prores doctor`")
    _op = name


def is_fused(device_type: str) -> bool:
    """True where the fused operators run for tensors on such a device ("cpu", "cuda")."""
    return _op != "torch" and why_not_fused(device_type) is None


def describe_op(device_type: str) -> str:
    """What runs on such a device, and why it is not the fused operators where those were not refused by choice."""
    if _op == "torch":
        return "plain torch (--prores-op torch)"
    if why := why_not_fused(device_type):
        return f"plain torch: {why}"
    from megatron_prores.ops import fused

    return f"fused, {fused.build_info()['instruction_set'] if device_type == 'cpu' else 'CUDA'}"


def default_device_type() -> str:
    """Where a model trains on this machine."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def why_not_fused(device_type: str) -> str | None:
    """None where the fused operators can run on such a device, else the reason."""
    if device_type not in _reasons:
        _reasons[device_type] = _why_not_fused(device_type)
    return _reasons[device_type]


# What torch.compiler.assume_constant_result does, without the half second and the warnings of importing the compiler.
why_not_fused._dynamo_marked_constant = True


def _why_not_fused(device_type: str) -> str | None:
    try:
        from megatron_prores.ops import fused
    except ImportError as error:
        if "megatron_prores._C" in str(error) or "cannot import name '_C'" in str(error):
            folder = Path(__file__).parents[1]
            return (
                f"the extension was not built (there is none in {folder}: no C++ compiler when that was installed, "
                "or a source folder in the place of the installed package)"
            )
        return f"the extension does not load: {error}"
    if device_type == "cpu":
        return None
    if device_type != "cuda":
        return f"there are no fused operators for {device_type}"
    built = fused.build_info()["cuda_architectures"]
    if not built:
        return "the extension was built without CUDA (no nvcc when the package was installed?)"
    capability = torch.cuda.get_device_capability()
    if not runs_on(built, capability):
        return f"the extension was built for {built}, the GPU has {'.'.join(map(str, capability))}"
    return None


def runs_on(built: str, capability: tuple[int, int]) -> bool:
    """True where code for the architectures `built` ("8.0;9.0+PTX") runs on a GPU of such a compute capability.

    Machine code runs on later GPUs of its generation (8.0 on 8.6), PTX on everything later.
    """
    for major, minor, ptx in re.findall(r"(\d+)\.(\d+)[a-z]?(\+PTX)?", built):
        architecture = (int(major), int(minor))
        if architecture <= capability and (ptx or architecture[0] == capability[0]):
            return True
    return False
