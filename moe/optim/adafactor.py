"""Adafactor as T5X runs it: factored second moments, clipped updates, steps relative to a parameter.

Letters of the paper: X_t parameter, G_t gradient, R_t and C_t moments of rows and columns, V_t
second moments, U_t update; n rows and m columns in a matrix.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from moe.distributed.mesh import MeshConfig
from moe.distributed.sharding import Layout, local_shard
from moe.optim.sharded_optimizer import (
    PendingUpdate,
    ShardedOptimizer,
    SumsOverRanks,
    matrix_norms,
    moment_dtype,
    working_copy,
    zero_moment,
)
from moe.optim.sharded_parameters import (
    MatrixSharding,
    PartialSum,
    sharded_matrix_dims,
    zeros_with_dims,
)

MIN_DIM_SIZE_TO_FACTOR = 128
"""Rows and columns from which a matrix is factored."""

DECAY_EXPONENT = 0.8
"""The decay of second moments at step t = 0, 1, ... is 1 - (t + 1)^-0.8."""

EPSILON_1 = 1e-30
"""Added to the squared gradient, so that a zero gradient does not divide by zero."""

EPSILON_2 = 1e-3
"""Minimum scale of a parameter; lets a parameter of zeros learn."""


class Adafactor(ShardedOptimizer):
    """Adafactor without momentum and weight decay, whose expert axis is a batch axis.

    A parameter group may hold `batch_dims: n`: the first n dimensions then count separate
    parameters that are stored together (stacked experts). Moments, clipping and scale are taken
    within each of them, so that one expert's gradient never changes another's step. Of the other
    dimensions, the last one forms the columns of a matrix, and the rest form its rows: [2, F, D]
    takes the same steps as [2F, D]. So a stack that is not marked by `batch_dims` counts as one
    tall matrix. Set `group["lr"]` before each step; the caller has the schedule.

    Moments are kept in float32 (float64 for float64 parameters), regardless of the parameters'
    dtype.

    DTensor parameters take the same steps as whole ones, each rank on its shard, for any sharding
    and any mesh. Their gradients must be placed as they are, and all ranks must bring gradients of
    the same parameters. Sums run over exactly the axes that shard what is summed, and are bucketed:
    at most three all-reduces for each axis in `MAX_BUCKET_ELEMENTS`. Replicas stay equal when their
    gradients are and their ranks add in the same order.

    Args:
        params: Parameters or groups of them, see `parameter_groups`.
        lr: Step relative to RMS(parameter): 0.01 changes a parameter by up to 1 % a step.
        clipping_threshold: Largest RMS of an update before `lr` and scale, d of the paper; smaller
            damps spikes and learning.
        min_dim_size_to_factor: A matrix is factored if it has at least so many rows and columns.
            Stacked matrices (`batch_dims` of 1 or more) are always factored: there the rule is
            explicit.

    Raises:
        ConfigError: When a value is out of range or a parameter has only batch dimensions.

    Source:
        Adafactor (arXiv:1804.04235) algorithms 4 and 5; google-research/t5x t5x/adafactor.py at
        0eb60a642d. Differs: columns are the last dimension and rows the others, whichever is larger
        (the factors are symmetric, so for a matrix this changes nothing); each parameter counts its
        own steps, so that one that joins late starts fresh.
    """

    above_zero = ("clipping_threshold",)

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.01,
        clipping_threshold: float = 1.0,
        min_dim_size_to_factor: int = MIN_DIM_SIZE_TO_FACTOR,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            clipping_threshold=clipping_threshold,
            min_dim_size_to_factor=min_dim_size_to_factor,
        )

    def update(self, pending: PendingUpdate) -> SumsOverRanks:
        """Takes one step on this rank's shard of one parameter."""
        parameter, group, sharding, _ = pending
        batch_dims = group["batch_dims"]
        state = self.state[parameter]
        if not state:
            state.update(_initial_state(parameter, group))

        # The whole step is computed in float32 or wider, regardless of the parameter's dtype.
        work = working_copy(parameter, batch_dims)
        X = work.X
        G = work.G

        # 1 - beta2_t: the weight with which G_t^2 enters the moments.
        new_weight = (state["step"] + 1.0) ** -DECAY_EXPONENT

        # U_t = G_t / sqrt(V_t)
        if "v_row" in state:
            U = yield from _normalise_factored(G, state, sharding, new_weight)
        else:
            U = _normalise(G, state, new_weight)
        state["step"] += 1

        # alpha_t = max(epsilon2, RMS(X_{t-1})) * lr, and the clipping max(1, RMS(U_t) / d).
        rms_X, rms_U = yield from _rms((X, U), batch_dims, sharding)  # [..., 1, 1] each
        scale = rms_X.clamp_(min=EPSILON_2)
        clipping = rms_U.div_(group["clipping_threshold"]).clamp_(min=1.0)

        # X_t = X_{t-1} - alpha_t * U_t / max(1, RMS(U_t) / d)
        X.addcmul_(U, scale.div_(clipping), value=-group["lr"])
        work.save()


def is_factored(shape: tuple[int, ...], batch_dims: int, min_dim_size: int) -> bool:
    """Returns whether moments of rows and columns are kept instead of all second moments.

    Args:
        shape: Shape of the whole parameter.
        batch_dims: Number of leading dimensions that count separate matrices.
        min_dim_size: Minimum number of rows and columns of a factored matrix; stacked ones are
            always factored.
    """
    matrix_shape = shape[batch_dims:]
    if len(matrix_shape) < 2:
        return False
    num_rows = math.prod(matrix_shape[:-1])
    num_columns = matrix_shape[-1]
    return batch_dims > 0 or min(num_rows, num_columns) >= min_dim_size


def _initial_state(parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
    """Returns step 0 and zero moments: R and C when the parameter is factored, else V."""
    dims = tuple(range(parameter.ndim))
    batch_dims = group["batch_dims"]
    if not is_factored(tuple(parameter.shape), batch_dims, group["min_dim_size_to_factor"]):
        return {"step": 0, "v": zero_moment(parameter)}

    # R has all dimensions but the columns, C all but the rows.
    row_dims = dims[:-1]
    column_dims = (*dims[:batch_dims], dims[-1])
    dtype = moment_dtype(parameter)
    return {
        "step": 0,
        "v_row": zeros_with_dims(parameter, row_dims, dtype),
        "v_col": zeros_with_dims(parameter, column_dims, dtype),
    }


def _normalise(G: Tensor, state: dict[str, Any], new_weight: float) -> Tensor:
    """Mixes G^2 <float>[...] into V and returns U = G / sqrt(V)."""
    # V_t = beta2_t V_{t-1} + (1 - beta2_t) (G_t^2 + epsilon1)
    V = local_shard(state["v"]).view_as(G)
    V.lerp_(G.square().add_(EPSILON_1), new_weight)
    return V.rsqrt().mul_(G)


def _normalise_factored(
    G: Tensor, state: dict[str, Any], sharding: MatrixSharding, new_weight: float
) -> SumsOverRanks:
    """Mixes G^2 <float>[..., n, m] into R and C and returns U = G / sqrt(R C / mean(R))."""
    # Means of G_t^2 over the columns of each row and over the rows of each column.
    squared = G.square()
    row_mean = _part_of_mean(squared, -1, sharding.num_columns)  # [..., n]
    column_mean = _part_of_mean(squared, -2, sharding.num_rows)  # [..., m]
    yield [
        PartialSum(row_mean, sharding.column_groups),
        PartialSum(column_mean, sharding.row_groups),
    ]

    # R_t = beta2_t R_{t-1} + (1 - beta2_t) mean(G_t^2 + epsilon1), and C_t likewise.
    R = local_shard(state["v_row"]).view_as(row_mean)
    R.lerp_(row_mean.add_(EPSILON_1), new_weight)
    C = local_shard(state["v_col"])
    C.lerp_(column_mean.add_(EPSILON_1), new_weight)

    # V_t = R_t C_t / mean(R_t): the rank-one matrix with these means of rows and columns.
    mean_R = _part_of_mean(R, -1, sharding.num_rows).unsqueeze(-1)  # [..., 1]
    yield [PartialSum(mean_R, sharding.row_groups)]

    # U_t = G_t / sqrt(V_t), written over the squares to spare memory.
    row_factor = R.div(mean_R).rsqrt_().unsqueeze(-1)  # [..., n, 1]
    column_factor = C.rsqrt().unsqueeze(-2)  # [..., 1, m]
    return torch.mul(G, row_factor, out=squared).mul_(column_factor)


def _part_of_mean(x: Tensor, dim: int, count: int) -> Tensor:
    """Returns the mean over `dim`, which has `count` entries in all; of a shard its share of it."""
    return x.mean(dim) if x.shape[dim] == count else x.sum(dim).div_(count)


def _rms(tensors: tuple[Tensor, ...], batch_dims: int, sharding: MatrixSharding) -> SumsOverRanks:
    """Returns the root mean square of each of <float>[..., n, m] by matrix, <float>[..., 1, 1]."""
    norms = yield from matrix_norms(tensors, batch_dims, sharding)

    # The norm over sqrt(n m).
    size = sharding.num_rows * sharding.num_columns
    for norm in norms:
        norm.mul_(size**-0.5)
    return norms


# ---- what a step costs, before any rank exists ----


def state_elements(layout: Layout, mesh: MeshConfig) -> int:
    """Returns the numbers that a rank keeps for one parameter: R and C, or V."""
    shape = layout.local_shape(mesh)
    batch_dims = int(layout.expert)
    if not is_factored(layout.shape, batch_dims, MIN_DIM_SIZE_TO_FACTOR):
        return math.prod(shape)

    # R has a number for each row, C one for each column, of every matrix.
    row_moments = math.prod(shape[:-1])
    column_moments = math.prod(shape[:batch_dims]) * shape[-1]
    return row_moments + column_moments


def summed_elements(layout: Layout, mesh: MeshConfig) -> dict[tuple[str, ...], int]:
    """Returns the numbers that a rank sums over other ranks for one parameter, by mesh axes."""
    batch_dims = int(layout.expert)
    last_dim = len(layout.shape) - 1
    shape = layout.local_shape(mesh)
    num_matrices = math.prod(shape[:batch_dims])

    elements: dict[tuple[str, ...], int] = {}
    for axes, dim in sharded_matrix_dims(layout).items():
        # The squares of RMS(X) and RMS(U), of each matrix.
        elements[axes] = 2 * num_matrices

        # Sharded columns: means of rows. Sharded rows: means of columns, and the mean of R.
        if is_factored(layout.shape, batch_dims, MIN_DIM_SIZE_TO_FACTOR):
            if dim == last_dim:
                elements[axes] += math.prod(shape[:-1])
            else:
                elements[axes] += num_matrices * (shape[-1] + 1)
    return elements
