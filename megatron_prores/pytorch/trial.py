"""One forward of a model to look at, whatever state the model is in."""

import contextlib
import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megatron_prores.errors import UserError

Example = tuple | dict | None
"""The arguments of the trial forward: positional ones, keywords, or None for token ids of shape [1, 2]."""


def trial(model: nn.Module, example: Example, stacks: Iterable[str]) -> None:
    """One forward in eval mode, uncompiled, that leaves nothing behind."""
    stand_ins = _stand_ins(model)
    devices = (t.device for t in (*stand_ins.values(), *model.parameters()) if t.device.type != "meta")
    if example is None:
        example = (torch.zeros(1, 2, dtype=torch.long, device=next(devices, "cpu")),)
    args, kwargs = ((), example) if isinstance(example, dict) else (tuple(example), {})
    eager = contextlib.nullcontext()
    if "torch._dynamo" in sys.modules:
        eager = torch.compiler.set_stance("force_eager")
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), eager:
            if stand_ins:
                torch.func.functional_call(model, stand_ins, args, kwargs)
            else:
                model(*args, **kwargs)
    except UserError:
        raise
    except Exception as error:
        line = next(iter(str(error).splitlines()), "")
        shapes = ", ".join(str(list(value.shape)) for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        raise UserError(
            f"ProRes cannot attach to {type(model).__name__}: a trial forward on {shapes} failed with "
            f"{type(error).__name__}: {line}; if the model takes other arguments, give them as `example`. Its lists of "
            f"layers: {', '.join(stacks)}"
        ) from error
    finally:
        for module in training:
            module.training = True


def _stand_ins(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of the right shape for the weights that have no numbers yet, all in the memory of the largest one."""
    missing = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        shape = getattr(tensor, "ds_shape", tensor.shape)  # ZeRO-3: the whole weight's
        if tensor.is_meta or shape != tensor.shape:
            missing[name] = (shape, tensor.dtype, torch.device("cpu") if tensor.is_meta else tensor.device)
    sizes: dict[tuple, int] = {}
    for shape, *kind in missing.values():
        sizes[tuple(kind)] = max(sizes.get(tuple(kind), 0), shape.numel())
    memory = {
        (dtype, device): torch.ones(size, dtype=dtype, device=device).mul_(0.01 if dtype.is_floating_point else 1)
        for (dtype, device), size in sizes.items()
    }
    return {name: memory[*kind][: shape.numel()].view(shape) for name, (shape, *kind) in missing.items()}
