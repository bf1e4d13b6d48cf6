"""ProRes in DeepSpeed: `initialize` in the place of `deepspeed.initialize`, and a pretraining entry for GPTs.

Importing this package does not import DeepSpeed.
"""

from typing import Any


def initialize(*, model: Any = None, config: Any = None, **kwargs: Any) -> tuple:
    """`deepspeed.initialize` with ProRes switched on; takes and returns what that does.

    The `"prores"` section of the DeepSpeed config gives the schedule (see `megatron_prores.deepspeed.section`). alpha
    advances by one step whenever the engine applies an optimizer step, and not when it skips one for an overflow.
    `engine.prores` is the hook that does so; it is saved and restored with DeepSpeed's checkpoints.

    Args:
        model: a Hugging Face pre-norm decoder, a model or `PipelineModule` whose layers have a
            `megatron_prores.coefficients.LayerCoefficient` as `coefficient`, or Megatron's layers from this package.
        config: a DeepSpeed config: a path or a dictionary. Its section "prores" is read here; DeepSpeed ignores it.
        kwargs: of `deepspeed.initialize`; and `example`, the arguments of a forward, for a Hugging Face or other model
            that does not run on token ids alone (see `megatron_prores.attach`).

    Returns:
        The engine, its optimizer, the data loader and the scheduler.

    Raises:
        UserError: the section, the model or the combination with DeepSpeed's settings cannot work.
    """
    from megatron_prores.deepspeed.engine import initialize

    return initialize(model=model, config=config, **kwargs)
