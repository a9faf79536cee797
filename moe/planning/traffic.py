"""Bytes that one rank sends in one update, by what they are for and the mesh axis that they cross.

What is sent to n ranks is counted as it leaves this one, whatever route the backend takes: a gather
sends the own shard to the n - 1 others, a reduce-scatter a shard of the input to each of them, an
all-reduce does both with one n-th of its tensor, and an all-to-all sends what is not for this rank
itself. Rows are taken to be spread evenly over experts.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from moe.distributed.mesh import MeshConfig
from moe.distributed.sharding import Layout
from moe.models.attention import Attention
from moe.models.blocks import FeedForward
from moe.models.modeling import STMoEForConditionalGeneration
from moe.optim.optimizers import OPTIMIZERS
from moe.planning.memory import Unit, fsdp_units
from moe.planning.workload import FLOAT32_BYTES, StackPass, Workload, stack_passes
from moe.sparse.losses import num_scope_ranks

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
"""Groups of ranks that something crosses, by the axes of the mesh that they span."""

_NAMES = {axes: name for name, axes in AXES.items()}


class Transfer(NamedTuple):
    """What one rank sends in one update.

    Attributes:
        what: What for.
        axis: A name in AXES.
        num_bytes: How much.
    """

    what: str
    axis: str
    num_bytes: float


class PassCounts(NamedTuple):
    """How often passes run in an update.

    Attributes:
        backward: Backward passes.
        forward: Forward passes; twice as many when the balance loss needs the shares of all before
            it starts.
        recomputed: Forward passes that activation checkpointing repeats.
    """

    backward: int
    forward: int
    recomputed: int


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


def traffic(
    model: STMoEForConditionalGeneration,
    layouts: Mapping[str, Layout],
    workload: Workload,
    mesh: MeshConfig,
) -> tuple[Transfer, ...]:
    """Returns everything that one rank sends in one update, equal kinds added up.

    What sends nothing is left out.

    Args:
        model: Whole or on a mesh, on any device.
        layouts: Layouts by name of parameter.
        workload: Rows, lengths, precision, checkpointing.
        mesh: Sizes.
    """
    stacks = stack_passes(model, workload, mesh)
    num_passes = workload.num_passes(mesh)

    # A balance loss over more than one pass needs all counts first: a forward pass of its own.
    scope = model.config.balance_scope
    is_wide = scope in ("ranks", "global")
    counts_first = is_wide and num_passes * num_scope_ranks(scope, mesh) > 1
    num_balance_totals = num_passes if counts_first else 0
    passes = PassCounts(
        backward=num_passes,
        forward=num_passes + num_balance_totals,
        recomputed=num_passes if workload.activation_checkpointing else 0,
    )

    # Each part in the order in which an update comes to it first.
    units = fsdp_units(layouts, mesh, bfloat16=workload.bfloat16)
    parts = [_fsdp_transfers(units, mesh, passes)]
    for stack in stacks:
        parts.append(_expert_transfers(stack, mesh, passes))
    for stack in stacks:
        parts.append(_tensor_parallel_transfers(stack, mesh, passes))
    parts.append(_optimizer_transfers(workload, layouts, mesh))
    parts.append(_statistics_transfers(stacks, mesh, num_balance_totals))

    # Equal kinds added up.
    totals: dict[tuple[str, str], float] = {}
    for transfer in chain.from_iterable(parts):
        kind = (transfer.what, transfer.axis)
        totals[kind] = totals.get(kind, 0.0) + transfer.num_bytes
    return tuple(Transfer(*kind, total) for kind, total in totals.items() if total)


def _all_reduce(
    what: str,
    axis: str,
    num_bytes: float,
    mesh: MeshConfig,
) -> Transfer:
    """Returns what a rank sends in an all-reduce of so many bytes."""
    size = group_size(axis, mesh)
    return Transfer(what, axis, 2 * num_bytes * (size - 1) / size)


def _fsdp_transfers(
    units: list[Unit],
    mesh: MeshConfig,
    passes: PassCounts,
) -> Iterator[Transfer]:
    """Yields gathers of parameters and reductions of gradients.

    Gradients are reduced in float32, once, in the last backward pass.
    """
    for unit in units:
        axis = _NAMES[unit.layouts[0].fsdp_axes]
        shard_numel = unit.shard_numel(mesh)
        num_others = unit.num_shards - 1

        # A unit is gathered for each forward and each backward pass, which includes what activation
        # checkpointing runs again; the root stays from one to the other.
        num_gathers = passes.backward
        if not unit.is_root:
            num_gathers += passes.forward
        shard_bytes = shard_numel * unit.gathered_bytes
        yield Transfer("parameter gathers", axis, num_gathers * shard_bytes * num_others)

        # Over the shards first; then each shard over its replicas.
        gradient_bytes = shard_numel * FLOAT32_BYTES
        yield Transfer("gradient reduce-scatter", axis, gradient_bytes * num_others)
        yield _all_reduce("gradient all-reduce", "dp_replicate", gradient_bytes, mesh)


def _expert_transfers(
    stack: StackPass,
    mesh: MeshConfig,
    passes: PassCounts,
) -> Iterator[Transfer]:
    """Yields exchanges of rows and of their counts: to the experts and back, both ways."""
    if not stack.sparse_layers:
        return
    config = stack.sparse_layers[0].config
    num_layers = len(stack.sparse_layers)

    # Rows go to the experts and back in every pass; their counts, if ragged, only forwards.
    num_forward = passes.forward + passes.recomputed
    num_row_exchanges = 2 * (num_forward + passes.backward)
    num_count_exchanges = num_forward if config.dispatch == "ragged" else 0
    row_bytes = stack.expert_rows * stack.d_model * stack.product_bytes
    count_bytes = config.num_experts * _LONG_BYTES

    # On several nodes every row crosses both levels.
    levels = ("ep",)
    if mesh.ep_nodes > 1:
        levels = ("ep inside a node", "ep across nodes")
    for axis in levels:
        # What stays on this rank is not sent.
        size = group_size(axis, mesh)
        sent = num_layers * (size - 1) / size
        rows = sent * num_row_exchanges * row_bytes
        counts = sent * num_count_exchanges * count_bytes
        yield Transfer("rows to experts and back", axis, rows)
        yield Transfer("counts of rows", axis, counts)


def _tensor_parallel_transfers(
    stack: StackPass,
    mesh: MeshConfig,
    passes: PassCounts,
) -> Iterator[Transfer]:
    """Yields all-reduces over `tp`: of layers' outputs forwards, of their inputs' gradients back.

    Outputs travel in the dtype of products, gradients of inputs in that of the residual stream,
    which is float32; the rows of a sparse layer are cast before.
    """
    num_dense = 0
    for module in stack.module.modules():
        num_dense += isinstance(module, Attention | FeedForward)
    num_sparse = len(stack.sparse_layers)
    num_outputs = num_dense + num_sparse

    # Activation checkpointing ends where it has all that it needs: before the last output of a
    # block, unless dropout needs that.
    num_recomputed = num_outputs
    if not stack.module.dropout.p:
        num_recomputed -= len(stack.blocks)

    # Forwards: outputs of layers.
    residual = stack.num_tokens * stack.d_model
    num_sums = num_outputs * passes.forward + num_recomputed * passes.recomputed
    output_bytes = residual * stack.product_bytes * num_sums

    # Backwards: inputs of layers, and the combine weights of a router that learns.
    input_bytes = residual * num_dense * FLOAT32_BYTES
    input_bytes += residual * num_sparse * stack.product_bytes
    for layer in stack.sparse_layers:
        if layer.router.num_parameters(layer.config):
            input_bytes += stack.num_tokens * stack.num_choices * FLOAT32_BYTES

    # The memory, once for all layers.
    if stack.memory is not None:
        input_bytes += stack.memory.num_tokens * stack.d_model * FLOAT32_BYTES

    num_bytes = output_bytes + input_bytes * passes.backward
    yield _all_reduce("tensor-parallel sums", "tp", num_bytes, mesh)


def _optimizer_transfers(
    workload: Workload,
    layouts: Mapping[str, Layout],
    mesh: MeshConfig,
) -> Iterator[Transfer]:
    """Yields the sums of the optimizer over the axes that shard a parameter."""
    spec = OPTIMIZERS.get(workload.optimizer)
    for layout in layouts.values():
        summed = spec.summed_elements(layout, mesh, **workload.optimizer_options)
        for axes, numel in summed.items():
            yield _all_reduce("optimizer sums", _NAMES[axes], numel * FLOAT32_BYTES, mesh)


def _statistics_transfers(
    stacks: tuple[StackPass, StackPass],
    mesh: MeshConfig,
    num_balance_totals: int,
) -> Iterator[Transfer]:
    """Yields counts of losses, statistics of routers, and the norm of the gradient."""
    # Counts of the losses, then the two losses.
    num_bytes = 7 * _LONG_BYTES + 2 * FLOAT32_BYTES
    for stack in stacks:
        for layer in stack.sparse_layers:
            # Sums by expert and by choice, and those over all tokens.
            num_experts = layer.config.num_experts
            num_sums = 2 * num_experts + stack.num_choices + 5 + 6
            num_bytes += num_sums * _LONG_BYTES

            # Choices of each expert and their number, when the balance loss needs them first.
            total_bytes = num_balance_totals * (num_experts + 1) * FLOAT32_BYTES
            is_replica = layer.config.balance_scope == "ranks"
            axis = "dp_shard x ep" if is_replica else "data ranks"
            yield _all_reduce("statistics", axis, total_bytes, mesh)
    yield _all_reduce("statistics", "data ranks", num_bytes, mesh)

    # The norm of the gradient, a number.
    yield _all_reduce("statistics", "all ranks", _LONG_BYTES, mesh)
