"""From a command line to Megatron's validated arguments: config files, host backend, flags that fit the machine."""

import argparse
import importlib.util
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable, Sequence

from megatron_prores.config_file import config_arguments, excluded
from megatron_prores.errors import UserError, did_you_mean
from megatron_prores.megatron import enable, host, screen

_OUR_GROUPS = ("plan", "megatron_prores", "DeepSpeed", "ProRes")


def _own_flags() -> argparse.ArgumentParser:
    """The flags that act before Megatron is imported."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    group = parser.add_argument_group("megatron_prores")
    group.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="YAML of flag names and values; flags here win"
    )
    group.add_argument("--host", action="store_true", help="run on the host although GPUs are visible (gloo)")
    group.add_argument("--verbose", action="store_true", help="show everything that Megatron prints")
    parser.error = _refuse
    return parser


def _refuse(message: str) -> None:
    raise UserError(message)


def _be_a_world_of_one() -> None:
    """Without torchrun this process is the whole job."""
    if "RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in world.items()})


def _flags_for_this_machine(on_host: bool) -> list[str]:
    """Defaults that Megatron's own defaults need packages for that are not here. Configs and flags come after."""
    flags = list(host.FLAGS) if on_host else []
    if importlib.util.find_spec("transformer_engine") is None:
        flags += ["--transformer-impl", "local"]
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        flags += ["--no-gradient-accumulation-fusion"]
    if importlib.util.find_spec("fast_layer_norm") is None:
        flags += ["--no-persist-layer-norm"]
    return flags


def parse(
    argv: list[str],
    extra: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    defaults: Sequence[str] = (),
):
    """Megatron's arguments, validated and set as its globals, with ProRes enabled and the device chosen.

    Args:
        argv: the command line without the program.
        extra: adds flags of the caller to the parser.
        defaults: flags that config files and the command line win over.

    Raises:
        UserError: anything that Megatron or this package does not accept.
    """
    own, rest = _own_flags().parse_known_args(argv)
    wants_help = "-h" in rest or "--help" in rest
    if wants_help:
        screen.hush()
    elif not own.verbose:
        screen.quiet()
    _be_a_world_of_one()
    on_host = own.host or host.is_needed()
    if on_host:
        if not own.host and screen.is_first_rank() and not wants_help:
            screen.say("no GPU is visible: running on the host with gloo (--host asks for this by name)")
        host.install()
    enable()

    from megatron.training import arguments

    from megatron_prores.megatron import engine_fixes

    engine_fixes.install()
    defaults = [*_flags_for_this_machine(on_host), *defaults]
    provider = _give_to_megatron(argv, own.config, defaults, extra)
    return accepted(arguments.parse_and_validate_args, extra_args_provider=provider)


def parse_for_any_machine(
    argv: list[str],
    extra: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    defaults: Sequence[str] = (),
):
    """Megatron's arguments as given, with nothing validated, set or started, for a run that is elsewhere.

    Args:
        argv: the command line without the program.
        extra: adds flags of the caller to the parser.
        defaults: flags that config files and the command line win over.

    Raises:
        UserError: a flag, its value or a config file that the parser does not accept.
    """
    own, rest = _own_flags().parse_known_args(argv)
    wants_help = "-h" in rest or "--help" in rest
    if own.verbose or wants_help:
        screen.hush()
    else:
        screen.quiet()
    host.install()

    from megatron.training import arguments

    from megatron_prores.megatron.arguments import install

    install()
    defaults = [*_flags_for_this_machine(on_host=True), *defaults]
    provider = _give_to_megatron(argv, own.config, defaults, extra)
    return accepted(arguments.parse_args, extra_args_provider=provider)


def _give_to_megatron(argv: list[str], configs: list[str], defaults: list[str], extra: Callable | None) -> Callable:
    """Put defaults, config files and flags, later ones win, where Megatron's parser reads them.

    Returns:
        Megatron's `extra_args_provider`: adds our flags to that parser and lets it fail like ours.
    """
    from megatron.training import arguments

    def all_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = extra(parser) if extra else parser
        parser._add_container_actions(_own_flags())
        _make_help_readable(parser)
        parser.error = lambda message: _refuse(_with_suggestion(parser, message))
        return parser

    known = all_flags(arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    given = config_arguments(configs, known, argv) + argv
    sys.argv[1:] = _not_excluded(defaults, given, known) + given
    return all_flags


def _not_excluded(defaults: list[str], given: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """The defaults, each a word of its own, without those that cannot be given together with a flag that is given."""
    actions = parser._option_string_actions
    named = {actions[flag].dest for word in given if (flag := word.split("=")[0]) in actions}
    return [
        word
        for word in defaults
        if (action := actions.get(word.split("=")[0])) is None or not excluded(parser, action) & named
    ]


def accepted(function: Callable, *args, **kwargs):
    """Call a function of Megatron that validates its input, with what it refuses as a `UserError`.

    Megatron refuses by `assert`, often without a message; then the condition that did not hold is the message.
    """
    try:
        return function(*args, **kwargs)
    except UserError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else _failed_condition(error)
        raise UserError(f"Megatron does not accept these flags: {reason}") from error


def _make_help_readable(parser: argparse.ArgumentParser) -> None:
    """Our groups before Megatron's hundreds of flags; and Megatron's stray percent signs, which argparse trips over."""
    parser.usage = "%(prog)s [--config FILE] [FLAGS OF MEGATRON AND PRORES]"
    ranks = {title: rank for rank, title in enumerate(_OUR_GROUPS, start=-len(_OUR_GROUPS))}
    parser._action_groups.sort(key=lambda group: ranks.get(group.title, 0))
    formatter = parser._get_formatter()
    for action in parser._actions:
        try:
            formatter._expand_help(action) if action.help else None
        except (ValueError, TypeError, KeyError):
            action.help = action.help.replace("%", "%%")


def _failed_condition(error: BaseException) -> str:
    line = str(traceback.extract_tb(error.__traceback__)[-1].line)
    condition = line.removeprefix("assert ")
    if missing := re.fullmatch(r"args\.(\w+) is not None", condition):
        return f"--{missing[1].replace('_', '-')} is missing"
    return f"this does not hold: {condition}"


def _with_suggestion(parser: argparse.ArgumentParser, message: str) -> str:
    prefix = "unrecognized arguments: "
    if not message.startswith(prefix):
        return message
    unknown = next((word for word in message.removeprefix(prefix).split() if word.startswith("-")), "")
    return f"unknown flag {unknown or message.removeprefix(prefix)}" + did_you_mean(
        unknown.split("=")[0], [option for option in parser._option_string_actions if option.startswith("--")]
    )
