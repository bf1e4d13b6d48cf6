"""ProRes against stock Megatron: bit for bit where alpha is 1, and checkpoints that load both ways."""

from pathlib import Path

from runs import pretrain

SCRIPT = Path(__file__).with_name("megatron_pretrain_gpt.py")
PRORES_SPEC = ("--spec", "megatron_prores.megatron.spec", "prores_layer_spec")
# The fused operators round once where Megatron rounds after every operation, and have their own dropout mask.
BIT_FOR_BIT = ("--prores-op", "torch")
WITH_DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")


def stock(folder, *flags, data, **kwargs):
    """Megatron without ProRes: no flag, layer or hook of ours."""
    return pretrain(folder, *flags, script=SCRIPT, config={**data, "prores-warmup-steps": None}, **kwargs)


def test_alpha_one_is_stock_bit_for_bit(tmp_path, data):
    """`none` builds Megatron's layers; ProRes's own layers with alpha = 1 compute the same. Dropout is on."""
    megatron = stock(tmp_path / "stock", *WITH_DROPOUT, data=data)
    assert "ProRes" not in megatron.output
    none = pretrain(tmp_path / "none", *WITH_DROPOUT, "--prores-schedule", "none", config=data)
    ones = (*WITH_DROPOUT, *PRORES_SPEC, *BIT_FOR_BIT, "--prores-schedule", "none")
    ones = pretrain(tmp_path / "ones", *ones, config=data)
    assert len(megatron.losses) == 8 and len(megatron.evaluations) == 2
    assert none.losses == ones.losses == megatron.losses
    assert none.evaluations == ones.evaluations == megatron.evaluations


def test_alpha_one_is_stock_bit_for_bit_in_bf16(tmp_path, data):
    megatron = stock(tmp_path / "stock", *WITH_DROPOUT, "--bf16", data=data)
    ones = (*WITH_DROPOUT, "--bf16", *PRORES_SPEC, *BIT_FOR_BIT, "--prores-schedule", "none")
    ones = pretrain(tmp_path / "ones", *ones, config=data)
    assert ones.losses == megatron.losses


def test_one_call_in_a_users_own_script(tmp_path, data):
    """Megatron's script with `enable()` and `--spec` trains as our entry point does."""
    ours = pretrain(tmp_path / "ours", config=data)
    theirs = pretrain(tmp_path / "theirs", *PRORES_SPEC, script=SCRIPT, env={"WITH_PRORES": "1"}, config=data)
    assert theirs.losses == ours.losses
    assert theirs.evaluations == ours.evaluations


def test_checkpoints_load_both_ways(tmp_path, data):
    """ProRes to 4 (warm from 3 on), then either engine to 8: the same curve. Then stock to 4 and ProRes to 8."""
    warm = {**data, "prores-warmup-steps": 0.5, "prores-op": "torch"}
    to_four = ("--save-interval", "4", "--exit-interval", "4")
    prores, plain = str(tmp_path / "prores-checkpoint"), str(tmp_path / "stock-checkpoint")
    pretrain(tmp_path / "first", "--save", prores, *to_four, config=warm)
    stock_after = stock(tmp_path / "stock-after", "--load", prores, data=data)
    prores_after = pretrain(tmp_path / "prores-after", "--load", prores, config=warm)
    assert sorted(stock_after.losses) == [5, 6, 7, 8]
    assert stock_after.losses == prores_after.losses

    stock(tmp_path / "stock-first", "--save", plain, *to_four, data=data)
    stock_straight = stock(tmp_path / "stock-straight", "--load", plain, data=data)
    prores_on_stock = pretrain(tmp_path / "prores-on-stock", "--load", plain, "--prores-override", config=warm)
    assert prores_on_stock.losses == stock_straight.losses
