"""The mesh: which ranks hold which part of a model and of a batch. Comes first; sharding.py and
exchange.py use it.
"""

import itertools
import math
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe.checks import check, check_choice, check_integer
from moe.errors import ConfigError
from moe.kernels.torch_private import flatten_mesh_axes, join_meshes, split_mesh_axis

AXES = ("dp_replicate", "dp_shard", "ep", "tp")
"""Axes of every mesh, from the slowest network to the fastest: neighbouring ranks are of one `tp`."""

MOST_RANKS = 1_000_000
"""Most ranks of a mesh."""

WHY_MOST_RANKS = "no cluster has more devices"

_SHOWN = 3


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the axes of a mesh; their product is the number of ranks.

    A data rank is a place on the first three axes: it holds its own rows of every batch.

    Attributes:
        dp_replicate: Replicas of everything; their gradients are all-reduced.
        dp_shard: Data ranks over which parameters are sharded beside `ep`.
        ep: Ranks that the experts of a layer are spread over, E / ep each. Dense parameters are
            sharded over dp_shard x ep.
        tp: Ranks that share one data rank's attention heads and hidden units, also those inside an
            expert.
        ep_nodes: Nodes that an `ep` axis spans; more than 1 exchanges tokens inside nodes first,
            then across.

    Source:
        ST-MoE (arXiv:2202.08906) §5: an outer x inner x model mesh; 2-D gradient summation
        (arXiv:2011.03641) is dp_shard x dp_replicate.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    tp: int = 1
    ep_nodes: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            check_integer(f"mesh.{name}", value, least=1, most=MOST_RANKS, reason=WHY_MOST_RANKS)
        check(
            self.num_ranks <= MOST_RANKS,
            "mesh",
            self,
            f"at most {MOST_RANKS:,} ranks in all ({WHY_MOST_RANKS})",
        )
        if self.ep % self.ep_nodes:
            raise ConfigError(
                f"mesh.ep_nodes is {self.ep_nodes}, which does not divide mesh.ep, {self.ep}. Every node must hold "
                "the same number of ranks of the axis."
            )

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return self.num_data_ranks * self.tp

    @property
    def num_data_ranks(self) -> int:
        """Parts that a batch is cut into."""
        return self.dp_replicate * self.dp_shard * self.ep

    def __str__(self) -> str:
        sizes = asdict(self)
        return " x ".join(f"{name} {sizes[name]}" for name in AXES)


class MeshLimits(NamedTuple):
    """What the axes of a mesh must divide.

    Attributes:
        num_ranks: Ranks that there are.
        num_experts: Experts of a sparse layer, E; 0 for none.
        num_heads: Attention heads, H.
        d_ff: Hidden units of a feed-forward layer, F.
        num_groups: Groups that tokens of a forward pass are routed in, of all data ranks together;
            None if unknown.
    """

    num_ranks: int
    num_experts: int
    num_heads: int
    d_ff: int
    num_groups: int | None = None


def check_mesh(config: MeshConfig, limits: MeshLimits) -> None:
    """Refuses a mesh that does not fit, before anything is allocated.

    Raises:
        ConfigError: With every number that does not go, and the nearest meshes that would.
    """
    if wrong := _misfits(config, limits):
        near = fitting_meshes(limits, near=config)[:_SHOWN]
        advice = "; ".join(str(mesh) for mesh in near) or "none with these numbers"
        raise ConfigError(
            f"The mesh {config} does not fit: {'; '.join(wrong)}. Meshes that would fit: {advice}."
        )


def fitting_meshes(limits: MeshLimits, *, near: MeshConfig | None = None) -> list[MeshConfig]:
    """Returns every mesh of `limits.num_ranks` ranks that fits, the nearest to `near` first.

    Near is a small sum of the factors (as logarithms) by which axes differ.
    """
    near = near or MeshConfig()
    num_ranks = limits.num_ranks
    check_integer("The number of ranks", num_ranks, least=1, most=MOST_RANKS, reason=WHY_MOST_RANKS)

    # What does not fit by itself is left out before it is combined with anything.
    ep_sizes = [ep for ep in divisors(num_ranks) if _can_spread_experts(limits, ep)]
    tp_sizes = [
        tp for tp in divisors(num_ranks) if limits.num_heads % tp == 0 and limits.d_ff % tp == 0
    ]
    found = []
    for ep, tp in itertools.product(ep_sizes, tp_sizes):
        if num_ranks % (ep * tp):
            continue
        for replicate in divisors(num_ranks // (ep * tp)):
            shard = num_ranks // (ep * tp * replicate)
            config = MeshConfig(replicate, shard, ep, tp, math.gcd(ep, near.ep_nodes))
            if not _misfits(config, limits):
                found.append(config)
    found.sort(
        key=lambda config: (config.dp_replicate, config.dp_shard, config.ep)
    )  # of equally near ones the smaller

    def distance(config: MeshConfig) -> float:
        return sum(abs(math.log(getattr(config, axis) / getattr(near, axis))) for axis in AXES)

    return sorted(found, key=distance)


def divisors(number: int) -> list[int]:
    """Returns the divisors of a positive integer, smallest first."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    large = [number // size for size in reversed(small) if size * size != number]
    return small + large


def _can_spread_experts(limits: MeshLimits, ep: int) -> bool:
    """Returns whether each rank of an `ep` axis gets as many experts as the others."""
    return ep == 1 or (limits.num_experts > 0 and limits.num_experts % ep == 0)


def _misfits(config: MeshConfig, limits: MeshLimits) -> list[str]:
    """Returns what does not fit, in words."""
    ep, tp, data = config.ep, config.tp, config.num_data_ranks
    wrong = []
    if config.num_ranks != limits.num_ranks:
        wrong.append(f"it has {config.num_ranks} ranks, but there are {limits.num_ranks}")
    if not _can_spread_experts(limits, ep):
        wrong.append(f"{limits.num_experts} experts cannot be spread evenly over ep {ep}")
    for name, number in (
        ("attention heads", limits.num_heads),
        ("hidden units (d_ff)", limits.d_ff),
    ):
        if number % tp:
            wrong.append(f"{number} {name} cannot be spread evenly over tp {tp}")
    if limits.num_groups is not None and limits.num_groups % data:
        groups = f"{limits.num_groups} groups of tokens"
        wrong.append(
            f"{groups} cannot be spread evenly over {data} data ranks (a smaller group_size makes more)"
        )
    return wrong


class ExpertAxis(NamedTuple):
    """The ranks that the experts of a layer are spread over.

    Attributes:
        size: How many.
        group: All of them.
        inside: Those of this node; None for an exchange of one level.
        across: Those with this rank's place in the other nodes; None likewise.
    """

    size: int
    group: ProcessGroup
    inside: ProcessGroup | None = None
    across: ProcessGroup | None = None


class Mesh(NamedTuple):
    """A mesh of running ranks.

    Attributes:
        config: Its sizes.
        device_mesh: With the axes `AXES`.
        dense: What dense parameters are sharded over: dp_replicate, and dp_shard x ep in one axis.
        experts: What experts are sharded over beside ep and tp: dp_replicate and dp_shard.
        ep: The exchange's ranks; None when all experts are here.
        data: Ranks that hold other rows of a batch and the same place in `tp`.
        tp: Ranks that hold the same rows; None when that is this rank alone.
        data_rank: Which rows this rank holds.
    """

    config: MeshConfig
    device_mesh: DeviceMesh
    dense: DeviceMesh
    experts: DeviceMesh
    ep: ExpertAxis | None
    data: ProcessGroup
    tp: ProcessGroup | None
    data_rank: int

    def rows(self, num_rows: int) -> slice:
        """Returns which of a batch's rows this rank holds.

        Raises:
            ConfigError: When they cannot be spread evenly.
        """
        parts = self.config.num_data_ranks
        if num_rows % parts:
            raise ConfigError(
                f"A batch of {num_rows} rows cannot be spread evenly over {parts} data ranks ({self.config}). Choose "
                f"training.batch_size as a multiple of {parts}, or another mesh."
            )
        share = num_rows // parts
        return slice(self.data_rank * share, (self.data_rank + 1) * share)


def build_mesh(config: MeshConfig, device_type: str) -> Mesh:
    """Returns the mesh over all ranks; every rank must call it.

    Args:
        config: Sizes.
        device_type: `cpu` or `cuda`.

    Raises:
        ConfigError: When there are more or fewer ranks than the mesh has, or no such devices.
    """
    check_choice("device_type", device_type, ("cpu", "cuda"))
    world = dist.get_world_size() if dist.is_initialized() else 1
    if config.num_ranks != world:
        raise ConfigError(
            f"The mesh {config} has {config.num_ranks} ranks, but {world} are running. Start as many, e.g. by "
            f"torchrun --nproc-per-node {config.num_ranks}, or choose a mesh of {world}."
        )
    sizes = asdict(config)
    whole = init_device_mesh(device_type, tuple(sizes[axis] for axis in AXES), mesh_dim_names=AXES)
    data = flatten_mesh_axes(whole["dp_replicate", "dp_shard", "ep"], "data")
    dense_shard = flatten_mesh_axes(whole["dp_shard", "ep"], "dense_shard")
    return Mesh(
        config=config,
        device_mesh=whole,
        dense=join_meshes([whole["dp_replicate"], dense_shard]),
        experts=whole["dp_replicate", "dp_shard"],
        ep=_expert_axis(config, whole),
        data=data.get_group(),
        tp=whole["tp"].get_group() if config.tp > 1 else None,
        data_rank=data.get_local_rank(),
    )


def _expert_axis(config: MeshConfig, whole: DeviceMesh) -> ExpertAxis | None:
    """Returns the ranks of this rank's `ep` axis."""
    if config.ep == 1:
        return None
    ep = whole["ep"]
    if config.ep_nodes == 1:
        return ExpertAxis(config.ep, ep.get_group())
    sizes = (config.ep_nodes, config.ep // config.ep_nodes)
    levels = split_mesh_axis(ep, sizes, ("ep_across", "ep_inside"))
    return ExpertAxis(
        config.ep, ep.get_group(), levels["ep_inside"].get_group(), levels["ep_across"].get_group()
    )
