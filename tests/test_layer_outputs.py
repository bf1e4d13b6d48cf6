"""What a probe records of a real Megatron model, against what the layers do to the residual stream."""

import numpy as np
import pytest
import torch
from test_layer import BATCH, HIDDEN, LAYERS, MODELS, SEQ, batch, build, warm_up, world_of_one  # noqa: F401

from megatron_prores.megatron.layer_outputs import LayerOutputs, merged, sample_tokens
from megatron_prores.megatron.spec import prores_layer_spec, stock_layer_spec

SAMPLED = sample_tokens(BATCH, SEQ, count=6)


def test_sampled_tokens():
    assert sample_tokens(2, 32).shape == (32, 2)
    assert sample_tokens(1, 4).tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]
    assert sample_tokens(2, 4, count=4).tolist() == [[0, 1], [0, 3], [1, 1], [1, 3]]
    for sequences, length in ((1, 4096), (3, 11), (7, 5)):
        tokens = sample_tokens(sequences, length)
        assert len(np.unique(tokens, axis=0)) == len(tokens) == min(32, sequences * length)
        assert tokens.min() >= 0 and (tokens.max(axis=0) < (sequences, length)).all()


def recorded(model):
    """The records, and the layers' inputs and outputs, float64 [L, s, b, h]."""
    tokens, positions, mask, _ = batch()
    inputs, outputs = [], []

    def look(module, args, kwargs, output):
        inputs.append(kwargs["hidden_states"])
        outputs.append(output[0])

    handles = [layer.register_forward_hook(look, with_kwargs=True) for layer in model.decoder.layers]
    model.eval()
    with torch.no_grad(), LayerOutputs(model.decoder.layers, SAMPLED) as record:
        model(tokens, positions, mask)
    for handle in handles:
        handle.remove()
    return record.records(), torch.stack(inputs).detach().double(), torch.stack(outputs).detach().double()


def of_sampled(x):
    """[n, h] of [s, b, h]."""
    return x[SAMPLED[:, 1], SAMPLED[:, 0]].numpy()


def residuals(probe):
    return probe.directions * probe.magnitudes[..., None].astype(np.float64)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("norm", ["pre", "sandwich", "lns", "stock"])
def test_against_what_a_layer_adds_to_the_stream(norm, name):
    """alpha times the residual output is the difference that a layer makes."""
    stock = norm == "stock"
    model = build(stock_layer_spec if stock else lambda config: prores_layer_spec(config, norm=norm), **MODELS[name])
    alphas = [1.0] * LAYERS if stock else warm_up(model, T=2, step=1)
    records, inputs, outputs = recorded(model)
    probe = merged([records], SAMPLED, np.zeros((BATCH, SEQ)))
    assert probe.layers.tolist() == list(range(1, LAYERS + 1))
    np.testing.assert_allclose(probe.norms, outputs.square().mean(3).sqrt().mean((1, 2)), rtol=1e-6)
    for index, alpha in enumerate(alphas):
        added = of_sampled(outputs[index] - inputs[index]) / alpha
        np.testing.assert_allclose(residuals(probe)[index], added, atol=1e-3 * np.abs(added).max())
        np.testing.assert_allclose(probe.magnitudes[index], np.sqrt(np.square(added).mean(1)), rtol=1e-5)


@pytest.mark.parametrize("norm", ["post", "deepnorm"])
def test_where_the_stream_itself_is_normalised(norm):
    """The first layer of one whose attention puts out nothing: N(A*x + alpha*F(x)) with x = N(A*x_in)."""
    model = build(lambda config: prores_layer_spec(config, norm=norm))
    warm_up(model, T=2, step=1)
    layer = model.decoder.layers[0]
    with torch.no_grad():
        layer.self_attention.linear_proj.weight.zero_()
    records, inputs, outputs = recorded(model)
    probe = merged([records], SAMPLED, np.zeros((BATCH, SEQ)))
    scale = (2 * LAYERS) ** 0.25 if norm == "deepnorm" else 1.0
    with torch.no_grad():
        middle = layer.post_self_attn_layernorm(scale * inputs[0].float())
        expected = of_sampled(layer.mlp(middle)[0].double())
    np.testing.assert_allclose(residuals(probe)[0], expected, atol=1e-3 * np.abs(expected).max())
    np.testing.assert_allclose(probe.norms, outputs.square().mean(3).sqrt().mean((1, 2)), rtol=1e-6)


def test_ranks_that_share_the_sequence_make_one_probe():
    model = build()
    warm_up(model, T=2, step=1)
    whole = recorded(model)[0]
    parts = []
    for start in (SEQ // 2, 0):  # a rank that has the first half of what this model computes, and one of the second
        mine = np.flatnonzero((SAMPLED[:, 1] >= start) & (SAMPLED[:, 1] < start + SEQ // 2))
        parts.append({layer: (norm, mine, some[mine], sizes[mine]) for layer, (norm, _, some, sizes) in whole.items()})
    one, two = merged([whole], SAMPLED, 0), merged([{}, *parts], SAMPLED, 0)
    for name in ("layers", "norms", "directions", "magnitudes"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    assert one.directions.shape == (LAYERS, len(SAMPLED), HIDDEN) and one.directions.dtype == np.float16


def test_nothing_is_left_behind_and_a_second_pass_replaces_the_first():
    model = build()
    warm_up(model, T=2, step=1)
    tokens, positions, mask, _ = batch()
    model.eval()
    with torch.no_grad():
        with LayerOutputs(model.decoder.layers, SAMPLED) as once:
            model(tokens, positions, mask)
        with LayerOutputs(model.decoder.layers, SAMPLED) as twice:
            model(tokens.flip(1), positions, mask)
            model(tokens, positions, mask)
        first = once.records()
        model(tokens.flip(1), positions, mask)
    assert not any(module._forward_hooks for module in model.modules())
    for layer, (norm, _, directions, magnitudes) in twice.records().items():
        assert norm == first[layer][0] == once.records()[layer][0]
        np.testing.assert_array_equal(directions, first[layer][2])
        np.testing.assert_array_equal(magnitudes, first[layer][3])


def test_an_output_of_zero_has_no_direction():
    model = build()
    warm_up(model, T=2, step=1)
    with torch.no_grad():
        for module in (model.decoder.layers[1].self_attention.linear_proj, model.decoder.layers[1].mlp.linear_fc2):
            module.weight.zero_()
    records, _, _ = recorded(model)
    _, _, directions, magnitudes = records[2]
    assert not directions.any() and not magnitudes.any() and records[1][2].any()
