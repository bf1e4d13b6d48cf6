"""What came out of a comparison, in words and in numbers with their intervals."""

import math
from collections.abc import Iterable, Sequence

from megatron_prores.compare.results import ArmResult
from megatron_prores.compare.statistics import Estimate


def sentences(results: Sequence[ArmResult]) -> Iterable[str]:
    """What came out, arm by arm, in plain words."""
    for result in results:
        name, loss = result.arm.name, result.loss
        for run in result.diverged:
            yield f"{name}, seed {run.seed}: diverged after step {run.last_step}; not in the means"
        if not loss.values:
            continue
        if result.difference is None:
            missing = f"; nothing of {result.arm.versus} is finished" if result.arm.versus else ""
            yield f"{name}: loss {with_interval(loss)}, perplexity {perplexity(loss)}{missing}"
            continue
        yield f"{name}: loss {with_interval(loss)}, perplexity {perplexity(loss)}; {_against(result)}"


def _against(result: ArmResult) -> str:
    difference, versus, count = result.difference, result.arm.versus, len(result.difference.values)
    if not count:
        return f"no seed to compare with {versus}"
    if not any(difference.values):
        return f"no difference to {versus} in {count} seed{'s' * (count > 1)}"
    amount = f"{abs(difference.mean):.4f}"
    direction = "below" if difference.mean < 0 else "above"
    text = f"{amount} {direction} {versus}"
    if count == 1:
        return f"{text} from one seed, whose noise is unknown"
    interval = f"95%: {_signed(difference.interval[0])} to {_signed(difference.interval[1])}"
    agree = all((value < 0) == (difference.mean < 0) for value in difference.values)
    if not difference.excludes_zero:
        return f"{text} ({interval}), which is within the noise of {count} seeds{', though all agree' * agree}"
    return f"{text} ({interval}){f', in each of {count} seeds' * agree}"


def with_interval(estimate: Estimate) -> str:
    return f"{estimate.mean:.4f}" + (f" ± {estimate.half_width:.4f}" if math.isfinite(estimate.half_width) else "")


def perplexity(loss: Estimate) -> str:
    """exp(mean loss), and what the loss's interval becomes."""
    mean = _exp(loss.mean)
    if not math.isfinite(loss.half_width):
        return mean
    low, high = map(_exp, loss.interval)
    return f"{mean} ({low} to {high})"


def _exp(loss: float) -> str:
    return f"{math.exp(min(loss, 700)):{'.2f' if loss < 14 else '.3g'}}"


def _signed(value: float) -> str:
    return f"{value:+.4f}"


def signed_with_interval(estimate: Estimate) -> str:
    return _signed(estimate.mean) + (f" ± {estimate.half_width:.4f}" if math.isfinite(estimate.half_width) else "")
