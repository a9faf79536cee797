"""Which elements of a whole tensor a rank holds, and where they stand in a file that holds the
tensor row by row.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from moe.distributed.mesh import Mesh, MeshConfig
from moe.distributed.sharding import Layout, MeshCoordinate, chunk_range

ShardSlices = tuple[tuple[int, int], ...]
"""Start and end in each dimension of a whole tensor."""


def shard_slices(layout: Layout, config: MeshConfig, place: MeshCoordinate) -> ShardSlices:
    """Returns what the rank at `place` holds of a parameter, gate and up apart; see `cut` and
    `shard_over_fsdp`.
    """
    box = [(0, size) for size in layout.shape]
    if layout.expert:
        box[0] = _chunk(box[0], config.ep, place.ep)
    if layout.tp_dim is not None:
        box[layout.tp_dim] = _chunk(box[layout.tp_dim], config.tp, place.tp)
    if layout.num_shards > 1:
        box[layout.shard_dim] = _chunk(
            box[layout.shard_dim], layout.num_shards, _shard(layout, place)
        )
    return tuple(box)


def is_first_replica(layout: Layout, mesh: Mesh, place: MeshCoordinate) -> bool:
    """Returns whether this rank is the first of those that hold the same box of a parameter."""
    return (
        mesh.device_mesh.get_local_rank("dp_replicate") == 0
        and (layout.tp_dim is not None or place.tp == 0)
        and (layout.num_shards > 1 or _shard(layout, place) == 0)
    )


def contiguous_runs(box: ShardSlices, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the stretches of a whole tensor of `shape` that a box consists of: their starts and
    lengths in elements.

    Their order is that of the box's own elements, row by row.
    """
    sizes = [end - start for start, end in box]
    if 0 in sizes:
        return
    last_cut = max((dim for dim, size in enumerate(sizes) if size != shape[dim]), default=0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = math.prod(sizes[last_cut:])
    first = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    for index in itertools.product(*(range(size) for size in sizes[:last_cut])):
        yield first + sum(i * stride for i, stride in zip(index, strides, strict=False)), length


def _chunk(ends: tuple[int, int], parts: int, part: int) -> tuple[int, int]:
    """Returns start and end of one part of what lies between two ends."""
    start, end = chunk_range(ends[1] - ends[0], parts, part)
    return ends[0] + start, ends[0] + end


def _shard(layout: Layout, place: MeshCoordinate) -> int:
    """Returns the rank's number among those that FSDP shards the parameter over, or would."""
    return place.expert_shard if layout.expert else place.dense_shard
