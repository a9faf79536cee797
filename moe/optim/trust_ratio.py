"""Trust ratios: steps of LARS and LAMB relative to the norm of each weight matrix.

Comes after sharded_optimizer.py; lars.py and lamb.py define the norms.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from moe.checks import check
from moe.distributed.mesh import MeshConfig
from moe.distributed.sharding import Layout
from moe.optim.parameter_groups import SPECIAL_KINDS, parameter_kind
from moe.optim.sharded_optimizer import PendingUpdate, ShardedOptimizer
from moe.optim.sharded_parameters import sharded_matrix_dims


class TrustRatioOptimizer(ShardedOptimizer):
    """An optimizer whose step on a matrix is scaled by a trust ratio, computed separately for each
    expert.

    A parameter group may hold `kinds`, the kind of each parameter as `parameter_groups` gives
    them; those named in `skip` get neither ratio nor weight decay. Without `kinds` every parameter
    is a weight. Like every setting, `skip` may differ between groups.

    Args:
        params: Parameters or groups of them, see `parameter_groups`.
        skip: Default of the groups.
        settings: Other defaults of the groups: `lr`, `weight_decay`, `epsilon` and others.
    """

    def __init__(self, params: Iterable[Any], *, skip: Sequence[str], **settings: Any) -> None:
        is_list = isinstance(skip, list | tuple) and all(kind in SPECIAL_KINDS for kind in skip)
        expected = f"a list of kinds of {', '.join(SPECIAL_KINDS)}, or []"
        check(is_list, f"skip of {type(self).__name__.lower()}", skip, expected)
        super().__init__(params, skip=list(skip), **settings)


def is_adapted(pending: PendingUpdate) -> bool:
    """Returns whether a parameter gets a trust ratio and weight decay."""
    return pending.kind not in pending.group["skip"]


def add_product(x: Tensor, y: Tensor, rate: float | Tensor, sign: int) -> None:
    """Adds sign * rate * y to x <float>[..., n, m], in place; `rate` may differ by matrix."""
    if isinstance(rate, Tensor):
        x.addcmul_(y, rate, value=sign)
    else:
        x.add_(y, alpha=sign * rate)


# ---- what a step costs, before any rank exists ----


def summed_norms(
    layout: Layout,
    mesh: MeshConfig,
    *,
    num_norms: int,
    skip: Sequence[str] = SPECIAL_KINDS,
    **options: Any,
) -> dict[tuple[str, ...], int]:
    """Returns the numbers that a rank sums over other ranks for one parameter, by mesh axes.

    Args:
        layout: Layout of the parameter.
        mesh: Sizes.
        num_norms: Norms that are taken of each matrix.
        skip: Kinds without a ratio.
        options: Other options of the optimizer, which change no sum.
    """
    batch_dims = int(layout.expert)
    if parameter_kind(layout.rule, len(layout.shape) - batch_dims) in skip:
        return {}

    num_matrices = math.prod(layout.local_shape(mesh)[:batch_dims])
    return dict.fromkeys(sharded_matrix_dims(layout), num_norms * num_matrices)
