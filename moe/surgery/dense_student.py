"""A dense student of a sparse teacher: its weights, with one feed-forward layer for each layer of experts.

`distillation` then trains it. Where a block has a dense layer after the sparse one, or the experts
do not fit a dense layer, the student keeps sparse layers, of a single expert with a gate of 1.
"""

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor

from moe.checks import check, check_choice
from moe.convert.formats import rewrite_checkpoint
from moe.convert.weight_map import ConvertedCheckpoint, empty_weights, sparse_blocks
from moe.data.pipeline import Batch
from moe.errors import ConfigError
from moe.models.configuration import STMoEConfig
from moe.models.configuration_checks import refuse_quantized
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.weight_files import LazyTensor
from moe.sparse.editing import LayerKey
from moe.sparse.experts import truncated_normal_
from moe.surgery.alignment import aligned_units
from moe.surgery.expert_statistics import expert_statistics

StudentInit = Literal["random", "mean", "aligned_mean", "best"]
"""Initial weights of a layer in place of experts: drawn anew, the mean of the experts, their mean weighted
by gates after an alignment of their hidden units, or the expert with the largest gates."""

_SPARSE = "sparse_feed_forward."
_EXPERTS = _SPARSE + "experts."
_DENSE = "feed_forward."

_LAYER_SETTINGS = (
    "router_options",
    "decoder_router",
    "decoder_router_options",
    "encoder_experts",
    "decoder_experts",
    "prefix_experts",
)
"""Settings that a student without routers does not have."""


def mean_gates(
    model: STMoEForConditionalGeneration, batches: Iterable[Batch]
) -> dict[LayerKey, Tensor]:
    """Returns the mean gate of each expert over all tokens, 0 where a token does not use it.

    A layer's gates add up to 1 if its router normalises them and requests all choices.

    Args:
        model: The teacher.
        batches: Keyword arguments of its forward, with labels; see `expert_statistics`.

    Returns:
        <float64>[E] for each sparse layer.

    Raises:
        DataError: When no batch holds a token.
    """
    gates: dict[LayerKey, Tensor] = {}
    for key, statistics in expert_statistics(model, batches).items():
        gates[key] = (statistics.gate_sum / statistics.num_tokens).cpu()
    return gates


# ---------------------------------------------------------------------------
# The architecture


def parts_of_layer(config: STMoEConfig) -> int:
    """Returns G, the number of consecutive experts that make up a layer of width d_ff; 1 for none."""
    width = config.expert_d_ff or config.d_ff
    parts = config.d_ff // width
    fits = config.d_ff % width == 0
    for layer in config.all_sparse_configs():
        fits = fits and layer.num_experts % parts == 0
    return parts if fits else 1


def dense_obstacles(config: STMoEConfig) -> list[str]:
    """Returns what of a sparse model has no place in a dense one of the same shape, or in a T5."""
    obstacles = []
    if config.sparse_dense_stacking:
        num_sparse = config.num_sparse_encoder_layers + config.num_sparse_decoder_layers
        num_blocks = config.num_layers + config.stack_sizes(True)[0]
        obstacles.append(
            f"{num_sparse} of its {num_blocks} blocks have a feed-forward layer after the sparse one "
            "(sparse_dense_stacking), and a dense block has one only"
        )
    width = student_width(config)
    if width != config.d_ff:
        obstacles.append(f"its experts have {width} hidden units, and d_ff is {config.d_ff}")
    return obstacles


def student_width(config: STMoEConfig) -> int:
    """Returns the hidden units of the layer in place of a layer of experts."""
    return parts_of_layer(config) * (config.expert_d_ff or config.d_ff)


def student_config(teacher: STMoEConfig) -> STMoEConfig:
    """Returns the config of the student.

    Raises:
        ConfigError: When the teacher is dense, or its experts are shared or have additive biases.
    """
    if not teacher.num_experts:
        raise ConfigError(
            "The teacher is dense (num_experts is 0), so that no layer of experts can become a dense one. Give a "
            "sparse teacher, or a student of your own (--student)."
        )
    if teacher.expert_bias == "additive":
        raise ConfigError(
            "The teacher's experts have additive biases (expert_bias), which a dense layer cannot have. Give a student "
            "of your own (--student)."
        )
    num_shared = teacher.num_shared_experts
    expected = "0: a dense layer has one width. Give a student of your own (--student)"
    check(num_shared == 0, "num_shared_experts of the teacher", num_shared, expected)
    plain: dict[str, Any] = {"router": STMoEConfig.router, "expert_bias": "none"}
    plain |= dict.fromkeys(_LAYER_SETTINGS)
    if not dense_obstacles(teacher):
        counts = ("num_experts", "num_sparse_encoder_layers", "num_sparse_decoder_layers")
        widths = {"expert_d_ff": None, "expert_dropout_rate": None}
        return teacher.replaced(**plain, **dict.fromkeys(counts, 0), **widths)

    # One expert, which every token uses with a gate of 1.
    unlimited = ("capacity_factor", "eval_capacity_factor", "expert_capacity")
    weights = ("load_balance_loss_weight", "router_z_loss_weight")
    return teacher.replaced(
        **plain,
        **dict.fromkeys(unlimited),
        **dict.fromkeys(weights, 0.0),
        num_experts=1,
        num_selected_experts=1,
        expert_d_ff=student_width(teacher),
    )


# ---------------------------------------------------------------------------
# The weights


class _Layer(NamedTuple):
    """The experts of a layer, or with E = 1 the layer in their place, as float32.

    Attributes:
        up: [E, H, F, D] gate and up projection (H = 2), or the up projection.
        down: [E, D, F].
    """

    up: Tensor
    down: Tensor


def dense_student_checkpoint(
    source: Path | str,
    folder: Path,
    init: StudentInit,
    gates: Mapping[LayerKey, Tensor],
    seed: int = 0,
) -> STMoEConfig:
    """Writes a dense student of a sparse model; holds one layer of experts in memory at a time.

    Args:
        source: Folder of the teacher.
        folder: Exists, and is empty.
        init: See `StudentInit`.
        gates: <float64>[E] of each layer, see `mean_gates`.
        seed: Seed of layers that are drawn anew.

    Returns:
        The config of the student.

    Raises:
        ConfigError: When the model is dense.
        CheckpointError: When a tensor of the source is not accounted for.

    Source:
        Switch (arXiv:2101.03961) §4.2: the teacher's weights outside of the experts, and layers
        drawn anew in place of the experts (`random`). Differs: the other values of `init`.
    """
    check_choice("init", init, get_args(StudentInit))
    change = partial(dense_student, init=init, gates=gates, seed=seed)
    return rewrite_checkpoint(source, folder, change)


def dense_student(
    teacher: ConvertedCheckpoint, init: StudentInit, gates: Mapping[LayerKey, Tensor], seed: int
) -> ConvertedCheckpoint:
    """Returns the weights of the student, each of which is computed when it is read."""
    refuse_quantized(teacher.config, "turned into a dense layer", teacher.report.source)
    config = student_config(teacher.config)
    keys = sparse_blocks(teacher.config)
    blocks = list(keys)
    dtype = teacher.weights[f"{blocks[0]}{_EXPERTS}down_proj"].dtype

    @lru_cache(maxsize=1)  # the weights of a layer are read one after the other
    def layer_of(block: str) -> _Layer:
        experts = _read_experts(teacher, block)
        if init == "random":
            return _draw(experts, teacher.config.initializer_scale, seed + blocks.index(block))
        parts = parts_of_layer(teacher.config)
        layer_gates = rearrange(gates[keys[block]].float(), "(e g) -> e g", g=parts).sum(dim=1)
        return reduce_experts(experts, init, layer_gates)

    def read(name: str, block: str, shape: torch.Size) -> Tensor:
        if name.endswith("router.gate"):
            return torch.zeros(shape, dtype=dtype)
        layer = layer_of(block)
        is_down = "down_proj" in name
        weight = layer.down if is_down else rearrange(layer.up, "e h f d -> e (h f) d")
        return weight.reshape(shape).to(dtype)

    weights: dict[str, LazyTensor] = {}
    for name, tensor in empty_weights(config).items():
        block = name.partition(_SPARSE)[0].partition(_DENSE)[0]
        if block in keys and (_SPARSE in name or not config.num_experts):
            shape = tensor.shape
            weights[name] = LazyTensor(shape, dtype, partial(read, name, block, shape))
            continue

        # The norm before a layer of experts is the one before the layer in their place.
        is_moved = name not in teacher.weights
        source = name.replace(".feed_forward_norm.", ".sparse_norm.") if is_moved else name
        weights[name] = teacher.weights[source]
    return teacher._replace(config=config, weights=weights)


def _read_experts(teacher: ConvertedCheckpoint, block: str) -> _Layer:
    """Returns the experts of a block; G consecutive ones become one of the width of all."""
    G = parts_of_layer(teacher.config)
    halves = 2 if teacher.config.gated else 1
    first = "gate_up_proj" if halves == 2 else "up_proj"
    up = teacher.weights[f"{block}{_EXPERTS}{first}"].read().float()
    down = teacher.weights[f"{block}{_EXPERTS}down_proj"].read().float()

    # Each part has the G-th part of the gates.
    up = rearrange(up, "(e g) (h f) d -> e h (g f) d", g=G, h=halves)
    down = rearrange(down, "(e g) d f -> e d (g f)", g=G) / G

    # A factor of a hidden unit is one of its column of the down projection.
    if teacher.config.expert_bias == "multiplicative":
        factor = teacher.weights[f"{block}{_EXPERTS}bias"].read().float()
        down = down * rearrange(factor, "(e g) f -> e 1 (g f)", g=G)
    return _Layer(up, down)


def _draw(experts: _Layer, initializer_scale: float, seed: int) -> _Layer:
    """Returns a new layer with the shape of one expert, drawn like those of a new model."""
    layer = _Layer(torch.empty_like(experts.up[:1]), torch.empty_like(experts.down[:1]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for weight in layer:
            truncated_normal_(weight, math.sqrt(initializer_scale / weight.shape[-1]))
    return layer


def reduce_experts(experts: _Layer, init: StudentInit, gates: Tensor) -> _Layer:
    """Returns one layer in place of E experts; its output is scaled by the sum of the gates.

    Args:
        experts: The experts.
        init: See `StudentInit`, but for `random`.
        gates: <float32>[E] mean gate of each expert.
    """
    up = experts.up
    down = experts.down
    if init == "aligned_mean":
        up = up.clone()  # they may be pages of a file
        down = down.clone()
        best = int(gates.argmax())
        for expert in range(gates.numel()):
            order = aligned_units(up[expert], down[expert], up[best], down[best])
            up[expert] = up[expert][:, order]
            down[expert] = down[expert][:, order]

    # Share of each expert in the weights.  [E]
    shares = {
        "mean": torch.full_like(gates, 1 / gates.numel()),
        "aligned_mean": gates / gates.sum(),
        "best": F.one_hot(gates.argmax(), gates.numel()).to(gates.dtype),
    }[init]
    return _Layer(
        einsum(shares, up, "e, e h f d -> h f d")[None],
        einsum(shares, down, "e, e d f -> d f")[None] * gates.sum(),
    )
