"""Initial weights as a function of a seed and a parameter's name: the same on every mesh."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moe.distributed.mesh import MeshConfig
from moe.distributed.sharding import (
    Layout,
    MeshCoordinate,
    chunk_range,
    local_shard,
    shard_over_ep_tp,
    shard_over_fsdp,
)
from moe.sparse.experts import Experts


@torch.no_grad()
def draw_weights(
    module: nn.Module,
    seed: int,
    layouts: Mapping[str, Layout],
    mesh: MeshConfig,
    coordinate: MeshCoordinate,
) -> None:
    """Draws every parameter anew and resets buffers.

    Beside its shards a rank holds one module's weights at a time. Of stacked experts it draws only
    its own, one after the other.

    Args:
        module: Whose leaves know `reset_parameters`; whole, or sharded over a mesh.
        seed: Another seed is another model.
        layouts: Layout of each parameter by name.
        mesh: Sizes of the mesh.
        coordinate: Where this rank stands on the mesh.
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

        # A head that is the embedding has no layout of its own.
        if not leaf_layouts:
            continue
        if isinstance(leaf, Experts):
            _draw_experts(leaf, shards, leaf_layouts, f"{seed}/{path}", mesh, coordinate)
            continue
        for name, weight in _draw(leaf, leaf_layouts, f"{seed}/{path}").items():
            _copy_shard(weight, shards[name], leaf_layouts[name], mesh, coordinate)


def _draw_experts(
    experts: Experts,
    shards: dict[str, Tensor],
    layouts: dict[str, Layout],
    seed: str,
    mesh: MeshConfig,
    coordinate: MeshCoordinate,
) -> None:
    """Fills the shards of stacked experts; each expert is drawn from a seed of its own."""
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
            # Where FSDP shards the experts themselves, some belong to other ranks.
            start = 0
            end = num_local
            if layouts[name].shard_dim == 0:
                num_shards = layouts[name].num_shards
                start, end = chunk_range(num_local, num_shards, coordinate.expert_shard)
            if start <= expert < end:
                shard = shards[name][expert - start]
                _copy_shard(weight, shard, single_layouts[name], mesh, single_coordinate)


def _copy_shard(
    weight: Tensor, shard: Tensor, layout: Layout, mesh: MeshConfig, coordinate: MeshCoordinate
) -> None:
    """Copies this rank's part of a whole weight <float>[...] into its shard <float>[...]."""
    part = shard_over_ep_tp(weight, layout, mesh, coordinate)
    part = shard_over_fsdp(part, layout, coordinate)
    shard.copy_(part.reshape(shard.shape))


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
