"""The collectives of one update, and the bytes that one rank sends in them, by purpose and mesh axis.

Bytes are counted as they leave the rank, for any route of the backend: among n ranks a gather sends this rank's shard
to the n - 1 others, a reduce-scatter a shard of the input to each of them, an all-reduce does both with one n-th of its
tensor, and an all-to-all sends everything that is not for this rank itself. Rows are assumed to be spread evenly over
experts.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

from moe.distributed.mesh import MeshConfig
from moe.distributed.sharding import Layout
from moe.models.attention import Attention
from moe.models.blocks import FeedForward
from moe.models.losses import StackCounts
from moe.models.modeling import STMoEForConditionalGeneration
from moe.optim.optimizers import OPTIMIZERS
from moe.planning.memory import Unit, fsdp_units
from moe.planning.workload import (
    FLOAT32_BYTES,
    PassCounts,
    StackPass,
    Workload,
    pass_counts,
    stack_passes,
)
from moe.sparse.stats import RouterStats

_LONG_BYTES = 8
"""Bytes of int64 and float64."""

AXES: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "ep": ("ep",),
    "ep inside a node": ("ep inside",),
    "ep across nodes": ("ep across",),
    "dp_shard": ("dp_shard",),
    "dp_shard x ep": ("dp_shard", "ep"),
    "dp_replicate": ("dp_replicate",),
    "data ranks": ("dp_replicate", "dp_shard", "ep"),
    "all ranks": ("dp_replicate", "dp_shard", "ep", "tp"),
}
"""Groups of ranks that run collectives, by the axes of the mesh that they span."""

_NAMES = {axes: name for name, axes in AXES.items()}


class Kind(StrEnum):
    """A kind of collective, and the meaning of a call's payload."""

    ALL_GATHER = "all-gather"
    """Payload: the tensor that is gathered."""

    REDUCE_SCATTER = "reduce-scatter"
    """Payload: the whole tensor that a rank puts in."""

    ALL_REDUCE = "all-reduce"
    """Payload: the tensor that is summed."""

    ALL_TO_ALL = "all-to-all"
    """Payload: what all ranks put in together, including what each keeps."""


class Collective(NamedTuple):
    """Equal collectives of one update; every rank is in one group.

    Attributes:
        what: Purpose, e.g. `parameter gathers`.
        axis: A name in AXES: the ranks of a group.
        kind: Kind of collective.
        payload_bytes: Bytes of one call, see the kind.
        num_calls: Calls in an update, one after the other.
    """

    what: str
    axis: str
    kind: Kind
    payload_bytes: float
    num_calls: int

    def sent_bytes(self, mesh: MeshConfig) -> float:
        """Returns one rank's traffic in all calls."""
        size = group_size(self.axis, mesh)
        share = (size - 1) / size
        if self.kind == Kind.ALL_REDUCE:
            share = 2 * (size - 1) / size
        elif self.kind == Kind.ALL_TO_ALL:
            share /= size
        return self.payload_bytes * self.num_calls * share


class Transfer(NamedTuple):
    """Data that one rank sends in one update.

    Attributes:
        what: Purpose, e.g. `parameter gathers`.
        axis: A name in AXES.
        num_bytes: Bytes.
    """

    what: str
    axis: str
    num_bytes: float


def axis_sizes(mesh: MeshConfig) -> dict[str, int]:
    """Returns the size of every simple axis, `ep` also by its two levels."""
    return {
        "dp_replicate": mesh.dp_replicate,
        "dp_shard": mesh.dp_shard,
        "ep": mesh.ep,
        "tp": mesh.tp,
        "ep inside": mesh.ep // mesh.ep_nodes,
        "ep across": mesh.ep_nodes,
    }


def group_size(axis: str, mesh: MeshConfig) -> int:
    """Returns the ranks of a group on an axis of AXES."""
    sizes = axis_sizes(mesh)
    return math.prod(sizes[part] for part in AXES[axis])


def collectives(
    model: STMoEForConditionalGeneration,
    layouts: Mapping[str, Layout],
    workload: Workload,
    mesh: MeshConfig,
) -> tuple[Collective, ...]:
    """Returns all collectives of one update, equal ones merged.

    Collectives of one rank, or without bytes, are omitted. Optimizer sums and statistics, which are
    small, count as one message on each axis.

    Args:
        model: Whole or on a mesh, on any device.
        layouts: Layouts by name of parameter.
        workload: Rows, lengths, precision, checkpointing.
        mesh: Sizes.
    """
    stacks = stack_passes(model, workload, mesh)
    passes = pass_counts(model, workload, mesh)

    # In the order in which an update first runs them.
    units = fsdp_units(layouts, mesh, bfloat16=workload.bfloat16)
    parts = [_fsdp_collectives(units, mesh, passes)]
    for stack in stacks:
        parts.append(_expert_collectives(stack, mesh, passes))
    for stack in stacks:
        parts.append(_tensor_parallel_collectives(stack, passes))
    parts.append(_optimizer_collectives(workload, layouts, mesh))
    parts.append(_statistics_collectives(stacks, counts_first=passes.counts_first))

    # Equal ones as one.
    num_calls: Counter[tuple[str, str, Kind, float]] = Counter()
    for part in chain.from_iterable(parts):
        if part.sent_bytes(mesh):
            num_calls[part.what, part.axis, part.kind, part.payload_bytes] += part.num_calls
    return tuple(Collective(*key, calls) for key, calls in num_calls.items())


def transfers(parts: Iterable[Collective], mesh: MeshConfig) -> tuple[Transfer, ...]:
    """Returns one rank's traffic in some collectives, equal kinds added up."""
    totals: dict[tuple[str, str], float] = {}
    for part in parts:
        kind = (part.what, part.axis)
        totals[kind] = totals.get(kind, 0.0) + part.sent_bytes(mesh)
    return tuple(Transfer(*kind, total) for kind, total in totals.items())


def _fsdp_collectives(
    units: list[Unit], mesh: MeshConfig, passes: PassCounts
) -> Iterator[Collective]:
    """Yields gathers of parameters and reductions of gradients.

    Gradients are reduced in float32, once, in the last backward pass.
    """
    for unit in units:
        axis = _NAMES[unit.layouts[0].fsdp_axes]
        numel = unit.numel(mesh)

        # A unit is gathered for each forward and each backward pass, which includes what activation
        # checkpointing runs again; the root stays from one to the other.
        num_gathers = passes.forward
        if not unit.is_root:
            num_gathers += passes.backward
        gathered_bytes = numel * unit.gathered_bytes
        yield Collective("parameter gathers", axis, Kind.ALL_GATHER, gathered_bytes, num_gathers)

        # Over the shards first; then each shard over its replicas.
        gradient_bytes = numel * FLOAT32_BYTES
        yield Collective("gradient reduce-scatter", axis, Kind.REDUCE_SCATTER, gradient_bytes, 1)
        shard_bytes = unit.shard_numel(mesh) * FLOAT32_BYTES
        yield Collective("gradient all-reduce", "dp_replicate", Kind.ALL_REDUCE, shard_bytes, 1)


def _expert_collectives(
    stack: StackPass, mesh: MeshConfig, passes: PassCounts
) -> Iterator[Collective]:
    """Yields exchanges of rows and of their counts: to the experts and back, both ways."""
    num_forward = passes.forward + passes.recomputed
    num_row_exchanges = 2 * (num_forward + passes.backward)

    # Ranks with fixed slots tell each other how many they have.
    counts = "counts of rows"
    number_bytes = group_size("ep", mesh) ** 2 * _LONG_BYTES
    for layer in stack.sparse_layers:
        if layer.config.dispatch == "static":
            yield Collective(counts, "ep", Kind.ALL_TO_ALL, number_bytes, num_forward)

    # On several nodes every row crosses both levels.
    levels = ("ep",)
    if mesh.ep_nodes > 1:
        levels = ("ep inside a node", "ep across nodes")
    for axis, layer in itertools.product(levels, stack.sparse_layers):
        # Total input of all ranks of a group.
        config = layer.config
        size = group_size(axis, mesh)
        row_bytes = stack.expert_rows(layer) * stack.d_model * stack.product_bytes
        count_bytes = config.num_experts * _LONG_BYTES

        # Rows go to the experts and back in every pass; their counts, if ragged, only forwards.
        rows = "rows to experts and back"
        yield Collective(rows, axis, Kind.ALL_TO_ALL, size * row_bytes, num_row_exchanges)
        if config.dispatch == "ragged":
            yield Collective(counts, axis, Kind.ALL_TO_ALL, size * count_bytes, num_forward)


def _tensor_parallel_collectives(stack: StackPass, passes: PassCounts) -> Iterator[Collective]:
    """Yields all-reduces over `tp`: of layers' outputs forwards, of their inputs' gradients back.

    Outputs are sent in the dtype of products, gradients of inputs in the residual stream's, which
    is float32; the rows of a sparse layer are cast before.
    """
    num_dense = 0
    for module in stack.module.modules():
        num_dense += isinstance(module, Attention | FeedForward)
    num_sparse = len(stack.sparse_layers)
    num_outputs = num_dense + num_sparse

    # Activation checkpointing stops as soon as it has everything it needs: before the last output
    # of a block, unless dropout needs that.
    num_recomputed = num_outputs
    if not stack.module.dropout.p:
        num_recomputed -= len(stack.blocks)

    def summed(num_bytes: float, num_calls: int) -> Collective:
        return Collective("tensor-parallel sums", "tp", Kind.ALL_REDUCE, num_bytes, num_calls)

    # Forwards: outputs of layers.
    residual = stack.num_tokens * stack.d_model
    num_sums = num_outputs * passes.forward + num_recomputed * passes.recomputed
    yield summed(residual * stack.product_bytes, num_sums)

    # Backwards: inputs of layers, and the combine weights of a router that learns.
    yield summed(residual * FLOAT32_BYTES, num_dense * passes.backward)
    yield summed(residual * stack.product_bytes, num_sparse * passes.backward)
    for layer in stack.sparse_layers:
        if layer.router.num_parameters(layer.config):
            num_weights = stack.num_choices(layer)
            yield summed(num_weights * FLOAT32_BYTES, passes.backward)

    # The memory, once for all layers.
    if stack.memory is not None:
        memory = stack.memory.num_tokens * stack.d_model
        yield summed(memory * FLOAT32_BYTES, passes.backward)


def _optimizer_collectives(
    workload: Workload, layouts: Mapping[str, Layout], mesh: MeshConfig
) -> Iterator[Collective]:
    """Yields the sums of the optimizer over the axes that shard a parameter."""
    spec = OPTIMIZERS.get(workload.optimizer)
    numel_by_axes: Counter[tuple[str, ...]] = Counter()
    for layout in layouts.values():
        numel_by_axes.update(spec.summed_elements(layout, mesh, **workload.optimizer_options))

    for axes, numel in numel_by_axes.items():
        num_bytes = numel * FLOAT32_BYTES
        yield Collective("optimizer sums", _NAMES[axes], Kind.ALL_REDUCE, num_bytes, 1)


def _statistics_collectives(
    stacks: tuple[StackPass, StackPass], *, counts_first: bool
) -> Iterator[Collective]:
    """Yields counts of losses, statistics of routers, and the norm of the gradient."""
    # Labels and the counts of both stacks, then loss and cross-entropy.
    num_counts = 1 + len(stacks) * len(StackCounts._fields)
    num_bytes = num_counts * _LONG_BYTES + 2 * FLOAT32_BYTES
    for stack in stacks:
        for layer in stack.sparse_layers:
            # Statistics have a number for each expert, for each choice, or for all tokens.
            num_experts = layer.config.num_experts
            sizes = {
                "expert_load": num_experts,
                "accepted_load": num_experts,
                "dropped_by_choice": layer.router.num_choices(layer.config),
            }
            num_sums = sum(sizes.get(name, 1) for name in RouterStats._fields)
            num_bytes += num_sums * _LONG_BYTES

            # The choices of each expert and the number of tokens, if the balance loss needs them first.
            if counts_first:
                total_bytes = (num_experts + 1) * FLOAT32_BYTES
                is_replica = layer.config.balance_scope == "ranks"
                axis = "dp_shard x ep" if is_replica else "data ranks"
                yield Collective("statistics", axis, Kind.ALL_REDUCE, total_bytes, 1)
    yield Collective("statistics", "data ranks", Kind.ALL_REDUCE, num_bytes, 1)

    # The norm of the gradient, a number.
    yield Collective("statistics", "all ranks", Kind.ALL_REDUCE, _LONG_BYTES, 1)
