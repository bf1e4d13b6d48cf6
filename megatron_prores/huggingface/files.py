"""Weights in safetensors files, as `save_pretrained` and `from_pretrained` of transformers know them."""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_prores.errors import UserError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def save_weights(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int = 5 * 10**9) -> int:
    """Write named tensors in their order, to several files beyond a size; of the tensors only one file's are held.

    Returns:
        The number of files.
    """
    shards: list[tuple[Path, list[str]]] = []
    pending: dict[str, torch.Tensor] = {}
    total = parameters = size = 0

    def flush() -> None:
        path = folder / f"shard-{len(shards) + 1}.safetensors"
        save_file(pending, path, metadata={"format": "pt"})
        path.chmod(folder.stat().st_mode & 0o666)  # safetensors makes it the owner's alone
        shards.append((path, list(pending)))
        pending.clear()

    for name, tensor in tensors:
        # A copy of its own on the host: parts of one weight share memory, and safetensors refuses that.
        tensor = tensor.detach().to("cpu", copy=True).contiguous()
        if pending and size + tensor.nbytes > shard_bytes:
            flush()
            size = 0
        pending[name] = tensor
        size, total, parameters = size + tensor.nbytes, total + tensor.nbytes, parameters + tensor.numel()
    flush()
    if len(shards) == 1:
        shards[0][0].rename(folder / _SINGLE)
        return 1
    weight_map = {}
    for number, (path, names) in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        path.rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_parameters": parameters, "total_size": total}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return len(shards)


class SavedWeights:
    """The named tensors of a model's folder, read one at a time.

    Raises:
        UserError: the folder holds no safetensors, or one is missing or damaged.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._open = ExitStack()
        self._files = {}
        try:
            for file in _file_names(folder):
                opened = self._open.enter_context(safe_open(folder / file, framework="pt"))
                self._files |= dict.fromkeys(opened.keys(), opened)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            self._open.close()
            raise UserError(f"the weights in {folder} cannot be read: {error}") from error

    def names(self) -> set[str]:
        return set(self._files)

    def dtype(self) -> str:
        """The one dtype that holds all of them exactly: "float32", "bfloat16" or "float16"."""
        found = {_DTYPES.get(file.get_slice(name).get_dtype(), "float32") for name, file in self._files.items()}
        return found.pop() if len(found) == 1 else "float32"

    def read(self, name: str) -> torch.Tensor:
        return self._files[name].get_tensor(name)

    def close(self) -> None:
        self._open.close()


def _file_names(folder: Path) -> list[str]:
    if (folder / _INDEX).is_file():
        return sorted(set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    if (folder / _SINGLE).is_file():
        return [_SINGLE]
    if list(folder.glob("*.bin")):
        raise UserError(
            f"{folder} holds PyTorch files and no safetensors: load it in transformers and save_pretrained() it anew"
        )
    raise UserError(f"{folder} holds no {_SINGLE} and no {_INDEX}")
