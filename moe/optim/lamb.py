"""LAMB: Adam whose step is relative to the norm of each layer, and of each expert.

Letters of the paper: w weights, g gradient, m and v moments, r Adam's step, u the whole update.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from moe.optim.parameter_groups import SPECIAL_KINDS
from moe.optim.sharded_optimizer import (
    PendingUpdate,
    SumsOverRanks,
    adam_step,
    matrix_norms,
    working_copy,
)
from moe.optim.trust_ratio import TrustRatioOptimizer, add_product, is_adapted


class LAMB(TrustRatioOptimizer):
    """LAMB, whose expert axis is a batch axis: each expert has its own trust ratio.

    A step is w <- w - lr ratio u, with u = r + weight_decay w and r Adam's step. The ratio of a
    matrix is |w| / |u|, and 1 where |w| or |u| is 0. If |g| is 0, as for an expert without tokens,
    it is at most 1: otherwise the remaining r would be scaled to full length for hundreds of steps,
    and weight decay would shrink the expert by lr a step instead of lr weight_decay.
    Skipped parameters take Adam's step: ratio 1, no decay.

    Moments are kept in float32 (float64 for float64 parameters). DTensor parameters take the same
    steps as whole ones, on any mesh; norms need one all-reduce for each axis.

    Args:
        params: Parameters or groups of them, see `parameter_groups`.
        lr: Relative change of a matrix's norm in one step.
        beta1: Share of the first moment that stays; larger averages over more steps.
        beta2: Share of the second moment that stays.
        epsilon: Added to the root of the second moment.
        weight_decay: Share of the weights that is added to Adam's step.
        skip: Kinds of parameters that get no ratio and no decay: `norms`, `biases`, `router`.

    Raises:
        ConfigError: When a value is out of range or a parameter has only batch dimensions.

    Source:
        LAMB (arXiv:1904.00962) algorithm 2, with phi the identity. Differs: one ratio for each
        expert of a stack, at most 1 where the gradient is 0; routers are skipped by default.
    """

    below_one = ("beta1", "beta2")

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay: float = 0.0,
        skip: Sequence[str] = SPECIAL_KINDS,
    ) -> None:
        super().__init__(
            params,
            skip=skip,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
            weight_decay=weight_decay,
        )

    def update(self, pending: PendingUpdate) -> SumsOverRanks:
        """Takes one step on this rank's shard of one parameter."""
        parameter, group, sharding, _ = pending
        # The whole step is computed in float32 or wider, regardless of the parameter's dtype.
        work = working_copy(parameter, group["batch_dims"])
        w = work.X
        g = work.G
        u = adam_step(g, parameter, self.state[parameter], group)

        # lr ratio; u = r + weight_decay w.
        rate: float | Tensor = group["lr"]
        if is_adapted(pending):
            if group["weight_decay"]:
                u.add_(w, alpha=group["weight_decay"])
            norms = yield from matrix_norms((w, u, g), group["batch_dims"], sharding)
            rate = _trust_ratio(*norms).mul_(rate)  # [..., 1, 1]

        add_product(w, u, rate, -1)
        work.save()


def _trust_ratio(w_norm: Tensor, u_norm: Tensor, g_norm: Tensor) -> Tensor:
    """Returns |w| / |u|, 1 where either is 0, and at most 1 where |g| is 0; <float>[..., 1, 1]."""
    ratio = w_norm / u_norm
    ratio = ratio.where((w_norm > 0) & (u_norm > 0), 1.0)
    return ratio.where(g_norm > 0, ratio.clamp(max=1.0))
