"""The "prores" section of a DeepSpeed config: every mistake is one line."""

import base64
import json

import pytest

from megatron_prores.deepspeed.section import Section, check_types, parse, read_config
from megatron_prores.errors import UserError


def test_nothing_given_is_the_papers_default():
    assert parse({"train_batch_size": 8}) == Section()
    schedule = Section().resolve(4)
    assert (schedule.name, schedule.warmup_steps, schedule.total_steps) == ("linear", 1000, 4000)


def test_total_warmup():
    section = parse({"prores": {"schedule": "equal", "total_warmup_steps": 500}})
    assert section.resolve(4).total_steps == 500


WRONG = {
    "unknown key": ({"warmup_step": 5}, 'unknown key "warmup_step" (did you mean warmup_steps?)'),
    "another key": ({"nonsense": 5}, "the keys are schedule, warmup_steps"),
    "text for a number": ({"warmup_steps": "1000"}, '"warmup_steps" must be a number of steps, not "1000"'),
    "true for a number": ({"warmup_steps": True}, '"warmup_steps" must be a number of steps, not true'),
    "null": ({"warmup_steps": None}, '"warmup_steps" must be a number of steps, not null'),
    "number for a name": ({"schedule": 3}, '"schedule" must be a name in quotes, not 3'),
    "text for a switch": ({"override": "yes"}, '"override" must be true or false, not "yes"'),
    "T and W": ({"warmup_steps": 5, "total_warmup_steps": 50}, "give the ProRes warm-up once"),
    "misspelt schedule": ({"schedule": "liner"}, "did you mean linear?"),
    "negative": ({"warmup_steps": -5}, "must be a positive number of steps, not -5"),
    "zero": ({"total_warmup_steps": 0}, "must be a positive number of steps, not 0"),
    "infinite": ({"warmup_steps": float("inf")}, "must be a positive number of steps, not inf"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes(name):
    section, message = WRONG[name]
    with pytest.raises(UserError) as refused:
        parse({"prores": section})
    assert message in str(refused.value)
    assert '"prores" in the DeepSpeed config' in str(refused.value) and "\n" not in str(refused.value)


def test_the_section_itself():
    with pytest.raises(UserError, match="must be an object"):
        parse({"prores": "linear"})
    for name in ("ProRes", "pro_res"):
        with pytest.raises(UserError, match=f'has a section "{name}": write "prores"'):
            parse({name: {}})


@pytest.mark.parametrize(
    "config",
    [
        *({name: True} for name in ("zero_optimization", "bf16", "checkpoint", "optimizer", "scheduler", "pipeline")),
        {"zero_optimization": {"stage": "1"}},
        {"zero_optimization": {"stage": 4}},
        {"fp16": {"enabled": "false"}},
        {"checkpoint": {"load_universal": "no"}},
        {"gradient_clipping": "1"},
        {"bfloat16": {"enabled": True}},
    ],
    ids=str,
)
def test_types_of_deepspeeds_own_settings(config):
    with pytest.raises(UserError, match=next(iter(config))):
        check_types(config)


def test_reading(tmp_path):
    content = {"train_batch_size": 8, "prores": {"schedule": "equal"}}
    path = tmp_path / "deepspeed.json"
    path.write_text("// DeepSpeed's configs may have comments\n" + json.dumps(content))
    encoded = base64.urlsafe_b64encode(json.dumps(content).encode()).decode()
    assert read_config(str(path)) == read_config(encoded) == read_config(content) == content


UNREADABLE = {
    "twice": ('{"prores": {}, "zero_optimization": {"stage": 1, "stage": 2}}', '"stage" is given twice'),
    "not JSON": ("{{", "is not valid JSON"),
    "a list": ("[1, 2]", "must be an object"),
    "binary": (b"\xff\xfe\x00", "cannot be read"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable(tmp_path, name):
    text, message = UNREADABLE[name]
    path = tmp_path / "deepspeed.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as refused:
        read_config(str(path))
    assert message in str(refused.value) and str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_missing():
    with pytest.raises(UserError, match=r"nowhere\.json cannot be read"):
        read_config("nowhere.json")
