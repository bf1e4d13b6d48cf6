"""Megatron's GPT with DeepSpeed as the engine: the Megatron trainer's losses in every layout, resume, overflow."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from runs import Run, environment, kill_at, pretrain, run

ENTRY = "megatron_prores.deepspeed.pretrain_gpt"
CONFIGS = Path(__file__).parents[2] / "configs" / "deepspeed"

TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
# Six layers on four stages.
PP4 = ("--pipeline-model-parallel-size", "4")
PP4 += ("--decoder-first-pipeline-num-layers", "1", "--decoder-last-pipeline-num-layers", "1")

# The same initial weights in every layout and engine come from the seed.
SAME_WEIGHTS = {"prores-init": "default"}

ds_run = partial(run, module=ENTRY)
ds_pretrain = partial(pretrain, module=ENTRY)
ds_kill_at = partial(kill_at, module=ENTRY)


def config_flags(folder: Path, zero: int | None = None, **sections) -> tuple[str, str]:
    """`--deepspeed_config` with a config of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    content = dict(sections) if zero is None else {"zero_optimization": {"stage": zero}, **sections}
    path = folder / "deepspeed.json"
    path.write_text(json.dumps(content))
    return "--deepspeed_config", str(path)


def assert_same(one: Run, other: Run, relative: float = 1e-5) -> None:
    assert len(one.losses) == 8 and len(one.evaluations) == 2
    assert other.losses == pytest.approx(one.losses, rel=relative)
    assert other.evaluations == pytest.approx(one.evaluations, rel=relative)


@pytest.fixture(scope="module")
def megatron(tmp_path_factory, data) -> Run:
    """Megatron's trainer in one process."""
    return pretrain(tmp_path_factory.mktemp("megatron"), config={**data, **SAME_WEIGHTS})


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero(tmp_path, data, megatron, zero, processes):
    """One model, two engines, one curve."""
    flags = config_flags(tmp_path, zero)
    assert_same(megatron, ds_pretrain(tmp_path, *flags, processes=processes, config={**data, **SAME_WEIGHTS}))


LAYOUTS = {
    "PP2": (2, 1, PP2, [("0", "1-3"), ("1", "4-6")]),
    "PP4": (4, 1, PP4, [("0", "1"), ("1", "2-3"), ("2", "4-5"), ("3", "6")]),
    "PP2 x DP2": (4, 1, PP2, None),
    "PP2 without ZeRO": (2, 0, PP2, None),
    "TP2 x ZeRO-1": (2, 1, TP2, None),
    "TP2 x ZeRO-3 x DP2": (4, 3, TP2, None),
    "TP2 x PP2": (4, 1, (*TP2, *PP2), None),
    "PP2, recomputed": (
        *(2, 1),
        (*PP2, "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
        None,
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(tmp_path, data, megatron, name):
    processes, zero, layout, stages = LAYOUTS[name]
    flags = config_flags(tmp_path, zero)
    other = ds_pretrain(tmp_path, *flags, *layout, processes=processes, config={**data, **SAME_WEIGHTS})
    assert_same(megatron, other)
    if stages:  # each stage computes alpha for its own layers
        assert [(f"stage {stage}", layers) for stage, layers in stages] == [entry[:2] for entry in other.stages()]


@pytest.mark.parametrize("module", [ENTRY, "megatron_prores.megatron.pretrain_gpt"])
def test_evaluation_in_other_microbatches_on_two_tensor_parallel_ranks(tmp_path, data, megatron, module):
    flags = config_flags(tmp_path, 1) if module == ENTRY else ()
    flags += (*TP2, "--eval-micro-batch-size", "1")
    other = run(tmp_path, *flags, processes=2, module=module, config={**data, **SAME_WEIGHTS})
    assert_same(megatron, other)


@pytest.mark.parametrize("norm", ["post", "sandwich", "deepnorm", "lns"])
def test_norms_on_two_stages(tmp_path, data, norm):
    config = {**data, **SAME_WEIGHTS, "prores-norm": norm}
    one = pretrain(tmp_path / "megatron", config=config)
    assert_same(one, ds_pretrain(tmp_path, *config_flags(tmp_path, 1), *PP2, processes=2, config=config))


def test_tied_embeddings_and_learned_positions_on_two_stages(tmp_path, data):
    tied = {"untie-embeddings-and-output-weights": None, "position-embedding-type": "learned_absolute"}
    config = {**data, **SAME_WEIGHTS, **tied}
    one = pretrain(tmp_path / "megatron", config=config)
    assert_same(one, ds_pretrain(tmp_path, *config_flags(tmp_path, 1), *PP2, processes=2, config=config))


def test_bf16_follows_megatron(tmp_path, data):
    """Master weights and moments are float32 in both; the sums of gradients are ordered otherwise."""
    config = {**data, **SAME_WEIGHTS}
    one = pretrain(tmp_path / "megatron", "--bf16", config=config)
    other = ds_pretrain(tmp_path, "--deepspeed_config", str(CONFIGS / "bf16.json"), processes=2, config=config)
    assert_same(one, other, relative=2e-3)
    assert "bfloat16" in other.output


RESUMES = {
    "ZeRO-0": (2, 0, ()),
    "ZeRO-1": (2, 1, ()),
    "ZeRO-2": (2, 2, ()),
    "ZeRO-3": (2, 3, ()),
    "PP2, ZeRO-1": (2, 1, PP2),
    "TP2 x PP2, ZeRO-1": (4, 1, (*TP2, *PP2)),
}


@pytest.mark.parametrize("name", RESUMES)
def test_resume_is_bit_identical(tmp_path, data, name):
    """Eight steps at once = four, kill in the fifth or sixth, and four more; with dropout, mid-warm-up."""
    processes, zero, layout = RESUMES[name]
    flags = (*config_flags(tmp_path, zero), *layout, "--hidden-dropout", "0.1", "--attention-dropout", "0.1")
    kwargs = {"processes": processes, "config": {**data, **SAME_WEIGHTS}}
    straight = ds_pretrain(tmp_path / "straight", *flags, **kwargs)
    saving = ("--save", str(tmp_path / "checkpoint"), "--save-interval", "4")
    ds_kill_at(tmp_path / "killed", "step 5", *flags, *saving, **kwargs)
    resumed = ds_pretrain(tmp_path / "resumed", *flags, *saving, "--load", str(tmp_path / "checkpoint"), **kwargs)
    assert sorted(resumed.losses) == [5, 6, 7, 8]
    assert resumed.losses == {step: loss for step, loss in straight.losses.items() if step > 4}
    assert resumed.evaluations[8] == straight.evaluations[8]


def _make_universal(checkpoint: Path, step: int) -> None:
    """As DeepSpeed's documentation says, without extra flags."""
    folder = checkpoint / f"global_step{step}"
    program = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    options = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    done = subprocess.run(
        [*program, "--input_folder", str(folder), "--output_folder", f"{folder}_universal", *options],
        env=environment(DS_ACCELERATOR="cpu"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (checkpoint / "latest_universal").write_text(f"global_step{step}_universal")


# ZeRO stage, then (processes, layout) of each part of the run, and what it may drift.
UNIVERSAL = {
    "ZeRO-1, 2 to 4 to 1": (1, [(2, ()), (4, ()), (1, ())], 1e-5),
    # DeepSpeed's own drift, the same with --prores-schedule none.
    "ZeRO-3, 2 to 1": (3, [(2, ()), (1, ())], 1e-3),
    "PP2 to PP4": (1, [(2, PP2), (4, PP4)], 1e-5),
    "TP2 x PP2 to PP2": (1, [(4, (*TP2, *PP2)), (2, PP2)], 1e-5),
}


@pytest.mark.parametrize("name", UNIVERSAL)
def test_universal_checkpoint_continues_in_another_layout(tmp_path, data, megatron, name):
    """Each part trains two steps further and saves; what it saved is made universal. No dropout."""
    zero, parts, drift = UNIVERSAL[name]
    checkpoint = tmp_path / "checkpoint"
    losses = {}
    for index, (processes, layout) in enumerate(parts):
        last = index == len(parts) - 1
        sections = {"checkpoint": {"load_universal": True}} if index else {}
        flags = config_flags(tmp_path / str(index), zero, **sections)
        flags += ("--load", str(checkpoint)) if index else ()
        flags += () if last else ("--save", str(checkpoint), "--save-interval", "2", "--exit-interval", "2")
        part = ds_pretrain(tmp_path / str(index), *flags, *layout, processes=processes, config={**data, **SAME_WEIGHTS})
        assert min(part.losses) == 1 + 2 * index
        losses |= part.losses
        if not last:
            _make_universal(checkpoint, 2 + 2 * index)
    assert losses == pytest.approx(megatron.losses, rel=drift)


def test_overflow_does_not_advance_alpha(tmp_path, data):
    """2^24 is too large a scale; the engine halves it until a step fits."""
    fp16 = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
    result = ds_pretrain(tmp_path, *config_flags(tmp_path, 1, fp16=fp16), config={**data, **SAME_WEIGHTS})
    alphas = [line.split("alpha ")[1].split()[0] for line in result.output.splitlines() if line.startswith("step ")]
    skipped = alphas.count("0.000")
    assert 0 < skipped < 6
    # T = 2: alpha of layer 1 after the first and the second applied step.
    assert alphas[skipped : skipped + 2] == ["0.500", "1.000"]
    steps = "steps were" if skipped > 1 else "step was"
    assert f"ProRes: alpha stayed at t = 0 while {skipped} optimizer {steps} skipped for an overflow" in result.output


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_every_config_trains(tmp_path, data, path):
    layout = PP2 if path.stem == "pipeline" else ()
    result = ds_pretrain(
        tmp_path, "--deepspeed_config", str(path), *layout, processes=2, config={**data, "train-iters": 2}
    )
    assert sorted(result.losses) == [1, 2]


def test_under_the_deepspeed_launcher(tmp_path, data, megatron):
    """`deepspeed --module`, which gives every rank --local_rank."""
    from runs import arguments

    argv = arguments(tmp_path, *config_flags(tmp_path, 2), config={**data, **SAME_WEIGHTS})
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2", "--master_port", "29631"]
    done = subprocess.run(
        [*launcher, "--module", ENTRY, *argv],
        env=environment(DS_ACCELERATOR="cpu"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    last = [line for line in done.stdout.splitlines() if line.startswith("step 8")]
    assert f"loss {megatron.losses[8]:.4f}" in last[0]


REFUSED = {
    "no config": ((), None, "--deepspeed_config is missing"),
    "missing file": (("--deepspeed_config", "nowhere.json"), None, "nowhere.json cannot be read"),
    "ZeRO-2 pipeline": (PP2, {"zero_optimization": {"stage": 2}}, 'set "stage": 1 in "zero_optimization"'),
    "batch": ((), {"train_batch_size": 16}, '"train_batch_size": 16 in the DeepSpeed config contradicts'),
    "clipping": ((), {"gradient_clipping": 0.5}, '"gradient_clipping": 0.5 in the DeepSpeed config contradicts'),
    "precision": (("--bf16",), {"bf16": {"enabled": False}}, "contradict each other"),
    "length in two places": (
        ("--prores-warmup-fraction", "0.5"),
        {"prores": {"schedule": "linear", "warmup_steps": 7}},
        "say it in one place",
    ),
    "scheduler": ((), {"scheduler": {"type": "WarmupLR"}}, "the learning rate follows Megatron's flags"),
    "learning rate": ((), {"optimizer": {"params": {"lr": 0.5}}}, "contradicts --lr"),
    "betas": ((), {"optimizer": {"params": {"betas": [0.8, 0.99]}}}, "contradicts --adam-beta1 and --adam-beta2"),
    "query norms": ((*TP2, "--qk-layernorm"), {}, "--qk-layernorm with --tensor-model-parallel-size"),
    "fine-tuning": (("--finetune",), {"zero_optimization": {"stage": 3}}, "--finetune does not work with ZeRO stage 3"),
    "half precision": (("--bf16",), {}, "other updates in bf16 without ZeRO"),
    "misspelt": ((), {"prores": {"schedul": "linear"}}, 'unknown key "schedul" (did you mean schedule?)'),
    "two schedules": (
        ("--prores-schedule", "equal"),
        {"prores": {"schedule": "linear"}},
        "say it in one place",
    ),
    "DeepSpeed's own key": ((), {"zero_optimization": {"stag": 1}}, "DeepSpeed does not accept this"),
    "Megatron's optimizer": (("--use-distributed-optimizer",), {}, '"zero_optimization"'),
    "sequence parallel": ((*TP2, "--sequence-parallel"), {}, "--sequence-parallel is not supported"),
    "loss scale": (
        ("--initial-loss-scale", "1024"),
        {},
        '--initial-loss-scale is not supported under DeepSpeed: use "fp16"',
    ),
    "probes": (("--prores-probe-interval", "2"), {}, "--prores-probe-interval is not supported under DeepSpeed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(tmp_path, data, name):
    flags, config, message = REFUSED[name]
    given = () if config is None else config_flags(tmp_path, **config)
    result = ds_run(tmp_path, *given, *flags, processes=2, config=data)
    assert result.returncode != 0
    assert len(result.error_lines) == 1 and message in result.error_lines[0], result.errors[-2000:]
    assert "Traceback" not in result.errors.split("torch/distributed")[0]


def test_what_there_is_to_load(tmp_path, data):
    """Nothing yet is said; the other trainer's checkpoint is refused; what is loaded is named, with its alphas."""
    flags = config_flags(tmp_path, 1)
    folder = tmp_path / "checkpoint"
    saving = ("--save", str(folder), "--load", str(folder), "--save-interval", "4", "--exit-interval", "4")
    first = ds_pretrain(tmp_path / "first", *flags, *saving, config=data)
    assert f"no checkpoint in {folder} yet: starting from the initial weights" in first.output
    assert "ZeRO stage 1" in first.output
    second = ds_pretrain(tmp_path / "second", *flags, *saving, config=data)
    assert f"loaded checkpoint of iteration 4 from {folder}" in second.output
    assert "alpha at iteration 4:" in second.output and sorted(second.losses) == [5, 6, 7, 8]
    chosen = ds_pretrain(tmp_path / "chosen", *flags, "--load", str(folder), "--ckpt-step", "4", config=data)
    assert chosen.losses[5] == second.losses[5]
    evaluated = ds_pretrain(tmp_path / "only", *flags, "--load", str(folder), "--skip-train", config=data)
    assert "final evaluation at iteration 8" in evaluated.output
    (folder / "latest").unlink()
    lost = ds_run(tmp_path / "lost", *flags, *saving, config=data)
    assert lost.returncode == 2 and "there is global_step4, global_step8, see --ckpt-step" in lost.error_lines[0]
    other = tmp_path / "megatron"
    pretrain(tmp_path / "third", "--save", str(other), "--save-interval", "4", "--exit-interval", "4", config=data)
    refused = ds_run(tmp_path / "fourth", *flags, "--load", str(other), config=data)
    assert refused.returncode == 2 and "is of Megatron's trainer" in refused.error_lines[0]


def test_resume_with_another_schedule_is_refused(tmp_path, data):
    saving = ("--save", str(tmp_path / "checkpoint"), "--save-interval", "4", "--exit-interval", "4")
    flags = config_flags(tmp_path, 1)
    ds_pretrain(tmp_path / "first", *flags, *saving, config=data)
    loading = (*flags, "--load", str(tmp_path / "checkpoint"))
    other = {**data, "prores-warmup-steps": 3}
    refused = ds_run(tmp_path / "refused", *loading, config=other)
    assert refused.returncode == 2 and "trained with ProRes linear (T = 2)" in refused.error_lines[0]
    assert sorted(ds_pretrain(tmp_path / "over", *loading, "--prores-override", config=other).losses) == [5, 6, 7, 8]
    norm = ds_run(tmp_path / "norm", *loading, "--prores-norm", "lns", config=data)
    assert norm.returncode == 2 and "--prores-norm pre" in norm.error_lines[0]
