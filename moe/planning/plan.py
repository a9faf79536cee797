"""A plan: what a model and an update need on a mesh, whether that fits, and which meshes of N ranks
need least.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from moe.distributed.mesh import AXES as MESH_AXES
from moe.distributed.mesh import MeshConfig, divisors, fitting_meshes
from moe.errors import ConfigError
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.parallelize import mesh_limits, model_layouts
from moe.planning.activations import Activations, activations
from moe.planning.flops import forward_flops, training_flops_per_token
from moe.planning.memory import gathered_bytes, optimizer_bytes, parameter_bytes
from moe.planning.traffic import AXES, Transfer, axis_sizes, group_size, traffic
from moe.planning.workload import Workload, groups_alike
from moe.sparse.groups import sequences_per_group, tokens_per_group

RANKS_OF_NODE = 8
BYTES_PER_SECOND = {"inside": 450e9, "across": 50e9}
"""Assumed for `seconds_of`: what a rank sends inside a node of `RANKS_OF_NODE`, and across, as in an HGX H100 node."""


@dataclass(frozen=True)
class Plan:
    """What a model and an update need on a mesh; bytes are of one rank, the one with most where
    they differ.

    Attributes:
        config: Of the model.
        workload: The update.
        mesh: The ranks.
        num_parameters: Of the whole model.
        num_active_parameters: That a token uses.
        flops_per_token: Of training, see `training_flops_per_token`.
        flops_per_sequence: Of a forward pass.
        parameters: Bytes of parameters.
        gradients: Bytes of gradients at the end of an update.
        optimizer: Bytes of the optimizer's state.
        gathered: Bytes of whole parameters and gradients that pass by, see `gathered_bytes`.
        activations: Bytes that a forward pass keeps.
        transfers: What the rank sends in an update.
    """

    config: STMoEConfig
    workload: Workload
    mesh: MeshConfig
    num_parameters: int
    num_active_parameters: int
    flops_per_token: float
    flops_per_sequence: float
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: Activations
    transfers: tuple[Transfer, ...]

    @property
    def memory(self) -> int:
        """Bytes of a rank in all."""
        state = self.parameters + self.gradients + self.optimizer
        return state + self.gathered + self.activations.total

    @property
    def seconds(self) -> float:
        """Seconds that a rank would send for, one thing after the other: see `seconds_of`."""
        return sum(seconds_of(transfer, self.mesh) for transfer in self.transfers)


def build_model(config: STMoEConfig) -> STMoEForConditionalGeneration:
    """Returns the model on the meta device, where it takes no memory."""
    with torch.device("meta"):
        return STMoEForConditionalGeneration(config)


def make_plan(model: nn.Module, config: STMoEConfig, workload: Workload, mesh: MeshConfig) -> Plan:
    """Returns what an update needs; the mesh must fit, see `check_mesh`.

    Args:
        model: With whole parameters, on any device; see `build_model`.
        config: Of the model.
        workload: The update.
        mesh: Sizes.
    """
    layouts = model_layouts(model, config, mesh)
    state = parameter_bytes(layouts, mesh)
    accumulates = workload.num_passes(mesh) > 1
    return Plan(
        config=config,
        workload=workload,
        mesh=mesh,
        num_parameters=config.num_parameters(),
        num_active_parameters=config.num_active_parameters(),
        flops_per_token=training_flops_per_token(config, workload),
        flops_per_sequence=forward_flops(config, workload) / workload.batch_size,
        parameters=state,
        gradients=state,
        optimizer=optimizer_bytes(layouts, mesh, workload.optimizer),
        gathered=gathered_bytes(
            layouts, mesh, bfloat16=workload.precision == "bfloat16", accumulates=accumulates
        ),
        activations=activations(config, workload, mesh),
        transfers=traffic(config, layouts, workload, mesh),
    )


def suggest(config: STMoEConfig, workload: Workload, num_ranks: int, memory: int) -> list[Plan]:
    """Returns a plan for every mesh of `num_ranks` ranks that the model and the batch allow, the
    best first.

    Those that fit into memory come first; then those that send for the fewest seconds, by
    `seconds_of`. Where the workload leaves the micro-batch open, a mesh gets the largest that fits,
    or 1 when none does: larger ones gather parameters less often.

    Args:
        config: Of the model.
        workload: The update.
        num_ranks: Ranks.
        memory: Bytes of a device.

    Raises:
        ConfigError: When there is no such mesh.
    """
    model, num_groups = build_model(config), None
    if config.num_sparse_encoder_layers or config.num_sparse_decoder_layers:
        rows, size = workload.batch_size, tokens_per_group(config)
        num_groups = math.gcd(
            *(rows // sequences_per_group(rows, length, size) for length in workload.lengths)
        )
    plans = []
    for mesh in fitting_meshes(mesh_limits(config, num_ranks, num_groups)):
        candidates = [make_plan(model, config, cut, mesh) for cut in _cuts(config, workload, mesh)]
        if candidates:
            plans.append(
                next((plan for plan in candidates if plan.memory <= memory), candidates[-1])
            )
    if not plans:
        raise ConfigError(
            f"No mesh of {num_ranks} ranks goes with the model and the batch. Choose another number of ranks, a batch "
            "size that more ranks divide, or a smaller model.group_size."
        )
    return sorted(plans, key=lambda plan: (plan.memory > memory, plan.seconds, plan.memory))


def _cuts(config: STMoEConfig, workload: Workload, mesh: MeshConfig) -> Iterator[Workload]:
    """Yields the workload with every micro-batch that it allows and that groups tokens alike, the
    largest first.
    """
    if workload.batch_size % mesh.num_data_ranks:
        return
    rows = workload.rows_of_rank(mesh)
    micro_batches = (
        [workload.micro_batch_size] if workload.micro_batch_size else reversed(divisors(rows))
    )
    for micro in micro_batches:
        cut = replace(workload, micro_batch_size=micro)
        if rows % micro == 0 and groups_alike(config, cut, mesh):
            yield cut


def seconds_of(transfer: Transfer, mesh: MeshConfig) -> float:
    """Returns how long a rank would send at `BYTES_PER_SECOND`.

    A group lies inside a node when the innermost axes up to its outermost have no more than
    `RANKS_OF_NODE` ranks. A measure to compare meshes by; a run is also bound by its products, and
    does both at the same time.
    """
    return (
        transfer.num_bytes
        / BYTES_PER_SECOND["inside" if _inside_node(transfer.axis, mesh) else "across"]
    )


def _inside_node(axis: str, mesh: MeshConfig) -> bool:
    """Returns whether every group on an axis of traffic.AXES has its ranks in one node."""
    if axis in ("ep inside a node", "ep across nodes"):
        return axis == "ep inside a node"
    sizes = axis_sizes(mesh)
    spanned = [part for part in MESH_AXES if part in AXES[axis] and sizes[part] > 1]
    if not spanned or group_size(axis, mesh) == 1:
        return True
    outermost = MESH_AXES.index(spanned[0])
    return math.prod(sizes[part] for part in MESH_AXES[outermost:]) <= RANKS_OF_NODE
