"""Bytes that one rank sends in one update, by what they are for and by the axis of the mesh that
they cross.

What is sent to n ranks is counted as it leaves this one, whatever route the backend takes: a gather
sends the own shard to the n - 1 others, a reduce-scatter a shard of the input to each of them, an
all-reduce does both with one n-th of its tensor, and an all-to-all sends what is not for this rank
itself. Rows are taken to be spread evenly over experts.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from moe.distributed.mesh import MeshConfig
from moe.distributed.sharding import Layout
from moe.models.configuration import STMoEConfig
from moe.planning.memory import Unit, fsdp_units, is_factored
from moe.planning.workload import StackPass, Workload, stack_passes
from moe.sparse.all_routers import load_routers

_WIDE, _LONG = 4, 8
"""Bytes of float32, and of int64 and float64."""

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


def axis_sizes(mesh: MeshConfig) -> dict[str, int]:
    """Returns the size of every simple axis, `ep` also by its two levels."""
    inside = mesh.ep // mesh.ep_nodes
    simple = {
        "dp_replicate": mesh.dp_replicate,
        "dp_shard": mesh.dp_shard,
        "ep": mesh.ep,
        "tp": mesh.tp,
    }
    return {**simple, "ep inside": inside, "ep across": mesh.ep_nodes}


def group_size(axis: str, mesh: MeshConfig) -> int:
    """Returns the ranks of a group on an axis of AXES."""
    sizes = axis_sizes(mesh)
    return math.prod(sizes[part] for part in AXES[axis])


def traffic(
    config: STMoEConfig, layouts: Mapping[str, Layout], workload: Workload, mesh: MeshConfig
) -> tuple[Transfer, ...]:
    """Returns everything that one rank sends in one update, equal kinds added up; what sends
    nothing is left out.

    Args:
        config: Of the model.
        layouts: By name of parameter.
        workload: Rows, lengths, precision, checkpointing.
        mesh: Sizes.
    """
    stacks = stack_passes(config, workload, mesh)
    passes = workload.num_passes(mesh)
    counts_first = config.balance_scope in ("ranks", "global") and passes * mesh.num_data_ranks > 1
    times = _Times(
        passes,
        passes * (2 if counts_first else 1),
        passes if workload.activation_checkpointing else 0,
    )
    found: dict[tuple[str, str], float] = {}
    for part in (
        _units(fsdp_units(layouts, mesh, bfloat16=workload.precision == "bfloat16"), mesh, times),
        *(_exchange(config, stack, workload.product_bytes, mesh, times) for stack in stacks),
        *(
            _tensor_parallel(config, stack, stacks[0], workload.product_bytes, mesh, times)
            for stack in stacks
        ),
        _optimizer(layouts, mesh) if workload.optimizer == "adafactor" else (),
        _statistics(config, stacks, mesh, passes if counts_first else 0),
    ):
        for what, axis, num_bytes in part:
            found[what, axis] = found.get((what, axis), 0.0) + num_bytes
    return tuple(Transfer(*key, num_bytes) for key, num_bytes in found.items() if num_bytes)


class _Times(NamedTuple):
    """How often things run in an update.

    Attributes:
        backward: Backward passes.
        forward: Forward passes; twice as many when the balance loss needs the shares of all before
            it starts.
        again: Forward passes that activation checkpointing repeats.
    """

    backward: int
    forward: int
    again: int


def _all_reduce(num_bytes: float, axis: str, mesh: MeshConfig) -> float:
    """Returns what a rank sends in an all-reduce of so many bytes."""
    size = group_size(axis, mesh)
    return 2 * num_bytes * (size - 1) / size


def _units(units: list[Unit], mesh: MeshConfig, times: _Times) -> Iterator[Transfer]:
    """Yields gathers of parameters and reductions of gradients.

    A unit is gathered for each forward and each backward pass, which includes what activation
    checkpointing runs again; the root stays from one to the other. Gradients are reduced in
    float32, once, in the last backward pass.
    """
    for unit in units:
        axis = "dp_shard" if unit.layouts[0].expert else "dp_shard x ep"
        shard, others = unit.shard_numel(mesh), unit.num_shards - 1
        gathers = times.backward if unit.root else times.forward + times.backward
        yield Transfer("parameter gathers", axis, gathers * shard * others * unit.gathered_bytes)
        yield Transfer("gradient reduce-scatter", axis, shard * others * _WIDE)
        yield Transfer(
            "gradient all-reduce", "dp_replicate", _all_reduce(shard * _WIDE, "dp_replicate", mesh)
        )


def _exchange(
    config: STMoEConfig, stack: StackPass, width: int, mesh: MeshConfig, times: _Times
) -> Iterator[Transfer]:
    """Yields exchanges of rows and of their counts: to the experts and back, forwards and
    backwards.
    """
    journeys = 2 * (times.forward + times.again + times.backward)
    tellings = times.forward + times.again if config.dispatch == "ragged" else 0
    levels = ("ep inside a node", "ep across nodes") if mesh.ep_nodes > 1 else ("ep",)
    for axis in levels:
        size = group_size(axis, mesh)
        leaving = stack.num_sparse * (size - 1) / size
        yield Transfer(
            "rows to experts and back",
            axis,
            leaving * journeys * stack.expert_rows * config.d_model * width,
        )
        yield Transfer("counts of rows", axis, leaving * tellings * config.num_experts * _LONG)


def _tensor_parallel(
    config: STMoEConfig,
    stack: StackPass,
    encoder: StackPass,
    width: int,
    mesh: MeshConfig,
    times: _Times,
) -> Iterator[Transfer]:
    """Yields all-reduces over `tp`: of every layer's output, forwards, and of its input's gradient,
    backwards.

    Outputs travel in the dtype of products, gradients of inputs in that of the residual stream,
    which is float32; the rows of a sparse layer are cast before. Activation checkpointing ends
    where it has all that it needs: before the last output of a block, unless dropout needs that.
    """
    dense = stack.num_blocks - (0 if config.sparse_dense_stacking else stack.num_sparse)
    attentions = stack.num_blocks * (2 if stack.decoder else 1)
    outputs = attentions + dense + stack.num_sparse
    again = outputs if config.dropout_rate else outputs - stack.num_blocks
    tensor = stack.num_tokens * config.d_model
    total = tensor * width * (outputs * times.forward + again * times.again)
    inputs = tensor * ((attentions + dense) * _WIDE + stack.num_sparse * width)
    if stack.num_sparse:
        layer = config.sparse_config(decoder=stack.decoder)
        learns = load_routers().get(layer.router).num_parameters(layer) > 0
        inputs += (
            stack.num_sparse * stack.num_tokens * stack.places * _WIDE * learns
        )  # weights of combine
    if stack.decoder:
        inputs += encoder.num_tokens * config.d_model * _WIDE  # the memory, once for all layers
    yield Transfer(
        "tensor-parallel sums", "tp", _all_reduce(total + inputs * times.backward, "tp", mesh)
    )


def _optimizer(layouts: Mapping[str, Layout], mesh: MeshConfig) -> Iterator[Transfer]:
    """Yields the sums of Adafactor over the axes that cut a matrix: of rows, columns, their mean,
    and two norms.
    """
    for layout in layouts.values():
        batch, last = int(layout.expert), len(layout.shape) - 1
        local = layout.local_shape(mesh)
        cuts = [
            (layout.shard_dim, "dp_shard" if layout.expert else "dp_shard x ep", layout.num_shards)
        ]
        cuts.append((-1 if layout.tp_dim is None else layout.tp_dim, "tp", mesh.tp))
        for dim, axis, size in cuts:
            if dim < batch or size == 1:
                continue
            matrices = math.prod(local[:batch])
            numbers = 2 * matrices
            if is_factored(layout):
                of_columns = math.prod(local[:-1])
                numbers += of_columns if dim == last else matrices * (local[-1] + 1)
            yield Transfer("optimizer sums", axis, _all_reduce(numbers * _WIDE, axis, mesh))


def _statistics(
    config: STMoEConfig, stacks: tuple[StackPass, StackPass], mesh: MeshConfig, balance_totals: int
) -> Iterator[Transfer]:
    """Yields counts of losses, statistics of routers, and the norm of the gradient."""
    numbers = 7 * _LONG + 2 * _WIDE
    for stack in stacks:
        numbers += stack.num_sparse * (2 * config.num_experts + stack.places + 5 + 6) * _LONG
        numbers += stack.num_sparse * balance_totals * (config.num_experts + 1) * _WIDE
    yield Transfer("statistics", "data ranks", _all_reduce(numbers, "data ranks", mesh))
    yield Transfer("statistics", "all ranks", _all_reduce(_LONG, "all ranks", mesh))
