"""LARS: momentum whose step is relative to the norm of each layer, and of each expert.

Letters: w weights, g gradient, v momentum, lambda the learning rate, beta the momentum's decay, eta
the trust coefficient.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

from torch import Tensor

from moe.checks import check_choice
from moe.distributed.sharding import local_shard
from moe.optim.parameter_groups import SPECIAL_KINDS
from moe.optim.sharded_optimizer import (
    PendingUpdate,
    SumsOverRanks,
    matrix_norms,
    working_copy,
    zero_moment,
)
from moe.optim.trust_ratio import TrustRatioOptimizer, add_product, is_adapted

Momentum = Literal["scaled", "unscaled"]


class LARS(TrustRatioOptimizer):
    """LARS, whose expert axis is a batch axis: each expert has its own trust ratio.

    The ratio of a matrix is eta |w| / (|g| + weight_decay |w| + epsilon), and 1 where |w| or |g| is
    0: e.g. for an expert without tokens. With it

    - `scaled` momentum: v <- beta v + lambda ratio (g + weight_decay w), w <- w - v;
    - `unscaled`: v <- beta v + (g + weight_decay w), w <- w - lambda ratio v.

    Without trust ratios the two are the same as long as lambda is; when it falls, `scaled` continues
    with the larger steps of before. Skipped parameters use plain momentum: ratio 1, no decay.

    Momentum is kept in float32 (float64 for float64 parameters). DTensor parameters take the same
    steps as whole ones, on any mesh; norms need one all-reduce for each axis.

    Args:
        params: Parameters or groups of them, see `parameter_groups`.
        lr: lambda. With eta 0.001 it is usually 1 to 30; skipped parameters use it unchanged.
        momentum: Whether the rate is inside the momentum (`scaled`) or outside.
        beta: Share of the momentum that stays; larger averages over more steps.
        weight_decay: Share of the weights that is added to the gradient.
        trust_coefficient: eta. With 1, lambda is the largest share by which a step changes a matrix.
        epsilon: Added to the denominator of the ratio.
        skip: Kinds of parameters that get no ratio and no decay: `norms`, `biases`, `router`.

    Raises:
        ConfigError: When a value is out of range or a parameter has only batch dimensions.

    Source:
        LARS (arXiv:1708.03888); both kinds of momentum: MLPerf-0.6 on TPU-v3 pods
        (arXiv:1909.09756); `scaled` is tf.contrib.opt.LARSOptimizer as mlcommons/
        training_results_v0.7 runs it. Differs: one ratio for each expert of a stack, and routers
        are skipped by default.
    """

    above_zero = ("trust_coefficient",)
    below_one = ("beta",)

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1.0,
        momentum: Momentum = "scaled",
        beta: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        epsilon: float = 0.0,
        skip: Sequence[str] = SPECIAL_KINDS,
    ) -> None:
        check_choice("momentum of lars", momentum, get_args(Momentum))
        super().__init__(
            params,
            skip=skip,
            lr=lr,
            momentum=momentum,
            beta=beta,
            weight_decay=weight_decay,
            trust_coefficient=trust_coefficient,
            epsilon=epsilon,
        )

    def update(self, pending: PendingUpdate) -> SumsOverRanks:
        """Takes one step on this rank's shard of one parameter."""
        parameter, group, sharding, _ = pending
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = zero_moment(parameter)

        # The whole step is computed in float32 or wider, regardless of the parameter's dtype.
        work = working_copy(parameter, group["batch_dims"])
        w = work.X
        g = work.G
        v = local_shard(state["momentum_buffer"]).view_as(w)

        # lambda ratio, and g + weight_decay w.
        rate: float | Tensor = group["lr"]
        if is_adapted(pending):
            w_norm, g_norm = yield from matrix_norms((w, g), group["batch_dims"], sharding)
            rate = _trust_ratio(w_norm, g_norm, group).mul_(rate)  # [..., 1, 1]
            if group["weight_decay"]:
                g = g.add(w, alpha=group["weight_decay"])

        # The learning rate is applied before the momentum, or after it.
        v.mul_(group["beta"])
        if group["momentum"] == "scaled":
            add_product(v, g, rate, 1)
            w.sub_(v)
        else:
            v.add_(g)
            add_product(w, v, rate, -1)
        work.save()


def _trust_ratio(w_norm: Tensor, g_norm: Tensor, group: dict[str, Any]) -> Tensor:
    """Returns eta |w| / (|g| + weight_decay |w| + epsilon), 1 where a norm is 0; <float>[..., 1, 1]."""
    denominator = g_norm.add(w_norm, alpha=group["weight_decay"]).add_(group["epsilon"])
    ratio = w_norm.div(denominator).mul_(group["trust_coefficient"])
    return ratio.where((w_norm > 0) & (g_norm > 0), 1.0)
