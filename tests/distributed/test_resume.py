"""Runs that are killed, moved to another layout, or resumed from a damaged checkpoint."""

import shutil

import pytest
from runs import kill_at, pretrain, run

PP2 = ("--pipeline-model-parallel-size", "2")
TP2 = ("--tensor-model-parallel-size", "2")
WITH_DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")
EVERY_FOUR = ("--save-interval", "4")

# name: (processes, flags, whether torchrun starts what is killed and what resumes it)
KILLED = {
    "one process": (1, WITH_DROPOUT, False),
    "pp2 virtual stages": (2, (*WITH_DROPOUT, *PP2, "--num-layers-per-virtual-pipeline-stage", "1"), True),
    "dp2 bf16 distributed optimizer": (2, (*WITH_DROPOUT, "--bf16", "--use-distributed-optimizer"), False),
    "tp2 sequence parallel": (2, (*WITH_DROPOUT, *TP2, "--sequence-parallel"), False),
}


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_run_continues_bit_for_bit(name, tmp_path, data):
    processes, flags, fresh = KILLED[name]
    kwargs = {"processes": processes, "config": data}
    straight = pretrain(tmp_path / "straight", *flags, **kwargs)
    checkpoint = str(tmp_path / "checkpoint")
    again = (*flags, "--save", checkpoint, "--load", checkpoint, *EVERY_FOUR)
    kill_at(tmp_path / "killed", "step 6/8", *again, fresh=fresh, **kwargs)
    resumed = pretrain(tmp_path / "resumed", *again, fresh=fresh, **kwargs)
    assert sorted(resumed.losses) == [5, 6, 7, 8]
    assert resumed.losses == {step: straight.losses[step] for step in (5, 6, 7, 8)}
    assert resumed.evaluations[8] == straight.evaluations[8]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, TP2), (2, PP2)),
        ((2, (*PP2, "--num-layers-per-virtual-pipeline-stage", "1")), (1, ())),
        (
            (2, ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")),
            (2, (*PP2, "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")),
        ),
    ],
    ids=["tp2 to pp2", "virtual stages to one process", "dp2 to pp2 with the distributed optimizer"],
)
def test_resume_in_another_layout(first, second, tmp_path, data, from_initial, one_process):
    checkpoint = str(tmp_path / "checkpoint")
    start = (*first[1], *from_initial, "--save", checkpoint, *EVERY_FOUR, "--exit-interval", "4")
    pretrain(tmp_path / "first", *start, processes=first[0], config=data)
    resumed = pretrain(tmp_path / "second", *second[1], "--load", checkpoint, processes=second[0], config=data)
    assert resumed.losses == pytest.approx({step: one_process.losses[step] for step in (5, 6, 7, 8)}, rel=1e-5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, data):
    """Checkpoints of iterations 4 and 8 of a two-stage run, T = 2."""
    folder = tmp_path_factory.mktemp("saved")
    pretrain(folder, *PP2, "--save", str(folder / "checkpoint"), *EVERY_FOUR, processes=2, config=data)
    return folder / "checkpoint"


@pytest.mark.parametrize(
    ("change", "saved_value", "current_value"),
    [
        ({"prores-warmup-steps": 3}, "linear, T = 2,", "linear, T = 3,"),
        ({"prores-schedule": "equal"}, "linear, T = 2,", "equal, T = 2,"),
        ({"prores-schedule": "none"}, "linear, T = 2,", "none"),
    ],
)
def test_another_schedule_is_refused_by_name(change, saved_value, current_value, tmp_path, data, saved):
    flags = ("--load", str(saved), "--ckpt-step", "4")
    refused = run(tmp_path / "refused", *flags, config={**data, **change})
    assert refused.returncode == 2
    assert len(refused.error_lines) == 1
    assert saved_value in refused.error_lines[0] and current_value in refused.error_lines[0]
    assert "Traceback" not in refused.errors
    assert not refused.losses


def test_another_schedule_with_override(tmp_path, data, saved):
    flags = ("--load", str(saved), "--ckpt-step", "4", "--prores-override")
    resumed = pretrain(tmp_path, *flags, config={**data, "prores-schedule": "equal"})
    assert "resuming with equal" in resumed.output
    assert [alphas for _, _, alphas in resumed.stages()] == ["1 1 1 1 1 1"]


def test_the_same_warmup_said_otherwise_is_accepted(tmp_path, data, saved):
    """W = 12 over six layers is T = 2."""
    same = {**data, "prores-warmup-steps": None, "prores-total-warmup-steps": 12}
    assert pretrain(tmp_path, "--load", str(saved), "--ckpt-step", "4", config=same).losses


def _truncate(checkpoint):
    shard = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])


def _remove_shard(checkpoint):
    max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size).unlink()


def _remove_index(checkpoint):
    (checkpoint / ".metadata").unlink()


@pytest.mark.parametrize("damage", [_truncate, _remove_shard, _remove_index])
def test_a_damaged_checkpoint_is_named_and_the_earlier_one_loads(damage, tmp_path, data, saved):
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(saved, checkpoint)
    damage(checkpoint / "iter_0000008")
    longer = {**data, "train-iters": 8}
    failed = run(tmp_path / "failed", *PP2, "--load", str(checkpoint), processes=2, config=longer)
    assert failed.returncode != 0
    assert len(failed.error_lines) == 1
    assert "iteration 8" in failed.error_lines[0] and "--ckpt-step 4" in failed.error_lines[0]
    earlier = pretrain(
        tmp_path / "earlier", *PP2, "--load", str(checkpoint), "--ckpt-step", "4", processes=2, config=longer
    )
    assert sorted(earlier.losses) == [5, 6, 7, 8]
