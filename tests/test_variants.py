"""Norm placements and initial weights in a real Megatron model, against the paper's formulas."""

import argparse
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, _get_param_groups, get_standard_config_overrides
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.training.models.gpt import GPTModelBuilder
from test_layer import (
    BATCH,
    HIDDEN,
    LAYERS,
    MODELS,
    SEQ,
    assert_same,
    attention,
    batch,
    build,
    model_config,
    rms_norm,
    run,
    swiglu,
    transformer_config,
    warm_up,
    world_of_one,  # noqa: F401
)
from torch.nn import functional as F

from megatron_prores.errors import UserError
from megatron_prores.megatron import initial
from megatron_prores.megatron.arguments import add_prores_arguments, validate_prores_arguments
from megatron_prores.megatron.driver import bind, stage_table
from megatron_prores.megatron.guard import check_norm
from megatron_prores.megatron.initial import Weights, draw, initialize, weights_from_args
from megatron_prores.megatron.layer import ProResTransformerLayer
from megatron_prores.megatron.norm import build_norm
from megatron_prores.megatron.spec import prores_layer_spec
from megatron_prores.schedule import Schedule
from megatron_prores.variants import PLACEMENTS, placement_of, weight_distribution

VARIANTS = ["pre", "post", "sandwich", "deepnorm", "lns"]
IDENTITY_AT_ZERO = ["pre", "sandwich", "lns"]

# alpha of layers 1, 2, 3: zeros, a third, without ProRes, and in the middle of a warm-up.
ALPHAS = {
    "0": (("linear", 1, 0), [0, 0, 0]),
    "1/3": (("fix-L", 1, 0), [1 / 3, 1 / 3, 1 / 3]),
    "without": (("none", 1, 0), [1, 1, 1]),
    "linear": (("linear", 10, 7), [7 / 10, 7 / 20, 7 / 30]),
}


def build_variant(norm, **flags):
    return build(partial(prores_layer_spec, norm=norm), **flags)


# The formulas once more, with nothing of Megatron: what `add` of each variant computes from x, the branch F, its norms
# and alpha in layer l of L.


def add(variant, x, branch, norm_before, norm_added, alpha, layer):
    if variant == "pre":
        return x + alpha * branch(norm_before(x))
    if variant == "post":
        return norm_added(x + alpha * branch(x))
    if variant == "sandwich":
        return x + alpha * norm_added(branch(norm_before(x)))
    if variant == "deepnorm":
        return norm_added((2 * LAYERS) ** 0.25 * x + alpha * branch(x))
    if variant == "lns":
        return x + alpha * branch(norm_before(x) / math.sqrt(layer))
    raise AssertionError(variant)


def reference(variant, weights, tokens, alphas):
    x = weights["embedding.word_embeddings.weight"][tokens]
    for layer, alpha in enumerate(alphas, start=1):
        w = {name.removeprefix(f"decoder.layers.{layer - 1}."): weight for name, weight in weights.items()}
        projections = w["self_attention.linear_qkv.weight"], w["self_attention.linear_proj.weight"]
        feed_forward = w["mlp.linear_fc1.weight"], w["mlp.linear_fc2.weight"]
        for branch, before, added in (
            (lambda h, w=projections: attention(h, *w), "input_layernorm", "post_self_attn_layernorm"),
            (lambda h, w=feed_forward: swiglu(h, *w), "pre_mlp_layernorm", "post_mlp_layernorm"),
        ):
            norms = [partial(rms_norm, gain=w.get(f"{name}.weight")) for name in (before, added)]
            x = add(variant, x, branch, *norms, alpha, layer)
    return rms_norm(x, weights["decoder.final_layernorm.weight"]) @ weights["output_layer.weight"].T


@pytest.mark.parametrize("case", ALPHAS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_are_those_of_the_formulas(variant, case):
    schedule, alphas = ALPHAS[case]
    model = build_variant(variant).double()
    warm_up(model, *schedule)
    logits, loss, grads = run(model)

    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    tokens, _, _, labels = batch()
    theirs = reference(variant, weights, tokens, [float(np.float32(alpha)) for alpha in alphas])
    their_loss = F.cross_entropy(theirs.flatten(0, 1), labels.flatten())
    their_loss.backward()
    assert logits.dtype == torch.float64 and logits.std() > 0.1
    torch.testing.assert_close(logits, theirs.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(loss, their_loss.detach(), rtol=1e-12, atol=0)
    for name, weight in weights.items():
        theirs = torch.zeros_like(weight) if weight.grad is None else weight.grad
        torch.testing.assert_close(grads[name], theirs, rtol=1e-9, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_of_any_model_is_made_of_its_parts(variant, flags):
    """LayerNorms and linear layers with biases, experts; the parts are Megatron's, the residual adds written out."""
    model = build_variant(variant, **flags | {"hidden_dropout": 0.0})
    _, _, mask, _ = batch()
    warm_up(model, "linear", 10, 7)
    norm_class = "layer_norm" if flags["normalization"] == "LayerNorm" else "rms_norm"

    def norm(module):
        """With the gains of a module, whose own forward is not used."""
        gains = list(module.parameters())
        return lambda x: getattr(F, norm_class)(x, [HIDDEN], *gains, eps=1e-5)

    def branch(module):
        def with_bias(x):
            out, bias = module(x)
            return out if bias is None else out + bias

        return with_bias

    generator = torch.Generator().manual_seed(4)
    for number, (layer, alpha) in enumerate(zip(model.decoder.layers, [0.7, 0.35, 0.7 / 3], strict=True), start=1):
        x = torch.randn(SEQ, BATCH, HIDDEN, generator=generator)
        out, _ = layer(x, attention_mask=mask)
        for module, before, added in (
            (partial(layer.self_attention, attention_mask=mask), layer.input_layernorm, layer.post_self_attn_layernorm),
            (layer.mlp, layer.pre_mlp_layernorm, layer.post_mlp_layernorm),
        ):
            norms = [norm(module) if module is not None else None for module in (before, added)]
            x = add(variant, x, branch(module), *norms, alpha, number)
        torch.testing.assert_close(out, x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_alpha_one_is_the_variant_without_prores_bit_for_bit(variant, flags):
    """In the float32 of training, with dropout where the model has it."""
    model = build_variant(variant, **flags)
    assert warm_up(model, "linear", 2, 6) == [1.0] * LAYERS
    warm = run(model)
    assert warm_up(model, "none") == [1.0] * LAYERS
    assert_same(run(model), warm)
    assert warm_up(model, "linear", 2, 5)[-1] < 1
    assert not torch.equal(run(model)[0], warm[0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_alpha_zero_is_the_identity_or_norms_alone_and_gives_no_gradient_to_a_branch(variant):
    model = build_variant(variant)
    assert warm_up(model, "linear", 1, 0) == [0.0] * LAYERS
    hidden = {}
    model.decoder.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: hidden.update(start=kwargs["hidden_states"]), with_kwargs=True
    )
    model.decoder.final_layernorm.register_forward_pre_hook(lambda _, args: hidden.update(end=args[0]))
    _, _, grads = run(model)
    if variant in IDENTITY_AT_ZERO:
        assert torch.equal(hidden["start"], hidden["end"]) and hidden["end"].any()
    else:
        x = hidden["start"]
        for layer in model.decoder.layers:
            scale = (2 * LAYERS) ** 0.25 if variant == "deepnorm" else 1
            for norm in (layer.post_self_attn_layernorm, layer.post_mlp_layernorm):
                x = rms_norm(scale * x, norm.weight)
        torch.testing.assert_close(hidden["end"], x, rtol=1e-5, atol=1e-6)
    for name, grad in grads.items():
        on_the_stream = "decoder.layers." not in name or (variant not in IDENTITY_AT_ZERO and ".post_" in name)
        assert grad is not None and grad.any() == on_the_stream, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_trains_without_prores(variant):
    """By its layers alone. In the authors' code LNS without ProRes is an identity whose layers get no gradient."""
    model = build_variant(variant)
    warm_up(model, "none")
    optimizer = torch.optim.Adam(model.decoder.layers.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        _, loss, _ = run(model)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


# Parameters.


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_and_checkpoint_keys(variant):
    model = build_variant(variant)
    placement = PLACEMENTS[variant]
    layer = {name for name, _ in model.decoder.layers[1].named_parameters() if "norm" in name}
    before = {"input_layernorm.weight", "pre_mlp_layernorm.weight"}
    added = {"post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"}
    assert layer == (before if placement.before else set()) | (added if placement.branch or placement.after else set())
    assert model.decoder.final_layernorm.weight.shape == (HIDDEN,)  # in every variant
    sharded = model.sharded_state_dict()
    assert {name for name, _ in model.named_parameters()} <= sharded.keys()
    for name in added & layer:
        tensors = [sharded[f"decoder.layers.{number}.{name}"] for number in range(LAYERS)]
        assert {tensor.key for tensor in tensors} == {f"decoder.layers.{name}"}
        assert [tensor.global_offset for tensor in tensors] == [(number, 0) for number in range(LAYERS)]
        assert {tensor.global_shape for tensor in tensors} == {(LAYERS, HIDDEN)}
        assert {tensor.replica_id for tensor in tensors} == {(0, 0, 0)}


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("variant", ["post", "sandwich", "deepnorm", "lns"])
def test_every_norm_carries_the_sequence_parallel_mark(variant, normalization):
    config = transformer_config(normalization=normalization)
    config.sequence_parallel = True
    layer = ProResTransformerLayer(config, local_submodules(), norm=variant)
    norms = [parameter for name, parameter in layer.named_parameters() if "norm" in name]
    sites = 4 if variant == "sandwich" else 2
    assert len(norms) == sites * (2 if normalization == "LayerNorm" else 1)
    assert all(parameter.sequence_parallel for parameter in norms)


@pytest.mark.parametrize("variant", VARIANTS)
def test_norms_and_biases_are_not_decayed(variant):
    model = build_variant(variant, normalization="LayerNorm", add_bias_linear=True)
    config = OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.1)
    groups = _get_param_groups([model], config, get_standard_config_overrides(config))
    decayed = {id(parameter) for group in groups if group["wd_mult"] for parameter in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert (id(parameter) in decayed) == (parameter.ndim > 1), name
        assert (parameter.ndim == 1) == ("norm" in name or name.endswith(".bias")), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_float32_residual_stays_float32_in_bf16(variant):
    half = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    model = build_variant(variant, **half, fp32_residual_connection=True)
    warm_up(model, "linear", 10, 7)
    dtypes = []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda _, args, out: dtypes.append(out[0].dtype))
    tokens, positions, mask, _ = batch()
    logits = Float16Module(model.config, model)(tokens, positions, mask)
    logits.sum().backward()
    assert dtypes == [torch.float32] * LAYERS

    exact = build_variant(variant)
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items() if value is not None})
    warm_up(exact, "linear", 10, 7)
    expected = exact(tokens, positions, mask)
    assert (logits.float() - expected).norm() / expected.norm() < 0.02


# What could not work is refused.


def local_submodules(**replaced):
    submodules = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    submodules.input_layernorm = submodules.pre_mlp_layernorm = build_norm
    for name, value in replaced.items():
        assert hasattr(submodules, name)
        setattr(submodules, name, value)
    return submodules


@pytest.mark.parametrize("variant", ["post", "deepnorm", "lns"])
@pytest.mark.parametrize("fused", ["input_layernorm", "pre_mlp_layernorm"])
def test_norms_fused_into_a_linear_layer_cannot_be_moved(variant, fused):
    """As in the layers of Transformer Engine: no norm of the layer's own, but one in `linear_qkv`."""
    with pytest.raises(UserError, match=f"--prores-norm {variant} .*--transformer-impl local"):
        ProResTransformerLayer(transformer_config(), local_submodules(**{fused: IdentityOp}), norm=variant)


def test_sandwich_adds_its_norms_to_layers_with_fused_ones():
    fused = local_submodules(input_layernorm=IdentityOp, pre_mlp_layernorm=IdentityOp)
    layer = ProResTransformerLayer(transformer_config(), fused, norm="sandwich")
    assert isinstance(layer.input_layernorm, IdentityOp)
    assert layer.post_self_attn_layernorm.weight.shape == layer.post_mlp_layernorm.weight.shape == (HIDDEN,)


@pytest.mark.parametrize(
    ("variant", "flags", "message"),
    [
        ("post", {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}, "--recompute-modules"),
        ("sandwich", {"layernorm_zero_centered_gamma": True}, "--apply-layernorm-1p"),
        ("sandwhich", {}, r"sandwhich \(did you mean sandwich\?\): use pre, post"),
    ],
)
def test_layers_that_cannot_be_built_are_refused(variant, flags, message):
    config = transformer_config(**flags)
    with pytest.raises(UserError, match=message):
        ProResTransformerLayer(config, local_submodules(input_layernorm=torch.nn.Identity), norm=variant)


@pytest.mark.parametrize("variant", ["post", "sandwich", "deepnorm"])
def test_graphs_of_parts_of_a_layer_are_refused_where_norms_are_added(variant):
    config = transformer_config()
    config.cuda_graph_impl, config.cuda_graph_modules = "local", ["attn"]
    with pytest.raises(UserError, match=f"--cuda-graph-modules .*{variant}"):
        ProResTransformerLayer(config, local_submodules(), norm=variant)


def parse(*argv, **megatron):
    args = add_prores_arguments(argparse.ArgumentParser()).parse_args(argv)
    values = {"num_layers": LAYERS, "train_iters": 100, "transformer_impl": "local", "seed": 7, "init_method_std": 0.02}
    return argparse.Namespace(**vars(args) | values | megatron)


@pytest.mark.parametrize(
    ("argv", "megatron", "message"),
    [
        (["--prores-norm", "post"], {"transformer_impl": "transformer_engine"}, "post .*--transformer-impl local"),
        (["--prores-norm", "lns"], {"mtp_num_layers": 1}, "--mtp-num-layers"),
        (
            ["--prores-norm", "sandwich", "--prores-schedule", "none"],
            {"hybrid_layer_pattern": "M"},
            "--prores-schedule none --prores-norm pre",
        ),
        (["--prores-init", "ds"], {"num_experts": 4}, "--prores-init ds does not support --num-experts"),
        (
            ["--prores-norm", "deepnorm"],
            {"multi_latent_attention": True},
            "--prores-init deepnorm, which --prores-norm deepnorm implies, .*--multi-latent-attention",
        ),
        (["--prores-init", "scaled"], {"perform_initialization": False}, "--no-initialization"),
        (["--prores-init", "scaled", "--prores-schedule", "none"], {"use_mup": True}, "--use-mup"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(argv, megatron, message):
    validate_prores_arguments(parse(*argv))
    with pytest.raises(UserError, match=message):
        validate_prores_arguments(parse(*argv, **megatron))


def test_experts_work_with_every_placement():
    for variant in ("post", "sandwich", "lns"):
        validate_prores_arguments(parse("--prores-norm", variant, num_experts=4))
    validate_prores_arguments(parse("--prores-norm", "sandwich", transformer_impl="transformer_engine"))


def test_another_placement_than_the_checkpoints_is_refused():
    saved = parse("--prores-norm", "lns")
    check_norm(saved, parse("--prores-norm", "lns"))
    with pytest.raises(UserError, match="trained with --prores-norm lns, this run asks for pre"):
        check_norm(saved, parse("--prores-override"))
    with pytest.raises(UserError, match="trained with --prores-norm pre, this run asks for post"):
        check_norm(argparse.Namespace(num_layers=LAYERS), parse("--prores-norm", "post"))


@pytest.mark.parametrize(
    ("built", "flags", "message"),
    [
        ("pre", ["--prores-norm", "post"], r'--prores-norm post .*builds pre: .*params=\{"norm": "post"\}'),
        (None, ["--prores-norm", "post", "--prores-schedule", "none"], "--prores-norm post .*no ProRes layer"),
    ],
)
def test_layers_of_another_placement_than_the_flags_are_refused(monkeypatch, built, flags, message):
    args = parse(*flags, iteration=0)
    monkeypatch.setattr("megatron_prores.megatron.driver.get_args", lambda: args)
    monkeypatch.setattr("megatron_prores.megatron.driver._coefficients", None)
    with pytest.raises(UserError, match=message):
        bind([build_variant(built) if built else build(None)])


def test_the_table_names_the_placement():
    stages = [(0, 0, [1, 2, 3])]
    assert stage_table(stages, Schedule("none", LAYERS), 0, "post").startswith("ProRes none; post norm; alpha")
    assert "norm" not in stage_table(stages, Schedule("linear", LAYERS, 1), 0, "pre")


# Initial weights.

WIDE = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "num_query_groups": 4, "ffn_hidden_size": 384}
WIDE_VOCAB, HEAD_SIZE = 512, 32
CUT = 0.98658  # std of a standard normal distribution cut off at 3: sqrt(1 - 6 phi(3) / (2 Phi(3) - 1))


def wide_model(init, embedding_std=None, seed=7, **flags):
    config = model_config(**WIDE | flags)
    config.vocab_size = WIDE_VOCAB
    torch.manual_seed(0)
    model = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    return initialize(model, Weights(init, seed, 0.02, embedding_std or 0.02)) if init else model


def projections(model, layer):
    """The weights of a layer (from 1) as the formulas know them."""
    layer = model.decoder.layers[layer - 1]
    groups = layer.self_attention.linear_qkv.weight.view(4, 2 + 2, HEAD_SIZE, 256)
    gate, up = layer.mlp.linear_fc1.weight.chunk(2)
    return {
        "q": groups[:, :2].flatten(0, 2),
        "k": groups[:, 2].flatten(0, 1),
        "v": groups[:, 3].flatten(0, 1),
        "o": layer.self_attention.linear_proj.weight,
        "gate": gate,
        "up": up,
        "down": layer.mlp.linear_fc2.weight,
    }


def expected_std(init, part, layer, weight):
    """Written out from the paper for L = 4 and a std of 0.02."""
    writes = part in ("o", "down")
    if init == "default":
        return 0.02 * CUT
    if init == "ds":
        return 0.02 * CUT / (math.sqrt(2 * layer) if writes else 1)
    if init == "scaled":
        return 0.02 * CUT / (math.sqrt(2 * 4) if writes else 1)
    gain = 1 if part in ("q", "k") else 32**-0.25
    return gain * math.sqrt(2 / (weight.shape[0] + weight.shape[1]))


@pytest.mark.parametrize("init", ["default", "ds", "scaled", "deepnorm"])
def test_statistics_of_the_initial_weights(init):
    model = wide_model(init)
    for layer in range(1, 5):
        for part, weight in projections(model, layer).items():
            expected = expected_std(init, part, layer, weight)
            assert weight.std().item() == pytest.approx(expected, rel=0.02), (part, layer)
            assert abs(weight.mean().item()) < 5 * expected / math.sqrt(weight.numel()), (part, layer)
            largest = weight.abs().max().item() / expected * CUT
            assert largest <= 3.0001 if init != "deepnorm" else largest > 3.5
    for weight in (model.embedding.word_embeddings.weight, model.output_layer.weight):
        assert weight.std().item() == pytest.approx(0.02 * CUT, rel=0.02)
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    assert norms and all(torch.equal(norm, torch.ones_like(norm)) for norm in norms)


@pytest.mark.parametrize("init", ["scaled", "deepnorm"])
def test_no_two_weights_are_the_same_numbers(init):
    model, again, other = wide_model(init), wide_model(init), wide_model(init, seed=8)
    first = {}
    for name, weight in model.named_parameters():
        assert torch.equal(weight, again.get_parameter(name))
        if weight.ndim > 1:
            assert not torch.equal(weight, other.get_parameter(name))
            first[name] = tuple((weight.flatten()[:8] / weight.std()).tolist())
    assert len(set(first.values())) == len(first) == 4 * 4 + 2


def test_embeddings_have_a_std_of_their_own_where_asked():
    args = parse("--prores-init", "default", embedding_init_method_std=1.0)
    assert weights_from_args(args) == Weights("default", 7, 0.02, 1.0)
    model = wide_model("default", embedding_std=1.0)
    assert model.embedding.word_embeddings.weight.std().item() == pytest.approx(CUT, rel=0.02)
    assert model.output_layer.weight.std().item() == pytest.approx(0.02 * CUT, rel=0.02)


def test_which_initialisation_a_run_has():
    assert weights_from_args(parse()) is None
    assert weights_from_args(parse("--prores-norm", "sandwich")) is None
    assert weights_from_args(parse("--prores-norm", "deepnorm")).init == "deepnorm"
    assert weights_from_args(parse("--prores-norm", "deepnorm", "--prores-schedule", "none")).init == "deepnorm"
    assert weights_from_args(parse("--prores-norm", "deepnorm", "--prores-init", "scaled")).init == "scaled"
    assert weights_from_args(argparse.Namespace()) is None  # stock


def test_the_trainer_starts_from_them_unless_it_loads_a_checkpoint(monkeypatch, tmp_path):
    """Both ways in which Megatron's trainer is told how to build the model."""
    args = parse("--prores-init", "ds", rank=1, load=str(tmp_path), pretrained_checkpoint=None)
    monkeypatch.setattr(initial, "get_args", lambda: args)

    def setup_model_and_optimizer(model_type, model_provider_func=None, *, cfg_container=None):
        if cfg_container is None:
            return model_provider_func()
        [model] = [wide_model(None)]
        for hook in cfg_container.model.pre_wrap_hooks:
            [model] = hook([model])
        return model

    monkeypatch.setattr(initial.training, "setup_model_and_optimizer", setup_model_and_optimizer)
    initial.install()
    initial.install()

    def built():
        container = SimpleNamespace(model=SimpleNamespace(pre_wrap_hooks=[]))
        yield initial.training.setup_model_and_optimizer("gpt", lambda: wide_model(None))
        yield initial.training.setup_model_and_optimizer("gpt", None, cfg_container=container)

    name = "decoder.layers.3.mlp.linear_fc2.weight"
    ours, megatrons = wide_model("ds").get_parameter(name), wide_model(None).get_parameter(name)
    assert all(torch.equal(model.get_parameter(name), ours) for model in built())
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    assert all(torch.equal(model.get_parameter(name), megatrons) for model in built())
    args.load, args.prores_init = None, None
    assert all(torch.equal(model.get_parameter(name), megatrons) for model in built())
    args.prores_init, args.num_experts = "ds", 4
    with pytest.raises(UserError, match="--num-experts"):
        next(built())


def test_a_shard_is_a_part_of_the_whole_weight(monkeypatch):
    """Every rank of four, by its place in the checkpoint; the real layouts are tested in tests/distributed."""
    model = wide_model("deepnorm")
    whole = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for rank in range(4):
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()

        def quarter(_, rank=rank):
            for name, weight in model.named_parameters():
                for at, block in enumerate(weight.chunk(2) if "fc1" in name else [weight]):
                    axis = 1 if "linear_proj" in name or "fc2" in name else 0
                    size = block.shape[axis] // 4
                    part = block.narrow(axis, rank * size, size)
                    offset = [0] * block.ndim
                    offset[axis] = at * block.shape[axis] + rank * size
                    yield ShardedTensor(
                        name, part, part.dtype, tuple(part.shape), tuple(weight.shape), tuple(offset), (1,) * block.ndim
                    )

        monkeypatch.setattr(initial, "_shards", quarter)
        initialize(model, Weights("deepnorm", 7, 0.02, 0.02))
        for shard in quarter(None):
            if len(shard.global_shape) > 1:
                part = tuple(
                    slice(at, at + size) for at, size in zip(shard.global_offset, shard.local_shape, strict=True)
                )
                assert torch.equal(shard.data, whole[shard.key][part]) and shard.data.any()


def test_the_padding_of_the_vocabulary_changes_no_token():
    config, weights = transformer_config(), Weights("default", 7, 0.02, 0.02)
    name = "embedding.word_embeddings.weight"
    small, large = (draw(name, (rows, 7), config, weights) for rows in (501, 640))
    assert torch.equal(small, large[:501])


def test_weights_in_bf16_are_those_in_float32_rounded():
    exact = wide_model("scaled")
    half = wide_model("scaled", bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16)
    for name, weight in exact.named_parameters():
        if weight.ndim > 1:
            assert half.get_parameter(name).dtype == torch.bfloat16
            assert torch.equal(half.get_parameter(name), weight.bfloat16()), name


def test_models_with_ungated_mlps_tied_and_learned_embeddings():
    config = model_config(**WIDE | {"gated_linear_unit": False, "activation_func": F.gelu, "add_bias_linear": True})
    config.vocab_size, config.share_embeddings_and_output_weights = WIDE_VOCAB, True
    config.position_embedding_type = "learned_absolute"
    config.seq_length = 256
    model = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    initialize(model, Weights("deepnorm", 7, 0.02, 0.02))
    up = model.decoder.layers[0].mlp.linear_fc1.weight
    assert up.std().item() == pytest.approx(32**-0.25 * math.sqrt(2 / (384 + 256)), rel=0.02)
    assert model.embedding.position_embeddings.weight.std().item() == pytest.approx(0.02 * CUT, rel=0.02)
    assert not any(weight.any() for name, weight in model.named_parameters() if name.endswith(".bias"))


def test_weights_that_no_initialisation_covers_are_refused():
    with pytest.raises(UserError, match=r"--prores-init does not know the weight decoder.layers.0.mlp.router.weight:"):
        draw("decoder.layers.0.mlp.router.weight", (4, 8), transformer_config(), Weights("ds", 7, 0.02, 0.02))


def test_placements_as_numbers():
    assert list(PLACEMENTS) == VARIANTS
    assert placement_of("deepnorm").residual_scale(8) == 2.0
    assert placement_of("post").residual_scale(8) == placement_of("lns").residual_scale(8) == 1.0
    assert [placement_of("lns").input_scale(layer) for layer in (1, 4)] == [1.0, 0.5]
    assert placement_of("pre").input_scale(4) == 1.0
    assert weight_distribution("ds", "o", 0.02, 8, 12, 100, 100) == (0.005, 3.0)
