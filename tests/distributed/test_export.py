"""Checkpoints of parallel runs as Hugging Face models and back: stock transformers computes the same logits."""

import json
from pathlib import Path

import pytest
import torch
from runs import pretrain
from zygote import Task, environment, zygote

transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file

CLI = "megatron_prores.cli"
TP2_PP2 = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
NO_EVALUATION = ("--eval-iters", "0")
GROUPED = {
    "group-query-attention": True,
    "num-query-groups": 2,
    "lr": 1e-2,
    "init-method-std": 0.1,
    "make-vocab-size-divisible-by": 2,  # 500 tokens and no padding, so that losses compare with an imported model's
}
TOKENS = torch.randint(0, 500, (2, 32), generator=torch.Generator().manual_seed(1))

# `prores export`, which also keeps the logits of the model that it exports.
WITH_LOGITS = """
import sys
import torch
from megatron_prores import cli
from megatron_prores.huggingface import export

load_model = export.load_model

def load_and_compute(args):
    model = load_model(args)
    tokens = torch.load(logits + ".tokens")
    with torch.inference_mode():
        torch.save(model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None).float(), logits)
    return model

logits = sys.argv.pop(1)
export.load_model = load_and_compute
cli.main()
"""


def prores(folder: Path, *argv: str, module: str = CLI) -> tuple[int, str, str]:
    """Run a command in a fork: its exit code, stdout, stderr."""
    files = (folder / "output", folder / "errors")
    code = zygote(CLI).start(Task(module, [*map(str, argv)], 1, environment(), folder, *files)).wait(120)
    return code, *(file.read_text() for file in files)


def exported(folder: Path, checkpoint: Path, *flags: str) -> tuple[Path, torch.Tensor, str]:
    """The exported model's folder, Megatron's logits, and what the command printed."""
    folder.mkdir(exist_ok=True)
    (folder / "with_logits.py").write_text(WITH_LOGITS)
    torch.save(TOKENS, folder / "logits.tokens")
    argv = ("logits", "export", "--checkpoint", checkpoint, "--output", folder / "model", *flags)
    code, output, errors = prores(folder, *argv, module="with_logits")
    assert code == 0, errors
    return folder / "model", torch.load(folder / "logits"), output


def imported_from(folder: Path, model: Path) -> Path:
    """The folder of the checkpoint."""
    start = folder / "start"
    code, output, errors = prores(folder, "import", "--model", model, "--output", start)
    assert code == 0, errors
    assert f"--config {start / 'model.yaml'} --pretrained-checkpoint {start}" in output
    return start


@torch.inference_mode()
def stock_logits(model: Path) -> torch.Tensor:
    loaded = transformers.LlamaForCausalLM.from_pretrained(model)
    return loaded.eval()(TOKENS).logits.float()


def assert_same(ours: torch.Tensor, megatron: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert ours.shape[-1] <= megatron.shape[-1]
    megatron = megatron[..., : ours.shape[-1]]  # without padding of the vocabulary
    assert float((ours - megatron).abs().max() / megatron.abs().max()) < tolerance


def tensors(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


@pytest.fixture(scope="module")
def grouped(tmp_path_factory, data) -> Path:
    """Checkpoints of iterations 3, 6, 9 and 12 of TP2 x PP2 with grouped queries; T = 2, so that W = 12."""
    folder = tmp_path_factory.mktemp("grouped")
    flags = (*TP2_PP2, "--sequence-parallel", *NO_EVALUATION, "--train-iters", "12", "--save-interval", "3")
    pretrain(folder, *flags, "--save", str(folder / "checkpoint"), processes=4, config={**data, **GROUPED})
    return folder / "checkpoint"


@pytest.fixture(scope="module")
def finished(tmp_path_factory, grouped) -> tuple[Path, torch.Tensor, str]:
    return exported(tmp_path_factory.mktemp("finished"), grouped)


def test_in_mid_warm_up_alpha_is_in_the_weights(tmp_path, grouped, finished):
    model, logits, output = exported(tmp_path, grouped, "--ckpt-step", "3")
    assert_same(stock_logits(model), logits)
    record = json.loads((model / "prores_export.json").read_text())
    assert record["alphas"] == pytest.approx([1, 3 / 4, 3 / 6, 3 / 8, 3 / 10, 3 / 12])
    assert record["alphas_folded"] and record["iteration"] == 3 and record["schedule"] == "linear"
    assert f"exported iteration 3 to {model}: float32, 1 file; alpha 0.25 to 0.75 multiplied into" in output
    assert float((stock_logits(finished[0]) - logits[..., :500]).abs().max()) > 0.1  # nothing else would do
    config = transformers.AutoConfig.from_pretrained(model)
    assert (config.num_key_value_heads, config.vocab_size, config.tie_word_embeddings) == (2, 500, False)


def test_after_it_the_weights_are_as_they_were(finished, data):
    model, logits, output = finished
    assert_same(stock_logits(model), logits)
    assert "every alpha is 1, the weights are as they were" in output
    assert not json.loads((model / "prores_export.json").read_text())["alphas_folded"]
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(path) for path in (model, data["tokenizer-model"]))
    assert ours("def f(x): return x").input_ids == theirs("def f(x): return x").input_ids
    assert json.loads((model / "config.json").read_text())["eos_token_id"] == theirs.eos_token_id
    assert [path.name for path in model.parent.glob(".*")] == []


@pytest.fixture(scope="module")
def imported(tmp_path_factory, finished) -> Path:
    return imported_from(tmp_path_factory.mktemp("imported"), finished[0])


def test_import_then_export_gives_the_same_files(tmp_path, imported, finished):
    again, logits, _ = exported(tmp_path, imported)
    before, after = tensors(finished[0]), tensors(again)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert_same(logits, finished[1], 1e-6)
    for name in ("config", "generation_config"):
        first, second = (json.loads((model / f"{name}.json").read_text()) for model in (finished[0], again))
        assert first == second


def test_a_model_that_transformers_made(tmp_path, data):
    """Sharded, in bf16, tied, with more rows than its tokenizer has tokens."""
    config = transformers.LlamaConfig(
        vocab_size=520,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_theta=500000.0,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path / "model", max_shard_size="50KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    transformers.AutoTokenizer.from_pretrained(data["tokenizer-model"]).save_pretrained(tmp_path / "model")
    start = imported_from(tmp_path, tmp_path / "model")
    again, logits, _ = exported(tmp_path / "again", start)
    assert_same(stock_logits(tmp_path / "model"), logits, 3e-2)
    state = model.state_dict()
    for name, tensor in tensors(again).items():
        assert torch.equal(tensor, state[name][: len(tensor)])
    assert len(tensors(again)["model.embed_tokens.weight"]) == 500


# Of a run, the model and its tokenizer are in the imported YAML.
MODEL = (
    *("num-layers", "hidden-size", "num-attention-heads", "ffn-hidden-size", "max-position-embeddings"),
    *("position-embedding-type", "normalization", "swiglu", "disable-bias-linear", "prores-warmup-steps"),
    *("untie-embeddings-and-output-weights", "tokenizer-type", "tokenizer-model", "make-vocab-size-divisible-by"),
)


@pytest.fixture(scope="module")
def continued(tmp_path_factory, data, grouped):
    """The run from which the imported model comes, started anew from its weights with a finished warm-up."""
    flags = ("--load", str(grouped), "--finetune", "--no-load-optim", "--no-load-rng", *NO_EVALUATION)
    config = {**data, **GROUPED, "lr": 1e-3, "prores-schedule": "none"}
    return pretrain(tmp_path_factory.mktemp("continued"), *flags, "--train-iters", "2", config=config)


@pytest.mark.parametrize(
    ("processes", "layout"), [(1, ()), (4, (*TP2_PP2, "--sequence-parallel"))], ids=["1", "tp2pp2"]
)
def test_pretraining_continues_from_an_imported_model(processes, layout, tmp_path, data, imported, continued):
    """With the losses of the run that it comes from, in any layout; and a restart continues from its own."""
    without_model = {**data, **dict.fromkeys(MODEL)}
    flags = ("--config", str(imported / "model.yaml"), "--pretrained-checkpoint", str(imported), *layout)
    flags += ("--save", str(tmp_path / "run"), "--load", str(tmp_path / "run"), *NO_EVALUATION, "--save-interval", "2")
    first = pretrain(tmp_path / "first", *flags, "--train-iters", "2", processes=processes, config=without_model)
    assert f"loaded checkpoint of iteration 0 from {imported}" in first.output
    assert first.losses == pytest.approx(continued.losses, rel=1e-5)
    if processes == 1:
        longer = ("--train-iters", "3", "--override-opt-param-scheduler")
        again = pretrain(tmp_path / "again", *flags, *longer, config=without_model)
        assert "loaded checkpoint of iteration 2" in again.output and sorted(again.losses) == [3]


def test_tied_embeddings_biases_and_a_fixed_schedule(tmp_path, data):
    config = {
        **data,
        **{"untie-embeddings-and-output-weights": None, "disable-bias-linear": None},
        **{"prores-schedule": "fix-sqrt-L", "prores-warmup-steps": None, "lr": 1e-2, "init-method-std": 0.1},
    }
    flags = (*TP2_PP2, *NO_EVALUATION, "--train-iters", "2", "--save-interval", "2")
    pretrain(tmp_path, *flags, "--save", str(tmp_path / "checkpoint"), processes=4, config=config)
    model, logits, _ = exported(tmp_path / "out", tmp_path / "checkpoint")
    assert_same(stock_logits(model), logits)
    found = tensors(model)
    assert "lm_head.weight" not in found
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        assert found[f"model.layers.5.{name}.bias"].any()
    again, _, _ = exported(tmp_path / "again", imported_from(tmp_path, model))
    # 1/sqrt(6) is in the weights now, and not multiplied in once more.
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(again).items())


def test_lns_bf16_and_settings_that_megatron_does_not_restore(tmp_path, data):
    config = {
        **data,
        **{"prores-norm": "lns", "transformer-impl": "local", "bf16": True, "add-qkv-bias": True, "kv-channels": 8},
        **{"norm-epsilon": 1e-3, "rotary-base": 500, "rotary-seq-len-interpolation-factor": 2, "init-method-std": 0.1},
    }
    flags = (*NO_EVALUATION, "--train-iters", "2", "--save-interval", "2", "--lr", "1e-2")
    pretrain(tmp_path, *flags, "--save", str(tmp_path / "checkpoint"), config=config)
    model, logits, output = exported(tmp_path / "bf16", tmp_path / "checkpoint")
    assert "bfloat16" in output and "1/sqrt(l) of --prores-norm lns into the norms" in output
    assert {tensor.dtype for tensor in tensors(model).values()} == {torch.bfloat16}
    assert_same(stock_logits(model), logits, 3e-2)
    assert not tensors(model)["model.layers.5.self_attn.o_proj.bias"].any()  # q, k and v have biases, and so has o
    assert tensors(model)["model.layers.5.self_attn.v_proj.bias"].any()
    start = imported_from(tmp_path, model)
    assert "add-qkv-bias: true" in (start / "model.yaml").read_text()
    again, _, _ = exported(tmp_path / "again", start)
    assert all(torch.equal(tensors(model)[name], tensor) for name, tensor in tensors(again).items())
    code, _, errors = prores(
        tmp_path, "export", "--checkpoint", tmp_path / "checkpoint", "--output", model, "--dtype", "float32"
    )
    assert (
        code == 2
        and errors == f"error: --output {model} is not empty: name another folder, or replace it with --overwrite\n"
    )


def test_what_is_no_llama_is_refused_in_one_line(tmp_path, data):
    config = {**data, "normalization": "LayerNorm", "position-embedding-type": "learned_absolute"}
    flags = (*NO_EVALUATION, "--train-iters", "1", "--save-interval", "1")
    pretrain(tmp_path, *flags, "--save", str(tmp_path / "checkpoint"), config=config)
    code, _, errors = prores(
        tmp_path, "export", "--checkpoint", tmp_path / "checkpoint", "--output", tmp_path / "model"
    )
    assert code == 2
    assert errors == (
        "error: the model is not a Llama and cannot be exported: it has --position-embedding-type learned_absolute, "
        "a Llama rotary position embeddings; it has --normalization LayerNorm, a Llama RMSNorm\n"
    )
    assert not (tmp_path / "model").exists()
