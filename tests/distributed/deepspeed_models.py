"""Models of one's own under `megatron_prores.deepspeed.initialize`, on two ranks: run by test_deepspeed_models.py.

Writes what it measured to a JSON file: losses by case, and how often torch.compile compiled again.
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import megatron_prores
from megatron_prores.coefficients import LayerCoefficient
from megatron_prores.deepspeed import faults, initialize

STEPS, WIDTH, LAYERS = 6, 16, 4
T = 2


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def tokens(step: int) -> torch.Tensor:
    """Four sequences of 16."""
    return torch.randint(97, (4, 16), generator=torch.Generator().manual_seed(step))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def config_of(zero: int, warmup: float = T, **sections) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": None,
        "zero_optimization": {"stage": zero},
        "prores": {"schedule": "linear", "warmup_steps": warmup},
        **sections,
    }


def reference(warmup: float = T) -> list[float]:
    """Plain PyTorch in one process."""
    model = llama()
    prores = megatron_prores.attach(model, warmup_steps=warmup)
    optimizer = adamw(model)
    losses = []
    for step in range(STEPS):
        prores.set_step(step)
        batch = tokens(step)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def engine_of(zero: int, **kwargs) -> deepspeed.DeepSpeedEngine:
    model = llama()
    return initialize(model=model, optimizer=adamw(model), config=config_of(zero, **kwargs))[0]


def train(engine: deepspeed.DeepSpeedEngine, first: int = 0, last: int = STEPS) -> list[float]:
    """Each rank has half of the batch."""
    losses = []
    for step in range(first, last):
        batch = tokens(step).chunk(2)[dist.get_rank()]
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / 2)
    return losses


def resumed(folder: Path, zero: int) -> tuple[list[float], list[int]]:
    """Saved after three steps; the rest in a new engine. Also the clock before and after loading."""
    first = engine_of(zero)
    train(first, 0, 3)
    first.save_checkpoint(str(folder))
    second = engine_of(zero)
    clocks = [second.prores.completed]
    second.load_checkpoint(str(folder))
    clocks.append(second.prores.completed)
    return train(second, 3), clocks


class Block(nn.Module):
    """x + alpha*F(x), with an alpha of its own."""

    def __init__(self, number: int):
        super().__init__()
        torch.manual_seed(number)
        self.coefficient = LayerCoefficient(number, "cpu")
        self.branch = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.coefficient.read() * self.branch(x)


class Start(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(100)
        self.table = nn.Embedding(97, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


class End(nn.Linear):
    def __init__(self):
        torch.manual_seed(200)
        super().__init__(WIDTH, 97)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def pipeline(stages: int, compiled: bool = False) -> list[float]:
    """A user's own `PipelineModule`; two microbatches a step."""
    layers = [LayerSpec(Start), *(LayerSpec(Block, number) for number in range(1, LAYERS + 1)), LayerSpec(End)]
    module = PipelineModule(layers=layers, num_stages=stages, loss_fn=cross_entropy, partition_method="uniform")
    config = config_of(1)
    config["gradient_accumulation_steps"] = stages
    engine = initialize(model=module, config=config, optimizer=adamw(module))[0]
    if compiled:
        engine.compile(backend="aot_eager")
    losses = []
    for step in range(STEPS):
        chunks = tokens(step).chunk(2)
        batches = chunks if stages == 2 else [chunks[dist.get_rank()]]
        losses.append(float(engine.train_batch(iter([(batch, batch) for batch in batches]))))
    return losses


def compiled(zero: int) -> list[float]:
    """With torch.compile; a second compilation of anything is an error."""
    torch._dynamo.reset()
    engine = engine_of(zero)
    engine.compile(backend="aot_eager")
    first = train(engine, 0, 1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        return first + train(engine, 1)


def main() -> None:
    folder = Path(sys.argv[1])
    faults.skip_shared_memory_kernel()
    deepspeed.init_distributed("gloo")
    measured: dict = {"reference": reference(), "none": reference(1e-6)}
    for zero in range(4):
        engine = engine_of(zero)
        measured[f"zero {zero}"] = train(engine)
        measured[f"resumed {zero}"], measured[f"clocks {zero}"] = resumed(folder / f"zero-{zero}", zero)
    for zero in range(3):
        measured[f"compiled {zero}"] = compiled(zero)
    measured["table"] = engine.prores.attached.describe()
    measured["pipeline 1"], measured["pipeline 2"] = pipeline(1), pipeline(2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        measured["pipeline compiled"] = pipeline(2, compiled=True)
    if dist.get_rank() == 0:
        (folder / "measured.json").write_text(json.dumps(measured))
    dist.barrier()


if __name__ == "__main__":
    main()
