"""`megatron_prores.deepspeed.initialize` in one process: what it refuses, and what the hook does."""

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from megatron_prores.coefficients import LayerCoefficient
from megatron_prores.deepspeed import faults, initialize
from megatron_prores.errors import UserError

ONE = {"train_batch_size": 1, "steps_per_print": None}


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory):
    """A world of one on gloo."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}.items():
            patch.setenv(name, str(value))
        patch.setenv("MASTER_PORT", "29641")
        faults.skip_shared_memory_kernel()
        deepspeed.init_distributed("gloo")
        yield
    torch.distributed.destroy_process_group()


class Layer(nn.Module):
    def __init__(self, number: int = 1):
        super().__init__()
        self.coefficient = LayerCoefficient(number, "cpu")
        self.branch = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.coefficient.read() * self.branch(x)


def engine_of(*layers: nn.Module, scheduler=None, **config):
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config={**ONE, **config})[0]


def step(engine) -> None:
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()


def alphas(engine) -> list[float]:
    return [float(layer.coefficient.value) for layer in engine.module]


def test_alpha_follows_the_applied_steps():
    engine = engine_of(Layer(1), Layer(2), prores={"warmup_steps": 2})
    seen = [alphas(engine)]
    for _ in range(3):
        step(engine)
        seen.append(alphas(engine))
    assert seen == [[0, 0], [0.5, 0.25], [1, 0.5], [1, 0.75]]


def test_the_real_scheduler_is_stepped_saved_and_read(tmp_path):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    engine = engine_of(Layer(), scheduler=schedule, prores={"warmup_steps": 4})
    step(engine)
    step(engine)
    assert engine.get_lr() == [0.025] and engine.lr_scheduler.get_last_lr() == [0.025]
    engine.save_checkpoint(str(tmp_path))
    other = engine_of(Layer(), scheduler=schedule, prores={"warmup_steps": 4})
    other.load_checkpoint(str(tmp_path))
    assert other.get_lr() == [0.025] and alphas(other) == [0.5]
    assert other.lr_scheduler.last_epoch == 2  # what the real one has, the hook has


def test_a_checkpoint_without_prores_loads_with_override_and_the_other_way_round(tmp_path):
    model = nn.Sequential(Layer())
    model[0].coefficient.fill(1.0)
    config = {**ONE}
    stock = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]
    stock.save_checkpoint(str(tmp_path / "stock"))
    with pytest.raises(UserError, match=r"trained with ProRes none .*override"):
        engine_of(Layer(), prores={}).load_checkpoint(str(tmp_path / "stock"))
    engine = engine_of(Layer(), prores={"override": True})
    engine.load_checkpoint(str(tmp_path / "stock"))
    engine.save_checkpoint(str(tmp_path / "prores"))
    stock.load_checkpoint(str(tmp_path / "prores"))


def test_another_warmup_is_refused(tmp_path):
    engine_of(Layer(), prores={"warmup_steps": 4}).save_checkpoint(str(tmp_path))
    with pytest.raises(UserError, match=r"trained with ProRes linear \(T = 4\), this run asks for linear, T = 5"):
        engine_of(Layer(), prores={"warmup_steps": 5}).load_checkpoint(str(tmp_path))


def test_refused():
    with pytest.raises(UserError, match="needs a DeepSpeed config"):
        initialize(model=Layer())
    with pytest.raises(UserError, match="needs a model"):
        initialize(config=ONE)
    with pytest.raises(UserError, match=r"numbers \[1, 3\] and not each of 1\.\.L once"):
        engine_of(Layer(1), Layer(3))
    with pytest.raises(UserError, match=r'DeepSpeed does not accept this: .*"stag"'):
        engine_of(Layer(), zero_optimization={"stag": 1})
    for precision in ("bf16", "fp16"):
        with pytest.raises(UserError, match=f"other updates in {precision} without ZeRO"):
            engine_of(Layer(), **{precision: {"enabled": True}})
    layer = Layer()
    layer.gain = nn.Parameter(torch.ones(()))
    with pytest.raises(UserError, match=r"parameter 0\.gain.*give it the shape \(1,\)"):
        engine_of(layer)


def pipeline(specs=None, **kwargs) -> PipelineModule:
    specs = specs or [LayerSpec(Layer, 1), LayerSpec(Layer, 2)]
    return PipelineModule(layers=specs, num_stages=1, loss_fn=nn.MSELoss(), partition_method="uniform", **kwargs)


def test_refused_in_a_pipeline():
    for stage in (2, 3):
        with pytest.raises(UserError, match=f"does not work with ZeRO stage {stage}"):
            initialize(model=pipeline(), config={**ONE, "zero_optimization": {"stage": stage}})
    with pytest.raises(UserError, match="activation checkpoints would include the first layer"):
        initialize(model=pipeline(activation_checkpoint_interval=1), config=ONE)
    with pytest.raises(UserError, match="activation checkpoints would include the first layer"):
        initialize(model=pipeline(), config={**ONE, "pipeline": {"activation_checkpoint_interval": 1}})
    faults.refuse(pipeline(activation_checkpoint_interval=1, checkpointable_layers=["Layer"]), ONE)
    with pytest.raises(UserError, match="no layer of the pipeline has an alpha"):
        plain = pipeline([LayerSpec(nn.Linear, 4, 4)])
        initialize(model=plain, optimizer=torch.optim.SGD(plain.parameters(), lr=0.1), config=ONE)


def test_tied_weights_without_zero_are_refused_where_clipping_counts_them_twice():
    tied = pipeline([TiedLayerSpec("t", Layer, 1, tied_weight_attr="branch.weight"), LayerSpec(Layer, 2)])
    clipped = {**ONE, "gradient_clipping": 1.0}
    faults.refuse(tied, clipped)  # on one stage there is one
    tied.tied_comms = {"t": {}}
    with pytest.raises(UserError, match="counts a tied weight once per stage"):
        faults.refuse(tied, clipped)
    faults.refuse(tied, {**clipped, "zero_optimization": {"stage": 1}})
