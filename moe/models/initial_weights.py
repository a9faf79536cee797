"""Initial weights as a function of a seed and a parameter's name, so that a model starts the same
on every mesh.
"""

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
    place: MeshCoordinate,
) -> None:
    """Draws every parameter anew and resets buffers; beside its shards a rank holds one module's
    weights at a time.

    Of stacked experts it draws only its own, one after the other.

    Args:
        module: Whose leaves know `reset_parameters`; whole, or cut over a mesh.
        seed: Another seed is another model.
        layouts: Where each parameter lies.
        mesh: Sizes of the mesh.
        place: This rank's place on it.
    """
    for path, leaf in module.named_modules():
        if not hasattr(leaf, "reset_parameters"):
            continue
        shards = {
            name: local_shard(parameter) for name, parameter in leaf.named_parameters(recurse=False)
        }
        known = {name: layouts[f"{path}.{name}"] for name in shards if f"{path}.{name}" in layouts}
        if not known:
            continue  # a head that is the embedding
        if isinstance(leaf, Experts):
            _draw_experts(leaf, shards, known, f"{seed}/{path}", mesh, place)
        else:
            for name, whole in _draw(leaf, known, f"{seed}/{path}").items():
                part = shard_over_fsdp(
                    shard_over_ep_tp(whole, known[name], mesh, place), known[name], place
                )
                shards[name].copy_(part.reshape(shards[name].shape))


def _draw_experts(
    experts: Experts,
    shards: dict[str, Tensor],
    layouts: dict[str, Layout],
    seed: str,
    mesh: MeshConfig,
    place: MeshCoordinate,
) -> None:
    """Fills the shards of stacked experts; each expert is drawn from a seed of its own."""
    num_here = layouts["down_proj"].shape[0] // mesh.ep
    alone = {
        name: layout._replace(
            shape=(1, *layout.shape[1:]),
            expert=False,
            num_shards=1 if layout.shard_dim == 0 else layout.num_shards,
        )
        for name, layout in layouts.items()
    }
    at = place._replace(dense_shard=place.expert_shard)
    for expert in range(num_here):
        drawn = _draw(experts, alone, f"{seed}/{place.ep * num_here + expert}")
        for name, whole in drawn.items():
            start, end = 0, num_here
            if layouts[name].shard_dim == 0:
                start, end = chunk_range(num_here, layouts[name].num_shards, place.expert_shard)
            if start <= expert < end:
                target = shards[name][expert - start]
                target.copy_(
                    shard_over_fsdp(
                        shard_over_ep_tp(whole, alone[name], mesh, at), alone[name], at
                    ).reshape(target.shape)
                )


def _draw(leaf: nn.Module, layouts: Mapping[str, Layout], seed: str) -> dict[str, Tensor]:
    """Returns fresh whole parameters <float>[...] of a leaf by name; the leaf keeps those that it
    has.
    """
    own = dict(leaf._parameters)
    whole = {
        name: nn.Parameter(local_shard(leaf.get_parameter(name)).new_empty(layout.shape))
        for name, layout in layouts.items()
    }
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7])
    with torch.random.fork_rng(devices=[p.device for p in whole.values() if p.is_cuda][:1]):
        torch.manual_seed(number)
        try:
            leaf._parameters.update(whole)
            leaf.reset_parameters()  # pyright: ignore[reportCallIssue]  # found by the caller
        finally:
            leaf._parameters.update(own)
    return {name: parameter.detach() for name, parameter in whole.items()}
