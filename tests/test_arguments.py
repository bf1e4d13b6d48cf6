"""The schedule that Megatron's arguments ask for, what ProRes refuses, and what a checkpoint must agree with."""

import argparse
import io

import pytest
from megatron.training import arguments as megatron_arguments

from megatron_prores import SCHEDULES, Schedule
from megatron_prores.errors import UserError
from megatron_prores.megatron import screen
from megatron_prores.megatron.arguments import (
    add_prores_arguments,
    install,
    schedule_from_args,
    validate_prores_arguments,
)
from megatron_prores.megatron.guard import check_schedule

LAYERS = 4


def parse(*argv, **megatron):
    """The ProRes flags of a command line among Megatron's arguments."""
    args = add_prores_arguments(argparse.ArgumentParser()).parse_args(argv)
    values = {"num_layers": LAYERS, "train_iters": 100, "train_samples": None, "global_batch_size": 8, "rank": 0}
    return argparse.Namespace(**vars(args) | values | megatron)


def stock(**megatron):
    """Arguments as Megatron alone saves them."""
    return argparse.Namespace(num_layers=LAYERS, train_iters=100, rank=0, **megatron)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], Schedule("linear", LAYERS, 1000)),
        (["--prores-schedule", "equal"], Schedule("equal", LAYERS, 1000)),
        (["--prores-warmup-steps", "7"], Schedule("linear", LAYERS, 7)),
        (["--prores-warmup-steps", "2.5"], Schedule("linear", LAYERS, 2.5)),
        (["--prores-total-warmup-steps", "40"], Schedule("linear", LAYERS, 10)),
        (["--prores-total-warmup-steps", "40", "--prores-schedule", "equal"], Schedule("equal", LAYERS, 40)),
        (["--prores-warmup-fraction", "0.2"], Schedule("linear", LAYERS, 5)),
        (["--prores-schedule", "none"], Schedule("none", LAYERS)),
    ],
)
def test_schedule_of_the_flags(argv, expected):
    assert schedule_from_args(parse(*argv)) == expected


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_a_flag(name):
    schedule = schedule_from_args(parse("--prores-schedule", name))
    assert (schedule.name, schedule.num_layers) == (name, LAYERS)


def test_total_that_the_layers_do_not_divide_is_exact():
    schedule = schedule_from_args(parse("--prores-total-warmup-steps", "10", num_layers=3))
    assert schedule.total_steps == 10
    assert schedule.alpha(10).tolist() == [1.0, 1.0, 1.0] and schedule.alpha(9)[2] < 1


def test_fraction_of_a_run_in_samples():
    args = parse("--prores-warmup-fraction", "0.5", train_iters=None, train_samples=80 * 8 + 7)
    assert schedule_from_args(args).total_steps == 40
    args = parse("--prores-warmup-fraction", "0.5", train_iters=60, train_samples=80 * 8)
    assert schedule_from_args(args).total_steps == 30  # Megatron has worked the iterations out


@pytest.mark.parametrize(
    ("argv", "megatron", "message"),
    [
        (["--prores-warmup-fraction", "0.5"], {"train_iters": None}, "needs the run's length"),
        (["--prores-warmup-fraction", "0.5"], {"train_iters": 0}, "needs the run's length"),
        (["--prores-warmup-fraction", "1.5"], {}, "fraction must be above 0 and at most 1, not 1.5"),
        (["--prores-warmup-steps", "0"], {}, "T must be a positive number of steps, not 0"),
        (["--prores-warmup-steps", "nan"], {}, "T must be a positive number of steps, not nan"),
        (["--prores-total-warmup-steps", "-3"], {}, "W must be a positive number of steps, not -3"),
        (["--prores-schedule", "linaer"], {}, r"unknown ProRes schedule 'linaer' \(did you mean linear\?\)"),
        # Not from a command line, whose parser refuses them together, but from a script's own arguments.
        (["--prores-warmup-steps", "2"], {"prores_total_warmup_steps": 3}, "once: .*not T=2.0 and W=3"),
        (["--prores-warmup-steps", "2"], {"prores_warmup_fraction": 0.1}, "once: .*not T=2.0 and fraction=0.1"),
    ],
)
def test_settings_that_cannot_be(argv, megatron, message):
    for function in (schedule_from_args, validate_prores_arguments):
        with pytest.raises(UserError, match=message):
            function(parse(*argv, **megatron))


@pytest.mark.parametrize("other", ["--prores-total-warmup-steps", "--prores-warmup-fraction"])
def test_the_warmup_is_given_once(other, capsys):
    with pytest.raises(SystemExit):
        parse("--prores-warmup-steps", "2", other, "0.5")
    assert f"argument {other}: not allowed with argument --prores-warmup-steps" in capsys.readouterr().err


def test_stock_arguments_have_no_schedule():
    assert schedule_from_args(stock()) == Schedule("none", LAYERS)
    validate_prores_arguments(stock(mtp_num_layers=1))


UNSUPPORTED = {
    "yaml_cfg": ("a.yaml", "--yaml-cfg .*use --config"),
    "mtp_num_layers": (1, "--mtp-num-layers"),
    "hybrid_layer_pattern": ("M*M*", "--hybrid-layer-pattern"),
    "heterogeneous_layers_config_path": ("a.json", "--heterogeneous-layers-config-path"),
    "modelopt_enabled": (True, "ModelOpt"),
    "inference_fuse_tp_communication": (True, "--inference-fuse-tp-communication"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_flags_are_named(name):
    value, message = UNSUPPORTED[name]
    validate_prores_arguments(parse(**dict.fromkeys(UNSUPPORTED)))
    with pytest.raises(UserError, match=f"ProRes does not support {message}.*--prores-schedule none"):
        validate_prores_arguments(parse(**{name: value}))
    validate_prores_arguments(parse("--prores-schedule", "none", **{name: value}))


def test_megatrons_parser_knows_the_flags(monkeypatch):
    monkeypatch.setattr(megatron_arguments, "add_megatron_arguments", megatron_arguments.add_megatron_arguments)
    install()
    install()  # adding a flag twice would be an argparse error
    parser = megatron_arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(["--num-layers", "4", "--prores-warmup-steps", "9", "--train-iters", "5"])
    assert schedule_from_args(args) == Schedule("linear", 4, 9)
    # The names that are refused are ones that Megatron has.
    missing = [name for name in UNSUPPORTED if not hasattr(args, name)]
    assert missing == ["modelopt_enabled"]  # set by Megatron's ModelOpt scripts


# Resuming.


def test_equal_schedules_resume():
    check_schedule(parse(), parse())
    check_schedule(parse("--prores-warmup-steps", "10"), parse("--prores-total-warmup-steps", "40"))
    check_schedule(parse("--prores-warmup-fraction", "0.4"), parse("--prores-warmup-steps", "10"))
    check_schedule(stock(), stock())
    check_schedule(stock(), parse("--prores-schedule", "none"))
    check_schedule(parse("--prores-schedule", "none", "--prores-warmup-steps", "3"), parse("--prores-schedule", "none"))


@pytest.mark.parametrize(
    ("saved", "current", "both"),
    [
        (parse(), parse("--prores-schedule", "equal"), ["linear, T = 1000", "equal, T = 1000"]),
        (parse("--prores-warmup-steps", "3"), parse("--prores-warmup-steps", "5"), ["T = 3, W = 12", "T = 5, W = 20"]),
        (
            parse("--prores-warmup-fraction", "0.4"),
            parse("--prores-warmup-fraction", "0.4", train_iters=200),  # a longer run stretches the warm-up
            ["T = 10", "T = 20"],
        ),
        (stock(), parse(), ["trained with ProRes none", "asks for linear, T = 1000"]),
        (parse(), stock(), ["trained with ProRes linear, T = 1000", "asks for none"]),
        (parse(), parse("--prores-schedule", "none"), ["linear, T = 1000", "asks for none"]),
    ],
    ids=["name", "T", "fraction", "stock to ProRes", "ProRes to stock", "ProRes to none"],
)
def test_different_schedules_do_not_resume(saved, current, both):
    with pytest.raises(UserError, match="--prores-override") as error:
        check_schedule(saved, current)
    for part in both:
        assert part in str(error.value)
    check_schedule(saved, argparse.Namespace(**vars(current) | {"prores_override": True}))


def test_override_says_so_once(monkeypatch):
    said = io.StringIO()
    monkeypatch.setattr(screen, "_screen", said)
    saved, current = parse("--prores-warmup-steps", "3"), parse("--prores-warmup-steps", "5", "--prores-override")
    check_schedule(saved, current)
    assert said.getvalue().count("\n") == 1
    assert "T = 3" in said.getvalue() and "T = 5" in said.getvalue()
    current.rank = 1
    check_schedule(saved, current)
    assert said.getvalue().count("\n") == 1
