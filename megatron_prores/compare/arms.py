"""The arms of a comparison: named settings on top of what all runs share."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_prores.config_file import read_mapping
from megatron_prores.errors import UserError, did_you_mean

RESERVED = ("seed", "save", "load", "tensorboard-dir", "config")
"""Flags that the comparison itself sets for every run."""

WARMUP_FLAGS = ("prores-warmup-steps", "prores-total-warmup-steps", "prores-warmup-fraction")
"""Of these a run has one; a flag on the command line takes the place of the others."""

_VERSUS = "versus"
_TAKEN = ("arms", "arms.csv", "runs.csv", "curves.csv", "report.html", "command.txt")  # in --output
_LONGEST_NAME = 100


@dataclass(frozen=True)
class Arm:
    """One way of training.

    Attributes:
        name: also of the folder of its runs.
        settings: flags without dashes and their values; they win over the shared config files.
        versus: the arm that its results are compared with; None for a baseline.
    """

    name: str
    settings: dict[str, Any]
    versus: str | None


def read_arms(path: str) -> list[Arm]:
    """The arms in a YAML file, in its order.

    The file maps each arm's name to a mapping of flags (without dashes) to values. The key `versus` names the arm to
    compare with; arms without it are baselines. Where no arm has one, all are compared with the first.

    Raises:
        UserError: the file cannot be read, or an arm in it cannot be used.
    """
    content = read_mapping("--arms", path)
    if len(content) < 2:
        raise UserError(f"{path}: a comparison needs two arms or more, not {len(content)}")
    for name in content:
        if isinstance(name, bool):  # YAML also reads yes, no, on and off so
            raise UserError(f"{path}: an arm's name is read as {str(name).lower()}: put it in quotes")
    arms = [_arm(path, str(name), settings) for name, settings in content.items()]
    names = [arm.name for arm in arms]
    for arm in arms:
        if arm.versus is not None and (arm.versus not in names or arm.versus == arm.name):
            others = [name for name in names if name != arm.name]
            raise UserError(
                f"{path}: {arm.name} is compared with {arm.versus}, which is no other arm"
                f"{did_you_mean(arm.versus, others)}"
            )
    if not any(arm.versus for arm in arms):
        first, *rest = arms
        arms = [first, *(Arm(arm.name, arm.settings, first.name) for arm in rest)]
    for arm in arms:
        baseline = next((other for other in arms if other.name == arm.versus), None)
        if baseline is not None and baseline.versus is not None:
            raise UserError(
                f"{path}: {arm.name} is compared with {arm.versus}, which is compared with {baseline.versus} itself: "
                "compare both with one baseline"
            )
    return arms


def _arm(path: str, name: str, settings: Any) -> Arm:
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise UserError(f"{path}: {name!r} cannot be a folder's name: use letters, digits and . _ + -")
    if name in _TAKEN or len(name) > _LONGEST_NAME:
        why = "is the comparison's own" if name in _TAKEN else f"has more than {_LONGEST_NAME} letters"
        raise UserError(f"{path}: the name {name} {why}: take another")
    if settings is None:
        settings = {}
    if not isinstance(settings, dict):
        raise UserError(f"{path}: {name} must be a mapping of flag names to values, not a {type(settings).__name__}")
    settings = {str(key): value for key, value in settings.items()}
    versus = settings.pop(_VERSUS, None)
    for key in settings:
        if key.replace("_", "-") in RESERVED:
            raise UserError(f"{path}: {name} cannot set {key}: prores compare gives each run its own")
    return Arm(name, settings, None if versus is None else str(versus))


def check_trained(path: str, arms: list[Arm], folder: Path) -> None:
    """Refuse to report runs under settings that they were not trained with.

    Raises:
        UserError: `write_settings` wrote others.
    """
    for arm in arms:
        trained = folder / f"{arm.name}.yaml"
        if trained.exists() and (yaml.safe_load(trained.read_text()) or {}) != arm.settings:
            raise UserError(f"{path}: {arm.name} was trained with other settings, those in {trained}")


def groups(arms: list[Arm]) -> list[list[Arm]]:
    """Each baseline with the arms that are compared with it."""
    return [[base, *(arm for arm in arms if arm.versus == base.name)] for base in arms if base.versus is None]


def write_settings(arm: Arm, folder: Path) -> Path:
    """The arm's settings as a config file of the trainer."""
    path = folder / f"{arm.name}.yaml"
    path.write_text(yaml.safe_dump(arm.settings, sort_keys=False))
    return path
