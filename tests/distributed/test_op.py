"""The fused operators train as plain torch does."""

import pytest
from runs import pretrain, run

TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
LAYOUTS = {
    "tp2 sequence parallel": (2, (*TP2, "--sequence-parallel")),
    "pp2 virtual stages": (2, (*PP2, "--num-layers-per-virtual-pipeline-stage", "1")),
    "tp2 full recompute": (
        2,
        (*TP2, "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "2"),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_fused_and_torch_give_the_same_losses(name, tmp_path, data):
    processes, flags = LAYOUTS[name]
    config = {**data, "train-iters": 20, "eval-interval": 20}
    fused, torch = (
        pretrain(tmp_path / op, *flags, "--prores-op", op, processes=processes, config=config)
        for op in ("fused", "torch")
    )
    assert "residual add: fused" in fused.output and "residual add: plain torch" in torch.output
    assert len(fused.losses) == 20 and fused.losses[20] < fused.losses[1] - 0.1
    assert fused.losses == pytest.approx(torch.losses, rel=1e-6)
    assert fused.evaluations == pytest.approx(torch.evaluations, rel=1e-6)


def test_recompute_repeats_the_dropout_mask(tmp_path, data):
    """Each rank draws its own mask under sequence parallelism, and draws it again when it recomputes."""
    flags = (*TP2, "--sequence-parallel", "--hidden-dropout", "0.1", "--prores-op", "fused")
    recompute = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "2")
    stored, recomputed, none = (
        pretrain(tmp_path / name, *flags, *more, processes=2, config=data)
        for name, more in (("stored", ()), ("recomputed", recompute), ("none", ("--hidden-dropout", "0.0")))
    )
    assert recomputed.losses == stored.losses
    assert stored.losses[8] != pytest.approx(none.losses[8], rel=1e-4)


def test_fused_where_it_is_not_built_is_refused(tmp_path, data):
    without = {"PYTHONPATH": str(tmp_path)}
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['megatron_prores._C'] = None\n")
    refused = run(tmp_path / "refused", "--prores-op", "fused", config=data, env=without)
    assert refused.returncode == 2
    assert len(refused.error_lines) == 1 and "not built" in refused.error_lines[0]
    auto = pretrain(tmp_path / "auto", "--train-iters", "1", config=data, env=without)
    assert auto.output.count("residual add: plain torch: the extension was not built") == 1
