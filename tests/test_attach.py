"""ProRes attached to models of Hugging Face, against formulas written out again; and what it refuses."""

import copy
import io
import subprocess
import sys

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from megatron_prores import Schedule
from megatron_prores.errors import UserError
from megatron_prores.pytorch import attach

transformers.logging.set_verbosity_error()
LAYERS, HIDDEN, HEADS, GROUPS, VOCAB = 3, 32, 4, 2, 64
HEAD = HIDDEN // HEADS
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}

USUAL = "self_attn", "mlp"
POST = "post_attention_layernorm", "post_feedforward_layernorm"
# model type, flags, the outputs that are added to x, and the norms whose inputs are x and, one by one, the sums after
# it (a norm under both names has parallel branches; a branch stands for itself where it has no norm before it).
FAMILIES = {
    "llama": ("llama", {}, USUAL, ("input_layernorm", "post_attention_layernorm")),
    "mistral": ("mistral", {}, USUAL, ("input_layernorm", "post_attention_layernorm")),
    "qwen2": ("qwen2", {}, USUAL, ("input_layernorm", "post_attention_layernorm")),
    "qwen3": ("qwen3", {"head_dim": HEAD}, USUAL, ("input_layernorm", "post_attention_layernorm")),
    "qwen2_moe": (
        "qwen2_moe",
        EXPERTS | {"shared_expert_intermediate_size": 16},
        USUAL,
        ("input_layernorm", "post_attention_layernorm"),
    ),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"head_dim": HEAD}, USUAL, ("input_layernorm", "post_attention_layernorm")),
    "mixtral": ("mixtral", {"num_local_experts": 4}, USUAL, ("input_layernorm", "post_attention_layernorm")),
    "deepseek_v3": ("deepseek_v3", LATENT, USUAL, ("input_layernorm", "post_attention_layernorm")),
    "gpt_oss": (
        "gpt_oss",
        {"num_local_experts": 4, "head_dim": HEAD},
        USUAL,
        ("input_layernorm", "post_attention_layernorm"),
    ),
    "gpt2": ("gpt2", {}, ("attn", "mlp"), ("ln_1", "ln_2")),
    "gpt_bigcode": ("gpt_bigcode", {}, ("attn", "mlp"), ("ln_1", "ln_2")),
    "gpt_neox parallel": ("gpt_neox", {}, ("attention", "mlp"), ("input_layernorm", "input_layernorm")),
    "gpt_neox sequential": (
        "gpt_neox",
        {"use_parallel_residual": False},
        ("attention", "mlp"),
        ("input_layernorm", "post_attention_layernorm"),
    ),
    "gptj": ("gptj", {"rotary_dim": 4, "n_inner": 48}, ("attn", "mlp"), ("ln_1", "ln_1")),
    "gemma": ("gemma", {"head_dim": HEAD}, USUAL, ("input_layernorm", "post_attention_layernorm")),
    "gemma2": ("gemma2", {"head_dim": HEAD}, POST, ("input_layernorm", "pre_feedforward_layernorm")),
    "gemma3": ("gemma3_text", {"head_dim": HEAD}, POST, ("input_layernorm", "pre_feedforward_layernorm")),
    "opt": (
        "opt",
        {"ffn_dim": 48, "word_embed_proj_dim": HIDDEN},
        ("self_attn", "fc2"),
        ("self_attn_layer_norm", "final_layer_norm"),
    ),
    "phi": ("phi", {}, USUAL, ("input_layernorm", "input_layernorm")),
    "phi3": ("phi3", {}, USUAL, ("input_layernorm", "post_attention_layernorm")),
    "falcon parallel": ("falcon", {}, ("self_attention", "mlp"), ("input_layernorm", "input_layernorm")),
    "falcon sequential": (
        "falcon",
        {"parallel_attn": False, "bias": True},
        ("self_attention", "mlp"),
        ("input_layernorm", "post_attention_layernorm"),
    ),
    "bloom": (
        "bloom",
        {},
        ("self_attention.dense", "mlp.dense_4h_to_h"),
        ("input_layernorm", "post_attention_layernorm"),
    ),
    "mpt": (
        "mpt",
        {"d_model": HIDDEN, "n_heads": HEADS, "n_layers": LAYERS},
        ("attn", "ffn.down_proj"),
        ("norm_1", "norm_2"),
    ),
    "olmo": ("olmo", {}, USUAL, ("input_layernorm", "post_attention_layernorm")),
    "olmo2": ("olmo2", {}, POST, ("self_attn", "mlp")),
    "cohere": ("cohere", {}, USUAL, ("input_layernorm", "input_layernorm")),
    "stablelm": ("stablelm", {}, USUAL, ("input_layernorm", "post_attention_layernorm")),
    "glm4": (
        "glm4",
        {"head_dim": HEAD},
        ("post_self_attn_layernorm", "post_mlp_layernorm"),
        ("input_layernorm", "post_attention_layernorm"),
    ),
    "mamba": ("mamba", {"state_size": 4}, ("mixer",), ("norm",)),
}
each_family = pytest.mark.parametrize("family", FAMILIES)


def build(model_type, auto=AutoModelForCausalLM, **flags):
    """A tiny model in eval mode with weights that are large enough to tell mistakes."""
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.for_model(model_type, **TINY | flags))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1).add_(0.05 * torch.randn(parameter.shape))
    return model.eval()


def build_family(family):
    model_type, flags, *_ = FAMILIES[family]
    return build(model_type, **flags)


def tokens():
    return torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))


def logits(model, **kwargs):
    with torch.no_grad():
        return model(tokens(), use_cache=False, **kwargs).logits


def gradients(model):
    model.zero_grad()
    F.cross_entropy(model(tokens(), use_cache=False).logits.flatten(0, 1), tokens().flatten()).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def hooks(model):
    return [hook for module in model.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]


def set_alphas(prores, alphas):
    """Any alphas, whatever the schedule says."""
    prores.set_step(0)
    for coefficient, alpha in zip(prores.coefficients, alphas, strict=True):
        coefficient.fill(alpha)
    return [coefficient.value.item() for coefficient in prores.coefficients]


class Llama:
    """Llama with alpha, from the paper's formula and the model's weights, in float64."""

    def __init__(self, model):
        self.weights = {
            name: parameter.detach().double().requires_grad_() for name, parameter in model.named_parameters()
        }
        self.eps = model.config.rms_norm_eps
        self.theta = model.config.rope_parameters["rope_theta"]

    def norm(self, x, name):
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weights[f"{name}.weight"]

    def linear(self, x, name):
        return x @ self.weights[f"{name}.weight"].T

    def rotate(self, x):  # [b, h, s, d]: pairs (i, i + d/2) by s * theta^(-2i/d)
        half = x.shape[-1] // 2
        frequency = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * frequency
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    def attention(self, x, name):
        b, s, _ = x.shape
        q, k, v = (self.linear(x, f"{name}.{p}_proj").view(b, s, -1, HEAD).transpose(1, 2) for p in "qkv")
        q, k = self.rotate(q), self.rotate(k)
        k, v = (t.repeat_interleave(HEADS // GROUPS, dim=1) for t in (k, v))
        scores = (q @ k.mT / HEAD**0.5).masked_fill(torch.ones(s, s).triu(1).bool(), -torch.inf)
        return self.linear((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1), f"{name}.o_proj")

    def mlp(self, x, name):
        gate = F.silu(self.linear(x, f"{name}.gate_proj"))
        return self.linear(gate * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def __call__(self, ids, alphas):
        x = self.weights["model.embed_tokens.weight"][ids]
        for i, alpha in enumerate(alphas):
            layer = f"model.layers.{i}"
            x = x + alpha * self.attention(self.norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn")
            x = x + alpha * self.mlp(self.norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
        return self.linear(self.norm(x, "model.norm"), "lm_head")


@pytest.mark.parametrize(
    ("schedule", "step"),
    [(("linear", 2), 0), (("fix-L", 1), 5), (("none", 1), 0), (("linear", 2), 3), (("stagewise-sqrt-l", 2), 3)],
    ids=["0", "1/3", "1", "linear", "stagewise"],
)
def test_llama_computes_the_formula(schedule, step):
    model = build("llama")
    attach(model, *schedule).set_step(step)
    alphas = torch.tensor(Schedule(schedule[0], LAYERS, schedule[1]).alpha(step), dtype=torch.float32).tolist()
    grads = gradients(model)
    reference = Llama(model)
    expected = reference(tokens(), alphas)
    F.cross_entropy(expected.flatten(0, 1), tokens().flatten()).backward()
    torch.testing.assert_close(logits(model), expected.float(), atol=2e-4, rtol=1e-4)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, reference.weights[name].grad.float(), atol=2e-5, rtol=1e-3, msg=name)


@each_family
def test_alpha_is_outside_everything_that_the_branch_does(family):
    *_, branches, norms = FAMILIES[family]
    model = build_family(family)
    blocks = next(
        list(module) for module in model.modules() if isinstance(module, nn.ModuleList) and hasattr(module[0], norms[0])
    )
    seen = [{} for _ in blocks]

    def keep(module, record, name=""):
        def hook(module, args, kwargs, output):
            record[name, "input"] = next(value for value in (*args, *kwargs.values()) if value.ndim > 1)
            record[name, "output"] = output[0] if isinstance(output, tuple) else output

        module.register_forward_hook(hook, with_kwargs=True)

    for block, record in zip(blocks, seen, strict=True):
        keep(block, record)
        for name in {*branches, *norms}:  # before alpha: hooks run in the order in which they were registered
            keep(block.get_submodule(name), record, name)
    prores = attach(model)
    assert [layer.block for layer in prores.layers] == blocks
    assert all(set(layer.writes) == set(branches) for layer in prores.layers)
    alphas = set_alphas(prores, [0.75, 1 / 3, 0.5])
    logits(model)
    for record, alpha in zip(seen, alphas, strict=True):
        x = record["", "input"]
        for i, (branch, norm) in enumerate(zip(branches, norms, strict=True)):
            if norm not in norms[:i]:  # sequential: what the branch reads is the sum so far
                torch.testing.assert_close(record[norm, "input"].reshape(x.shape), x, atol=1e-4, rtol=1e-5)
            x = x + alpha * record[branch, "output"].reshape(x.shape)
        torch.testing.assert_close(record["", "output"], x, atol=1e-4, rtol=1e-5)
        assert all((record[branch, "output"].abs() > 1e-2).any() for branch in branches)


@each_family
def test_alpha_1_is_the_model_bit_for_bit_and_alpha_0_the_identity(family):
    model = build_family(family)
    expected, expected_grads, keys = logits(model), gradients(model), list(model.state_dict())
    prores = attach(model, "equal", 10)
    prores.set_step(10)
    assert torch.equal(logits(model), expected)
    grads = gradients(model)
    assert all(torch.equal(grads[name], grad) for name, grad in expected_grads.items())
    assert list(model.state_dict()) == keys
    prores.set_step(5)
    assert not torch.equal(logits(model), expected)
    prores.set_step(0)
    streams = []
    for layer in prores.layers:
        layer.block.register_forward_hook(lambda block, args, output: streams.append(output))
    logits(model)
    first, *others = (stream[0] if isinstance(stream, tuple) else stream for stream in streams)
    assert len(others) == LAYERS - 1 and all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("model_type", ["gemma2", "olmo2"])
def test_norms_behind_the_branch_stay_inside(model_type):
    model = build(model_type, head_dim=HEAD)
    call = {}
    block = model.model.layers[0]
    block.register_forward_pre_hook(lambda block, args, kwargs: call.update(x=args[0], kwargs=kwargs), with_kwargs=True)
    logits(model)
    x, kwargs = call["x"], call["kwargs"]
    with torch.no_grad():
        before = block.input_layernorm if model_type == "gemma2" else lambda x: x
        branch = block.post_attention_layernorm(block.self_attn(before(x), **kwargs)[0])
        middle = x + 0.5 * branch
        before = block.pre_feedforward_layernorm if model_type == "gemma2" else lambda x: x
        expected = middle + 0.5 * block.post_feedforward_layernorm(block.mlp(before(middle)))
        set_alphas(attach(model), [0.5] * LAYERS)
        torch.testing.assert_close(block(x, **kwargs), expected)


@each_family
def test_attaching_and_detaching_leave_no_trace(family):
    model = build_family(family).train()
    before = {name: (tensor, tensor.clone()) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    attributes = {module: set(vars(module)) for module in model.modules()}
    inside = hooks(model)
    model.eval()
    expected = logits(model)
    model.train()
    rng = torch.get_rng_state()
    prores = attach(model)
    prores.set_step(0)
    prores.detach()
    prores.detach()
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(module.training for module in model.modules())
    assert hooks(model) == inside
    assert {module: set(vars(module)) for module in model.modules()} == attributes
    after = dict((*model.named_parameters(), *model.named_buffers()))
    assert all(after[name] is tensor and torch.equal(tensor, value) for name, (tensor, value) in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    assert torch.equal(logits(model), expected)
    with pytest.raises(UserError, match="was detached"):
        prores.set_step(1)


def test_dropout_is_scaled_with_the_branch():
    model = build("gpt2", resid_pdrop=0.5, embd_pdrop=0.0, attn_pdrop=0.0).train()
    prores = attach(model)
    raw, out, x = [], [], []
    block = model.transformer.h[0]
    block.attn.resid_dropout.register_forward_hook(lambda module, args, output: raw.append(output))
    block.ln_1.register_forward_pre_hook(lambda module, args: x.append(args[0]))
    block.ln_2.register_forward_pre_hook(lambda module, args: out.append(args[0]))
    set_alphas(prores, [0.25] * LAYERS)
    logits(model)
    assert (raw[0] == 0).float().mean() > 0.3
    torch.testing.assert_close(out[0], x[0] + 0.25 * raw[0])


def test_generation_with_a_cache_is_generation_without():
    model = build("llama")
    stock = model.generate(tokens(), max_new_tokens=8, do_sample=False)
    attach(model, "fix-L").set_step(0)  # 1/3 everywhere
    cached, plain = (model.generate(tokens(), max_new_tokens=8, do_sample=False, use_cache=c) for c in (True, False))
    assert torch.equal(cached, plain) and not torch.equal(cached, stock)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2", "olmo2", "mixtral"])
def test_recomputing_activations_changes_nothing(family, reentrant):
    model = build_family(family).train()
    prores = attach(model, "linear", 2)
    prores.set_step(1)
    torch.manual_seed(0)
    expected = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    torch.manual_seed(0)
    grads = gradients(model)
    assert all(torch.equal(grads[name], grad) for name, grad in expected.items())


def test_compiled_once_for_every_alpha():
    model = build("llama", num_hidden_layers=2)
    prores = attach(model, "linear", 2)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for step in range(5):
        prores.set_step(step)
        torch.testing.assert_close(logits(compiled), logits(model))
    assert counter.frame_count == 1


def test_compiled_before_and_with_gradients():
    model = Toy(ACCEPTED["as it is"])
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    stock = compiled(tokens())
    prores = attach(compiled, "linear", 2)  # what is compiled does not look for new hooks unless it is told to
    weights = list(model.layers.parameters())
    for step in range(5):
        prores.set_step(step)
        outs = [run(tokens()) for run in (compiled, model)]
        torch.testing.assert_close(*outs)
        torch.testing.assert_close(
            *(torch.autograd.grad(out.square().mean(), weights, allow_unused=True) for out in outs)
        )
    assert counter.frame_count == 2  # without hooks, with hooks
    prores.set_step(0)
    prores.detach()
    torch.testing.assert_close(compiled(tokens()), stock)


def test_bfloat16_is_kept_and_alpha_is_not_rounded():
    model = build("llama").bfloat16()
    raw = []
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: raw.append(output))
    attach(model, "fix-L").set_step(0)
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: raw.append(output))
    assert logits(model).dtype == torch.bfloat16
    *_, before, after = raw
    third = torch.tensor(1 / 3, dtype=torch.float32).double()
    assert after.dtype == torch.bfloat16 and torch.equal(after, (before.double() * third).float().bfloat16())


def test_weights_that_are_not_there_yet():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **TINY, num_local_experts=4))
    prores = attach(model, "linear", 2)
    assert all(set(layer.writes) == {"self_attn", "mlp"} for layer in prores.layers)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_alpha_follows_the_model_to_its_device():
    model = build("llama")
    prores = attach(model, "fix-L")
    model.cuda()
    prores.set_step(0)
    assert all(coefficient.value.is_cuda for coefficient in prores.coefficients)
    model(tokens().cuda())


def test_a_step_is_needed_before_a_forward():
    model = build("llama")
    prores = attach(model)
    with pytest.raises(UserError, match=r"layer 1 runs but nothing sets its alpha: call set_step"):
        logits(model)
    assert prores.step is None and "not set" in prores.describe()
    prores.set_step(500)
    assert prores.step == 500
    assert prores.describe().splitlines() == [
        "ProRes: linear, T = 1000, W = 3000 steps",
        "layer  module          scaled outputs  alpha",
        "1      model.layers.0  self_attn, mlp  0.5",
        "2      model.layers.1  self_attn, mlp  0.25",
        "3      model.layers.2  self_attn, mlp  0.166667",
    ]


def test_wrong_schedules_are_refused_and_leave_no_trace():
    model = build("llama")
    inside = hooks(model)
    for arguments, message in {
        ("linnear",): "did you mean linear",
        ("linear", -1): "positive number of steps",
        (Schedule("linear", 4),): "schedule is for 4 layers; the model has 3",
        (Schedule("linear", 3), 10): "give the ProRes warm-up once",
        (None,): "schedule must be a name or a Schedule, not a NoneType",
    }.items():
        with pytest.raises(UserError, match=message):
            attach(model, *arguments)
    with pytest.raises(UserError, match="needs a torch module, not a str"):
        attach("model")
    assert hooks(model) == inside


def test_attached_once():
    model = build("llama")
    prores = attach(model)
    with pytest.raises(UserError, match=r"attached to this LlamaForCausalLM already: detach\(\) it first"):
        attach(nn.DataParallel(model))
    prores.detach()
    attach(model)


def test_a_deep_copy_is_on_the_same_clock_and_a_pickle_is_refused():
    model = build("llama")
    stock = logits(model)
    prores = attach(model, "linear", 2)
    average = copy.deepcopy(model)
    prores.set_step(1)
    assert torch.equal(logits(average), logits(model))
    prores.detach(average)
    assert torch.equal(logits(average), stock) and not torch.equal(logits(model), stock)
    with pytest.raises(UserError, match="not pickled whole"):
        torch.save(model, io.BytesIO())
    torch.save(model.state_dict(), io.BytesIO())


class Toy(nn.Module):
    """A pre-norm network without attention, on token ids. `form` computes a layer's output from the layer and x."""

    class Block(nn.Module):
        def __init__(self, form):
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)
            self.gain = nn.Parameter(torch.full([HIDDEN], 0.5))
            self.form = form

        def forward(self, x):
            return self.form(self, x)

    def __init__(self, form):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleDict({str(i): self.Block(form) for i in range(2)})

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers.values():
            x = layer(x)
        return x


def elsewhere(block, x):
    branch = block.mlp(x)
    return x + branch + block.norm(branch)


ACCEPTED = {
    "as it is": lambda block, x: x + block.mlp(block.norm(x)),
    "in place": lambda block, x: x.add_(block.mlp(block.norm(x))),
    "subtracted": lambda block, x: x - block.mlp(block.norm(x)),
    "times a number": lambda block, x: x + block.mlp(block.norm(x)) * 0.1,
    "times a learned gain": lambda block, x: x + block.gain * block.mlp(block.norm(x)),
    "divided by a number": lambda block, x: x + block.mlp(block.norm(x)) / 8,
    "dropout behind it": lambda block, x: x + F.dropout(block.mlp(block.norm(x)), 0.5, block.training),
    "a gain on x": lambda block, x: x * block.gain + block.mlp(block.norm(x)),
    "flattened": lambda block, x: (x.flatten(0, 1) + block.mlp(block.norm(x.flatten(0, 1)))).view(x.shape),
}
REFUSED = {
    "norm after": (lambda block, x: block.norm(x + block.mlp(x)), r"the output of norm \(LayerNorm\), and x is not"),
    "no residual": (lambda block, x: block.mlp(block.norm(x)), r"the output of mlp \(Linear\), and x is not added"),
    "functional branch": (
        lambda block, x: x + F.silu(block.mlp(block.norm(x))),
        "the result of Silu is added to the residual stream, which no module puts out",
    ),
    "module left out": (
        lambda block, x: x + block.mlp(block.norm(x)) + F.linear(x, block.mlp.weight),
        "which no module puts out",
    ),
    "parameter": (lambda block, x: x + block.mlp(block.norm(x)) + block.gain, "does not depend on the layer's input"),
    "gate": (lambda block, x: x + block.mlp(block.norm(x)) * block.norm(x), "the result of Mul is added"),
    "quotient": (lambda block, x: x + block.gain / block.mlp(block.norm(x)), "the result of Div is added"),
    "used elsewhere": (elsewhere, "the output of mlp does not only go to the residual stream"),
    "called twice": (lambda block, x: x + block.mlp(block.mlp(x)) + 0 * block.norm(x), "mlp does not only go"),
    "more x": (lambda block, x: x + x + block.mlp(block.norm(x)), r"scaled by 0 the output is not x"),
    "hidden write": (
        lambda block, x: (x + block.mlp(block.norm(x))).data + x + block.mlp(x),
        "does not depend on the layer's input",
    ),
    "nothing": (lambda block, x: x.clone(), "nothing is added to the residual stream"),
    "part asleep": (lambda block, x: x + block.mlp(x), "norm did not run"),
    "other shape": (lambda block, x: (x + block.mlp(block.norm(x)))[:, :1], "not a tensor of the input's shape"),
}


@pytest.mark.parametrize("form", ACCEPTED.values(), ids=ACCEPTED)
def test_forms_of_the_residual_add(form):
    model = Toy(form)
    prores = attach(model)
    assert [list(layer.writes) for layer in prores.layers] == [["mlp"], ["mlp"]]
    ids, block = tokens(), model.layers["0"]
    x = model.embedding(ids)
    outs = {}
    for alpha in (0.0, 0.5, 1.0):
        set_alphas(prores, [alpha, 0])
        torch.manual_seed(0)
        outs[alpha] = block(x.clone())
    torch.testing.assert_close(outs[0.5] - outs[0.0], (outs[1.0] - outs[0.0]) / 2)
    assert not torch.equal(outs[1.0], outs[0.0])


@pytest.mark.parametrize(("form", "message"), REFUSED.values(), ids=REFUSED)
def test_forms_that_are_no_residual_add_are_refused(form, message):
    model = Toy(form)
    with pytest.raises(UserError, match=message) as error:
        attach(model)
    assert "\n" not in str(error.value) and "in layers.0 (Block)" in str(error.value)
    assert hooks(model) == []


def test_frozen_weights_and_switched_off_gradients():
    model = build("llama").requires_grad_(False)
    with torch.no_grad():
        assert all(set(layer.writes) == {"self_attn", "mlp"} for layer in attach(model).layers)


def test_a_module_of_two_layers_is_refused():
    model = Toy(ACCEPTED["as it is"])
    model.layers["1"].mlp = model.layers["0"].mlp
    with pytest.raises(UserError, match=r"in layers\.1 \(Block\) mlp is also a part of layers\.0"):
        attach(model)


def test_models_without_layers_or_with_other_arguments():
    with pytest.raises(UserError, match=r"looked for a list of layers .* found none"):
        attach(nn.Linear(2, 2))
    model = nn.Sequential(*Toy(ACCEPTED["as it is"]).layers.values())
    with pytest.raises(UserError, match=r"a trial forward on \[1, 2\] failed with .* give them as `example`"):
        attach(model)
    assert [layer.name for layer in attach(model, example=(torch.randn(2, HIDDEN),)).layers] == ["0", "1"]


@pytest.mark.parametrize(
    ("model_type", "flags", "message"),
    [
        ("bert", {"is_decoder": True}, r"bert\.encoder\.layer\.0 \(BertLayer\) what comes out is the output of output"),
        ("openai-gpt", {}, r"transformer\.h\.0 \(Block\) what comes out is the output of ln_2 \(LayerNorm\), and x is"),
        (
            "opt",
            {"ffn_dim": 48, "word_embed_proj_dim": HIDDEN, "do_layer_norm_before": False},
            r"the output of final_layer_norm \(LayerNorm\), and x is not added to it",
        ),
        ("gpt2", {"add_cross_attention": True}, r"crossattention and ln_cross_attn did not run"),
        ("rwkv", {"attention_hidden_size": HIDDEN}, r"rwkv\.blocks\.0 \(RwkvBlock\) what comes out is the output of"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 12 else "",
)
def test_models_of_another_structure_are_refused(model_type, flags, message):
    with pytest.raises(UserError, match=message):
        attach(build(model_type, **flags))


def test_encoder_decoders_are_refused():
    t5 = build("t5", AutoModelForSeq2SeqLM, d_model=HIDDEN, d_kv=HEAD, d_ff=48, num_layers=2, num_heads=HEADS)
    with pytest.raises(UserError, match=r"ValueError: .* Its lists of layers: encoder\.block, decoder\.block"):
        attach(t5)
    with pytest.raises(UserError, match=r"one stack of layers .* found encoder\.block and decoder\.block; attach to"):
        attach(t5, example={"input_ids": tokens(), "decoder_input_ids": tokens()})


def test_layers_of_several_kinds_and_the_bare_model():
    flags = {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4}
    flags |= {"expert_layer_period": 2, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
    model = build("jamba", AutoModel, **flags)
    layers = attach(model).layers
    assert [layer.name for layer in layers] == [f"layers.{i}" for i in range(4)]
    assert [set(layer.writes) - {"feed_forward"} for layer in layers] == [{"mamba"}, {"self_attn"}] * 2


def test_only_torch_is_imported():
    code = "import sys, megatron_prores.pytorch; print({'megatron', 'deepspeed', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
