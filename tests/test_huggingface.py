"""What export and import are made of: layouts, folding, settings, files."""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from megatron_prores import cli
from megatron_prores.errors import UserError
from megatron_prores.huggingface import layout, llama_config, megatron_flags
from megatron_prores.huggingface.files import SavedWeights, save_weights
from megatron_prores.huggingface.folder import check_new, new_folder
from megatron_prores.huggingface.folding import Folding, refuse_unfoldable
from megatron_prores.huggingface.layout import Kind, Shape, Weight
from megatron_prores.huggingface.rotary import inverse_frequencies, rope_parameters
from megatron_prores.schedule import alpha

LLAMA = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 16,
    "max_position_embeddings": 32,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5,
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": True,
    "init_method_std": 0.02,
    "prores_norm": "pre",
}


def arguments(**changes):
    return argparse.Namespace(**{**LLAMA, **changes})


@pytest.mark.parametrize(("queries", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("columns", [(), (5,)])
def test_queries_keys_and_values_are_taken_from_their_groups(queries, groups, columns):
    size, shape = 3, Shape(layers=1, queries=queries, groups=groups, tied=False)
    fused = torch.randn(groups * (queries // groups + 2) * size, *columns)
    q, k, v = layout.split(Kind.QKV, fused, shape)
    head = 0  # as Megatron's attention reads it: the queries of a group, then its key, then its value
    for group in range(groups):
        for member in range(queries // groups):
            query = group * (queries // groups) + member
            torch.testing.assert_close(q[query * size :][:size], fused[head * size :][:size], rtol=0, atol=0)
            head += 1
        for part in (k, v):
            torch.testing.assert_close(part[group * size :][:size], fused[head * size :][:size], rtol=0, atol=0)
            head += 1
    assert layout.fits(Kind.QKV, [q, k, v], shape, fused.shape)
    assert torch.equal(layout.fuse(Kind.QKV, [q, k, v], shape), fused)
    assert not layout.fits(Kind.QKV, [q, k, v[:-1]], shape, fused.shape)
    assert not layout.fits(Kind.QKV, [q, k, v], Shape(1, queries, groups, False), (len(fused), 7))


def test_gate_and_up_are_halves():
    shape, fused = Shape(1, 1, 1, False), torch.randn(8, 3)
    gate, up = layout.split(Kind.GATE_UP, fused, shape)
    assert torch.equal(gate, fused[:4]) and torch.equal(up, fused[4:])
    assert torch.equal(layout.fuse(Kind.GATE_UP, [gate, up], shape), fused)


@pytest.mark.parametrize("biases", [{}, {"qkv_bias": True}, {"bias": True}])
@pytest.mark.parametrize("tied", [False, True])
def test_the_names_are_those_of_transformers(biases, tied):
    transformers = pytest.importorskip("transformers")
    shape = Shape(layers=2, queries=4, groups=2, tied=tied, **biases)
    names = [name for weight in layout.weights(shape) for name in weight.names]
    args = arguments(
        add_qkv_bias="qkv_bias" in biases,
        add_bias_linear="bias" in biases,
        untie_embeddings_and_output_weights=not tied,
    )
    assert llama_config.shape_of(args) == shape
    config = transformers.LlamaConfig(**llama_config.llama_config(args, 10, 8.0, "float32"))
    with torch.device("meta"):
        theirs = dict(transformers.LlamaForCausalLM(config).named_parameters())
    assert len(names) == len(set(names)) and set(names) == set(theirs)


def test_norms_in_linear_layers_have_the_name_of_separate_ones():
    fused = "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight"
    assert layout.megatron_name(fused) == "decoder.layers.3.input_layernorm.weight"
    assert layout.megatron_name("decoder.layers.3.mlp.linear_fc1.weight") == "decoder.layers.3.mlp.linear_fc1.weight"


def test_alpha_goes_into_output_projections_only():
    folding = Folding.of("pre", alpha("linear", step=3, num_layers=4, warmup_steps=1))
    assert folding.layers == [4]
    weight = torch.randn(20, 20, dtype=torch.bfloat16)
    for kind, layer, factor in ((Kind.OUTPUT, 4, 0.75), (Kind.OUTPUT, 3, 1), (Kind.QKV, 4, 1), (Kind.NORM, 4, 1)):
        folded = folding(Weight(kind, "", (), layer), weight, torch.bfloat16)
        assert torch.equal(folded, (weight.float() * factor).bfloat16())
    # The product is rounded, and not alpha before it.
    third = torch.tensor(1 / 3)
    folded = Folding.of("pre", [1 / 3])(Weight(Kind.OUTPUT, "", (), 1), weight, torch.bfloat16)
    assert torch.equal(folded, (weight.float() * third).bfloat16())
    assert not torch.equal(folded, weight * third.bfloat16())


def test_constants_of_a_norm_go_into_its_gain():
    gain = torch.randn(5)
    folding = Folding.of("lns", [1.0] * 4)
    assert torch.equal(folding(Weight(Kind.NORM, "", (), 4), gain, torch.float32), gain / 2)
    assert torch.equal(folding(Weight(Kind.NORM, "", ()), gain, torch.float32), gain)  # the norm before the head
    centered = Folding.of("pre", [1.0], zero_centered=True)
    assert torch.equal(centered(Weight(Kind.NORM, "", (), 1), gain, torch.float32), gain + 1)
    assert torch.equal(centered(Weight(Kind.QKV, "", (), 1), gain, torch.float32), gain)


@pytest.mark.parametrize("norm", ["post", "deepnorm", "sandwich"])
def test_placements_with_other_norms_are_refused(norm):
    with pytest.raises(UserError, match=f"--prores-norm {norm}.*cannot be exported"):
        llama_config.refuse_inexpressible(arguments(prores_norm=norm))
    refuse_unfoldable("pre")
    refuse_unfoldable("lns")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"position_embedding_type": "learned_absolute"}, "--position-embedding-type learned_absolute, a Llama rotary"),
        ({"rotary_percent": 0.5}, "--rotary-percent 0.5"),
        ({"rotary_interleaved": True}, "it has --rotary-interleaved"),
        ({"normalization": "LayerNorm"}, "--normalization LayerNorm, a Llama RMSNorm"),
        ({"swiglu": False}, "it has no --swiglu"),
        ({"num_experts": 8}, "--num-experts 8, a Llama no experts"),
        ({"multi_latent_attention": True}, "--multi-latent-attention"),
        ({"qk_layernorm": True}, "--qk-layernorm"),
        ({"window_size": (128, 0)}, "--window-size"),
        ({"softmax_scale": 0.3}, "--softmax-scale 0.3"),
        ({"no_rope_freq": 4}, "--no-rope-freq 4"),
        ({"use_mup": True}, "--use-mup"),
        ({"hidden_size": 66}, "--hidden-size 66"),
        ({"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2}, "both"),
    ],
)
def test_what_is_no_llama_is_refused_in_one_line(change, reason):
    with pytest.raises(UserError) as refused:
        args = arguments(**change)
        llama_config.refuse_inexpressible(args)
        llama_config.llama_config(args, 10, 8.0, "float32")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_llama_is_not_refused():
    same = {"num_experts": None, "qk_layernorm": False, "softmax_scale": None, "window_size": None, "use_mup": False}
    llama_config.refuse_inexpressible(arguments(**same, prores_norm="lns"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {"rope_type": "default"}),
        ({"rotary_seq_len_interpolation_factor": 4}, {"rope_type": "linear", "factor": 4.0}),
        ({"use_rope_scaling": True}, llama_config.LLAMA3_SCALING | {"factor": 8.0}),
    ],
)
def test_rotary_settings_survive_both_directions(change, expected, tmp_path):
    pytest.importorskip("transformers")
    config = llama_config.llama_config(arguments(rotary_base=5000, **change), 10, 8.0, "float32")
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = megatron_flags.read_config(tmp_path)
    assert rope_parameters(read) == {"rope_theta": 5000.0, **expected}
    flags = megatron_flags.model_flags(read, megatron_flags.shape_of(read, False))
    assert flags["rotary-base"] == 5000
    assert flags.get("rotary-seq-len-interpolation-factor") == change.get("rotary_seq_len_interpolation_factor")
    assert flags.get("use-rope-scaling", False) == change.get("use_rope_scaling", False)


@pytest.mark.parametrize("change", [{}, {"rotary_seq_len_interpolation_factor": 4}, {"use_rope_scaling": True}])
def test_rotary_frequencies_are_those_of_transformers(change):
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = llama_config.llama_config(arguments(rotary_base=500000, kv_channels=64, **change), 10, 8.0, "float32")
    ours = inverse_frequencies(config["head_dim"], rope_parameters(config))
    torch.testing.assert_close(ours, LlamaRotaryEmbedding(LlamaConfig(**config)).inv_freq, rtol=1e-6, atol=0)


def test_the_yaml_holds_the_model(tmp_path):
    pytest.importorskip("transformers")
    config = llama_config.llama_config(arguments(), 100, 8.0, "bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = megatron_flags.read_config(tmp_path)
    flags = megatron_flags.model_flags(read, megatron_flags.shape_of(read, False))
    flags |= megatron_flags.run_flags(read, 90, "/a folder", "bfloat16")
    loaded = yaml.safe_load(megatron_flags.yaml_of(flags, "title"))
    assert float(loaded["norm-epsilon"]) == 1e-5 and isinstance(loaded["norm-epsilon"], float)
    assert loaded == flags
    expected = {
        "num-layers": 2,
        "num-query-groups": 2,
        "tokenizer-model": "/a folder",
        "padded-vocab-size": 100,
        "bf16": True,
        "disable-bias-linear": True,
        "prores-schedule": "none",
    }
    assert expected.items() <= loaded.items()
    assert "padded-vocab-size" not in megatron_flags.run_flags(read, 100, "x", "float32")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gemma2"}, "of the type gemma2"),
        ({"model_type": "mistral", "sliding_window": 128}, "sliding window of 128"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_theta": 10000.5, "rope_parameters": None}, "rope_theta is 10000.5"),
        (
            {"rope_parameters": None, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "no rotary embeddings of the type dynamic",
        ),
    ],
)
def test_what_megatron_has_not_is_not_imported(change, reason, tmp_path):
    pytest.importorskip("transformers")
    config = llama_config.llama_config(arguments(), 100, 8.0, "float32") | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=reason) as refused:
        megatron_flags.read_config(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_folder_that_is_no_model_is_named(tmp_path):
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        megatron_flags.read_config(tmp_path)
    with pytest.raises(UserError, match=r"holds no model\.safetensors"):
        SavedWeights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="cannot be read"):
        SavedWeights(tmp_path)


@pytest.mark.parametrize(("shard_bytes", "files"), [(10**9, 1), (100, 3)])
def test_weights_are_read_as_they_were_written(shard_bytes, files, tmp_path):
    whole = torch.randn(20, 2)
    tensors = {"a": whole[:10], "b": whole[10:], "c": torch.randn(3).bfloat16(), "d": torch.ones(90)}
    assert save_weights(tmp_path, tensors.items(), shard_bytes) == files
    assert len(list(tmp_path.glob("model*.safetensors"))) == len(list(tmp_path.glob("*.safetensors"))) == files
    weights = SavedWeights(tmp_path)
    assert weights.names() == set(tensors)
    assert weights.dtype() == "float32"
    for name, tensor in tensors.items():
        assert torch.equal(weights.read(name), tensor)
    weights.close()


def test_a_new_folder_is_whole_or_not_there(tmp_path):
    target = tmp_path / "in" / "model"
    with new_folder(str(target), "mark") as folder:
        (folder / "mark").write_text("1")
        assert not target.exists()
    assert os.listdir(target) == ["mark"] and os.listdir(target.parent) == ["model"]
    with pytest.raises(UserError, match="--overwrite"), new_folder(str(target), "mark"):
        pass
    with pytest.raises(RuntimeError), new_folder(str(target), "mark", overwrite=True) as folder:
        (folder / "other").write_text("2")
        raise RuntimeError
    assert os.listdir(target) == ["mark"] and os.listdir(target.parent) == ["model"]
    with new_folder(str(target), "mark", overwrite=True) as folder:
        (folder / "other").write_text("2")
    assert os.listdir(target) == ["other"] and os.listdir(target.parent) == ["model"]
    # What this command did not make is never replaced.
    with pytest.raises(UserError, match=r"is not empty: name another folder$"):
        check_new(str(target), "mark", overwrite=True)
    with pytest.raises(UserError, match="not a folder"):
        check_new(str(target / "other"), "mark", overwrite=True)
    with pytest.raises(UserError, match="a path that is not UTF-8"):
        check_new(str(tmp_path / "\udcff"), "mark", overwrite=True)


def test_a_killed_process_leaves_no_folder(tmp_path):
    target = tmp_path / "model"
    program = (
        "import os, signal, sys\n"
        "from megatron_prores.huggingface.folder import new_folder\n"
        "with new_folder(sys.argv[1], 'mark') as folder:\n"
        "    (folder / 'half').write_text('x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = subprocess.run([sys.executable, "-c", program, str(target)], cwd=Path(__file__).parent.parent)
    assert result.returncode == -signal.SIGKILL
    assert not target.exists()
    with new_folder(str(target), "mark") as folder:  # and is not in the way of the next
        (folder / "whole").touch()
    assert os.listdir(tmp_path) == ["model"] and os.listdir(target) == ["whole"]


@pytest.fixture
def tiny(tmp_path):
    """A Llama's folder without a tokenizer, and its tensors."""
    pytest.importorskip("transformers")
    config = llama_config.llama_config(arguments(num_layers=1, add_qkv_bias=True), 10, 8.0, "float32")
    shape = Shape(layers=1, queries=4, groups=2, tied=False, qkv_bias=True)
    tensors = {name: torch.zeros(2) for weight in layout.weights(shape) for name in weight.names}
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder, tensors


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model.layers.0.mlp.up_proj.weight": None}, "lacks model.layers.0.mlp.up_proj.weight: not the weights of"),
        ({"model.layers.0.extra": torch.ones(1)}, "holds an unknown model.layers.0.extra: not the weights of"),
        ({"model.layers.0.self_attn.o_proj.bias": torch.ones(2)}, "o_proj.bias is not zero and the MLP has no biases"),
        (
            {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)},
            "holds no tokenizer that transformers can load",
        ),
    ],
)
def test_weights_that_are_not_those_of_the_config_are_not_imported(change, reason, tiny, tmp_path):
    folder, tensors = tiny
    save_weights(folder, ((name, tensor) for name, tensor in (tensors | change).items() if tensor is not None))
    with pytest.raises(UserError) as refused:
        cli.run(["import", "--model", str(folder), "--output", str(tmp_path / "start")])
    assert reason in str(refused.value) and "\n" not in str(refused.value)
    assert os.listdir(tmp_path) == ["llama"]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["import", "--model", "{}/gone", "--output", "{}/out"], "gone: no such folder (nothing is downloaded)"),
        (["import", "--model", "{}", "--output", "{}"], "is not empty: name another folder"),
        (["export", "--checkpoint", "{}/gone", "--output", "{}/out"], "there is no checkpoint in"),
        (["export", "--checkpoint", "{}", "--output", "{}/file"], "is there and is not a folder"),
        (["export", "--checkpoint", "{}", "--output", "{}/file/out"], "cannot be written"),
    ],
)
def test_folders_are_looked_at_before_megatron_starts(command, reason, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as refused:
        cli.run([word.replace("{}", str(tmp_path)) for word in command])
    assert reason in str(refused.value)
