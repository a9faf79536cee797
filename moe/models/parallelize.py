"""A model on a mesh: layouts of its parameters, process groups, units of FSDP, and initial weights.

Initial weights are a function of a seed and a parameter's name: the same on every mesh.
"""

import hashlib
import math
import warnings
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from moe.checks import check
from moe.distributed.mesh import Mesh, MeshConfig, MeshLimits
from moe.distributed.sharding import (
    Layout,
    MeshCoordinate,
    Rule,
    chunk_range,
    copy_shard,
    distribute_parameters,
    find_layout,
    find_rule,
    local_shard,
    shard_unit,
)
from moe.models.blocks import Block
from moe.models.configuration import STMoEConfig
from moe.models.configuration_checks import refuse_quantized
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.pretrained import STMoEPreTrainedModel
from moe.sparse.adapters import unwrapped
from moe.sparse.experts import Experts
from moe.sparse.layer import SparseFeedForward


def sharding_rules(config: STMoEConfig) -> tuple[Rule, ...]:
    """Returns the rules that cover every parameter of a model.

    Source:
        ST-MoE (arXiv:2202.08906) §5: experts over data rows, hidden units over model columns;
        Megatron-LM (arXiv:1909.08053) §3 for heads. Differs: the embedding and the head are not
        sharded over `tp`.
    """
    # The gate and the up projection of a gated layer are packed in one matrix.
    gated = config.gated
    return (
        # Whole on every rank of tp.
        Rule("embedding", r"(.*\.)?embed_tokens\.weight"),
        Rule("head", r"lm_head\.weight"),
        Rule("norm", r".*_norm\.weight"),
        # Attention: each rank of tp has some of the heads.
        Rule("position bias", r".*\.position_bias\.table", tp_dim=-1),
        Rule("attention in", r".*_attention\.[qkv]_proj\.weight", tp_dim=-2),
        Rule("attention out", r".*_attention\.o_proj\.weight", tp_dim=-1),
        # Sparse layers: experts over ep, the hidden units of each over tp.
        Rule("router", r".*\.sparse_feed_forward\.router\.gate"),
        Rule("experts in", r".*\.experts\.(gate_)?up_proj", tp_dim=-2, expert=True, packed=gated),
        Rule("experts out", r".*\.experts\.down_proj", tp_dim=-1, expert=True),
        Rule("expert bias", r".*\.experts\.bias", tp_dim=-1, expert=True),
        # Shared experts: hidden units over tp, like dense layers.
        Rule("experts in", r".*\.shared_experts\.(gate_)?up_proj", tp_dim=-2, packed=gated),
        Rule("experts out", r".*\.shared_experts\.down_proj", tp_dim=-1),
        Rule("expert bias", r".*\.shared_experts\.bias", tp_dim=-1),
        # Dense layers: hidden units over tp.
        Rule("feed-forward in", r".*\.feed_forward\.up_proj\.weight", tp_dim=-2, packed=gated),
        Rule("feed-forward out", r".*\.feed_forward\.down_proj\.weight", tp_dim=-1),
        # Low-rank adapters: those of experts are whole on every rank of ep, too.
        Rule("adapter", r".*\.lora_[AB]\..*"),
    )


def mesh_limits(config: STMoEConfig, num_ranks: int, num_groups: int | None = None) -> MeshLimits:
    """Returns the sizes that a mesh of `num_ranks` ranks must divide; see `check_mesh`."""
    num_experts = {layer.num_experts for layer in config.all_sparse_configs()}
    d_ff = math.gcd(config.d_ff, config.expert_d_ff or 0)
    return MeshLimits(num_ranks, tuple(sorted(num_experts)), config.num_heads, d_ff, num_groups)


def model_layouts(model: nn.Module, config: STMoEConfig, mesh: MeshConfig) -> dict[str, Layout]:
    """Returns the layout of each parameter by name.

    Args:
        model: With whole parameters.
        config: Config of the model.
        mesh: Sizes of the mesh.

    Raises:
        ConfigError: When no rule covers one of them, or the mesh has several ranks and experts are
            quantized, or shards hidden units of a model with adapters.
    """
    if mesh.num_ranks > 1:
        refuse_quantized(config, "sharded over ranks")
    rules = sharding_rules(config)
    layouts: dict[str, Layout] = {}
    for name, parameter in model.named_parameters():
        layouts[name] = find_layout(name, parameter.shape, rules, mesh)

    has_adapters = any(layout.rule == "adapter" for layout in layouts.values())
    check(mesh.tp == 1 or not has_adapters, "mesh.tp", mesh.tp, "1 for a model with adapters")
    return layouts


def rule_names(model: STMoEPreTrainedModel) -> dict[str, str]:
    """Returns the name of each parameter's rule, i.e. its kind, by the parameter's name.

    Args:
        model: Model with whole or sharded parameters.

    Raises:
        ConfigError: When no rule covers one of them.
    """
    rules = sharding_rules(model.config)
    names: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        names[name] = find_rule(name, parameter.shape, rules).name
    return names


def shard_model(
    model: STMoEForConditionalGeneration, mesh: Mesh, *, bfloat16: bool = False, gather: bool = True
) -> dict[str, Layout]:
    """Shards a model over a mesh and returns the layout of each parameter.

    Every block is an FSDP unit, and its experts and its router are separate units; the router, the
    embedding and the head are gathered as they are, so that routing and loss stay float32.

    Args:
        model: Model with whole parameters, equal on all ranks, or on the meta device.
        mesh: The ranks.
        bfloat16: Whether the parameters of blocks are gathered in bfloat16, for autocast.
        gather: Whether FSDP shards dense parameters; False keeps all of them on each data rank, for
            inference.

    Raises:
        ConfigError: When no rule covers a parameter, or experts are quantized.
    """
    layouts = model_layouts(model, model.config, mesh.config)
    if not gather:
        layouts = {name: layout._replace(num_shards=1) for name, layout in layouts.items()}
    distribute_parameters(model, layouts, mesh)

    # The ranks with which each module computes.
    model.mesh_config = mesh.config
    model.set_parallel_axes(mesh.ep, mesh.tp)

    # The graph breaks where ranks of ep exchange, and where those of tp draw their own random numbers.
    config = model.config
    drops_shards = mesh.tp is not None and (config.dropout_rate or config.expert_dropout_rate)
    if mesh.ep is not None or drops_shards:
        model._can_compile_fullgraph = False

    if gather and mesh.config.num_data_ranks > 1:
        shard_over_data_ranks(model, Block, mesh, layouts, bfloat16=bfloat16)
    return layouts


def shard_over_data_ranks(
    model: nn.Module,
    block_class: type,
    mesh: Mesh,
    layouts: Mapping[str, Layout],
    *,
    bfloat16: bool,
) -> None:
    """Makes a model, its blocks, and their experts and routers units of FSDP.

    Args:
        model: Any Transformer; what is outside of its blocks is one unit, for `generate` too.
        block_class: Class of its blocks.
        mesh: The ranks.
        layouts: Layout of each parameter.
        bfloat16: See `shard_model`.
    """
    dims: dict[nn.Parameter, int] = {}
    for name, parameter in model.named_parameters():
        dims[parameter] = layouts[name].shard_dim

    # From the inside out: FSDP skips parameters that already belong to a unit.
    blocks = [module for module in model.modules() if isinstance(module, block_class)]
    for block in blocks:
        for layer in block.modules():
            if not isinstance(layer, SparseFeedForward):
                continue
            if mesh.experts.size() > 1:
                shard_unit(unwrapped(layer.experts), mesh, dims, experts=True, bfloat16=bfloat16)

            # A router is a separate unit only if it must stay wider than its block.
            has_gate = next(layer.router.parameters(), None) is not None
            if bfloat16 and has_gate:
                shard_unit(layer.router, mesh, dims, experts=False, bfloat16=False)
        shard_unit(block, mesh, dims, experts=False, bfloat16=bfloat16)
    shard_unit(model, mesh, dims, experts=False, bfloat16=False)
    model.register_forward_hook(_free_without_gradient)
    if hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")

    # The router's logits by sequence are views of a tensor with a gradient. FSDP2 warns that writing
    # into them before the backward pass is an error, which nothing here does.
    message = rf"FSDP2-wrapped module \({type(model).__name__}\) returned a view tensor"
    warnings.filterwarnings("ignore", message, UserWarning)


def _free_without_gradient(model: nn.Module, *_: object) -> None:
    """Frees what FSDP keeps for a backward pass, if there is none.

    An update between an evaluation and the next forward pass would otherwise leave it stale.
    """
    if not torch.is_grad_enabled():
        cast(FSDPModule, model).reshard()


@torch.no_grad()
def draw_weights(
    module: nn.Module,
    seed: int,
    layouts: Mapping[str, Layout],
    mesh: MeshConfig,
    coordinate: MeshCoordinate,
) -> None:
    """Re-initializes every parameter and resets buffers.

    Besides its shards, a rank holds one module's weights at a time. It draws only its own experts,
    one at a time.

    Args:
        module: Its leaves have `reset_parameters`; whole, or sharded over a mesh.
        seed: Different seeds give different models.
        layouts: Layout of each parameter by name.
        mesh: Sizes of the mesh.
        coordinate: Coordinate of this rank on the mesh.
    """
    for path, leaf in module.named_modules():
        if not hasattr(leaf, "reset_parameters"):
            continue

        shards: dict[str, Tensor] = {}
        leaf_layouts: dict[str, Layout] = {}
        for name, parameter in leaf.named_parameters(recurse=False):
            shards[name] = local_shard(parameter)
            if f"{path}.{name}" in layouts:
                leaf_layouts[name] = layouts[f"{path}.{name}"]

        # A head that is the embedding has no separate layout.
        if not leaf_layouts:
            continue
        if isinstance(leaf, Experts) and leaf_layouts["down_proj"].expert:
            _draw_experts(leaf, shards, leaf_layouts, f"{seed}/{path}", mesh, coordinate)
            continue
        for name, weight in _draw(leaf, leaf_layouts, f"{seed}/{path}").items():
            copy_shard(weight, shards[name], leaf_layouts[name], mesh, coordinate)


def _draw_experts(
    experts: Experts,
    shards: dict[str, Tensor],
    layouts: dict[str, Layout],
    seed: str,
    mesh: MeshConfig,
    coordinate: MeshCoordinate,
) -> None:
    """Fills the shards of stacked experts; each expert is drawn from its own seed."""
    num_local = layouts["down_proj"].shape[0] // mesh.ep

    # Layouts of a single expert: not over ep, and over FSDP only where that shards within experts.
    single_layouts: dict[str, Layout] = {}
    for name, layout in layouts.items():
        single_layouts[name] = layout._replace(
            shape=(1, *layout.shape[1:]),
            expert=False,
            num_shards=1 if layout.shard_dim == 0 else layout.num_shards,
        )
    single_coordinate = coordinate._replace(dense_shard=coordinate.expert_shard)

    for expert in range(num_local):
        number = coordinate.ep * num_local + expert
        weights = _draw(experts, single_layouts, f"{seed}/{number}")
        for name, weight in weights.items():
            # If FSDP shards the experts dimension itself, some experts belong to other ranks.
            start = 0
            end = num_local
            if layouts[name].shard_dim == 0:
                num_shards = layouts[name].num_shards
                start, end = chunk_range(num_local, num_shards, coordinate.expert_shard)
            if start <= expert < end:
                shard = shards[name][expert - start]
                copy_shard(weight, shard, single_layouts[name], mesh, single_coordinate)


def _draw(leaf: nn.Module, layouts: Mapping[str, Layout], seed: str) -> dict[str, Tensor]:
    """Returns fresh whole parameters <float>[...] of a leaf by name; the leaf keeps its own."""
    whole: dict[str, nn.Parameter] = {}
    for name, layout in layouts.items():
        empty = local_shard(leaf.get_parameter(name)).new_empty(layout.shape)
        whole[name] = nn.Parameter(empty)
    devices = [parameter.device for parameter in whole.values() if parameter.is_cuda]

    # The leaf draws its weights itself, with whole parameters for its shards.
    shards = dict(leaf._parameters)
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7])
    with torch.random.fork_rng(devices=devices[:1]):
        torch.manual_seed(number)
        try:
            leaf._parameters.update(whole)
            leaf.reset_parameters()  # pyright: ignore[reportCallIssue]  # found by the caller
        finally:
            leaf._parameters.update(shards)
    return {name: parameter.detach() for name, parameter in whole.items()}
