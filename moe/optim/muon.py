"""Muon: momentum whose step is made orthogonal, for each matrix and each expert.

Letters: w weights, g gradient, v momentum, u update, mu the momentum's decay.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe.distributed.mesh import MeshConfig
from moe.distributed.sharding import Layout, local_shard
from moe.optim.parameter_groups import SPECIAL_KINDS, WEIGHT, parameter_kind
from moe.optim.sharded_optimizer import (
    PendingUpdate,
    ShardedOptimizer,
    SumsOverRanks,
    adam_step,
    working_copy,
    zero_moment,
)
from moe.optim.sharded_parameters import (
    MatrixSharding,
    PartialSum,
    shard_in_matrices,
    sharded_matrix_dims,
)

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5


class Muon(ShardedOptimizer):
    """Muon for matrices, whose expert axis is a batch axis; Adam for all other parameters.

    A step of a matrix [n, m] is v <- mu v + g, u = g + mu v, and

        w <- (1 - lr weight_decay) w - 0.2 lr sqrt(max(n, m)) orthogonalize(u)

    whose RMS is about that of Adam's, so that one learning rate serves both. Embeddings, norms,
    biases and routers take Adam's step, embeddings with weight decay. An expert whose gradient is 0
    makes no step: its fading momentum would be scaled to full length for hundreds of steps.

    Gate and up projection of an expert are one matrix [2F, D].

    Moments are kept in float32 (float64 for float64 parameters). Experts that a rank holds whole
    stay there; a matrix that is sharded over ranks is gathered, and each of them orthogonalizes all
    of it. So a step on a mesh is that of one process, but for the rounding of the gradient.

    Args:
        params: Parameters or groups of them, see `parameter_groups`.
        lr: Rate of Adam; 0.001 to 0.01.
        momentum: mu; larger averages over more steps.
        beta1: Share of Adam's first moment that stays.
        beta2: Share of Adam's second moment that stays.
        epsilon: Added to the root of Adam's second moment.
        weight_decay: Share of lr by which matrices and embeddings shrink.

    Raises:
        ConfigError: When a value is out of range or a parameter has only batch dimensions.

    Source:
        Muon (github.com/KellerJordan/Muon, muon.py); size of the step and weight decay:
        arXiv:2502.16982 §2.2, `match_rms_adamw` of torch.optim.Muon. Differs: stacked experts;
        iterations in bfloat16 on an accelerator only, elsewhere in float32 or wider.
    """

    below_one = ("momentum", "beta1", "beta2")

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.002,
        momentum: float = 0.95,
        beta1: float = 0.9,
        beta2: float = 0.95,
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
            weight_decay=weight_decay,
        )

    def held_elements(self, sharding: MatrixSharding) -> int:
        """Returns the number of elements of the whole matrices, since they are gathered."""
        return sharding.shard_elements * math.prod(map(dist.get_world_size, sharding.groups))

    def update(self, pending: PendingUpdate) -> SumsOverRanks:
        """Takes one step on this rank's shard of one parameter."""
        parameter, group, _, kind = pending
        state = self.state[parameter]

        # The whole step is computed in float32 or wider, regardless of the parameter's dtype.
        work = working_copy(parameter, group["batch_dims"])
        w = work.X
        decay = 0.0 if kind in SPECIAL_KINDS else group["weight_decay"]
        w.mul_(1 - group["lr"] * decay)

        if _is_orthogonalized(kind, parameter.ndim - group["batch_dims"]):
            if not state:
                state["momentum_buffer"] = zero_moment(parameter)
            v = local_shard(state["momentum_buffer"]).view_as(w)
            v.mul_(group["momentum"]).add_(work.G)
            u = work.G.add(v, alpha=group["momentum"])
            u = yield from _orthogonal_step(u, work.G, pending)
        else:
            u = adam_step(work.G, parameter, state, group)

        w.sub_(u, alpha=group["lr"])
        work.save()


def _orthogonal_step(u: Tensor, g: Tensor, pending: PendingUpdate) -> SumsOverRanks:
    """Returns 0.2 sqrt(max(n, m)) orthogonalize(u) on this rank's shard, 0 where g is 0.

    Args:
        u: <float>[..., n, m] this rank's shard.
        g: <float>[..., n, m] this rank's shard of the gradient.
        pending: The parameter.
    """
    parameter, group, sharding, _ = pending
    batch_dims = group["batch_dims"]
    shard = local_shard(parameter)
    has_gradient = g.ne(0).any(-1, keepdim=True).any(-2, keepdim=True).to(u.dtype)  # [..., 1, 1]

    # Whole matrices: the shards of all ranks, each in its place, are added.
    place = shard_in_matrices(parameter, batch_dims)
    shape = (*shard.shape[:batch_dims], *parameter.shape[batch_dims:])
    if sharding.groups:
        whole = u.new_zeros(shape)
        whole[place] = u.view(shard.shape)
        yield [PartialSum(whole, sharding.groups), PartialSum(has_gradient, sharding.groups)]
        u = whole.flatten(batch_dims, -2)

    u = orthogonalize(u).mul_(has_gradient.clamp(max=1.0))
    u.mul_(0.2 * math.sqrt(max(sharding.num_rows, sharding.num_columns)))
    return u.view(shape)[place].reshape_as(g) if sharding.groups else u


def orthogonalize(x: Tensor) -> Tensor:
    """Returns about U V^T of each matrix x = U S V^T, <float>[..., n, m]: its singular values are
    0.7 to 1.2, and those near 0 stay there.

    Newton-Schulz iterations of the odd polynomial a s + b s^3 + c s^5, in bfloat16 on an
    accelerator.

    Args:
        x: <float>[..., n, m].
    """
    dtype = x.dtype if x.device.type == "cpu" else torch.bfloat16
    a, b, c = COEFFICIENTS

    # Rows are the shorter side. Singular values below 1 converge.
    X = x.reshape(-1, *x.shape[-2:])  # [B, n, m]
    is_tall = X.shape[-2] > X.shape[-1]
    X = X.mT if is_tall else X
    norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True)
    X = (X / norm.clamp(min=1e-30)).to(dtype)

    # X <- a X + (b A + c A^2) X with A = X X^T.
    for _ in range(NUM_ITERATIONS):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)

    X = X.mT if is_tall else X
    return X.to(x.dtype).reshape(x.shape)


def _is_orthogonalized(kind: str, matrix_dims: int) -> bool:
    return kind == WEIGHT and matrix_dims >= 2


# ---- what a step costs, before any rank exists ----


def state_elements(layout: Layout, mesh: MeshConfig, **options: Any) -> int:
    """Returns the numbers of state that a rank keeps for one parameter: one moment, or Adam's two."""
    num_moments = 1 if _of_layout(layout) else 2
    return num_moments * math.prod(layout.local_shape(mesh))


def summed_elements(layout: Layout, mesh: MeshConfig, **options: Any) -> dict[tuple[str, ...], int]:
    """Returns the numbers that a rank sums over other ranks for one parameter, by mesh axes."""
    if not _of_layout(layout):
        return {}

    # Whole matrices, and whether each has a gradient.
    batch_dims = int(layout.expert)
    num_matrices = math.prod(layout.local_shape(mesh)[:batch_dims])
    numel = num_matrices * (math.prod(layout.shape[batch_dims:]) + 1)
    return dict.fromkeys(sharded_matrix_dims(layout), numel)


def _of_layout(layout: Layout) -> bool:
    """Returns whether a parameter of this layout is orthogonalized."""
    matrix_dims = len(layout.shape) - int(layout.expert)
    return _is_orthogonalized(parameter_kind(layout.rule, matrix_dims), matrix_dims)
