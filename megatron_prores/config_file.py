"""`--config FILE.yaml`: a flat mapping of flag names to values, turned into command-line arguments."""

import argparse
import math
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from megatron_prores.errors import UserError, did_you_mean


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key that is written twice is an error and not the last one's."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict:
    keys = [loader.construct_object(key) for key, _ in node.value]
    for index, (key, (key_node, _)) in enumerate(zip(keys, node.value, strict=True)):
        if key in keys[:index]:
            raise yaml.YAMLError(f"line {key_node.start_mark.line + 1}: {key} is given twice")
    return loader.construct_mapping(node)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def config_arguments(
    paths: Iterable[str], parser: argparse.ArgumentParser, command_line: Sequence[str] = ()
) -> list[str]:
    """The arguments that the files stand for, to be put before those of the command line, which then win.

    Keys are flags without the leading dashes, with `-` or `_` between words. `true` gives a switch, `false` leaves
    it out (or gives its `--no-` form where there is one), a list gives several values. Of several files later ones
    win. Of flags that exclude each other, one in a later file or on the command line replaces the others.

    Raises:
        UserError: the file is missing or not a flat mapping, or a key is not a flag of the parser.
    """
    merged: dict[str, tuple[argparse.Action, Any]] = {}
    for path in paths:
        seen: dict[str, str] = {}
        for key, value in read_mapping("--config", path).items():
            action = _find(parser, str(key), path)
            if action.dest in seen:
                raise UserError(f"{path}: {key} and {seen[action.dest]} are the same flag: keep one")
            seen[action.dest] = str(key)
            for other in excluded(parser, action) - seen.keys():
                merged.pop(other, None)
            merged[action.dest] = (action, value, f"{path}: {key}", _flag(parser, str(key)))
    for word in command_line:
        action = parser._option_string_actions.get(word.split("=")[0])
        for other in excluded(parser, action) if action else ():
            merged.pop(other, None)
    return [argument for entry in merged.values() for argument in _arguments(*entry)]


def excluded(parser: argparse.ArgumentParser, action: argparse.Action) -> set[str]:
    """The flags that cannot be given together with this one."""
    groups = [group._group_actions for group in parser._mutually_exclusive_groups if action in group._group_actions]
    return {other.dest for group in groups for other in group if other is not action}


def read_mapping(flag: str, path: str) -> dict:
    """A YAML file whose top level is a mapping, in which no key stands twice.

    Args:
        flag: that named the file, for the message.

    Raises:
        UserError: the file is missing, is not YAML, or holds something else.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{flag} {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        content = yaml.load(text, _UniqueKeys)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path} must be a mapping of names to values, not a {type(content).__name__}")
    return content


def _flag(parser: argparse.ArgumentParser, key: str) -> str | None:
    known = parser._option_string_actions
    spellings = (f"--{key}", f"--{key.replace('_', '-')}", f"--{key.replace('-', '_')}")
    return next((flag for flag in spellings if flag in known), None)


def _find(parser: argparse.ArgumentParser, key: str, path: str) -> argparse.Action:
    flag = _flag(parser, key)
    if flag in ("--config", "--help", "--host", "--verbose"):
        raise UserError(f"{path}: {key} acts before the file is read: give {flag} on the command line")
    if flag is None:
        names = [option.removeprefix("--") for option in parser._option_string_actions if option.startswith("--")]
        raise UserError(f"{path}: unknown key {key}{did_you_mean(key.replace('_', '-'), names)}")
    return parser._option_string_actions[flag]


def _arguments(action: argparse.Action, value: Any, where: str, flag: str) -> list[str]:
    values = value if isinstance(value, list) else [value]
    for item in values:
        if item is None or isinstance(item, list | dict):
            kind = "empty" if item is None else "a list in a list" if isinstance(item, list) else "a mapping"
            raise UserError(f"{where} must be a value or a list of values, not {kind}")
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UserError(f"{where} is a switch: give true or false, not {value}")
        if value:
            return [flag]
        if not isinstance(action, argparse.BooleanOptionalAction):
            return []
        is_negative = flag.startswith("--no-")
        return [next(option for option in action.option_strings if option.startswith("--no-") != is_negative)]
    if any(isinstance(item, bool) for item in values):  # YAML also reads yes, no, on and off so
        raise UserError(f"{where} takes a value, not true or false: put the word in quotes if you mean it")
    if not isinstance(value, list):
        return [f"{flag}={value}"]
    if action.nargs is None:
        raise UserError(f"{where} takes one value, not a list")
    return [flag, *map(_word, value)]


def _word(value: Any) -> str:
    """A value after a flag; argparse takes -1e-05 for a flag, and -0.00001 not."""
    is_negative = isinstance(value, float) and value < 0 and math.isfinite(value)
    return f"{Decimal(repr(value)):f}" if is_negative else str(value)
