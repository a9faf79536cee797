"""The device mesh: which ranks hold which part of a model and of a batch.

Its sizes are checked before ranks exist. sharding.py places parameters on it, all_to_all.py exchanges
rows over its `ep` axis.
"""

import itertools
import math
import os
from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe.checks import check, check_choice, check_integer
from moe.distributed.exchanges import (
    ExpertExchange,
    GradientReduction,
    load_expert_exchange,
    load_gradient_reduction,
)
from moe.distributed.launch import backend_of
from moe.errors import ConfigError
from moe.kernels.torch_private import flatten_mesh_axes, join_meshes, split_mesh_axis

AXES = ("dp_replicate", "dp_shard", "ep", "tp")
"""Axes of every mesh, from the slowest network to the fastest: neighbouring ranks share one `tp`."""

LostReplicaPolicy = Literal["constant_work", "shrink"]

_MAX_RANKS = 1_000_000
"""Most ranks of a mesh."""

_NUM_SUGGESTIONS = 3


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the axes of a mesh; their product is the number of ranks.

    A data rank is a coordinate on the first three axes: it holds its own rows of every batch.

    Attributes:
        dp_replicate: Replicas of everything; their gradients are all-reduced.
        dp_shard: Data ranks over which parameters are sharded, besides `ep`.
        ep: Ranks that share the experts of a layer, E / ep each. Dense parameters are sharded over
            dp_shard x ep.
        tp: Ranks that share the attention heads and hidden units of one data rank, including the
            experts' hidden units.
        ep_nodes: Nodes that an `ep` axis spans; more than 1 exchanges tokens inside nodes first,
            then across.
        gradient_reduction: Schedule by which gradients are summed, e.g. `ring`, `torus 4x4` or
            `ring 4x4 without 5,6 in bfloat16`: an algorithm, the grid of the ranks of an axis, its
            dead ranks, and the dtype of the messages. Null for torch's own collectives.
        expert_exchange: Schedule for exchanging rows over `ep`, in the same format. Null for
            torch's own.
        on_lost_replica: What happens when one of the `dp_replicate` replicas, which are launched
            separately, is lost in a step: with `constant_work`, the others take over its rows; with
            `shrink`, its rows are dropped. Null launches all ranks together, and the run ends.

    Source:
        ST-MoE (arXiv:2202.08906) §5: an outer x inner x model mesh; 2-D gradient summation
        (arXiv:2011.03641) is dp_shard x dp_replicate.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    tp: int = 1
    ep_nodes: int = 1
    gradient_reduction: str | None = None
    expert_exchange: str | None = None
    on_lost_replica: LostReplicaPolicy | None = None

    def __post_init__(self) -> None:
        for name in (*AXES, "ep_nodes"):
            value = getattr(self, name)
            check_integer(f"mesh.{name}", value, least=1, most=_MAX_RANKS)

        if self.ep % self.ep_nodes:
            raise ConfigError(
                f"mesh.ep_nodes is {self.ep_nodes}, which does not divide mesh.ep, {self.ep}. "
                "Every node must hold the same number of ranks of the axis."
            )

        self._check_gradient_reduction()
        self._check_expert_exchange()
        self._check_on_lost_replica()

    def _check_gradient_reduction(self) -> None:
        """Raises a ConfigError unless the schedule fits every group that sums gradients."""
        text = self.gradient_reduction
        if text is None:
            return
        gradients = load_gradient_reduction(text)
        groups = {
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "dp_shard x ep": self.dp_shard * self.ep,
        }
        for what, size in groups.items():
            if size > 1:
                gradients.check_group(size, what)

    def _check_expert_exchange(self) -> None:
        """Raises a ConfigError unless the schedule fits the `ep` axis."""
        name = "mesh.expert_exchange"
        text = self.expert_exchange
        if text is None:
            return
        expected = "null with mesh.ep_nodes above 1, which has two steps of torch's own"
        check(self.ep_nodes == 1, name, text, expected)
        load_expert_exchange(text).check_group(self.ep, "ep")

    def _check_on_lost_replica(self) -> None:
        """Raises a ConfigError unless there are replicas that may be lost, summed by torchft."""
        name = "mesh.on_lost_replica"
        policy = self.on_lost_replica
        if policy is None:
            return
        check_choice(name, policy, get_args(LostReplicaPolicy))
        expected = "null with mesh.gradient_reduction, whose ranks are fixed"
        check(self.gradient_reduction is None, name, policy, expected)

    @property
    def launched(self) -> "MeshConfig":
        """Mesh of the ranks of one launch: one replica if replicas may be lost, else all."""
        if self.on_lost_replica is None:
            return self
        return replace(self, dp_replicate=1, on_lost_replica=None)

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return self.num_data_ranks * self.tp

    @property
    def num_data_ranks(self) -> int:
        """Ranks that a batch is split over."""
        return self.dp_replicate * self.dp_shard * self.ep

    def __str__(self) -> str:
        sizes = asdict(self)
        return " x ".join(f"{name} {sizes[name]}" for name in AXES)


class MeshLimits(NamedTuple):
    """Numbers that the axes of a mesh must divide.

    Attributes:
        num_ranks: Number of ranks.
        num_experts: Experts of a sparse layer, E, each number once; none for a dense model.
        num_heads: Attention heads, H.
        d_ff: Hidden units of a feed-forward layer, F.
        num_groups: Groups of tokens in a forward pass of all data ranks together; None if unknown.
    """

    num_ranks: int
    num_experts: tuple[int, ...]
    num_heads: int
    d_ff: int
    num_groups: int | None = None


def check_mesh(config: MeshConfig, limits: MeshLimits) -> None:
    """Raises if a mesh does not fit, before anything is allocated.

    Raises:
        ConfigError: With every number that does not divide, and the nearest meshes that would fit.
    """
    problems = _mesh_problems(config, limits)
    if problems:
        nearest = valid_meshes(limits, nearest_to=config)[:_NUM_SUGGESTIONS]
        suggestions = "; ".join(str(mesh) for mesh in nearest) or "none with these numbers"
        raise ConfigError(
            f"The mesh {config} does not fit: {'; '.join(problems)}. "
            f"Meshes that would fit: {suggestions}."
        )


def valid_meshes(limits: MeshLimits, *, nearest_to: MeshConfig | None = None) -> list[MeshConfig]:
    """Returns every mesh of `limits.num_ranks` ranks that fits, nearest to a given one first.

    The distance of two meshes is the sum of the absolute logarithms of the factors by which their
    axes differ.

    Args:
        limits: Numbers that the axes must divide.
        nearest_to: Mesh to compare with; None for a mesh of one rank.
    """
    target = nearest_to or MeshConfig()
    num_ranks = limits.num_ranks

    # A size that an axis cannot have alone is also impossible in combination.
    ep_sizes = [ep for ep in divisors(num_ranks) if _experts_divide(limits, ep)]
    tp_sizes = [tp for tp in divisors(num_ranks) if _heads_and_units_divide(limits, tp)]

    meshes: list[MeshConfig] = []
    for ep, tp in itertools.product(ep_sizes, tp_sizes):
        if num_ranks % (ep * tp):
            continue

        # The remaining ranks are dp_replicate x dp_shard.
        num_dp_ranks = num_ranks // (ep * tp)
        for dp_replicate in divisors(num_dp_ranks):
            mesh = MeshConfig(
                dp_replicate=dp_replicate,
                dp_shard=num_dp_ranks // dp_replicate,
                ep=ep,
                tp=tp,
                ep_nodes=math.gcd(ep, target.ep_nodes),
            )
            if not _mesh_problems(mesh, limits):
                meshes.append(mesh)

    # Of equally near meshes, the smaller one comes first.
    def distance_and_size(mesh: MeshConfig) -> tuple[float, int, int, int]:
        total = 0.0
        for axis in AXES:
            factor = getattr(mesh, axis) / getattr(target, axis)
            total += abs(math.log(factor))
        return total, mesh.dp_replicate, mesh.dp_shard, mesh.ep

    meshes.sort(key=distance_and_size)
    return meshes


def divisors(number: int) -> list[int]:
    """Returns the divisors of a positive integer, smallest first."""
    small: list[int] = []
    large: list[int] = []
    for divisor in range(1, math.isqrt(number) + 1):
        if number % divisor:
            continue

        # Divisors come in pairs, except for the root of a square.
        small.append(divisor)
        if divisor * divisor != number:
            large.append(number // divisor)
    return small + large[::-1]


def _experts_divide(limits: MeshLimits, ep: int) -> bool:
    return ep == 1 or (bool(limits.num_experts) and math.gcd(*limits.num_experts) % ep == 0)


def _heads_and_units_divide(limits: MeshLimits, tp: int) -> bool:
    """Returns whether each rank of a `tp` axis gets as many heads and hidden units as the others."""
    return limits.num_heads % tp == 0 and limits.d_ff % tp == 0


def _mesh_problems(config: MeshConfig, limits: MeshLimits) -> list[str]:
    """Returns a clause for an error message for each number that does not fit."""
    # The number of ranks, and the experts of a layer over `ep`.
    problems: list[str] = []
    if config.num_ranks != limits.num_ranks:
        problems.append(f"it has {config.num_ranks} ranks, but there are {limits.num_ranks}")
    if not _experts_divide(limits, config.ep):
        numbers = [str(number) for number in limits.num_experts if number % config.ep]
        experts = " and ".join(numbers) or "0"
        problems.append(f"{experts} experts cannot be spread evenly over ep {config.ep}")

    # Heads and hidden units over `tp`.
    divided_by_tp = {"attention heads": limits.num_heads, "hidden units (d_ff)": limits.d_ff}
    for name, number in divided_by_tp.items():
        if number % config.tp:
            problems.append(f"{number} {name} cannot be spread evenly over tp {config.tp}")

    # Groups of tokens over the data ranks: a group never crosses a rank.
    data_ranks = config.num_data_ranks
    if limits.num_groups is not None and limits.num_groups % data_ranks:
        problems.append(
            f"{limits.num_groups} groups of tokens cannot be spread evenly over {data_ranks} data "
            "ranks (a smaller group_size makes more)"
        )
    return problems


class ExpertAxis(NamedTuple):
    """The ranks that share the experts of a layer.

    Attributes:
        size: Number of ranks.
        group: All ranks.
        intra_node: Ranks of this node; None for an exchange of one step.
        inter_node: Ranks with this rank's local index in all nodes; None likewise.
        exchange: Schedule for exchanging rows; None for torch's own all-to-all.
    """

    size: int
    group: ProcessGroup
    intra_node: ProcessGroup | None = None
    inter_node: ProcessGroup | None = None
    exchange: ExpertExchange | None = None


class Mesh(NamedTuple):
    """A mesh of running ranks.

    Attributes:
        config: Its sizes.
        device_mesh: With the axes `AXES`.
        dense: Mesh over which dense parameters are sharded: dp_replicate, and dp_shard x ep as one
            axis.
        experts: Mesh over which experts are sharded besides ep and tp: dp_replicate and dp_shard.
        ep: Ranks that exchange rows; None if all experts are on this rank.
        data: Ranks that hold other rows of a batch, with the same coordinate on `tp`.
        tp: Ranks that hold the same rows; None if that is only this rank.
        data_rank: Number of this rank's share of rows.
        replica: Ranks of `data` that together hold one copy of the model.
        gradients: Sums gradients by a schedule; None for torch's own.
    """

    config: MeshConfig
    device_mesh: DeviceMesh
    dense: DeviceMesh
    experts: DeviceMesh
    ep: ExpertAxis | None
    data: ProcessGroup
    tp: ProcessGroup | None
    data_rank: int
    replica: ProcessGroup
    gradients: GradientReduction | None = None

    def rows(self, num_rows: int) -> slice:
        """Returns which of a batch's rows this rank holds.

        Raises:
            ConfigError: When they cannot be spread evenly.
        """
        num_data_ranks = self.config.num_data_ranks
        if num_rows % num_data_ranks:
            raise ConfigError(
                f"A batch of {num_rows} rows cannot be spread evenly over {num_data_ranks} data "
                f"ranks ({self.config}). Choose training.batch_size as a multiple of "
                f"{num_data_ranks}, or another mesh."
            )
        rows_per_rank = num_rows // num_data_ranks
        first = self.data_rank * rows_per_rank
        return slice(first, first + rows_per_rank)


def build_mesh(config: MeshConfig, device_type: str) -> Mesh:
    """Returns the mesh over all ranks; every rank must call it.

    A single process that has not joined others makes its own process group, which `launch` ends.

    Args:
        config: Sizes.
        device_type: `cpu` or `cuda`.

    Raises:
        ConfigError: When the number of ranks differs from the mesh, or there are no such devices.
    """
    check_choice("device_type", device_type, ("cpu", "cuda"))
    num_running = dist.get_world_size() if dist.is_initialized() else 1
    if config.num_ranks != num_running:
        raise ConfigError(
            f"The mesh {config} has {config.num_ranks} ranks, but {num_running} are running. "
            f"Start as many, e.g. by torchrun --nproc-per-node {config.num_ranks}, or choose a "
            f"mesh of {num_running}."
        )

    # Otherwise torch would look for the variables of torchrun.
    if not dist.is_initialized():
        if "WORLD_SIZE" in os.environ:
            raise ConfigError(
                "torchrun started this process, but it has not joined the other ranks. Call "
                "build_mesh inside `with launch():`."
            )
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # documented
        dist.init_process_group(backend_of(device_type), store=store, rank=0, world_size=1)

    sizes = tuple(getattr(config, axis) for axis in AXES)
    device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)

    # Rows of a batch are split over the first three axes.
    data = flatten_mesh_axes(device_mesh["dp_replicate", "dp_shard", "ep"], "data")

    # Dense parameters are replicated over the first and sharded over the next two.
    dense_shard = flatten_mesh_axes(device_mesh["dp_shard", "ep"], "dense_shard")
    dense = join_meshes([device_mesh["dp_replicate"], dense_shard])

    gradients = None
    if config.gradient_reduction is not None:
        gradients = load_gradient_reduction(config.gradient_reduction)
    return Mesh(
        config=config,
        device_mesh=device_mesh,
        dense=dense,
        experts=device_mesh["dp_replicate", "dp_shard"],
        ep=_expert_axis(config, device_mesh["ep"]),
        data=data.get_group(),
        tp=device_mesh["tp"].get_group() if config.tp > 1 else None,
        data_rank=data.get_local_rank(),
        replica=dense_shard.get_group(),
        gradients=gradients,
    )


def _expert_axis(config: MeshConfig, ep: DeviceMesh) -> ExpertAxis | None:
    """Returns the ranks of this rank's `ep` axis; None if that is only this rank."""
    if config.ep == 1:
        return None
    if config.expert_exchange is not None:
        exchange = load_expert_exchange(config.expert_exchange)
        return ExpertAxis(config.ep, ep.get_group(), exchange=exchange)
    if config.ep_nodes == 1:
        return ExpertAxis(config.ep, ep.get_group())

    # Neighbouring ranks share a node: the outer part of the axis crosses nodes.
    sizes = (config.ep_nodes, config.ep // config.ep_nodes)
    levels = split_mesh_axis(ep, sizes, ("ep_inter_node", "ep_intra_node"))
    return ExpertAxis(
        size=config.ep,
        group=ep.get_group(),
        intra_node=levels["ep_intra_node"].get_group(),
        inter_node=levels["ep_inter_node"].get_group(),
    )
