"""Upcycling: a sparse model whose experts are copies of a dense model's feed-forward layers.

Everything else is copied and the routers are re-initialized. With the default settings the new
model computes what the dense one did.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from moe.checks import check, check_integer
from moe.convert.formats import rewrite_checkpoint
from moe.convert.weight_map import ConvertedCheckpoint, empty_weights, sparse_blocks
from moe.errors import ConfigError
from moe.models.configuration import STMoEConfig
from moe.models.configuration_checks import SIZES
from moe.models.weight_files import LazyTensor
from moe.sparse.all_routers import build_router
from moe.sparse.config import SparseConfig
from moe.sparse.router import Router
from moe.sparse.router_options import ROUTERS, option_names

EXACT_ROUTING: Mapping[str, Any] = {
    "router": "token_choice",
    "decoder_router": None,
    "decoder_router_options": None,
    "capacity_factor": None,
    "eval_capacity_factor": None,
}
_EXACT_OPTIONS = {"second_expert_policy": "all", "eval_second_expert_policy": "all"}
# With these, copies compute the dense layer: gates sum to 1, and no token is dropped.

_DERIVED = {
    *SIZES,
    "num_experts",
    "encoder_experts",
    "decoder_experts",
    "num_selected_experts",
    "num_sparse_encoder_layers",
    "num_sparse_decoder_layers",
    "expert_d_ff",
    "model_type",
    "feed_forward_proj",
    "relative_bias_in_every_block",
    "tie_word_embeddings",
    "scale_decoder_outputs",
    "layer_norm_epsilon",
    "is_encoder_decoder",
    "pad_token_id",
    "eos_token_id",
    "bos_token_id",
    "decoder_start_token_id",
}
"""Fields that follow from the dense model or from another setting."""

_EXPERTS = "sparse_feed_forward.experts."
_ROUTER = "sparse_feed_forward.router."
_DENSE_OUTPUT = "feed_forward.down_proj.weight"


@dataclass(frozen=True)
class Upcycling:
    """Settings of an upcycling.

    Attributes:
        num_experts: Copies of the dense layer in a sparse layer, E.
        num_selected_experts: Copies that a token uses, K.
        granularity: Parts that each copy is cut into, G. The layer then has G E experts of d_ff / G
            units, of which a token uses G K. The parts of a copy start with the same router row, so
            that a token uses each part equally often.
        num_sparse_encoder_layers: Sparse layers of the encoder; None for every second block.
        num_sparse_decoder_layers: The same for the decoder.
        seed: Seed of the routers.
        fields: Further fields of STMoEConfig, e.g. another router or a capacity factor; they
            override the lossless settings.

    Source:
        Sparse upcycling (arXiv:2212.05055). Differs: tokens choose in both stacks, gates sum to 1,
        and no token is dropped, so that nothing is lost at step 0. `granularity`: virtual groups
        (arXiv:2410.07524). Differs: the output is scaled instead of all weights, which is exact for
        GEGLU.
    """

    num_experts: int = 8
    num_selected_experts: int = 2
    granularity: int = 1
    num_sparse_encoder_layers: int | None = None
    num_sparse_decoder_layers: int | None = None
    seed: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises a ConfigError when a value is out of range."""
        check_integer("num_experts", self.num_experts, least=2)
        check_integer("granularity", self.granularity, least=1)
        num_shared = self.fields.get("num_shared_experts", 0)
        expected = "0: the copies of a dense layer are routed"
        check(num_shared == 0, "num_shared_experts", num_shared, expected)

    def config(self, dense: STMoEConfig) -> STMoEConfig:
        """Returns the config of the sparse model.

        Raises:
            ConfigError: When the model is sparse already, or a setting does not fit it.
        """
        if dense.num_experts:
            raise ConfigError(
                f"The model has {dense.num_experts} experts already; expected a dense one, with num_experts 0."
            )
        for name in sorted(_DERIVED & self.fields.keys()):
            raise ConfigError(
                f"{name} cannot be set as a field: it follows from the dense model or another setting. Leave it out."
            )

        # Parts of equal width.
        G = self.granularity
        parts = f"a divisor of d_ff, {dense.d_ff}: each layer is split into equal parts"
        check(dense.d_ff % G == 0, "granularity", G, parts)

        sparse_layers = {
            "num_sparse_encoder_layers": self.num_sparse_encoder_layers,
            "num_sparse_decoder_layers": self.num_sparse_decoder_layers,
        }
        for (name, number), decoder in zip(sparse_layers.items(), (False, True), strict=True):
            if number is None:
                sparse_layers[name] = every_second(dense.stack_sizes(decoder)[0])
        settings = {
            "num_experts": G * self.num_experts,
            "num_selected_experts": G * self.num_selected_experts,
            "expert_d_ff": None if G == 1 else dense.d_ff // G,
            **sparse_layers,
        }
        fields = {**EXACT_ROUTING, **settings, **self.fields}
        fields["router_options"] = self.router_options(fields["router"], "router_options")
        if fields["decoder_router"] is not None:
            options = self.router_options(fields["decoder_router"], "decoder_router_options")
            fields["decoder_router_options"] = options
        return dense.replaced(**fields)

    def router_options(self, router: str, field_name: str) -> dict[str, Any]:
        """Returns the options of a router: those with which nothing is lost, then the given ones.

        Raises:
            ConfigError: When the field of that name is not a mapping.
        """
        given = self.fields.get(field_name)
        is_mapping = given is None or isinstance(given, Mapping)
        check(is_mapping, field_name, given, "a mapping of options, or None")
        known = option_names(ROUTERS.get(router))
        exact = {name: value for name, value in _EXACT_OPTIONS.items() if name in known}
        return exact | dict(given or {})


def every_second(num_blocks: int) -> int:
    """Returns the largest number of sparse layers, at most half of the blocks, that divides them."""
    return max(
        number for number in range(1, max(1, num_blocks // 2) + 1) if num_blocks % number == 0
    )


def upcycle_checkpoint(
    source: Path | str, folder: Path, upcycling: Upcycling, **download: Any
) -> STMoEConfig:
    """Writes the upcycled model of a dense one; holds one tensor in memory at a time.

    Args:
        source: A folder of a dense T5, T5X checkpoint or model of ours, or a name of the hub.
        folder: Exists, and is empty.
        upcycling: The settings.
        download: `revision`, `token`, `cache_dir` and the like.

    Returns:
        The config of the sparse model.

    Raises:
        ConfigError: When the model is sparse already, or a setting does not fit it.
        CheckpointError: When a tensor of the source is not accounted for.
    """
    return rewrite_checkpoint(source, folder, partial(upcycled, upcycling=upcycling), **download)


def upcycled(dense: ConvertedCheckpoint, upcycling: Upcycling) -> ConvertedCheckpoint:
    """Returns the weights of the sparse model, each of which is computed when it is read."""
    config = upcycling.config(dense.config)
    blocks = sparse_blocks(config)
    routers = draw_routers(config, upcycling)
    weights: dict[str, LazyTensor] = {}
    for name, tensor in empty_weights(config).items():
        if name in routers:
            weights[name] = LazyTensor(tensor.shape, routers[name].dtype, routers[name].detach)
            continue
        source = dense.weights[_dense_name(name)]
        read = partial(_sparse_weight, name, source, config, upcycling)

        # A dense layer after the sparse one starts with an output of zero.
        if name.removesuffix(_DENSE_OUTPUT) in blocks:
            read = partial(torch.zeros, tensor.shape, dtype=source.dtype)
        weights[name] = LazyTensor(tensor.shape, source.dtype, read)
    return dense._replace(config=config, weights=weights)


def draw_routers(config: STMoEConfig, upcycling: Upcycling) -> dict[str, Tensor]:
    """Returns the parameters and buffers <any>[...] of the routers by name, drawn as for a new model.

    The parts of a copy have equal rows.
    """
    drawn: dict[str, Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(upcycling.seed)
        for block, (stack, _) in sparse_blocks(config).items():
            router = draw_router(config.sparse_config(decoder=stack == "decoder"), upcycling)
            for name, tensor in router.state_dict().items():
                drawn[f"{block}{_ROUTER}{name}"] = tensor
    return drawn


def draw_router(config: SparseConfig, upcycling: Upcycling) -> Router:
    """Returns a router of new numbers; the parts of a copy have equal rows."""
    router = build_router(config)
    if upcycling.granularity > 1:
        rows = router.gate.data[:: upcycling.granularity]  # [E, D]
        router.gate.data = rows.repeat_interleave(upcycling.granularity, dim=0)
    return router


def _dense_name(name: str) -> str:
    """Returns the name of the dense weight that a sparse weight is copied from."""
    name = name.replace(".sparse_norm.", ".feed_forward_norm.")
    name = name.replace(_EXPERTS + "down_proj", _DENSE_OUTPUT)
    for first_projection in ("gate_up_proj", "up_proj", "bias"):
        name = name.replace(_EXPERTS + first_projection, "feed_forward.up_proj.weight")
    return name


def _sparse_weight(
    name: str, source: LazyTensor, config: STMoEConfig, upcycling: Upcycling
) -> Tensor:
    """Returns a weight <any>[...] of the sparse model.

    Args:
        name: Its name.
        source: Weight of the dense model from which it is made.
        config: Config of the sparse model.
        upcycling: The settings.
    """
    E = upcycling.num_experts
    G = upcycling.granularity
    F = config.d_ff
    weight = source.read()
    if _EXPERTS not in name:
        return weight
    if name.endswith("bias"):
        is_factor = config.expert_bias == "multiplicative"
        return torch.full((G * E, F // G), 1.0 if is_factor else 0.0, dtype=weight.dtype)

    return expert_copies(weight, upcycling, F, is_down=name.endswith("down_proj"))


def expert_copies(weight: Tensor, upcycling: Upcycling, F: int, *, is_down: bool) -> Tensor:
    """Returns the weights of all experts that are copies, or parts of copies, of a dense layer.

    Args:
        weight: <any>[2F or F, D] (gate above up), or [D, F].
        upcycling: The settings.
        F: Number of hidden units of the dense layer.
        is_down: Whether the hidden units are columns.

    Returns:
        <any>[G E, 2F/G or F/G, D], or [G E, D, F/G].
    """
    E = upcycling.num_experts
    G = upcycling.granularity

    # Copies with their own memory: shared storage would train, and be saved, as one expert.
    copies = weight.repeat(E, 1, 1)  # [E, 2F or F, D], or [E, D, F]

    # Hidden units are cut into parts; gate and up projection are stacked.
    if is_down:
        parts = rearrange(copies, "e d (g f) -> (e g) d f", g=G)
        return parts.mul_(G)
    halves = copies.shape[1] // F
    return rearrange(copies, "e (h g f) d -> (e g) (h f) d", h=halves, g=G)
