"""`deepspeed.initialize` with ProRes: alpha advances with the optimizer steps that the engine applies."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import deepspeed
import torch
import torch.distributed
from deepspeed.pipe import PipelineModule

from megatron_prores.coefficients import LayerCoefficient, StageCoefficients
from megatron_prores.deepspeed import faults
from megatron_prores.deepspeed.section import check_types, parse, read_config
from megatron_prores.errors import UserError
from megatron_prores.pytorch import ProRes, attach
from megatron_prores.pytorch.trial import Example
from megatron_prores.schedule import Schedule

Say = Callable[[str], None]

STATE = "megatron_prores"
"""Our key in the scheduler's state and in the client state; DeepSpeed merges both with names of its own."""


class AlphaScheduler:
    """What DeepSpeed takes for its learning-rate scheduler: the real one, if any, and ProRes's alpha beside it.

    DeepSpeed steps its scheduler once per applied optimizer step, not per microbatch and not for a step that it skips
    for an overflow, and saves and restores it in plain, pipeline and universal checkpoints. The clock is
    t = global_steps - skipped_steps: forward number k uses alpha(k-1), not counting what was skipped.

    Attributes:
        coefficients: the alphas of this rank's layers.
        inner: the learning-rate scheduler, or None.
        completed: t of the alpha that the next forward uses.
        attached: where the model's layers do not read alpha by themselves, what `megatron_prores.attach` returned:
            `attached.describe()` says which modules are scaled, `attached.detach()` takes ProRes off.
    """

    attached: ProRes | None = None

    def __init__(self, engine: deepspeed.DeepSpeedEngine, coefficients: StageCoefficients, override: bool, say: Say):
        self.coefficients = coefficients
        self.inner = engine.lr_scheduler
        self._engine = engine
        self._override = override
        self._say = say if torch.distributed.get_rank() == 0 else lambda line: None
        self._skipped = 0
        self.set_step(0)

    @property
    def schedule(self) -> Schedule:
        return self.coefficients.schedule

    def set_step(self, step: int) -> None:
        """Make the next forward use alpha(l, step)."""
        self.completed = step
        self.coefficients.set_step(step)

    def set_to_clock(self) -> None:
        """Make the next forward use the alpha of the steps that the engine has applied so far."""
        self._skipped = self._engine.skipped_steps
        self.set_step(self._engine.global_steps - self._skipped)

    def step(self, *args, **kwargs) -> None:
        """The engine has applied an optimizer step, which it counts just after this call."""
        if self.inner is not None:
            self.inner.step(*args, **kwargs)
        skipped = self._engine.skipped_steps
        if new := skipped - self._skipped:
            self._say(
                f"ProRes: alpha stayed at t = {self.completed} while {new} optimizer "
                f"{'step was' if new == 1 else 'steps were'} skipped for an overflow"
            )
            self._skipped = skipped
        self.set_step(self._engine.global_steps + 1 - skipped)

    def describe(self) -> str:
        """A table: the layers of this rank and their alphas."""
        rows = [f"{part.layer_number:5}  {float(part.value):.6g}" for part in self.coefficients.coefficients]
        return "\n".join([f"ProRes: {self.schedule}; after {self.completed} steps", "layer  alpha", *rows])

    __repr__ = describe

    def get_lr(self) -> list[float]:
        return self.get_last_lr()

    def get_last_lr(self) -> list[float]:
        """The learning rate of every parameter group."""
        if hasattr(self.inner, "get_last_lr"):
            return self.inner.get_last_lr()
        return [group["lr"] for group in self._engine.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The real scheduler's state, which a run without ProRes can load too, with the schedule's settings in it."""
        state = {} if self.inner is None else dict(self.inner.state_dict())
        return {**state, STATE: _settings(self.schedule)}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore the real scheduler. alpha is set from the engine's clock when the engine has loaded that.

        Raises:
            UserError: the checkpoint was trained with another schedule, or another T.
        """
        state = dict(state or {})
        self._compare(state.pop(STATE, {"schedule": "none"}))
        if self.inner is not None and state:
            self.inner.load_state_dict(state)

    def _compare(self, saved: dict[str, Any]) -> None:
        current = _settings(self.schedule)
        if saved == current or saved["schedule"] == current["schedule"] == "none":
            return
        told = f"{saved['schedule']} (T = {float(Fraction(saved.get('warmup_steps', 0))):g})"
        if self._override:
            self._say(f"ProRes: resuming with {self.schedule}; the checkpoint was trained with {told}")
            return
        raise UserError(
            f"the checkpoint was trained with ProRes {told}, this run asks for {self.schedule}: use the same settings "
            "(where the warm-up is a fraction of the run, the same --train-iters, or --prores-total-warmup-steps), "
            'or change the schedule from here on with "override": true in "prores" (--prores-override)'
        )

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet
            raise AttributeError(name)
        return getattr(self.inner, name)


def _settings(schedule: Schedule) -> dict[str, Any]:
    return {"schedule": schedule.name, "warmup_steps": str(schedule.warmup_steps)}


def _print(line: str) -> None:
    print(line, flush=True)


def initialize(
    *,
    model: torch.nn.Module | None = None,
    config: Any = None,
    args: Any = None,
    config_params: Any = None,
    example: Example = None,
    **kwargs,
) -> tuple:
    """See `megatron_prores.deepspeed.initialize`."""
    if model is None:
        raise UserError("megatron_prores.deepspeed.initialize needs a model")
    given = next(
        (one for one in (config, config_params, getattr(args, "deepspeed_config", None)) if one is not None), None
    )
    if given is None:
        raise UserError("megatron_prores.deepspeed.initialize needs a DeepSpeed config: config=, or --deepspeed_config")
    config = read_config(given)
    check_types(config)
    section = parse(config)
    faults.refuse(model, config)
    if not torch.cuda.is_available():
        faults.skip_shared_memory_kernel()
    coefficients, attached = _own_coefficients(model), None
    if not coefficients and not isinstance(model, PipelineModule):
        attached = attach(model, section.schedule, example=example)  # before ZeRO-3 takes the model apart
        coefficients = attached.coefficients
    try:
        with _read_already(args):
            engine = start(model=model, config=config, args=args, **kwargs)
        schedule = section.resolve(_number_of_layers(engine, coefficients))
    except BaseException:
        if attached is not None:
            attached.detach()
        raise
    hook = switch_on(engine, StageCoefficients(schedule, coefficients), section.override)
    if attached is not None:
        attached.schedule, hook.attached = schedule, attached
    if torch.distributed.get_rank() == 0:
        _print(f"ProRes {schedule}; {schedule.num_layers} layers")
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


@contextmanager
def _read_already(args: Any) -> Iterator[None]:
    """DeepSpeed takes a config once: from its argument, or from the command line's."""
    path = getattr(args, "deepspeed_config", None)
    if path is None:
        yield
        return
    args.deepspeed_config = None
    try:
        yield
    finally:
        args.deepspeed_config = path


def start(**kwargs) -> deepspeed.DeepSpeedEngine:
    """`deepspeed.initialize`, with what it refuses as one line.

    Raises:
        UserError: says what DeepSpeed says.
    """
    try:
        return deepspeed.initialize(**kwargs)[0]
    except (AssertionError, TypeError, ValueError) as error:  # pydantic's are ValueErrors
        raise UserError(f"DeepSpeed does not accept this: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if hasattr(error, "errors"):  # a list per key, which pydantic prints over many lines
        wrong = [f'"{".".join(map(str, entry["loc"]))}": {entry["msg"]}' for entry in error.errors()]
        return f"{getattr(error, 'title', '')}: {'; '.join(wrong)}"
    return " ".join(str(error).split()) or type(error).__name__


def switch_on(
    engine: deepspeed.DeepSpeedEngine, coefficients: StageCoefficients, override: bool = False, say: Say = _print
) -> AlphaScheduler:
    """Have an engine set the alphas of its layers.

    Args:
        engine: as `deepspeed.initialize` returned it.
        coefficients: of the layers on this rank.
        override: resume although the checkpoint was trained with another schedule.
        say: prints a line, on one rank.

    Returns:
        The scheduler that the engine now has, also as `engine.prores`.
    """
    scheduler = AlphaScheduler(engine, coefficients, override, say)
    engine.lr_scheduler = engine.prores = scheduler
    load_checkpoint = engine.load_checkpoint

    @functools.wraps(load_checkpoint)
    def load_checkpoint_and_alpha(*args, **kwargs):
        result = load_checkpoint(*args, **kwargs)
        scheduler.set_to_clock()
        return result

    engine.load_checkpoint = load_checkpoint_and_alpha
    return scheduler


def _number_of_layers(engine: deepspeed.DeepSpeedEngine, local: list[LayerCoefficient]) -> int:
    """L, from what all pipeline stages hold.

    Raises:
        UserError: (on every rank) that is not 1..L.
    """
    numbers = [coefficient.layer_number for coefficient in local]
    if isinstance(engine.module, PipelineModule):
        group = engine.grid.get_pipe_parallel_group()
        gathered: list = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(gathered, numbers, group=group)
        numbers = [number for stage in gathered for number in stage]
    numbers.sort()
    if not numbers:
        raise UserError(
            "no layer of the pipeline has an alpha: give every block a megatron_prores.coefficients.LayerCoefficient "
            "named coefficient, and scale its residual branches by coefficient.read()"
        )
    if numbers != list(range(1, len(numbers) + 1)):
        raise UserError(
            f"the LayerCoefficients have the numbers {numbers} and not each of 1..L once: number them from 1 over the "
            "whole model, all pipeline stages"
        )
    return len(numbers)


def _own_coefficients(model: torch.nn.Module) -> list[LayerCoefficient]:
    """Those that the model's layers read by themselves."""
    coefficients = [getattr(module, "coefficient", None) for module in model.modules()]
    return [coefficient for coefficient in coefficients if isinstance(coefficient, LayerCoefficient)]
