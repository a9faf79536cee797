"""A plan: the requirements of a model and an update on a mesh, and the meshes of N ranks that need the least."""

from dataclasses import dataclass, replace

import torch

from moe.distributed.mesh import AXES as MESH_AXES
from moe.distributed.mesh import MeshConfig, divisors, valid_meshes
from moe.errors import ConfigError
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.parallelize import mesh_limits, model_layouts
from moe.planning.activations import Activations, activations
from moe.planning.layer_costs import forward_flops, repeated_flops
from moe.planning.memory import gathered_bytes, optimizer_bytes, parameter_bytes
from moe.planning.traffic import (
    AXES,
    Collective,
    Transfer,
    axis_sizes,
    collectives,
    group_size,
    transfers,
)
from moe.planning.workload import Workload
from moe.sparse.groups import common_num_groups, has_same_groups, tokens_per_group

RANKS_PER_NODE = 8
BYTES_PER_SECOND = {"inside": 450e9, "across": 50e9}
"""Assumed by `seconds_of`: bandwidth of a rank inside a node of `RANKS_PER_NODE`, and across nodes.

An HGX H100 node has these.
"""


@dataclass(frozen=True)
class Plan:
    """Requirements of a model and an update on a mesh.

    Bytes are per rank, for the rank with the most.

    Attributes:
        workload: The update.
        mesh: The ranks.
        num_parameters: Parameters of the whole model.
        num_active_parameters: Parameters that a token uses.
        forward_flops: Operations of a forward pass over the update, of all ranks together.
        repeated_flops: Operations in addition to one forward and one backward pass, see
            `repeated_flops`.
        parameters: Bytes of parameters.
        gradients: Bytes of gradients at the end of an update.
        optimizer: Bytes of the optimizer's state.
        gathered: Bytes of whole parameters and gradients held temporarily, see `gathered_bytes`.
        activations: Bytes that a forward pass keeps.
        collectives: Collectives of an update.
    """

    workload: Workload
    mesh: MeshConfig
    num_parameters: int
    num_active_parameters: int
    forward_flops: int
    repeated_flops: int
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: Activations
    collectives: tuple[Collective, ...]

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Bytes that the rank sends in an update."""
        return transfers(self.collectives, self.mesh)

    @property
    def num_tokens(self) -> int:
        """Tokens of inputs and targets in an update."""
        return self.workload.batch_size * sum(self.workload.lengths)

    @property
    def flops_per_token(self) -> float:
        """Operations of one forward and one backward pass for each token of inputs and targets."""
        return 3 * self.forward_flops / self.num_tokens

    @property
    def flops_per_rank(self) -> float:
        """Operations per rank and update, including recomputation."""
        return (3 * self.forward_flops + self.repeated_flops) / self.mesh.num_ranks

    @property
    def memory(self) -> int:
        """Total bytes of a rank."""
        train_state = self.parameters + self.gradients + self.optimizer
        return train_state + self.gathered + self.activations.total

    @property
    def seconds(self) -> float:
        """Seconds that a rank would send, one collective after the other: see `seconds_of`."""
        return sum(seconds_of(transfer, self.mesh) for transfer in self.transfers)


def build_model(config: STMoEConfig) -> STMoEForConditionalGeneration:
    """Returns the model on the meta device, where it takes no memory."""
    with torch.device("meta"):
        return STMoEForConditionalGeneration(config)


def make_plan(model: STMoEForConditionalGeneration, workload: Workload, mesh: MeshConfig) -> Plan:
    """Returns the requirements of an update; the mesh must fit, see `check_mesh`.

    Args:
        model: Model with whole parameters, on any device; see `build_model`.
        workload: The update.
        mesh: Sizes.
    """
    config = model.config
    layouts = model_layouts(model, config, mesh)

    # Gradients have the same layout as their parameters.
    state_bytes = parameter_bytes(layouts, mesh)
    gathered = gathered_bytes(
        layouts, mesh, bfloat16=workload.bfloat16, accumulates=workload.num_passes(mesh) > 1
    )

    return Plan(
        workload=workload,
        mesh=mesh,
        num_parameters=config.num_parameters(),
        num_active_parameters=config.num_active_parameters(),
        forward_flops=forward_flops(model, workload),
        repeated_flops=repeated_flops(model, workload, mesh),
        parameters=state_bytes,
        gradients=state_bytes,
        optimizer=optimizer_bytes(layouts, mesh, workload.optimizer, workload.optimizer_options),
        gathered=gathered,
        activations=activations(model, workload, mesh),
        collectives=collectives(model, layouts, workload, mesh),
    )


def suggest(config: STMoEConfig, workload: Workload, num_ranks: int, memory: int) -> list[Plan]:
    """Returns a plan for every mesh that the model and the batch allow, the best first.

    Meshes that fit into memory come first, ordered by their communication time, by `seconds_of`.
    If the workload does not set the micro-batch, a mesh gets the largest that fits, or 1 when none
    does: larger ones gather parameters less often.

    Args:
        config: Settings of the model.
        workload: The update.
        num_ranks: Ranks of every mesh.
        memory: Bytes of a device.

    Raises:
        ConfigError: If there is no such mesh.
    """
    # Groups of tokens never cross a rank: with sparse layers they limit the data ranks.
    model = build_model(config)
    num_groups = None
    if model.sparse_layers():
        group_size = tokens_per_group(config)
        num_groups = common_num_groups(workload.lengths, workload.batch_size, group_size)

    # One plan for each mesh that fits the model.
    plans: list[Plan] = []
    limits = mesh_limits(config, num_ranks, num_groups)
    for mesh in valid_meshes(limits):
        plan = _plan_largest_pass(model, workload, mesh, memory)
        if plan is not None:
            plans.append(plan)
    if not plans:
        raise ConfigError(
            f"No mesh of {num_ranks} ranks fits the model and the batch. Choose another number of ranks, a batch size "
            "that more ranks divide, or a smaller model.group_size."
        )

    def by_preference(plan: Plan) -> tuple[bool, float, int]:
        return plan.memory > memory, plan.seconds, plan.memory

    return sorted(plans, key=by_preference)


def _plan_largest_pass(
    model: STMoEForConditionalGeneration, workload: Workload, mesh: MeshConfig, memory: int
) -> Plan | None:
    """Returns the plan with the largest micro-batch that fits into memory, else the smallest one;
    None if the mesh does not divide the batch.
    """
    if workload.batch_size % mesh.num_data_ranks:
        return None
    rows = workload.rows_of_rank(mesh)
    sizes = divisors(rows)[::-1]
    if workload.micro_batch_size is not None:
        sizes = [workload.micro_batch_size]

    # A micro-batch divides the rank's rows, and routes tokens in the same groups as the whole
    # batch.
    has_groups = bool(model.sparse_layers())
    group_size = tokens_per_group(model.config)
    whole_batch = (workload.lengths, workload.batch_size)
    plan = None
    for size in sizes:
        if rows % size or (has_groups and not has_same_groups(*whole_batch, size, group_size)):
            continue
        plan = make_plan(model, replace(workload, micro_batch_size=size), mesh)
        if plan.memory <= memory:
            break
    return plan


def seconds_of(transfer: Transfer, mesh: MeshConfig) -> float:
    """Returns how long a rank would send at `BYTES_PER_SECOND`.

    A group is inside a node if the innermost axes up to its outermost have no more than
    `RANKS_PER_NODE` ranks. A measure to compare meshes by; a run is also bound by its products, and
    overlaps both.
    """
    network = "inside" if _is_inside_node(transfer.axis, mesh) else "across"
    return transfer.num_bytes / BYTES_PER_SECOND[network]


def _is_inside_node(axis: str, mesh: MeshConfig) -> bool:
    """Returns whether every group on an axis of traffic.AXES has its ranks in one node."""
    # For the two levels of an exchange, the name of the axis decides.
    if axis in ("ep inside a node", "ep across nodes"):
        return axis == "ep inside a node"
    if group_size(axis, mesh) == 1:
        return True

    # Neighbouring ranks lie along the innermost axis: a group spans all axes from its outermost on.
    num_spanned = 0
    num_ranks = 1
    sizes = axis_sizes(mesh)
    for name in reversed(MESH_AXES):
        num_ranks *= sizes[name]
        if name in AXES[axis] and sizes[name] > 1:
            num_spanned = num_ranks
    return num_spanned <= RANKS_PER_NODE
