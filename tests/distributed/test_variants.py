"""Norm placements and initial weights in real runs: the same losses in every layout, from a seed alone."""

import pytest
import torch
from megatron.core.dist_checkpointing import load_plain_tensors
from runs import outcomes, pretrain, run

TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
ALL_AXES = (*TP2, *PP2, "--sequence-parallel", "--num-layers-per-virtual-pipeline-stage", "1")
DISTRIBUTED_OPTIMIZER = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
FULL_RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "2")

# With an initialisation of each kind, tied embeddings (on both ends of the pipeline) and, for lns, without ProRes.
VARIANTS = {
    "post": {"prores-init": "ds"},
    "sandwich": {"prores-init": "scaled", "untie-embeddings-and-output-weights": None},
    "deepnorm": {},
    "lns": {"prores-init": "scaled", "prores-schedule": "none"},
}

# What each is resumed in, from the checkpoint of one process: (processes, flags).
OTHER_LAYOUT = {
    "post": (2, (*DISTRIBUTED_OPTIMIZER, *FULL_RECOMPUTE)),
    "sandwich": (2, (*TP2, "--sequence-parallel", "--recompute-granularity", "selective")),
    "deepnorm": (2, (*PP2, "--num-layers-per-virtual-pipeline-stage", "1")),
    "lns": (2, (*PP2, "--decoder-first-pipeline-num-layers", "2")),
}


def config_of(norm, data):
    return {**data, "prores-norm": norm, **VARIANTS[norm]}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, data):
    """Every variant in one process, with checkpoints of iterations 4 and 8."""
    finished = {}

    def of(norm):
        if norm not in finished:
            folder = tmp_path_factory.mktemp(norm)
            save = ("--save", str(folder / "checkpoint"), "--save-interval", "4")
            save += DISTRIBUTED_OPTIMIZER if norm == "post" else ()  # it is resumed with it
            finished[norm] = pretrain(folder, *save, config=config_of(norm, data)), folder / "checkpoint"
        return finished[norm]

    return of


@pytest.mark.parametrize("norm", VARIANTS)
def test_losses_do_not_depend_on_the_layout(norm, tmp_path, data, one_process):
    """From the seed: the initial weights are the same too."""
    four = pretrain(tmp_path, *ALL_AXES, processes=4, config=config_of(norm, data))
    one, _ = one_process(norm)
    assert sorted(four.losses) == list(range(1, 9))
    assert four.losses == pytest.approx(one.losses, rel=1e-5)
    assert four.evaluations == pytest.approx(one.evaluations, rel=1e-5)
    assert one.losses[8] < one.losses[1] - 0.05
    assert [stage[1] for stage in four.stages()] == ["1", "2", "3", "4", "5", "6"]


@pytest.mark.parametrize("norm", OTHER_LAYOUT)
def test_resume_in_another_layout(norm, tmp_path, data, one_process):
    processes, flags = OTHER_LAYOUT[norm]
    one, checkpoint = one_process(norm)
    load = ("--load", str(checkpoint), "--ckpt-step", "4")
    resumed = pretrain(tmp_path, *load, *flags, processes=processes, config=config_of(norm, data))
    assert resumed.losses == pytest.approx({step: one.losses[step] for step in (5, 6, 7, 8)}, rel=1e-5)
    assert resumed.evaluations[8] == pytest.approx(one.evaluations[8], rel=1e-5)


def test_bf16_with_the_distributed_optimizer_and_recompute(tmp_path, data, one_process):
    flags = (*TP2, "--sequence-parallel", "--bf16", "--use-distributed-optimizer", *FULL_RECOMPUTE)
    half = pretrain(tmp_path, *flags, processes=2, config=config_of("post", data))
    assert half.losses == pytest.approx(one_process("post")[0].losses, rel=3e-3)


def test_every_initial_weight_is_the_same_bit_for_bit(tmp_path, data):
    """A step with a learning rate of 0 in TP2 x PP2 and in one process; q, k, v share a weight, and gate and up."""
    config = {**config_of("deepnorm", data), "lr": 0.0, "train-iters": 1, "eval-iters": 0, "num-query-groups": 2}
    config["group-query-attention"] = True
    tensors = []
    for name, processes, flags in (("one", 1, ()), ("four", 4, (*TP2, *PP2))):
        save = ("--save", str(tmp_path / name / "checkpoint"), "--save-interval", "1")
        pretrain(tmp_path / name, *save, *flags, "--no-save-optim", processes=processes, config=config)
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            tensors.append(load_plain_tensors(str(tmp_path / name / "checkpoint" / "iter_0000001")))
        finally:
            torch.distributed.destroy_process_group()
    one, four = tensors
    weights = [name for name, value in one.items() if torch.is_tensor(value) and value.ndim > 1]
    assert one.keys() == four.keys() and len(weights) > 6
    for name in weights:
        assert torch.equal(one[name], four[name]), name


def test_another_placement_is_refused_and_restored(tmp_path, data, one_process):
    _, checkpoint = one_process("deepnorm")
    load = ("--load", str(checkpoint), "--ckpt-step", "4")
    refused = run(tmp_path / "refused", *load, config={**config_of("deepnorm", data), "prores-norm": "pre"})
    assert refused.returncode == 2 and not refused.losses
    [line] = refused.error_lines
    assert "trained with --prores-norm deepnorm, this run asks for pre" in line
    flags = (*load, "--use-checkpoint-args")
    restored = pretrain(tmp_path / "restored", *flags, config={**config_of("deepnorm", data), "prores-norm": None})
    assert "; deepnorm norm; alpha at iteration 4:" in restored.output
    assert restored.losses[8] == one_process("deepnorm")[0].losses[8]


@pytest.mark.parametrize("norm", OTHER_LAYOUT)
def test_text_from_a_checkpoint(norm, tmp_path, one_process):
    _, checkpoint = one_process(norm)
    line = ["generate", "--checkpoint", str(checkpoint), "--ckpt-step", "8", "--max-new-tokens", "4", "--greedy"]
    [(code, output, errors)] = outcomes(tmp_path, "megatron_prores.cli", {norm: (line, 1)}).values()
    assert code == 0, errors
    assert f"; {norm} norm; alpha at iteration 8:" in output
    assert "4 tokens in" in output
