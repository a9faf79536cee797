"""The two auxiliary losses of a router, as sums and counts.

Comes after plan.py; layer.py returns them. The balance loss may be taken over more tokens than one
call has: see `BalanceTotals` and `balance_within` at the end.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe.distributed.collectives import sum_over_ranks
from moe.distributed.mesh import MeshConfig
from moe.sparse.config import BalanceScope, SparseConfig
from moe.sparse.plan import DispatchPlan, RouterScores


class RouterLosses(NamedTuple):
    """Auxiliary losses of one layer, unweighted; each loss is its sum divided by its count.

    Sums and counts add up over micro-batches and ranks exactly; means do not.

    Attributes:
        load_balance_sum: <float32>[] sum over groups; for wider scopes the loss times its count.
        load_balance_count: <float32>[] weight of this call in the mean: groups that hold a real
            token, and for wider scopes the tokens; in `mesh_tensorflow` all groups
            or positions.
        router_z_sum: <float32>[] sum over tokens.
        router_z_count: <float32>[] tokens.
        choices: <float32>[E] choices of each expert that the balance loss counts, in this call.
        prob_sums: <float32>[E] sums of the router's probabilities over the same tokens, with
            gradient.
        num_share_tokens: <float32>[] tokens that the shares are of, in this call.
        group_load_balance: <float32>[G] balance loss of each group, 0 without a real token; for
            wider scopes the loss of the whole scope, G times.
        group_router_z: <float32>[G] mean over the tokens of each group, 0 without any.
    """

    load_balance_sum: Tensor
    load_balance_count: Tensor
    router_z_sum: Tensor
    router_z_count: Tensor
    choices: Tensor
    prob_sums: Tensor
    num_share_tokens: Tensor
    group_load_balance: Tensor
    group_router_z: Tensor

    @property
    def load_balance_loss(self) -> Tensor:
        """<float32>[] E * sum_i f_i P_i, mean over scopes.

        It is 1 at perfect balance (K with all choices), and at most E.
        """
        return self.load_balance_sum / self.load_balance_count.clamp(min=1)

    @property
    def router_z_loss(self) -> Tensor:
        """<float32>[] mean over tokens of logsumexp(logits)²."""
        return self.router_z_sum / self.router_z_count.clamp(min=1)


class BalanceTotals(NamedTuple):
    """Data for the shares of a balance loss whose scope is wider than one call.

    Attributes:
        choices: <float32>[E] choices of each expert.
        num_share_tokens: <float32>[] tokens.
    """

    choices: Tensor
    num_share_tokens: Tensor


def router_losses(
    scores: RouterScores,
    plan: DispatchPlan,
    config: SparseConfig,
    *,
    balanced_by_construction: bool = False,
) -> RouterLosses:
    """Returns both auxiliary losses of a layer.

    The balance loss counts choices before anything is dropped, and only the mean probability
    carries a gradient. Padding enters neither loss, unless the configuration says so.

    Trap: in Mesh-TensorFlow the z-loss is multiplied by the balance weight, so its setting z there
    acts like 0.01 z; the weights of this library are independent factors.

    Args:
        scores: <float32>[G, S, E] of the router.
        plan: The resulting plan.
        config: Determines the choices and positions that count, and the scope.
        balanced_by_construction: Makes the balance loss 0, for routers in which experts choose.

    Source:
        ST-MoE (arXiv:2202.08906) appendix A and eq. 5; Mesh-TensorFlow transformer/moe.py at
        a32810e. Differs: shares are computed over a group's real tokens by default, and the mean is over
        groups that hold one (there: of all positions, over all groups, which
        `mesh_tensorflow` follows), so that padding changes nothing.
    """
    is_real = plan.token_mask.to(scores.probs.dtype)  # [G, S], 1 for a real token

    # Eq. 5: (log sum_i exp x_i)² of each token, with x the router's logits.
    z = scores.logits.logsumexp(dim=-1).square()  # [G, S]

    # Padding does not count, or in Flaxformer as a token with logits of 0.
    if config.rules.router_z_loss_over == "real_tokens":
        z = z * is_real
    num_groups, group_size, num_experts = scores.probs.shape
    num_real = is_real.sum(dim=-1)  # [G]
    num_tokens = _num_counted(num_real, group_size, config.rules.router_z_loss_over)  # [G]
    num_share_tokens = _num_counted(num_real, group_size, config.rules.balance_over)  # [G]

    if balanced_by_construction:
        # A balance loss of zero, without a graph or any counted group.
        zero = scores.probs.new_zeros(())
        balance = {
            "load_balance_sum": zero,
            "load_balance_count": zero,
            "choices": zero.expand(num_experts),
            "prob_sums": zero.expand(num_experts),
            "group_load_balance": zero.expand(num_groups),
        }
    else:
        balance = _balance_loss(scores, plan, is_real, num_share_tokens, config)
    losses = RouterLosses(
        router_z_sum=z.sum(),
        router_z_count=num_tokens.sum(),
        num_share_tokens=num_share_tokens.sum(),
        group_router_z=z.sum(dim=-1) / num_tokens.clamp(min=1),
        **balance,
    )

    # Shares of a group, or of the whole call; wider scopes are computed by callers, which know the
    # ranks.
    if balanced_by_construction or config.balance_scope == "group":
        return losses
    return balance_within(losses, BalanceTotals(losses.choices, losses.num_share_tokens))


def _balance_loss(
    scores: RouterScores,
    plan: DispatchPlan,
    is_real: Tensor,
    num_share_tokens: Tensor,
    config: SparseConfig,
) -> dict[str, Tensor]:
    """Returns the fields of the balance loss of appendix A: E * sum_i f_i P_i of each group, and their sum."""
    num_groups, _, num_experts = scores.probs.shape

    # n f_i: how many of the group's tokens chose expert i, before policy and capacity; no gradient.
    counts_all = config.rules.balance_choices == "all"
    num_choices = config.num_selected_experts if counts_all else 1
    chosen = plan.expert_index[..., :num_choices].flatten(1)  # [G, S * K]
    counted = is_real[..., None].expand(*is_real.shape, num_choices).flatten(1)
    choices = scores.probs.new_zeros(num_groups, num_experts)
    choices = choices.scatter_add_(1, chosen, counted)

    # n P_i: probability of expert i, summed over the same tokens; only this factor has a gradient.
    # A sum, not a product of matrices, which autocast would round.  [G, E]
    prob_sums = (scores.probs * is_real[..., None]).sum(dim=1)

    # E sum_i f_i P_i: both factors are divided by n at once, after the sum over experts.  [G]
    scale = num_experts * num_share_tokens.clamp(min=1).pow(-2)
    group_load_balance = (choices * prob_sums).sum(dim=-1) * scale
    return {
        "load_balance_sum": group_load_balance.sum(),
        "load_balance_count": num_share_tokens.sign().sum(),
        "choices": choices.sum(dim=0),
        "prob_sums": prob_sums.sum(dim=0),
        "group_load_balance": group_load_balance,
    }


def _num_counted(num_real: Tensor, group_size: int, positions: str) -> Tensor:
    """Returns the positions of each group that count <float32>[G]: its real tokens <float32>[G], or all."""
    return num_real if positions == "real_tokens" else torch.full_like(num_real, group_size)


# ---- scopes wider than one call ----


def num_scope_ranks(scope: BalanceScope, mesh: MeshConfig) -> int:
    """Returns the number of data ranks that a scope spans on a mesh."""
    if scope == "global":
        return mesh.num_data_ranks
    return mesh.dp_shard * mesh.ep if scope == "ranks" else 1


def balance_totals(losses: RouterLosses, group: ProcessGroup | None = None) -> BalanceTotals:
    """Returns the totals of the shares over the ranks of `group`, without gradient.

    A collective of E + 1 numbers. Add the totals of several calls with `add_totals` when the scope
    spans micro-batches.

    Args:
        losses: Losses of this rank's call.
        group: Ranks of the scope; None for all of them. Without torch.distributed there is one
            rank.
    """
    with torch.no_grad():
        # One collective for both.
        numbers = torch.cat([losses.choices, losses.num_share_tokens[None]])  # [E + 1]
        totals = sum_over_ranks(numbers, group)
        return BalanceTotals(choices=totals[:-1], num_share_tokens=totals[-1])


def add_totals(a: BalanceTotals, b: BalanceTotals) -> BalanceTotals:
    """Returns the totals of both together."""
    return BalanceTotals(a.choices + b.choices, a.num_share_tokens + b.num_share_tokens)


def balance_within(losses: RouterLosses, totals: BalanceTotals) -> RouterLosses:
    """Returns the losses of a part of a scope that is wider than one call.

    The sums of all parts, divided by the sum of their counts, are the loss of the whole scope, and
    so are their gradients: choices carry none, and the loss is linear in the probabilities.

    Args:
        losses: Losses of the part.
        totals: Totals of the whole scope.
    """
    # E * sum_i f_i P_i times the tokens of the part: f_i over the scope, P_i over the part.
    num_experts = losses.prob_sums.shape[-1]
    overlap = (totals.choices * losses.prob_sums).sum()
    loss_sum = num_experts * overlap / totals.num_share_tokens.clamp(min=1)
    losses = losses._replace(load_balance_sum=loss_sum, load_balance_count=losses.num_share_tokens)

    group_loss = losses.load_balance_loss.expand_as(losses.group_load_balance)
    return losses._replace(group_load_balance=group_loss)
