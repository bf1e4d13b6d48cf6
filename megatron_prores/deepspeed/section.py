"""The `"prores"` section of a DeepSpeed config, which DeepSpeed itself ignores silently.

    "prores": {"schedule": "linear", "warmup_steps": 1000}

| key | value |
| --- | --- |
| `schedule` | a name in `megatron_prores.schedule.SCHEDULES`; default "linear" |
| `warmup_steps` | T, the first layer's warm-up in optimizer steps; default 1000 |
| `total_warmup_steps` | instead of T: W, optimizer steps until every alpha is 1 |
| `override` | true: resume although the checkpoint was trained with another schedule; default false |
"""

import base64
import binascii
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from megatron_prores.errors import UserError, did_you_mean
from megatron_prores.schedule import Schedule


@dataclass(frozen=True)
class Section:
    """The section as it was given; None where a key is left out."""

    schedule: str = "linear"
    warmup_steps: Real | None = None
    total_warmup_steps: Real | None = None
    override: bool = False

    def resolve(self, num_layers: int) -> Schedule:
        """The schedule of a model of L layers.

        Raises:
            UserError: the settings contradict each other or are out of range.
        """
        try:
            return Schedule.resolve(
                self.schedule,
                num_layers,
                warmup_steps=self.warmup_steps,
                total_warmup_steps=self.total_warmup_steps,
            )
        except UserError as error:
            raise UserError(f'"prores" in the DeepSpeed config: {error}') from error


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


_KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "schedule": (lambda value: isinstance(value, str), "a name in quotes"),
    "warmup_steps": (_is_number, "a number of steps"),
    "total_warmup_steps": (_is_number, "a number of steps"),
    "override": (lambda value: isinstance(value, bool), "true or false"),
}


# Of DeepSpeed's own settings, those that are looked at here: the types that they must have.
_OBJECTS = ("zero_optimization", "bf16", "fp16", "checkpoint", "optimizer", "scheduler", "pipeline")
_VALUES: dict[tuple[str, str], tuple[Callable[[Any], bool], str]] = {
    ("zero_optimization", "stage"): (
        lambda value: value in (0, 1, 2, 3) and not isinstance(value, bool),
        "0, 1, 2 or 3",
    ),
    ("bf16", "enabled"): (lambda value: isinstance(value, bool), "true or false"),
    ("fp16", "enabled"): (lambda value: isinstance(value, bool), "true or false"),
    ("checkpoint", "load_universal"): (lambda value: isinstance(value, bool), "true or false"),
}


def check_types(config: dict[str, Any]) -> None:
    """Refuse settings of DeepSpeed's that it would trip over, or take for something else.

    Raises:
        UserError: names the setting.
    """
    if "bfloat16" in config:
        raise UserError('the DeepSpeed config has a section "bfloat16": write "bf16"')
    for name in _OBJECTS:
        if name in config and not isinstance(config[name], dict):
            raise UserError(f'"{name}" in the DeepSpeed config must be an object, {{...}}, not {config[name]!r}')
    for (name, key), (fits, kind) in _VALUES.items():
        value = config.get(name, {}).get(key)
        if value is not None and not fits(value):
            raise UserError(f'"{name}": {{"{key}"}} in the DeepSpeed config must be {kind}, not {json.dumps(value)}')
    clipping = config.get("gradient_clipping", 0)
    if not _is_number(clipping):
        raise UserError(f'"gradient_clipping" in the DeepSpeed config must be a number, not {json.dumps(clipping)}')


def parse(config: dict[str, Any]) -> Section:
    """The section of a config, checked in full: names, types, ranges and what excludes what.

    Raises:
        UserError: one line for the first thing that is wrong.
    """
    near = next((key for key in config if key != "prores" and re.sub("[^a-z]", "", key.lower()) == "prores"), None)
    if near is not None:
        raise UserError(f'the DeepSpeed config has a section "{near}": write "prores"')
    section = config.get("prores", {})
    if not isinstance(section, dict):
        raise UserError(f'"prores" in the DeepSpeed config must be an object, {{...}}, not {section!r}')
    for key, value in section.items():
        if key not in _KEYS:
            raise UserError(
                f'"prores" in the DeepSpeed config: unknown key "{key}"{did_you_mean(key, _KEYS)}; '
                f"the keys are {', '.join(_KEYS)}"
            )
        fits, kind = _KEYS[key]
        if not fits(value):
            raise UserError(f'"prores" in the DeepSpeed config: "{key}" must be {kind}, not {json.dumps(value)}')
    result = Section(**section)
    result.resolve(num_layers=1)
    return result


def read_config(config: str | Path | dict[str, Any]) -> dict[str, Any]:
    """A DeepSpeed config as `deepspeed.initialize` takes it: a path, a dictionary, or JSON in base64.

    Raises:
        UserError: it cannot be read, is not an object, or gives a key twice.
    """
    if isinstance(config, dict):
        return config
    if not isinstance(config, str | Path):
        raise UserError(f"a DeepSpeed config is a path or a dictionary, not {config!r}")
    try:
        import hjson  # DeepSpeed's own reader: JSON with comments
    except ModuleNotFoundError as error:
        raise UserError("DeepSpeed is not installed: pip install -c constraints.txt deepspeed") from error

    where = f"the DeepSpeed config {config}"
    path = Path(config)
    try:
        if not _is_file(path) and (text := _decoded(str(config))):
            where = "the DeepSpeed config (base64)"
        else:
            text = path.read_text(encoding="utf-8")
        content = hjson.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, where))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except (hjson.HjsonDecodeError, RecursionError, OverflowError) as error:
        raise UserError(f"{where} is not valid JSON: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"{where} must be an object, {{...}}, not a {type(content).__name__}")
    return content


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # base64 may be longer than a name may be
        return False


def _decoded(text: str) -> str | None:
    try:
        decoded = base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise UserError(f'{where}: "{key}" is given twice')
        result[key] = value
    return result
