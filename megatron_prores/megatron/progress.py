"""What a run says on the screen while it trains."""

import functools
import math
import time
from collections.abc import Callable

from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.training import get_args, training
from megatron.training.utils import is_last_rank

from megatron_prores.coefficients import StageCoefficients
from megatron_prores.megatron import driver
from megatron_prores.megatron.screen import is_first_rank, say
from megatron_prores.schedule import Schedule


class Progress:
    """Counts time and tokens between two lines. Evaluations and checkpoints do not count as training time."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        self._since = time.perf_counter()
        self._iterations = 0
        self._tokens = 0

    def step(self, tokens: int) -> None:
        self._iterations += 1
        self._tokens += tokens

    def exclude(self, seconds: float) -> None:
        self._since += seconds

    def rates(self) -> tuple[float, float]:
        """Iterations and tokens per second since the last restart."""
        seconds = max(time.perf_counter() - self._since, 1e-9)
        return self._iterations / seconds, self._tokens / seconds


_progress: Progress | None = None


def install() -> None:
    """Print a line every `--log-interval` iterations, and one for every evaluation and checkpoint."""
    global _progress
    if _progress is not None:
        return
    _progress = Progress()
    for name, wrap in (
        ("train", _restart_before),
        ("training_log", _log_after),
        ("evaluate", _report_evaluation),
        ("evaluate_and_print_results", _name_evaluation),
        ("save_checkpoint", _report_save),
    ):
        original = getattr(training, name)
        setattr(training, name, functools.wraps(original)(wrap(original)))


def exclude(seconds: float) -> None:
    """Leave time out of the training time that lines are about; nothing where no lines are printed."""
    if _progress is not None:
        _progress.exclude(seconds)


def _restart_before(train: Callable) -> Callable:
    def wrapper(*positional, **kwargs):
        args, coefficients = get_args(), driver.stage_coefficients()
        if args.iteration >= args.train_iters and is_last_rank():
            say(f"nothing left to train: iteration {args.iteration} of {args.train_iters}")
        elif is_last_rank() and _has_alpha(coefficients):
            layers = [str(number) for number in sampled_layers(coefficients.schedule)]
            say(f"alpha in the lines below: layers {', '.join(layers)}")
        _progress.restart()
        return train(*positional, **kwargs)

    return wrapper


def _log_after(training_log: Callable) -> Callable:
    losses: list = []

    def wrapper(loss_dict, total_loss_dict, learning_rate, iteration, *rest, **kwargs):
        result = training_log(loss_dict, total_loss_dict, learning_rate, iteration, *rest, **kwargs)
        args = get_args()
        _progress.step(get_current_global_batch_size() * args.seq_length)
        losses.extend(loss_dict[key].detach() for key in loss_dict if key == "lm loss")
        if iteration % args.log_interval == 0 or iteration == args.train_iters:
            if is_last_rank():
                grad_norm = kwargs.get("grad_norm", rest[3] if len(rest) > 3 else None)
                say(progress_line(iteration, losses, learning_rate, grad_norm))
            losses.clear()
            _progress.restart()
        return result

    return wrapper


def progress_line(iteration: int, losses: list, learning_rate: float | None, grad_norm: float | None) -> str:
    """One line: iteration, mean loss since the last line, speed, time left, alpha of first, middle and last layer."""
    args = get_args()
    steps_per_second, tokens_per_second = _progress.rates()
    parts = [f"step {iteration:>{len(str(args.train_iters))}}/{args.train_iters}"]
    if losses:
        parts.append(f"loss {sum(float(loss) for loss in losses) / len(losses):.4f}")
    if learning_rate is not None:
        parts.append(f"lr {learning_rate:.2e}")
    if grad_norm is not None:
        parts.append(f"grad {grad_norm:.2f}")
    parts += [f"{steps_per_second:.2f} steps/s", f"{tokens_per_second:,.0f} tokens/s"]
    coefficients = driver.stage_coefficients()
    if _has_alpha(coefficients):
        alphas = driver.alphas(iteration)
        parts.append("alpha " + " ".join(f"{alphas[n - 1]:.3f}" for n in sampled_layers(coefficients.schedule)))
    parts.append(f"ETA {_duration((args.train_iters - iteration) / steps_per_second)}")
    return " | ".join(parts)


def sampled_layers(schedule: Schedule) -> list[int]:
    """The first, the middle and the last layer."""
    return sorted({1, (schedule.num_layers + 1) // 2, schedule.num_layers})


def _has_alpha(coefficients: StageCoefficients | None) -> bool:
    return coefficients is not None and coefficients.schedule.name != "none"


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


_evaluation = ""


def _name_evaluation(evaluate_and_print_results: Callable) -> Callable:
    def wrapper(prefix, *args, **kwargs):
        global _evaluation
        _evaluation = prefix
        return evaluate_and_print_results(prefix, *args, **kwargs)

    return wrapper


def _report_evaluation(evaluate: Callable) -> Callable:
    def wrapper(*args, **kwargs):
        start = time.perf_counter()
        result = evaluate(*args, **kwargs)
        if is_last_rank() and result[0] and "lm loss" in result[0]:
            loss = float(result[0]["lm loss"])
            when = "final evaluation" if " on " in _evaluation else "evaluation"  # on other samples
            say(f"{when} at {_evaluation}: loss {loss:.4f}, perplexity {math.exp(min(loss, 700)):.2f}")
        _progress.exclude(time.perf_counter() - start)
        return result

    return wrapper


def _report_save(save_checkpoint: Callable) -> Callable:
    def wrapper(iteration, *args, **kwargs):
        start = time.perf_counter()
        result = save_checkpoint(iteration, *args, **kwargs)
        if is_first_rank():
            say(f"saved checkpoint of iteration {iteration} to {get_args().save}")
        _progress.exclude(time.perf_counter() - start)
        return result

    return wrapper
