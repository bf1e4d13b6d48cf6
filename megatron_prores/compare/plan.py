"""From the command line to the runs of a comparison, checked before any of them starts."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_prores.compare.arms import RESERVED, WARMUP_FLAGS, Arm, write_settings
from megatron_prores.compare.runs import Run, claim, trainer_command
from megatron_prores.errors import UserError

_ENDS_EARLY = (
    *("exit_interval", "exit_duration_in_mins", "exit_signal_handler", "exit_signal_handler_for_training"),
    "skip_train",
)
"""With these the trainer ends a run before its last step, and says by exit code 0 that all is well."""

# Where things lie, and not what is computed.
_NOT_SETTINGS = frozenset(("config", "host", "verbose", "save", "load", "tensorboard_dir", "rank", "world_size"))


def check_flags(flags: Sequence[str]) -> None:
    """Refuse flags that the comparison sets itself.

    Raises:
        UserError: names the flag.
    """
    names = {word.split("=")[0].removeprefix("--").replace("_", "-") for word in flags if word.startswith("--")}
    for name in RESERVED:
        if name in names and name != "config":
            hint = "use --seeds" if name == "seed" else "each run has its own folder in --output"
            raise UserError(f"leave out --{name}: {hint}")


def plan_runs(
    arms: Sequence[Arm], seeds: Sequence[int], flags: Sequence[str], processes: int, output: Path, data: str | None
) -> list[Run]:
    """The runs, seed by seed; their folders are made.

    Args:
        flags: the trainer's, `--config` among them.
        processes: of each run.
        data: the held-out set for the last checkpoints; by default the validation data, where it is one dataset.

    Raises:
        UserError: a run could not start, is of another length than the others, or its folder holds another run.
    """
    from megatron_prores.megatron import launch

    check_flags(flags)
    try:
        (output / "arms").mkdir(parents=True, exist_ok=True)
        configs = [write_settings(arm, output / "arms") for arm in arms]
    except OSError as error:
        raise UserError(f"--output {output} cannot be written ({error.strerror})") from error
    runs, claims, lengths = [], [], {}
    for arm, config in zip(arms, configs, strict=True):
        _refuse_overridden(arm, flags)
        shared = [*flags, "--config", str(config)]
        args = launch.parse_for_any_machine([*shared, "--tensorboard-dir", str(output / arm.name)])
        _check(args, arm, processes)
        lengths[arm.name] = args.train_iters
        held_out = data or _only_dataset(args)
        if held_out:
            _check_dataset(held_out)
        for seed in seeds:
            folder = output / arm.name / f"seed-{seed}"
            own = ["--seed", str(seed), "--log-timers-to-tensorboard", "--tensorboard-dir", str(folder / "tensorboard")]
            own += ["--save", str(folder / "checkpoints"), "--load", str(folder / "checkpoints")]
            command = trainer_command(processes, [*shared, *own])
            evaluation = _evaluation(folder, held_out, "--host" in flags)
            runs.append(Run(arm, seed, folder, args.train_iters, command, evaluation))
            claims.append(_settings(args) | {"seed": seed, "processes": processes})
    _check_lengths(lengths)
    # Only now: a folder made for settings that are refused would be in the way of the corrected ones.
    for run, settings in zip(runs, claims, strict=True):
        claim(run, settings)
    # All arms of a seed before the next seed: whenever it stops, what is there can be compared.
    return sorted(runs, key=lambda run: run.seed)


def _settings(args) -> dict:
    """What decides over the results, as JSON knows it."""
    found = {name: value for name, value in vars(args).items() if name not in _NOT_SETTINGS and _is_plain(value)}
    return json.loads(json.dumps(found))


def _is_plain(value) -> bool:
    return (
        all(map(_is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, str | int | float | None)
    )


def _evaluation(folder: Path, data: str | None, on_host: bool) -> tuple[str, ...] | None:
    if data is None:
        return None
    command = [sys.executable, "-m", "megatron_prores.cli", "evaluate", "--checkpoint", str(folder / "checkpoints")]
    return (*command, "--data", data, "--output", str(folder / "evaluation.json"), *["--host"] * on_host)


def _refuse_overridden(arm: Arm, flags: Sequence[str]) -> None:
    """A flag wins over a config file, so that an arm would lose its setting without a word."""
    given = {word.split("=")[0].lstrip("-").replace("_", "-") for word in flags if word.startswith("--")}
    for name in arm.settings:
        if name.replace("_", "-") in given:
            raise UserError(f"--{name} on the command line would overrule the arm {arm.name}: put it into --arms only")
        if name.replace("_", "-") in WARMUP_FLAGS and (other := given & set(WARMUP_FLAGS)):
            raise UserError(
                f"--{min(other)} on the command line would overrule {name} of the arm {arm.name}: put it into --config "
                "or --arms"
            )


def _check(args, arm: Arm, processes: int) -> None:
    from megatron_prores.megatron.data_check import check_data
    from megatron_prores.megatron.plan import plan

    if not args.train_iters:
        raise UserError("give --train-iters, in the config or as a flag: a comparison must know where its runs end")
    if not args.eval_iters or not args.eval_interval:
        raise UserError("give --eval-interval and --eval-iters: arms are compared by their validation loss")
    if not args.save_interval:
        raise UserError("give --save-interval: a run that is interrupted continues from its last checkpoint")
    for name in _ENDS_EARLY:
        if getattr(args, name, None):
            raise UserError(f"leave out --{name.replace('_', '-')}: every run is trained to its last step")
    try:
        plan(args, processes)
        check_data(args)
    except UserError as error:
        raise UserError("\n".join(f"{arm.name}: {line}" for line in str(error).splitlines())) from error


def _check_dataset(prefix: str) -> None:
    from megatron_prores.megatron.data_check import count_documents

    count_documents(prefix)


def _check_lengths(lengths: dict[str, int]) -> None:
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise UserError(f"the arms are not trained equally long (iterations: {shown})")


def _only_dataset(args) -> str | None:
    """The prefix of the validation data where it is one dataset of its own."""
    paths = args.valid_data_path or []
    names = paths if len(paths) == 1 else paths[1:] if len(paths) == 2 else []
    return names[0] if names else None
