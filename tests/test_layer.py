"""ProRes layers in a real Megatron model, against the stock model and against a plain PyTorch one."""

import inspect
import logging
import math
import os
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import training
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig
from torch.nn import functional as F

from megatron_prores import Schedule
from megatron_prores.coefficients import StageCoefficients
from megatron_prores.errors import UserError
from megatron_prores.megatron import host, spec
from megatron_prores.megatron.layer import ProResTransformerLayer
from megatron_prores.megatron.norm import _Norm, build_norm, has_apex
from megatron_prores.megatron.spec import prores_layer_spec, prores_local_layer_spec, stock_layer_spec

LAYERS, HIDDEN, HEADS, GROUPS, FFN, VOCAB, SEQ, BATCH = 3, 16, 4, 2, 24, 32, 8, 2
HEAD = HIDDEN // HEADS

LLAMA = {
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "normalization": "RMSNorm",
    "num_query_groups": GROUPS,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
}
GPT2 = {
    "gated_linear_unit": False,
    "activation_func": F.gelu,
    "normalization": "LayerNorm",
    "num_query_groups": HEADS,
    "add_bias_linear": True,
    "hidden_dropout": 0.1,
}
EXPERTS = LLAMA | {"num_moe_experts": 2, "moe_router_topk": 2, "moe_ffn_hidden_size": FFN}
MODELS = {"llama": LLAMA, "gpt2": GPT2, "experts": EXPERTS}


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    """Megatron on the host, one process."""
    host.install()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    host.uninstall()


def transformer_config(**flags):
    settings = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": FFN,
        "transformer_impl": "local",
        "use_cpu_initialization": True,
        "attention_dropout": 0.0,
        # Compiling, or kernels that are not there.
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
    return TransformerConfig(**settings | LLAMA | flags)


def model_config(spec=prores_layer_spec, **flags):
    return GPTModelConfig(
        transformer=transformer_config(**flags),
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        seq_length=SEQ,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def build(spec=prores_layer_spec, **flags):
    """Megatron's GPT with the same weights for every spec; spec None is Megatron's own choice."""
    torch.manual_seed(0)
    model = GPTModelBuilder(model_config(spec, **flags)).build_model(ProcessGroupCollection.use_mpu_process_groups())
    torch.manual_seed(1)
    with torch.no_grad():  # weights that are large enough, and norms and biases that are not 1 and 0, to tell mistakes
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.ndim > 1 else 1).add_(0.1 * torch.randn(parameter.shape))
    return model


def warm_up(model, name="linear", T=1, step=0):
    """Set the model's alphas; the schedule's formula is tested elsewhere."""
    stage = StageCoefficients(
        Schedule(name, num_layers=LAYERS, warmup_steps=T), [layer.coefficient for layer in model.decoder.layers]
    )
    stage.set_step(step)
    return [layer.coefficient.value.item() for layer in model.decoder.layers]


def batch():
    generator = torch.Generator().manual_seed(2)
    tokens, labels = torch.randint(0, VOCAB, (2, BATCH, SEQ), generator=generator)
    mask = torch.ones(SEQ, SEQ).triu(1).bool()[None, None]  # True is hidden
    return tokens, torch.arange(SEQ).expand(BATCH, SEQ), mask, labels


def run(model):
    """Logits of [b, s, v], the loss and all gradients by name; dropout from one seed."""
    tokens, positions, mask, labels = batch()
    torch.manual_seed(3)
    logits = model(tokens, positions, mask)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    model.zero_grad()
    loss.backward()
    return logits.detach(), loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(ours, theirs):
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert ours[2].keys() == theirs[2].keys()
    for name, grad in theirs[2].items():
        assert torch.equal(ours[2][name], grad), name


# The model once more, from the formulas, with nothing of Megatron.


def rms_norm(x, gain, eps=1e-5):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def rotate(x):
    """RoPE, base 10000, on [b, heads, s, d]; the angles in float32 as is usual."""
    half = x.shape[-1] // 2
    frequencies = 1.0 / 10000 ** (torch.arange(0, x.shape[-1], 2, dtype=torch.float32) / x.shape[-1])
    angles = torch.arange(x.shape[-2], dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(x, qkv, out):
    """Causal grouped-query attention on [b, s, h]; qkv holds, group by group, the queries, the key and the value."""
    b, s, _ = x.shape
    groups = qkv.view(GROUPS, HEADS // GROUPS + 2, HEAD, HIDDEN)
    project = "bsh,gndh->bgnsd"
    queries = rotate(torch.einsum(project, x, groups[:, :-2]).reshape(b, HEADS, s, HEAD))
    keys = rotate(torch.einsum(project, x, groups[:, -2:-1]).reshape(b, GROUPS, s, HEAD))
    values = torch.einsum(project, x, groups[:, -1:]).reshape(b, GROUPS, s, HEAD)
    keys, values = (tensor.repeat_interleave(HEADS // GROUPS, dim=1) for tensor in (keys, values))
    scores = queries @ keys.transpose(-1, -2) / math.sqrt(HEAD)
    scores = scores.masked_fill(torch.ones(s, s).triu(1).bool(), -math.inf)
    return (scores.softmax(-1) @ values).transpose(1, 2).reshape(b, s, HIDDEN) @ out.T


def swiglu(x, fc1, fc2):
    gate, up = (x @ fc1.T).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up) @ fc2.T


def reference(weights, tokens, alphas):
    x = weights["embedding.word_embeddings.weight"][tokens]
    for index, alpha in enumerate(alphas):
        w = {name.removeprefix(f"decoder.layers.{index}."): weight for name, weight in weights.items()}
        normed = rms_norm(x, w["input_layernorm.weight"])
        x = x + alpha * attention(normed, w["self_attention.linear_qkv.weight"], w["self_attention.linear_proj.weight"])
        normed = rms_norm(x, w["pre_mlp_layernorm.weight"])
        x = x + alpha * swiglu(normed, w["mlp.linear_fc1.weight"], w["mlp.linear_fc2.weight"])
    return rms_norm(x, weights["decoder.final_layernorm.weight"]) @ weights["output_layer.weight"].T


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (("linear", 1, 0), [0, 0, 0]),
        (("fix-L", 1, 0), [1 / 3, 1 / 3, 1 / 3]),
        (("none", 1, 0), [1, 1, 1]),
        (("linear", 10, 7), [7 / 10, 7 / 20, 7 / 30]),
        (("stagewise-0", 10, 14), [1, 0.4, 0]),
    ],
    ids=["0", "1/3", "1", "linear", "stagewise"],
)
def test_logits_and_gradients_are_those_of_the_formulas(schedule, expected, op):
    model = build().double()
    warm_up(model, *schedule)
    logits, loss, grads = run(model)

    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    tokens, _, _, labels = batch()
    theirs = reference(weights, tokens, [float(np.float32(alpha)) for alpha in expected])
    their_loss = F.cross_entropy(theirs.flatten(0, 1), labels.flatten())
    their_loss.backward()
    assert logits.dtype == torch.float64 and logits.std() > 0.1
    torch.testing.assert_close(logits, theirs.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(loss, their_loss.detach(), rtol=1e-12, atol=0)
    assert grads.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(grads[name], weight.grad, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.usefixtures("torch_op")
@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("stock", [None, stock_layer_spec], ids=["Megatron's spec", "stock_layer_spec"])
def test_alpha_one_is_the_stock_model_bit_for_bit(stock, flags):
    ours, theirs = build(**flags), build(stock, **flags)
    assert not any(isinstance(module, ProResTransformerLayer) for module in theirs.modules())
    assert warm_up(ours, "linear", 1, LAYERS) == [1.0] * LAYERS
    results = run(ours)
    assert_same(results, run(theirs))
    warm_up(ours, "linear", 1, LAYERS - 1)
    assert not torch.equal(run(ours)[0], results[0])  # alpha is what made them equal


@pytest.mark.usefixtures("torch_op")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("fp32_residual_connection", [False, True])
def test_alpha_one_is_the_stock_model_in_bf16(fp32_residual_connection, name):
    flags = MODELS[name] | {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    flags["fp32_residual_connection"] = fp32_residual_connection
    # Megatron's local spec cannot do a float32 residual: torch's norms then refuse bf16 parameters.
    stock = stock_layer_spec if fp32_residual_connection else None
    models = [Float16Module(transformer_config(**flags), build(spec, **flags)) for spec in (prores_layer_spec, stock)]
    warm_up(models[0].module, "none")
    streams = []
    models[0].module.decoder.layers[1].register_forward_hook(lambda layer, args, out: streams.append(out[0].dtype))
    results = run(models[0])
    assert streams == [torch.float32 if fp32_residual_connection else torch.bfloat16]
    assert results[2]["module.decoder.layers.0.mlp.linear_fc1.weight"].dtype == torch.bfloat16
    assert_same(results, run(models[1]))


def test_mixed_precision_leaves_alpha_in_float32():
    flags = {"bf16": True, "params_dtype": torch.bfloat16}
    model = build(**flags)
    values = [layer.coefficient.value for layer in model.decoder.layers]
    warm_up(model, "linear", 1, 1)
    Float16Module(transformer_config(**flags), model)
    for layer, value in zip(model.decoder.layers, values, strict=True):
        assert layer.mlp.linear_fc1.weight.dtype == torch.bfloat16
        assert layer.coefficient.value is value and value.dtype == torch.float32
        assert value.item() == np.float32(1 / layer.layer_number)


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
def test_alpha_zero_is_the_identity_with_zero_block_gradients(flags):
    model = build(**flags)
    assert warm_up(model, "linear", 1, 0) == [0.0] * LAYERS
    hidden = {}
    model.decoder.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: hidden.update(start=kwargs["hidden_states"]), with_kwargs=True
    )
    model.decoder.final_layernorm.register_forward_pre_hook(lambda _, args: hidden.update(end=args[0]))
    logits, _, grads = run(model)
    assert torch.equal(hidden["start"], hidden["end"]) and hidden["end"].any()
    inside = {name for name in grads if name.startswith("decoder.layers.")}
    assert len(inside) >= 6 * LAYERS
    for name, grad in grads.items():
        assert grad is not None and grad.any() == (name not in inside), name
    final = model.output_layer.weight
    norm = model.decoder.final_layernorm(model.embedding.word_embeddings(batch()[0]))
    if not flags["hidden_dropout"]:
        torch.testing.assert_close(logits, norm @ final.T)


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
def test_both_branches_are_scaled_by_the_same_alpha(flags):
    """Each layer by its own parts, which are Megatron's; the two residual adds are written out here."""
    model = build(**flags | {"hidden_dropout": 0.0})
    _, _, mask, _ = batch()
    warm_up(model, "linear", 10, 7)
    generator = torch.Generator().manual_seed(4)
    for layer, alpha in zip(model.decoder.layers, [7 / 10, 7 / 20, 7 / 30], strict=True):
        x = torch.randn(SEQ, BATCH, HIDDEN, generator=generator)
        out, _ = layer(x, attention_mask=mask)
        branch, bias = layer.self_attention(layer.input_layernorm(x), attention_mask=mask)
        x = x + alpha * (branch + (0 if bias is None else bias))
        branch, bias = layer.mlp(layer.pre_mlp_layernorm(x))
        torch.testing.assert_close(out, x + alpha * (branch + (0 if bias is None else bias)), rtol=1e-5, atol=1e-6)


def test_the_norm_before_the_mlp_is_computed_with_the_add(op, monkeypatch):
    model = build()
    warm_up(model, "linear", 10, 7)
    separate = []
    forward = _Norm.forward
    monkeypatch.setattr(_Norm, "forward", lambda norm, x: [separate.append(norm), forward(norm, x)][1])
    run(model)
    mlp_norms = {layer.pre_mlp_layernorm for layer in model.decoder.layers}
    assert mlp_norms.isdisjoint(separate) == (op == "fused")
    assert {layer.input_layernorm for layer in model.decoder.layers} <= set(separate)
    assert all(norm._known is None for norm in mlp_norms)


def test_a_norm_that_megatron_recomputes_stands_alone():
    # Megatron drops such a norm's output and calls the norm again. Running this needs Transformer Engine.
    layers = build(recompute_granularity="selective", recompute_modules=["layernorm"]).decoder.layers
    assert all(layer.recompute_pre_mlp_layernorm for layer in layers)
    assert all(layer.pre_mlp_layernorm not in layer.self_attn_bda.args for layer in layers)


def test_a_norm_computed_with_the_add_is_for_its_stream_only():
    norm = build_norm(transformer_config(), HIDDEN)
    x, residual = torch.randn(2, SEQ, BATCH, HIDDEN)
    stream, normed = norm(x, residual, torch.tensor(0.5))
    torch.testing.assert_close(stream, residual + x / 2)
    torch.testing.assert_close(normed, norm(stream))
    norm.remember(stream, normed)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (HIDDEN,), eps=norm.eps))
    norm.remember(stream, normed)
    assert norm(stream) is normed
    assert norm(stream) is not normed


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
def test_names_keys_and_numbers_are_those_of_the_stock_model(flags):
    ours, theirs = build(**flags), build(None, **flags)

    def shapes(model):
        return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    assert shapes(ours) == shapes(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    sharded = {name: entry.key for name, entry in ours.sharded_state_dict().items()}
    assert sharded == {name: entry.key for name, entry in theirs.sharded_state_dict().items()}
    assert not any("coefficient" in name or "alpha" in name for name in sharded)
    assert list(ours.named_buffers()) == list(theirs.named_buffers())
    layers = ours.decoder.layers
    assert all(type(layer) is ProResTransformerLayer for layer in layers)
    numbers = list(range(1, LAYERS + 1))
    assert (
        [layer.layer_number for layer in layers] == [layer.layer_number for layer in theirs.decoder.layers] == numbers
    )
    assert [layer.coefficient.layer_number for layer in layers] == numbers
    theirs.load_state_dict(ours.state_dict())


def test_the_forward_reads_alpha_at_its_own_address():
    """A copy would be stale inside a CUDA graph, and a number would wait for the device."""
    model = build()
    warm_up(model, "linear", 10, 7)
    addresses = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: addresses.append(t.data_ptr()) or t, lambda t: t):
        run(model)
    for layer in model.decoder.layers:
        assert addresses.count(layer.coefficient.value.data_ptr()) == 2


def test_a_layer_without_a_step_refuses_to_run():
    with pytest.raises(UserError, match=r"layer 1 .*enable\(\)"):
        run(build())


# Specs: Megatron shares one among the layers and rewrites what it finds in it.


def parts(node, path="spec"):
    """Every part of a spec by its path, by identity."""
    found = {path: node}
    if hasattr(node, "__dataclass_fields__"):
        for field in fields(node):
            found |= parts(getattr(node, field.name), f"{path}.{field.name}")
    return found


def local_spec():
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    # Megatron replaces an MLP that is given as a ModuleSpec in the submodules that it was handed.
    spec.submodules.mlp = ModuleSpec(MLP, submodules=MLPSubmodules(ColumnParallelLinear, RowParallelLinear))
    spec.module = ProResTransformerLayer
    return spec


@pytest.mark.usefixtures("torch_op")
@pytest.mark.parametrize("make", [local_spec, lambda: prores_local_layer_spec], ids=["of a user", "of the package"])
def test_a_spec_object_can_be_used_twice(make):
    spec = make()
    before = parts(spec)
    models = [build(spec), build(spec)]
    after = parts(spec)
    assert before.keys() == after.keys() and all(before[path] is after[path] for path in before)
    assert len(before) > 10
    layers = [layer for model in models for layer in model.decoder.layers]
    for what in ("coefficient", "submodules_config"):
        assert len({id(getattr(layer, what)) for layer in layers}) == 2 * LAYERS
    warm_up(models[0], "none")
    warm_up(models[1], "linear", 1, 1)
    assert [layer.coefficient.value.item() for layer in models[0].decoder.layers] == [1.0] * LAYERS
    theirs = build(None)
    assert_same(run(models[0]), run(theirs))


@pytest.mark.parametrize("function", [prores_layer_spec, stock_layer_spec])
def test_layer_specs_share_nothing(function):
    specs = function(model_config()).layer_specs + function(model_config()).layer_specs
    assert len(specs) == 2 * LAYERS
    assert len({id(spec) for spec in specs}) == len({id(spec.submodules) for spec in specs}) == 2 * LAYERS
    assert len({id(spec.submodules.self_attention.submodules) for spec in specs}) == 2 * LAYERS
    assert {spec.submodules.input_layernorm for spec in specs} == {build_norm}
    assert get_gpt_layer_local_spec().module is TransformerLayer


# What could not work is refused.


def build_layer(**flags):
    """One layer from a spec with some submodules replaced."""
    config = transformer_config()
    # Set now: Megatron's own checks would refuse it with the local implementation.
    config.inference_fuse_tp_communication = flags.pop("inference_fuse_tp_communication", False)
    keywords = {"is_mtp_layer": flags.pop("is_mtp_layer", False)}
    submodules = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    submodules.input_layernorm = submodules.pre_mlp_layernorm = build_norm
    for name, value in flags.items():
        assert hasattr(submodules, name)
        setattr(submodules, name, value)
    return ProResTransformerLayer(config, submodules, **keywords)


def other_add(training, fused):
    return get_bias_dropout_add(training, fused)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"is_mtp_layer": True}, "--mtp-num-layers"),
        ({"cross_attention": ModuleSpec(IdentityOp)}, "cross-attention: use a decoder-only layer spec"),
        ({"cross_attn_bda": get_bias_dropout_add}, "cross-attention: use a decoder-only layer spec"),
        ({"inference_fuse_tp_communication": True}, "--inference-fuse-tp-communication"),
        ({"self_attn_bda": other_add}, "get_bias_dropout_add as self_attn_bda"),
        ({"mlp_bda": other_add}, "get_bias_dropout_add as mlp_bda"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_layers_with_other_residual_adds_are_refused(flags, message):
    build_layer()
    with pytest.raises(UserError, match=message):
        build_layer(**flags)


@pytest.mark.skipif(HAVE_TE, reason="Transformer Engine is installed")
@pytest.mark.parametrize("function", [prores_layer_spec, stock_layer_spec])
def test_transformer_engine_is_asked_for_and_missing(function):
    with pytest.raises(
        UserError, match=r"--transformer-impl transformer_engine .* not installed.*--transformer-impl local"
    ):
        function(model_config(transformer_impl="transformer_engine"))


def test_other_specs_are_refused():
    config = model_config()
    config.restore_modelopt_state = True
    with pytest.raises(UserError, match="ModelOpt"):
        prores_layer_spec(config)
    config = model_config()
    config.transformer.transformer_impl = "inference_optimized"
    with pytest.raises(UserError, match=r"--transformer-impl inference_optimized"):
        prores_layer_spec(config)
    with pytest.raises(UserError, match=r"does not know the layer MLP .*--prores-schedule none"):
        spec._layer_spec(ModuleSpec(MLP), ProResTransformerLayer)


# The norm.


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norm_is_torchs_with_the_sequence_parallel_mark(name, sequence_parallel):
    config = transformer_config(normalization=name)
    config.sequence_parallel = sequence_parallel
    norm = build_norm(config=config, hidden_size=HIDDEN, eps=1e-3)
    theirs = getattr(torch.nn, name)(HIDDEN, eps=1e-3)
    assert {key: tensor.tolist() for key, tensor in norm.state_dict().items()} == {
        key: tensor.tolist() for key, tensor in theirs.state_dict().items()
    }
    x = 0.05 * torch.randn(3, 2, HIDDEN)
    assert torch.equal(norm(x), theirs(x))
    assert not torch.allclose(norm(x), build_norm(config, HIDDEN, 1e-5)(x))  # eps matters here
    marks = [parameter.sequence_parallel for parameter in norm.parameters()]
    assert marks == [sequence_parallel] * (1 if name == "RMSNorm" else 2)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_norm_of_a_float32_residual_is_taken_in_float32(name):
    norm = build_norm(transformer_config(normalization=name), HIDDEN).bfloat16()
    theirs = getattr(torch.nn, name)(HIDDEN, eps=1e-5)
    with torch.no_grad():
        for parameter, copy in zip(norm.parameters(), theirs.parameters(), strict=True):
            parameter.normal_()
            copy.copy_(parameter)
    x = torch.randn(64, HIDDEN, requires_grad=True)
    out = norm(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, theirs(x).bfloat16()) and not torch.equal(out, norm(x.bfloat16()))
    out.sum().backward()
    assert x.grad.dtype == torch.float32 and all(parameter.grad is not None for parameter in norm.parameters())


def test_every_norm_of_a_model_carries_the_mark():
    model = build(normalization="LayerNorm", qk_layernorm=True)
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    assert len(norms) == 2 * (4 * LAYERS + 1)
    assert all(hasattr(parameter, "sequence_parallel") for parameter in norms)


def test_norms_that_torch_has_not_are_refused():
    config = transformer_config()
    config.layernorm_zero_centered_gamma = True
    with pytest.raises(UserError, match="--apply-layernorm-1p needs Transformer Engine"):
        build_norm(config, HIDDEN)
    with pytest.raises(UserError, match="--apply-layernorm-1p"):
        build(layernorm_zero_centered_gamma=True)
    config = transformer_config()
    config.normalization = "L2Norm"
    with pytest.raises(UserError, match="--normalization L2Norm"):
        build_norm(config, HIDDEN)


def test_another_apex_is_not_nvidias(tmp_path):
    """The PyPI project of that name; Megatron's own check takes it for NVIDIA's."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import apex, torch\n"
        "from megatron.core.transformer.transformer_block import HAVE_APEX, LayerNormImpl\n"
        "from megatron.core.transformer.transformer_config import TransformerConfig\n"
        "from megatron.core.transformer.torch_norm import WrappedTorchNorm\n"
        "from megatron_prores.megatron.norm import build_norm, has_apex\n"
        "from megatron_prores.megatron.spec import _norm, prores_local_layer_spec\n"
        "assert HAVE_APEX and LayerNormImpl is not WrappedTorchNorm, 'Megatron has learnt the difference'\n"
        "assert not has_apex()\n"
        "torch.cuda.is_available = lambda: True\n"  # Apex is asked about only where there is a GPU
        "config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, normalization='LayerNorm')\n"
        "assert isinstance(build_norm(config, 4), torch.nn.LayerNorm)\n"
        "assert _norm(LayerNormImpl) is build_norm\n"
        "assert prores_local_layer_spec.submodules.input_layernorm is build_norm\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_apex_that_cannot_be_loaded_is_none(tmp_path, monkeypatch):
    (tmp_path / "apex" / "normalization").mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").write_text("")
    (tmp_path / "apex" / "normalization" / "__init__.py").write_text("raise OSError('built for another torch')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not has_apex()
    (tmp_path / "apex" / "normalization" / "__init__.py").write_text("class FusedLayerNorm: pass")
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, name)
    assert has_apex()
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, name)


# The host backend leaves nothing behind.

OWNERS = [
    torch,
    torch.Tensor,
    torch.nn.Module,
    torch.cuda,
    torch.distributed,
    torch.utils.data.DataLoader,
    megatron_random,
    training,
]


def attributes():
    return {(owner, name): inspect.getattr_static(owner, name) for owner in OWNERS for name in dir(owner)}


def test_uninstall_restores_every_attribute(monkeypatch):
    host.uninstall()
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    try:
        assert not host.is_installed()
        before = attributes()
        for _ in range(2):
            host.install()
            host.install()  # the second does nothing
            assert host.is_installed()
            during = attributes()
            changed = {key for key in before if before[key] is not during[key]}
            assert len(changed) > 50 and (torch, "zeros") in changed and (training, "initialize_megatron") in changed
            assert torch.zeros(1, device="cuda").device.type == "cpu"
            host.uninstall()
            after = attributes()
            assert after.keys() == before.keys()
            assert [key for key in before if before[key] is not after[key]] == []
            assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
            assert logging.getLogger(megatron_random.__name__).filters == []
    finally:
        host.install()


def test_the_owners_above_are_all(monkeypatch):
    replaced = []
    monkeypatch.setattr(host, "_replace", lambda owner, name, replacement: replaced.append(owner))
    host.uninstall()
    try:
        host.install()
        host.uninstall()
    finally:
        monkeypatch.undo()
        host.install()
    assert {id(owner) for owner in replaced} == {id(owner) for owner in OWNERS}
