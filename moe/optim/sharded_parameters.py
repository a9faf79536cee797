"""Parameters that are cut over ranks: how, what a state beside them looks like, and sums over what
is cut.

A parameter is read as `<float>[..., R, C]`: batch dimensions, then one matrix. Columns are its last
dimension, rows all the others. A DTensor holds a shard of that on each rank; everything else is
whole.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from moe.kernels.torch_private import StridedShard

Groups = tuple[ProcessGroup, ...]
"""One process group for each mesh axis that a sum runs over."""

Part = tuple[Tensor, Groups]
"""What this rank has of a sum, and the groups over which parts are added. Parts of no group are sums already."""


class Cut(NamedTuple):
    """The size of a parameter's matrices, and the ranks among which they are cut.

    An axis that cuts a batch dimension is in no group: nothing is ever summed over it.

    Attributes:
        num_rows: R of the whole matrix; 1 for a vector or a scalar.
        num_columns: C of the whole matrix; 1 for a scalar.
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
        """Ranks with another part of the same matrix."""
        return self.row_groups + self.column_groups


def cut_of(parameter: Tensor, batch_dims: int) -> Cut:
    """Returns how <float>[..., R, C] is cut, from its mesh and placements; no rank is asked.

    Args:
        parameter: DTensor on any mesh, each axis with `Replicate`, `Shard` or the strided shard of
            FSDP; or a tensor.
        batch_dims: How many of its first dimensions count separate matrices.
    """
    num_rows, num_columns = (
        math.prod(parameter.shape[batch_dims:-1]),
        math.prod(parameter.shape[batch_dims:][-1:]),
    )
    if not isinstance(parameter, DTensor):
        return Cut(num_rows, num_columns)
    mesh, row_groups, column_groups, num_shards = parameter.device_mesh, [], [], 1
    for axis, placement in enumerate(parameter.placements):
        dim = _cut_dim(placement)
        if dim is None or mesh.size(axis) == 1:
            continue
        num_shards *= mesh.size(axis)
        if dim >= batch_dims:
            groups = column_groups if dim == parameter.ndim - 1 else row_groups
            groups.append(mesh.get_group(axis))
    shard_elements = math.ceil(parameter.numel() / num_shards)
    return Cut(num_rows, num_columns, tuple(row_groups), tuple(column_groups), shard_elements)


def local_part(x: Tensor) -> Tensor:
    """Returns what this rank holds of <any>[...], in the same memory; call it without gradients."""
    return x.to_local() if isinstance(x, DTensor) else x


def zeros_along(parameter: Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns zeros <dtype>[...] with some dimensions of a parameter, placed as these are.

    Beside a DTensor stands a DTensor, replicated over the axes that cut one of the other
    dimensions, so that `torch.distributed.checkpoint` can save it and bring it to another mesh.

    Args:
        parameter: Any tensor.
        dims: Its dimensions to keep, in order.
        dtype: Of the zeros.
    """
    local = local_part(parameter)
    zeros = torch.zeros([local.shape[dim] for dim in dims], dtype=dtype, device=local.device)
    if not isinstance(parameter, DTensor):
        return zeros
    whole = torch.empty([parameter.shape[dim] for dim in dims], device="meta")
    placements = [_along(placement, dims) for placement in parameter.placements]
    return DTensor.from_local(
        zeros,
        parameter.device_mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def sum_parts(parts: Iterable[Part]) -> None:
    """Replaces each part by the sum over its groups, in one exchange for each group and dtype.

    Every rank of a group must come with parts of the same sizes in the same order.
    """
    by_group: dict[tuple[str, torch.dtype], tuple[ProcessGroup, list[Tensor]]] = {}
    for part, groups in parts:
        for group in groups:
            by_group.setdefault((group.group_name, part.dtype), (group, []))[1].append(part)
    for group, tensors in by_group.values():
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=group)
        for tensor, total in zip(
            tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True
        ):
            tensor.copy_(total.view_as(tensor))


def _cut_dim(placement: Placement) -> int | None:
    """Returns the dimension that an axis cuts, None for none."""
    if isinstance(placement, Shard | StridedShard):
        return placement.dim
    assert isinstance(placement, Replicate), (
        f"a parameter is cut or replicated, but its placement is {placement}"
    )
    return None


def _along(placement: Placement, dims: tuple[int, ...]) -> Placement:
    """Returns the placement of a tensor that has only `dims` of another one."""
    dim = _cut_dim(placement)
    if dim not in dims:
        return Replicate()
    if isinstance(placement, StridedShard):
        return StridedShard(dims.index(dim), split_factor=placement.split_factor)
    return Shard(dims.index(dim))
