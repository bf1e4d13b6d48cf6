"""The alphas of a rank: filled in place, at an address that stays, in float32 whatever the model is cast to."""

import pytest
import torch
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_prores import SCHEDULES, Schedule
from megatron_prores.coefficients import LayerCoefficient, StageCoefficients
from megatron_prores.errors import UserError


class Holder(torch.nn.Module):
    """A layer that holds a coefficient as ProRes layers do."""

    def __init__(self, layer_number):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.coefficient = LayerCoefficient(layer_number, "cpu")


def float16_module(dtype_flag):
    def cast(module):
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **{dtype_flag: True})
        return Float16Module(config, module)

    return cast


CASTS = {
    "bfloat16": lambda module: module.bfloat16(),
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
    "to": lambda module: module.to(torch.bfloat16),
    "to meta": lambda module: module.to("meta"),
    "Megatron bf16": float16_module("bf16"),
    "Megatron fp16": float16_module("fp16"),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_values_follow_the_schedule_in_place(name):
    schedule = Schedule(name, num_layers=6, warmup_steps=3)
    numbers = [5, 2, 3]  # any part of the layers, in any order
    coefficients = {number: LayerCoefficient(number, "cpu") for number in numbers}
    stage = StageCoefficients(schedule, coefficients.values())
    tensors = {number: coefficient.value for number, coefficient in coefficients.items()}
    addresses = {number: tensor.data_ptr() for number, tensor in tensors.items()}
    for step in [0, 1, 2, 3, 5, 7, 17, 18, 19, 1000, 4, 0]:  # backwards too: an earlier checkpoint was loaded
        stage.set_step(step)
        expected = torch.tensor(schedule.alpha(step), dtype=torch.float32)
        for number, coefficient in coefficients.items():
            assert coefficient.read() is tensors[number]
            assert coefficient.value.data_ptr() == addresses[number]
            assert coefficient.value == expected[number - 1]


def test_tensor_is_0_dim_float32_without_gradient():
    value = LayerCoefficient(1, "cpu").value
    assert value.shape == () and value.dtype == torch.float32 and not value.requires_grad
    assert (torch.ones(2, dtype=torch.bfloat16) * value).dtype == torch.bfloat16


def test_one_third_is_exact_to_float32():
    coefficient = LayerCoefficient(3, "cpu")
    StageCoefficients(Schedule("linear", num_layers=3, warmup_steps=1000), [coefficient]).set_step(1000)
    assert coefficient.read().item() == torch.tensor(1 / 3, dtype=torch.float64).float().item()


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_casting_the_model_leaves_alpha_alone(cast):
    holder = Holder(3)
    stage = StageCoefficients(Schedule("linear", num_layers=3, warmup_steps=1), [holder.coefficient])
    stage.set_step(1)
    tensor, address, dtype = holder.coefficient.value, holder.coefficient.value.data_ptr(), holder.linear.weight.dtype
    cast(holder)
    weight = holder.linear.weight
    assert weight.dtype != dtype or weight.is_meta  # the cast did happen
    value = holder.coefficient.read()
    assert (
        value is tensor and value.data_ptr() == address and value.dtype == torch.float32 and value.device.type == "cpu"
    )
    assert value.item() == pytest.approx(1 / 3, rel=1e-7)
    stage.set_step(2)
    assert holder.coefficient.read().item() == pytest.approx(2 / 3, rel=1e-7)


def test_alpha_is_in_no_state():
    holder = Holder(1)
    StageCoefficients(Schedule("fix-L", num_layers=2), [holder.coefficient]).set_step(0)
    assert set(holder.state_dict()) == {"linear.weight", "linear.bias"}
    assert [name for name, _ in holder.named_parameters()] == ["linear.weight", "linear.bias"]
    assert list(holder.named_buffers()) == []


def test_reading_before_the_first_step_is_refused():
    coefficient = LayerCoefficient(7, "cpu")
    with pytest.raises(UserError, match=r"layer 7 .*megatron_prores\.megatron\.enable\(\)"):
        coefficient.read()
    coefficient.fill(0.0)  # zero is a value too
    assert coefficient.read() == 0


def test_stage_without_layers():
    stage = StageCoefficients(Schedule("linear", num_layers=4), [])
    stage.set_step(0)
    stage.set_step(10)
    assert stage.coefficients == []


def test_an_unchanged_alpha_is_not_written_again():
    coefficient = LayerCoefficient(1, "cpu")
    stage = StageCoefficients(Schedule("linear", num_layers=1, warmup_steps=2), [coefficient])
    versions = []
    for step in range(6):
        stage.set_step(step)
        versions.append(coefficient.value._version)
    assert versions == [1, 2, 3, 3, 3, 3]
