"""`prores evaluate --tasks`: an exported model on tasks of lm-evaluation-harness, without a download."""

import argparse
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_prores.errors import UserError, did_you_mean
from megatron_prores.options import check_output

_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")


def run(options: argparse.Namespace) -> None:
    """Print the model's scores, and write them as JSON where asked.

    Args:
        options: `model` (a folder), `tasks` (names with commas between), `include_path` (a folder of further tasks, or
            None), `limit` (documents of each task, or None), `batch_size`, `output` (a JSON file, or None), `host`,
            `verbose`.

    Raises:
        UserError: an option is out of range, there is no such model or task, or a task's data are not on this machine.
    """
    _check(options)
    if not (Path(options.model) / "config.json").is_file():
        raise UserError(
            f"--model {options.model} is no Hugging Face model: it holds no config.json (see prores export)"
        )
    names = _names(options)
    for variable in _OFFLINE:  # read when these libraries are imported
        os.environ.setdefault(variable, "1")
    if not options.verbose:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    import lm_eval
    import torch

    manager = _task_manager(options.include_path, names)
    _check_tasks(manager, names)
    try:
        results = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(Path(options.model).absolute()), "dtype": "auto"},
            tasks=names,
            task_manager=manager,
            limit=options.limit,
            batch_size=options.batch_size,
            device="cuda" if torch.cuda.is_available() and not options.host else "cpu",
            log_samples=False,
        )
    except (OSError, ValueError) as error:  # its own checks, and those of transformers
        raise UserError(f"{options.model} cannot be evaluated: {_first_line(error)}") from error
    scores = _scores(results)
    for task, score in scores.items():
        for metric, value in score["metrics"].items():
            if (error := score["stderr"].get(metric)) is not None:
                value = f"{value:.4f} (standard error {error:.4f})"
            else:
                value = f"{value:.4f}"
            print(f"{task}: {metric} {value}, {score['documents']} documents, {score['shots']} shots")
    if options.output:
        content = {"model": options.model, "limit": options.limit, "tasks": scores, "exported": _record(options.model)}
        content["lm_eval_version"] = results.get("lm_eval_version") or lm_eval.__version__
        Path(options.output).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        print(f"wrote {options.output}")


@contextmanager
def exported(options: argparse.Namespace) -> Iterator[str]:
    """A checkpoint of Megatron as a folder for `run()`, for as long as it is needed.

    In a process of its own, so that the memory of Megatron's model is free again, and its host backend gone.

    Args:
        options: `checkpoint`, `ckpt_step`, `tokenizer_model`, and all of `run()` but `model`.

    Raises:
        UserError: what `prores export` says; an option of `run()` is out of range.
    """
    _check(options)  # before the export takes its time
    with tempfile.TemporaryDirectory(prefix="prores-") as folder:
        model = os.path.join(folder, "model")
        argv = ["export", "--checkpoint", options.checkpoint, "--output", model]
        for name in ("ckpt_step", "tokenizer_model"):
            if getattr(options, name) is not None:
                argv += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        argv += ["--host"] * options.host
        result = subprocess.run(
            [sys.executable, "-m", "megatron_prores.cli", *argv], stderr=subprocess.PIPE, text=True, check=False
        )
        if result.returncode:
            said = [line.removeprefix("error: ") for line in result.stderr.splitlines() if line.startswith("error: ")]
            if not said:
                sys.stderr.write(result.stderr)
            raise UserError("\n".join(said) or f"the export of {options.checkpoint} failed (above)")
        yield model


def _names(options: argparse.Namespace) -> list[str]:
    return [name.strip() for name in options.tasks.split(",") if name.strip()]


def _check(options: argparse.Namespace) -> None:
    if importlib.util.find_spec("lm_eval") is None or importlib.util.find_spec("accelerate") is None:
        raise UserError("--tasks needs lm-evaluation-harness: pip install 'megatron_prores[eval]'")
    if not _names(options):
        raise UserError("--tasks names no task")
    for name in ("limit", "batch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be 1 or more, not {value}")
    if not (Path(options.model) / "config.json").is_file():
        raise UserError(
            f"--model {options.model} is no Hugging Face model: it holds no config.json (see prores export)"
        )
    if options.include_path and not os.path.isdir(options.include_path):
        raise UserError(f"--include-path {options.include_path}: no such folder")
    check_output(options.output)


def _task_manager(include_path: str | None, names: list[str]):
    """Knows the tasks. To look through the harness's own thousands takes ten seconds, and only where it is needed."""
    from lm_eval.tasks import TaskManager

    if include_path:
        manager = TaskManager(include_path=include_path, include_defaults=False)
        if set(names) <= set(manager.all_subtasks):  # and no group, which may hold others
            return manager
    return TaskManager(include_path=include_path)


def _check_tasks(manager, names: list[str]) -> None:
    """Load each task, before the model takes its time."""
    for name in names:
        if name not in manager.all_tasks:
            raise UserError(
                f"there is no task {name}{did_you_mean(name, manager.all_tasks)}; "
                "your own are found with --include-path"
            )
        try:
            manager.load([name])
        except Exception as error:  # whatever a task or the library of its data raises
            raise UserError(
                f"the task {name} cannot be loaded, and nothing is downloaded unless HF_HUB_OFFLINE=0 and "
                f"HF_DATASETS_OFFLINE=0 are set ({_first_line(error)})"
            ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"


def _scores(results: dict) -> dict[str, dict]:
    """By task its metrics with their standard errors, and what they were measured on."""
    scores = {}
    for task, values in results["results"].items():
        numbers = {
            name.removesuffix(",none"): float(value)
            for name, value in values.items()
            if "," in name and isinstance(value, int | float) and not isinstance(value, bool)
        }
        scores[task] = {
            "metrics": {name: value for name, value in numbers.items() if "_stderr" not in name},
            "stderr": {name.replace("_stderr", ""): value for name, value in numbers.items() if "_stderr" in name},
            "documents": results.get("n-samples", {}).get(task, {}).get("effective"),
            "shots": results.get("n-shot", {}).get(task),
            "version": results.get("versions", {}).get(task),
        }
    return scores


def _record(model: str) -> dict | None:
    """What the export wrote about the checkpoint."""
    path = Path(model) / "prores_export.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
