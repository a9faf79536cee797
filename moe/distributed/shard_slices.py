"""Which elements of a whole tensor a rank holds, and where a file has them that stores it by rows."""

import itertools
import math
from collections.abc import Iterator, Sequence

from moe.distributed.mesh import Mesh, MeshConfig
from moe.distributed.sharding import Layout, MeshCoordinate, chunk_range

ShardSlices = tuple[tuple[int, int], ...]
"""Start and end in each dimension of a whole tensor."""


def shard_slices(layout: Layout, config: MeshConfig, coordinate: MeshCoordinate) -> ShardSlices:
    """Returns what one rank holds of a parameter, gate and up apart.

    It is what `shard_over_ep_tp` and `shard_over_fsdp` leave of the parameter.
    """
    slices = [(0, size) for size in layout.shape]

    # ep and tp first, then FSDP within what they left.
    if layout.expert:
        slices[0] = _chunk(slices[0], config.ep, coordinate.ep)
    if layout.tp_dim is not None:
        dim = layout.tp_dim
        slices[dim] = _chunk(slices[dim], config.tp, coordinate.tp)
    if layout.num_shards > 1:
        dim = layout.shard_dim
        index = layout.shard_index(coordinate)
        slices[dim] = _chunk(slices[dim], layout.num_shards, index)
    return tuple(slices)


def is_first_replica(layout: Layout, mesh: Mesh, coordinate: MeshCoordinate) -> bool:
    """Returns whether this rank is the first of those that hold the same shard of a parameter."""
    first_of_replicas = mesh.device_mesh.get_local_rank("dp_replicate") == 0

    # An axis that does not shard the parameter holds copies of it.
    first_of_tp = layout.tp_dim is not None or coordinate.tp == 0
    first_of_fsdp = layout.num_shards > 1 or layout.shard_index(coordinate) == 0
    return first_of_replicas and first_of_tp and first_of_fsdp


def contiguous_runs(slices: ShardSlices, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the contiguous runs of elements that slices of a whole tensor consist of.

    Their order is that of the shard's own elements, row by row.

    Args:
        slices: Start and end in each dimension.
        shape: Shape of the whole tensor.

    Yields:
        Start in the whole tensor and length of each run, in elements.
    """
    sizes = [end - start for start, end in slices]
    if 0 in sizes:
        return

    # From the last sharded dimension on all elements of a run are neighbours.
    last_sharded = 0
    for dim, size in enumerate(sizes):
        if size != shape[dim]:
            last_sharded = dim
    length = math.prod(sizes[last_sharded:])

    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    starts = [start for start, _ in slices]
    first = _element_offset(starts, strides)

    # One run for each index into the dimensions before.
    outer_ranges = map(range, sizes[:last_sharded])
    for index in itertools.product(*outer_ranges):
        yield first + _element_offset(index, strides), length


def _element_offset(index: Sequence[int], strides: Sequence[int]) -> int:
    """Returns how many elements of a tensor lie before an index into its first dimensions."""
    offset = 0
    for position, stride in zip(index, strides, strict=False):
        offset += position * stride
    return offset


def _chunk(whole: tuple[int, int], num_chunks: int, index: int) -> tuple[int, int]:
    """Returns start and end of one chunk of what lies between two ends."""
    first, last = whole
    start, end = chunk_range(last - first, num_chunks, index)
    return first + start, first + end
