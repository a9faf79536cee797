"""Parameters that are sharded over ranks: their state tensors, and sums over the shards.

A parameter is read as `<float>[..., n, m]`: batch dimensions, then one matrix. Its last dimension
counts the m columns, all the others together the n rows. A DTensor holds a shard of that on each
rank; everything else is whole.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from moe.distributed.sharding import Layout, chunk_of_interval, local_shard
from moe.kernels.torch_private import StridedShard

Groups = tuple[ProcessGroup, ...]
"""One process group for each mesh axis that a sum runs over."""


class PartialSum(NamedTuple):
    """A rank's part of a sum.

    Attributes:
        part: <float>[...] replaced by the sum; see `sum_in_place`.
        groups: Groups over which parts are added; without any the part is the sum already.
    """

    part: Tensor
    groups: Groups


class MatrixSharding(NamedTuple):
    """The size of a parameter's matrices, and the ranks over which they are sharded.

    An axis that shards a batch dimension is in no group: nothing is ever summed over it.

    Attributes:
        num_rows: n of the whole matrix; 1 for a vector or a scalar.
        num_columns: m of the whole matrix; 1 for a scalar.
        row_groups: Ranks with other rows of the same matrix.
        column_groups: Ranks with other columns of the same matrix.
        shard_elements: Elements of a shard, rounded up, batch dimensions included; the same number
            on every rank. 0 for a tensor that is on no mesh.
    """

    num_rows: int
    num_columns: int
    row_groups: Groups = ()
    column_groups: Groups = ()
    shard_elements: int = 0

    @property
    def groups(self) -> Groups:
        """Ranks with another shard of the same matrix."""
        return self.row_groups + self.column_groups


def matrix_sharding(parameter: Tensor, batch_dims: int) -> MatrixSharding:
    """Returns how a parameter is sharded, by its mesh and placements, without communication.

    Args:
        parameter: <float>[..., n, m] DTensor on any mesh, each axis with `Replicate`, `Shard` or
            the strided shard of FSDP; or a tensor.
        batch_dims: How many of its first dimensions count separate matrices.
    """
    # A vector is one row, a scalar one row of one column.
    matrix_shape = parameter.shape[batch_dims:]
    num_rows = math.prod(matrix_shape[:-1])
    num_columns = math.prod(matrix_shape[-1:])
    if not isinstance(parameter, DTensor):
        return MatrixSharding(num_rows, num_columns)

    mesh = parameter.device_mesh
    row_groups: list[ProcessGroup] = []
    column_groups: list[ProcessGroup] = []
    num_shards = 1
    for axis, placement in enumerate(parameter.placements):
        dim = _sharded_dim(placement)
        if dim is None or mesh.size(axis) == 1:
            continue
        num_shards *= mesh.size(axis)

        # A sharded batch dimension leaves every matrix whole.
        if dim == parameter.ndim - 1 and dim >= batch_dims:
            column_groups.append(mesh.get_group(axis))
        elif dim >= batch_dims:
            row_groups.append(mesh.get_group(axis))

    return MatrixSharding(
        num_rows=num_rows,
        num_columns=num_columns,
        row_groups=tuple(row_groups),
        column_groups=tuple(column_groups),
        shard_elements=math.ceil(parameter.numel() / num_shards),
    )


def shard_in_matrices(parameter: Tensor, batch_dims: int) -> tuple[slice, ...]:
    """Returns where this rank's shard is in the matrices of a parameter.

    Args:
        parameter: As in `matrix_sharding`.
        batch_dims: How many of its first dimensions count separate matrices. Their slices are
            whole: they are taken of the matrices that this rank has a part of.
    """
    intervals = [(0, size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh

        # A strided shard is a shard of what the other axes left.
        placements = enumerate(parameter.placements)
        for axis, placement in sorted(
            placements, key=lambda item: isinstance(item[1], StridedShard)
        ):
            dim = _sharded_dim(placement)
            if dim is not None and dim >= batch_dims:
                rank = mesh.get_local_rank(axis)
                intervals[dim] = chunk_of_interval(intervals[dim], mesh.size(axis), rank)
    return (slice(None),) * batch_dims + tuple(slice(*ends) for ends in intervals[batch_dims:])


def sharded_matrix_dims(layout: Layout) -> dict[tuple[str, ...], int]:
    """Returns the dimension that each group of mesh axes shards; axes that leave every matrix whole
    are left out.
    """
    dims: dict[tuple[str, ...], int] = {}
    if layout.num_shards > 1:
        dims[layout.fsdp_axes] = layout.shard_dim
    if layout.tp_dim is not None:
        dims[("tp",)] = layout.tp_dim
    batch_dims = int(layout.expert)
    return {axes: dim for axes, dim in dims.items() if dim >= batch_dims}


def local_gradient(parameter: Tensor) -> Tensor:
    """Returns this rank's shard of the gradient, <float>[...]."""
    grad = parameter.grad
    assert grad is not None, "step() updates only parameters with a gradient"
    if isinstance(parameter, DTensor):
        placements = grad.placements if isinstance(grad, DTensor) else "on no mesh"
        assert placements == parameter.placements, (
            f"a parameter placed as {parameter.placements} has a gradient that is placed as "
            f"{placements}"
        )
    return local_shard(grad)


def zeros_with_dims(parameter: Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns zeros <dtype>[...] with some dimensions of a parameter, placed as these are.

    For a DTensor the result is a DTensor, replicated over the axes that shard one of the other
    dimensions, so that `torch.distributed.checkpoint` can save it and bring it to another mesh.

    Args:
        parameter: <any>[...] any tensor.
        dims: Its dimensions to keep, in order.
        dtype: Dtype of the zeros.
    """
    local = local_shard(parameter)
    local_shape = [local.shape[dim] for dim in dims]
    zeros = torch.zeros(local_shape, dtype=dtype, device=local.device)
    if not isinstance(parameter, DTensor):
        return zeros

    # An empty meta tensor has the strides of the whole parameter.
    whole_shape = [parameter.shape[dim] for dim in dims]
    whole = torch.empty(whole_shape, device="meta")

    placements: list[Placement] = []
    for placement in parameter.placements:
        placements.append(_placement_with_dims(placement, dims))
    return DTensor.from_local(
        zeros,
        parameter.device_mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def sum_in_place(partial_sums: Iterable[PartialSum]) -> None:
    """Replaces each part by the sum over its groups, in one exchange for each group and dtype.

    Every rank of a group must pass parts of the same sizes in the same order.
    """
    # Parts of one group and dtype share an exchange, in the order in which they come.
    groups: dict[str, ProcessGroup] = {}
    parts_by_exchange: dict[tuple[str, torch.dtype], list[Tensor]] = {}
    for part, part_groups in partial_sums:
        for group in part_groups:
            groups[group.group_name] = group
            exchange = (group.group_name, part.dtype)
            parts_by_exchange.setdefault(exchange, []).append(part)

    for (group_name, _), parts in parts_by_exchange.items():
        flat = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(flat, group=groups[group_name])

        # Each part gets its piece of the sum back.
        sums = flat.split([part.numel() for part in parts])
        for part, total in zip(parts, sums, strict=True):
            part.copy_(total.view_as(part))


def _sharded_dim(placement: Placement) -> int | None:
    """Returns the dimension that an axis shards; None for none."""
    if isinstance(placement, Shard | StridedShard):
        return placement.dim
    assert isinstance(placement, Replicate), (
        f"a parameter is sharded or replicated, but its placement is {placement}"
    )
    return None


def _placement_with_dims(placement: Placement, dims: tuple[int, ...]) -> Placement:
    """Returns the placement of a tensor that has only the dimensions `dims` of another tensor."""
    dim = _sharded_dim(placement)
    if dim not in dims:
        return Replicate()

    # The dimension has another number among those that are kept.
    new_dim = dims.index(dim)
    if isinstance(placement, StridedShard):
        return StridedShard(new_dim, split_factor=placement.split_factor)
    return Shard(new_dim)
