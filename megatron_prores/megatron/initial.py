"""Initial weights that are the same in every layout: what `--prores-init` asks for.

Each weight is drawn whole, from a generator of its own that is seeded by the run's seed and the weight's name, and
every rank keeps the part that it holds. Names and parts are those of Megatron's distributed checkpoints, which know
how tensor parallelism cuts each weight and number the layers globally. Drawn on the host in float32, so that neither
the device nor the precision of the run changes them; a weight at a time, so that memory is that of the largest. A core
draws some 50 million a second, the parameters of its pipeline stage for each rank; a run that loads a checkpoint
draws none.

Megatron's own initialisation, without the flag, draws each rank's part with a seed that depends on the layout.
"""

import functools
import hashlib
import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import get_args, training
from megatron.training.checkpointing import checkpoint_exists

from megatron_prores.errors import UserError
from megatron_prores.megatron.arguments import validate_init
from megatron_prores.megatron.screen import say
from megatron_prores.variants import init_of, weight_distribution

_WHOLE = {
    "embedding.word_embeddings.weight": "embedding",
    "embedding.position_embeddings.weight": "embedding",
    "self_attention.linear_proj.weight": "o",
    "mlp.linear_fc1.weight": "up",
    "mlp.linear_fc2.weight": "down",
    "output_layer.weight": "head",
}


@dataclass(frozen=True)
class Weights:
    """Where a model's weights start.

    Attributes:
        init: a name in `megatron_prores.variants.INITS`.
        seed: of the run.
        std: of what the initialisation does not scale.
        embedding_std: of the embeddings.
    """

    init: str
    seed: int
    std: float
    embedding_std: float


def install() -> None:
    """Have the trainer's models start from `--prores-init`; a second call does nothing."""
    if getattr(training.setup_model_and_optimizer, "with_initial_weights", False):
        return
    setup = training.setup_model_and_optimizer
    signature = inspect.signature(setup)

    @functools.wraps(setup)
    def setup_model_and_optimizer(*args, **kwargs):
        run = get_args()
        validate_init(run)
        weights = weights_from_args(run)
        if weights is None or checkpoint_exists(run.load) or checkpoint_exists(run.pretrained_checkpoint):
            return setup(*args, **kwargs)
        # Before the optimizer copies the weights, and before mixed precision and data parallelism wrap the model.
        call = signature.bind(*args, **kwargs)
        container = call.arguments.get("cfg_container")
        if getattr(container, "model", None) is not None:
            container.model.pre_wrap_hooks.append(lambda chunks: [initialize(chunk, weights) for chunk in chunks])
        else:
            call.arguments["model_provider_func"] = _initialized(call.arguments["model_provider_func"], weights)
        tell(weights)
        return setup(*call.args, **call.kwargs)

    setup_model_and_optimizer.with_initial_weights = True
    training.setup_model_and_optimizer = setup_model_and_optimizer


def tell(weights: Weights) -> None:
    if get_args().rank == 0:
        say(f"initial weights: {weights.init}, the same in every layout (seed {weights.seed})")


def _initialized(provider: Callable, weights: Weights) -> Callable:
    return functools.wraps(provider)(lambda *args, **kwargs: initialize(provider(*args, **kwargs), weights))


def weights_from_args(args) -> Weights | None:
    """What Megatron's arguments ask for; None is Megatron's own initialisation."""
    init = init_of(getattr(args, "prores_norm", "pre"), getattr(args, "prores_init", None))
    if init is None:
        return None
    std, embedding_std = args.init_method_std, getattr(args, "embedding_init_method_std", None)
    return Weights(init, args.seed, std, std if embedding_std is None else embedding_std)


@torch.no_grad()
def initialize(chunk: torch.nn.Module, weights: Weights) -> torch.nn.Module:
    """Set the weights of a model chunk in place; biases and norms stay as Megatron made them, 0 and 1.

    Args:
        chunk: a `GPTModel` or a pipeline stage of one, not wrapped.

    Returns:
        The chunk.

    Raises:
        UserError: the model has a weight that the initialisations do not cover.
    """
    for name, shards in groupby(_shards(chunk), key=lambda shard: shard.key):
        whole = None
        for shard in shards:
            if len(shard.global_shape) == 1:
                continue
            if whole is None:
                whole = draw(name, shard.global_shape, chunk.config, weights)
            part = tuple(slice(at, at + size) for at, size in zip(shard.global_offset, shard.local_shape, strict=True))
            shard.data.copy_(whole[part])
    return chunk


def _shards(chunk: torch.nn.Module) -> Iterator[ShardedTensor]:
    state = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})  # layers numbered in their names
    apply_factories(state)
    return (value for value in nested_values(state) if isinstance(value, ShardedTensor))


def draw(name: str, shape: tuple[int, ...], config: TransformerConfig, weights: Weights) -> torch.Tensor:
    """A whole weight, by its name in distributed checkpoints (layers from 0): float32 on the host.

    Raises:
        UserError: no initialisation covers a weight of this name.
    """
    digest = hashlib.sha256(f"{weights.seed} {name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big"))
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    layer_number = int(layer[1]) + 1 if layer else 0
    whole = torch.empty(shape, dtype=torch.float32, device="cpu")
    fan_in = shape[1]
    for part, rows in _parts(name, whole, config):
        std = weights.embedding_std if part == "embedding" else weights.std
        fan_out = rows.numel() // fan_in
        std, cut = weight_distribution(weights.init, part, std, layer_number, config.num_layers, fan_in, fan_out)
        rows.copy_(_normal(rows.shape, std, cut, generator))
    return whole


def _parts(name: str, whole: torch.Tensor, config: TransformerConfig) -> list[tuple[str, torch.Tensor]]:
    """The projections that Megatron keeps in one weight, as views of it."""
    place = re.sub(r"decoder\.layers\.\d+\.", "", name)
    if place == "self_attention.linear_qkv.weight":  # group by group the queries, the key and the value
        heads = whole.view(config.num_query_groups, -1, config.kv_channels, whole.shape[1])
        return [("q", heads[:, :-2]), ("k", heads[:, -2]), ("v", heads[:, -1])]
    if place == "mlp.linear_fc1.weight" and config.gated_linear_unit:
        return list(zip(("gate", "up"), whole.chunk(2), strict=True))
    if place not in _WHOLE:
        raise UserError(f"--prores-init does not know the weight {name}: use Megatron's own initialisation without it")
    return [(_WHOLE[place], whole)]


def _normal(shape: tuple[int, ...], std: float, cut: float, generator: torch.Generator) -> torch.Tensor:
    """Normally distributed numbers below cut * std. Further rows do not change the first ones if `cut` is finite, so
    that the padding of the vocabulary, which depends on the layout, does not either.
    """
    numbers = torch.empty(shape, dtype=torch.float32, device="cpu")
    if math.isinf(cut):
        return numbers.normal_(0.0, std, generator=generator)
    probability = math.erf(cut / math.sqrt(2))
    numbers.uniform_(-probability, probability, generator=generator)
    return numbers.erfinv_().mul_(math.sqrt(2) * std).clamp_(-cut * std, cut * std)
