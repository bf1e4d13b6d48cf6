"""`--config FILE.yaml`: what the parser makes of a file is what the file says, and mistakes name file and key."""

import argparse
from contextlib import suppress

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_prores.config_file import config_arguments
from megatron_prores.errors import UserError


def make_parser():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config", action="append")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--name")
    parser.add_argument("--under_score")
    parser.add_argument("--both-opt_ways", "--both-opt-ways")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--no-rope-fusion", action="store_false", dest="rope_fusion")
    parser.add_argument("--cache", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--betas", nargs=2, type=float)
    parser.add_argument("--sizes", nargs="+", type=int)
    parser.add_argument("--words", nargs="*")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int)
    length.add_argument("--samples", type=int)
    return parser


@pytest.fixture
def write(tmp_path):
    def write(text, name="run.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def parse(write):
    """What Megatron's parser would hold of a YAML text and a command line."""

    def parse(*texts, argv=()):
        parser = make_parser()
        paths = [write(text, f"{number}.yaml") for number, text in enumerate(texts)]
        return vars(parser.parse_args([*config_arguments(paths, parser, argv), *argv]))

    return parse


def changed(values):
    """What differs from the parser's defaults."""
    defaults = vars(make_parser().parse_args([]))
    return {name: value for name, value in values.items() if value != defaults[name]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num-layers: 12", {"num_layers": 12}),
        ("num_layers: 12", {"num_layers": 12}),
        ("under-score: x", {"under_score": "x"}),
        ("under_score: x", {"under_score": "x"}),
        ("both_opt_ways: x", {"both_opt_ways": "x"}),
        ("both-opt_ways: x", {"both_opt_ways": "x"}),
        ("lr: 3e-4", {"lr": 3e-4}),  # a string in YAML 1.1
        ("lr: 3.0e-4", {"lr": 3e-4}),
        ("lr: -0.5", {"lr": -0.5}),
        ("num-layers: -1", {"num_layers": -1}),
        ("name: a b  c", {"name": "a b  c"}),
        ("name: --bf16 -x=1", {"name": "--bf16 -x=1"}),
        ("name: ''", {"name": ""}),
        ("name: 'no'", {"name": "no"}),
        ("name: ä=€", {"name": "ä=€"}),
        ("name: 2024", {"name": "2024"}),
        ("bf16: true", {"bf16": True}),
        ("bf16: yes", {"bf16": True}),
        ("bf16: false", {}),
        ("no-rope-fusion: true", {"rope_fusion": False}),
        ("no_rope_fusion: false", {}),
        ("cache: true", {"cache": True}),
        ("cache: false", {"cache": False}),
        ("no-cache: true", {"cache": False}),
        ("no-cache: false", {"cache": True}),
        ("betas: [0.9, 0.95]", {"betas": [0.9, 0.95]}),
        ("betas: [-1, -1.0e-5]", {"betas": [-1.0, -1e-5]}),
        ("betas: [-2.5e+20, .inf]", {"betas": [-2.5e20, float("inf")]}),
        ("sizes: [1, -2, 3]", {"sizes": [1, -2, 3]}),
        ("sizes: 7", {"sizes": [7]}),
        ("sizes: -7", {"sizes": [-7]}),
        ("words: []", {"words": []}),
        ("words: [0.3, /data/a b, x]", {"words": ["0.3", "/data/a b", "x"]}),
        ("words: --x", {"words": ["--x"]}),
        ("", {}),
        ("# nothing but a comment\n", {}),
        ("{}", {}),
        (
            "num-layers: 2\nname: x\nbf16: true\nsizes: [1, 2]",
            {"num_layers": 2, "name": "x", "bf16": True, "sizes": [1, 2]},
        ),
        ("num-layers: &a 3\nname: *a", {"num_layers": 3, "name": "3"}),
    ],
)
def test_values(parse, text, expected):
    assert changed(parse(text)) == expected


def test_command_line_wins(parse):
    values = parse("num-layers: 2\nname: file\ncache: true", argv=["--num-layers", "3", "--no-cache"])
    assert changed(values) == {"num_layers": 3, "name": "file", "cache": False}


def test_later_files_win(parse):
    first = "num-layers: 2\nname: a\nbf16: true\nno-rope-fusion: true\ncache: true\nsizes: [1, 2, 3]"
    second = "num_layers: 3\nbf16: false\nno_rope_fusion: false\nno-cache: true\nsizes: [4]"
    assert changed(parse(first, second)) == {"num_layers": 3, "name": "a", "cache": False, "sizes": [4]}
    assert changed(parse(first, "")) == changed(parse(first))
    assert parse(first, second, "name: b")["name"] == "b"


def test_of_flags_that_exclude_each_other_the_last_wins(parse, capsys):
    assert changed(parse("steps: 1", "samples: 2")) == {"samples": 2}
    assert changed(parse("steps: 1\nname: x", argv=["--samples", "2"])) == {"samples": 2, "name": "x"}
    assert changed(parse("steps: 1", "samples: 2", argv=["--steps=3"])) == {"steps": 3}
    with pytest.raises(SystemExit):
        parse("steps: 1\nsamples: 2")
    assert "not allowed with argument" in capsys.readouterr().err


def test_no_file():
    assert config_arguments([], make_parser()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num-layer: 2", r"run\.yaml: unknown key num-layer \(did you mean num-layers\?\)"),
        ("num_layer: 2", r"run\.yaml: unknown key num_layer \(did you mean num-layers\?\)"),
        ("qqqq: 2", r"run\.yaml: unknown key qqqq$"),
        ("--lr: 2", r"run\.yaml: unknown key --lr"),
        ("config: x.yaml", r"run\.yaml: config acts before the file is read"),
        ("help: true", r"run\.yaml: help acts before the file is read"),
        ("3: 2", r"run\.yaml: unknown key 3"),
        ("lr: 1\nname: x\nlr: 2", r"run\.yaml is not valid YAML: line 3: lr is given twice"),
        ("num-layers: 1\nnum_layers: 2", r"run\.yaml: num_layers and num-layers are the same flag: keep one"),
        ("cache: true\nno-cache: true", r"run\.yaml: no-cache and cache are the same flag: keep one"),
        ("[a, b]", r"run\.yaml must be a mapping of names to values, not a list"),
        ("just words", r"run\.yaml must be a mapping of names to values, not a str"),
        ("lr: {min: 1}", r"run\.yaml: lr must be a value or a list of values, not a mapping"),
        ("model:\n  num-layers: 2", r"run\.yaml: unknown key model"),
        ("words: [{a: b}]", r"run\.yaml: words must be a value or a list of values, not a mapping"),
        ("words: [[a]]", r"run\.yaml: words must be a value or a list of values, not a list in a list"),
        ("lr:", r"run\.yaml: lr must be a value or a list of values, not empty"),
        ("words: [a, ]\nsizes: [1, null]", r"run\.yaml: sizes must be a value or a list of values, not empty"),
        ("bf16:", r"run\.yaml: bf16 must be .* not empty"),
        ("bf16: 1", r"run\.yaml: bf16 is a switch: give true or false, not 1"),
        ("bf16: 'true'", r"run\.yaml: bf16 is a switch"),
        ("bf16: [true]", r"run\.yaml: bf16 is a switch"),
        ("lr: [1, 2]", r"run\.yaml: lr takes one value, not a list"),
        ("name: no", r"run\.yaml: name takes a value, not true or false: put the word in quotes"),
        ("lr: true", r"run\.yaml: lr takes a value, not true or false"),
        ("words: [a, on]", r"run\.yaml: words takes a value, not true or false"),
        ("lr: [1", r"run\.yaml is not valid YAML: "),
        ("lr: 1\n  name: x", r"run\.yaml is not valid YAML: "),
        ("lr: 1\n---\nlr: 2", r"run\.yaml is not valid YAML: "),
        ("lr: !!python/object:os.system x", r"run\.yaml is not valid YAML: "),
        ("? [a]\n: 1", r"run\.yaml is not valid YAML: "),
    ],
)
def test_mistakes_name_the_file_and_the_key(write, text, message):
    with pytest.raises(UserError, match=message) as error:
        config_arguments([write(text)], make_parser())
    assert "\n" not in str(error.value)


def test_a_mistake_in_the_second_file_names_the_second(write):
    with pytest.raises(UserError, match=r"second\.yaml: unknown key nam .*did you mean name"):
        config_arguments([write("name: x", "first.yaml"), write("nam: x", "second.yaml")], make_parser())


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"--config .*missing\.yaml cannot be read: No such file"):
        config_arguments([str(tmp_path / "missing.yaml")], make_parser())
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        config_arguments([str(tmp_path)], make_parser())
    (tmp_path / "latin.yaml").write_bytes("name: ä".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.yaml cannot be read"):
        config_arguments([str(tmp_path / "latin.yaml")], make_parser())


def test_a_value_of_the_wrong_type_is_the_parsers_to_refuse(parse, capsys):
    with pytest.raises(SystemExit):
        parse("num-layers: many")
    assert "--num-layers: invalid int value: 'many'" in capsys.readouterr().err


# argparse cannot take words that look like flags after a flag with several values.
plain_words = st.text(max_size=8).filter(lambda text: not text.startswith("-"))
floats = st.floats(allow_nan=False, allow_infinity=False)
KEYS = {
    "num_layers": st.integers(),
    "lr": st.floats(allow_nan=False),
    "name": st.text(max_size=20),
    "under_score": st.text(max_size=20),
    "bf16": st.booleans(),
    "cache": st.booleans(),
    "betas": st.lists(floats, min_size=2, max_size=2),
    "sizes": st.lists(st.integers(), min_size=1, max_size=4),
    "words": st.lists(plain_words, max_size=4),
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.fixed_dictionaries({}, optional=KEYS), dashes=st.booleans(), flow=st.booleans())
def test_round_trip(write, values, dashes, flow):
    keys = {name.replace("_", "-") if dashes else name: value for name, value in values.items()}
    path = write(yaml.safe_dump(keys, default_flow_style=flow))
    parser = make_parser()
    parsed = vars(parser.parse_args(config_arguments([path], parser)))
    assert parsed == vars(parser.parse_args([])) | values


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=anything | st.dictionaries(st.sampled_from(["num-layers", "bf16", "words", "cache", "lr"]), anything))
def test_any_yaml_gives_words_or_a_user_error(write, content):
    with suppress(UserError):
        words = config_arguments([write(yaml.safe_dump(content))], make_parser())
        assert all(isinstance(word, str) for word in words)
