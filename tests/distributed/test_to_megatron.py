"""`--to-megatron`: Megatron's trainer continues from DeepSpeed's checkpoint, whatever the layout, in mid-warm-up."""

import pytest
from runs import pretrain
from test_deepspeed import PP2, SAME_WEIGHTS, TP2, config_flags, ds_pretrain, ds_run

TIED = {"untie-embeddings-and-output-weights": None, "position-embedding-type": "learned_absolute"}
# Processes, ZeRO stage, layout, changes to the model.
LAYOUTS = {
    "ZeRO-1": (2, 1, (), {}),
    "ZeRO-3": (2, 3, (), {}),
    "PP2, tied": (2, 1, PP2, TIED),
    "TP2 x PP2": (4, 1, (*TP2, *PP2), {"prores-norm": "sandwich"}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_megatron_continues(tmp_path, data, name):
    processes, zero, layout, model = LAYOUTS[name]
    config = {**data, **SAME_WEIGHTS, **model}
    flags = (*config_flags(tmp_path, zero), *layout)
    saved, converted = tmp_path / "deepspeed", tmp_path / "converted"
    saving = ("--save", str(saved), "--save-interval", "4")
    straight = ds_pretrain(tmp_path / "straight", *flags, *saving, processes=processes, config=config)
    loading = ("--load", str(saved), "--ckpt-step", "4", "--to-megatron", str(converted))
    conversion = ds_pretrain(tmp_path / "conversion", *flags, *loading, processes=processes, config=config)
    assert f"iteration 4 is in {converted}, in Megatron's format" in conversion.output and not conversion.losses
    # Another layout, as Megatron's checkpoints allow; without the optimizer's states only the first step is the same.
    continuing = ("--load", str(converted), "--no-load-optim", "--no-load-rng")
    continued = pretrain(tmp_path / "continued", *continuing, config=config)
    assert sorted(continued.losses) == [5, 6, 7, 8]
    assert continued.losses[5] == pytest.approx(straight.losses[5], rel=1e-5)


def test_what_cannot_be_converted(tmp_path, data):
    flags = config_flags(tmp_path, 1)
    saved = tmp_path / "deepspeed"
    to = ("--to-megatron", str(tmp_path / "converted"))
    nothing = ds_run(tmp_path / "nothing", *flags, *to, config=data)
    assert nothing.returncode == 2 and "name its folder with --load" in nothing.error_lines[0]
    missing = ds_run(tmp_path / "missing", *flags, *to, "--load", str(saved), config=data)
    assert missing.returncode == 2 and f"no checkpoint to load in {saved}" in missing.error_lines[0]
    ds_pretrain(
        tmp_path / "run", *flags, "--save", str(saved), "--save-interval", "2", "--exit-interval", "2", config=data
    )
    in_use = ds_run(tmp_path / "used", *flags, "--load", str(saved), "--to-megatron", str(saved), config=data)
    assert in_use.returncode == 2 and "is not an empty folder" in in_use.error_lines[0]
    # Nothing is trained: the run's length does not matter, as long as alpha's does not change with it.
    longer = (*flags, *to, "--load", str(saved), "--train-iters", "16")
    override = ds_run(tmp_path / "override", *longer, "--prores-override", config=data)
    assert override.returncode == 2 and "remove --prores-override" in override.error_lines[0]
    fine = ds_run(tmp_path / "fine", *flags, *to, "--load", str(saved), "--finetune", config=data)
    assert fine.returncode == 2 and "remove --finetune" in fine.error_lines[0]
    assert not (tmp_path / "converted").exists()
    assert "iteration 2 is in" in ds_pretrain(tmp_path / "longer", *longer, config=data).output
