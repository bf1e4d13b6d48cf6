"""alpha in TensorBoard and Weights & Biases, beside Megatron's own scalars."""

import functools

from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer, training

from megatron_prores.megatron import driver


def install() -> None:
    """Log alpha whenever Megatron logs an iteration; a second call does nothing."""
    if getattr(training.training_log, "with_alpha", False):
        return
    original = training.training_log

    @functools.wraps(original)
    def training_log(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs):
        result = original(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs)
        log_alpha(iteration)
        return result

    training_log.with_alpha = True
    training.training_log = training_log


def log_alpha(iteration: int) -> None:
    """Write every layer's alpha, whichever stage holds it, where and as often as Megatron writes its scalars."""
    coefficients = driver.stage_coefficients()
    if coefficients is None or coefficients.schedule.name == "none":
        return
    writer, wandb = get_tensorboard_writer(), get_wandb_writer()
    if not (writer or wandb) or iteration % get_args().tensorboard_log_interval:
        return
    scalars = {
        f"prores/alpha/layer_{layer:03}": float(value) for layer, value in enumerate(driver.alphas(iteration), start=1)
    }
    if writer:
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, iteration)
    if wandb:
        wandb.log(scalars, iteration)
