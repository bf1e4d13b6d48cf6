"""The same losses in every parallel layout, and alpha on the right layers."""

import pytest
from runs import pretrain

L = 6
TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
DISTRIBUTED_OPTIMIZER = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")

# name: (processes, flags, expected layers of every stage and virtual chunk in the order of the model)
LAYOUTS = {
    "tp2": (2, TP2, ["1-6"]),
    "tp2 sequence parallel": (2, (*TP2, "--sequence-parallel"), ["1-6"]),
    "pp2": (2, PP2, ["1-3", "4-6"]),
    "pp2 virtual stages": (2, (*PP2, "--num-layers-per-virtual-pipeline-stage", "1"), ["1", "2", "3", "4", "5", "6"]),
    "tp2 pp2": (4, (*TP2, *PP2), ["1-3", "4-6"]),
    "tp2 pp2 sequence parallel virtual stages": (
        4,
        (*TP2, *PP2, "--sequence-parallel", "--num-layers-per-virtual-pipeline-stage", "1"),
        ["1", "2", "3", "4", "5", "6"],
    ),
    "dp2 distributed optimizer": (2, DISTRIBUTED_OPTIMIZER, ["1-6"]),
    "dp2 pp2 distributed optimizer": (4, (*PP2, *DISTRIBUTED_OPTIMIZER), ["1-3", "4-6"]),
    "full recompute": (
        1,
        ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "4"),
        ["1-6"],
    ),
    "tp2 selective recompute": (2, (*TP2, "--recompute-granularity", "selective"), ["1-6"]),
    "first stage of 2": (2, (*PP2, "--decoder-first-pipeline-num-layers", "2"), ["1-2", "3-6"]),
    "last stage of 1": (2, (*PP2, "--decoder-last-pipeline-num-layers", "1"), ["1-5", "6"]),
    "layout": (2, (*PP2, "--pipeline-model-parallel-layout", "Et|tttttL"), ["1", "2-6"]),
    "layout with virtual stages": (
        2,
        (*PP2, "--pipeline-model-parallel-layout", "Et|tt|t|ttL"),
        ["1", "2-3", "4", "5-6"],
    ),
    "layout with empty stages": (
        4,
        ("--pipeline-model-parallel-size", "4", "--pipeline-model-parallel-layout", "E|tttt|tt|L"),
        ["", "1-4", "5-6", ""],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_do_not_depend_on_the_layout(name, tmp_path, data, from_initial, one_process):
    processes, flags, layers = LAYOUTS[name]
    run = pretrain(tmp_path, *from_initial, *flags, processes=processes, config=data)
    assert sorted(run.losses) == list(range(1, 9))
    assert run.losses == pytest.approx(one_process.losses, rel=1e-5)
    assert run.evaluations == pytest.approx(one_process.evaluations, rel=1e-5)
    assert [stage[1] for stage in run.stages()] == layers


def test_the_model_learns_and_prores_matters(tmp_path, data, from_initial, one_process):
    """The comparison above would pass on a model that does nothing."""
    assert one_process.losses[8] < one_process.losses[1] - 0.1
    off = pretrain(tmp_path, *from_initial, "--prores-schedule", "none", config=data)
    assert off.losses[1] != one_process.losses[1]
    assert off.losses[8] != pytest.approx(one_process.losses[8], rel=1e-4)


def test_layers_that_no_stage_count_divides(tmp_path, data):
    """Five layers on two stages, against one process."""
    config = {**data, "num-layers": 5, "train-iters": 4}
    save = ("--save", str(tmp_path / "checkpoint"), "--save-interval", "1")
    pretrain(tmp_path / "initial", *save, "--train-iters", "1", config=config)
    start = ("--load", str(tmp_path / "checkpoint"), "--finetune", "--no-load-optim", "--no-load-rng")
    one = pretrain(tmp_path / "one", *start, config=config)
    two = pretrain(
        tmp_path / "two", *start, *PP2, "--decoder-first-pipeline-num-layers", "3", processes=2, config=config
    )
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    assert [stage[1] for stage in two.stages()] == ["1-3", "4-5"]


@pytest.mark.parametrize(
    "flags", [(*PP2, "--num-layers-per-virtual-pipeline-stage", "1"), (*TP2, "--sequence-parallel")]
)
def test_bf16(flags, tmp_path, data, from_initial, one_process):
    run = pretrain(tmp_path, *from_initial, *flags, "--bf16", processes=2, config=data)
    assert run.losses == pytest.approx(one_process.losses, rel=2e-3)


def test_alphas_are_printed(tmp_path, data):
    """The table of a run that resumes mid-warm-up, against numbers worked out by hand: t = 3, T = 2."""
    flags = (*PP2, "--num-layers-per-virtual-pipeline-stage", "1")
    config = {**data, "train-iters": 4}
    save = ("--save", str(tmp_path / "checkpoint"), "--save-interval", "3", "--exit-interval", "3")
    pretrain(tmp_path / "first", *flags, *save, processes=2, config=config)
    run = pretrain(tmp_path / "second", *flags, "--load", str(tmp_path / "checkpoint"), processes=2, config=config)
    assert run.stages() == [
        ("stage 0 chunk 0", "1", "1"),
        ("stage 1 chunk 0", "2", "0.75"),
        ("stage 0 chunk 1", "3", "0.5"),
        ("stage 1 chunk 1", "4", "0.375"),
        ("stage 0 chunk 2", "5", "0.3"),
        ("stage 1 chunk 2", "6", "0.25"),
    ]
