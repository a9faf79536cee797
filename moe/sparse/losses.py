"""The two auxiliary losses of a router, as sums and counts."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe.distributed.collectives import sum_over_ranks
from moe.sparse.config import SparseConfig
from moe.sparse.plan import DispatchPlan
from moe.sparse.scores import RouterScores


class RouterLosses(NamedTuple):
    """Auxiliary losses of one layer, unweighted; each loss is its sum divided by its count.

    Sums and counts add up over micro-batches and ranks exactly; means do not.

    Attributes:
        load_balance_sum: <float32>[] sum over groups; for wider scopes the loss times its count.
        load_balance_count: <float32>[] groups that hold a real token, and for wider scopes the
            tokens; with `balance_over` `all_positions` all groups or positions.
        router_z_sum: <float32>[] sum over tokens.
        router_z_count: <float32>[] tokens.
        choices: <float32>[E] choices of each expert that the balance loss counts, in this call.
        prob_sums: <float32>[E] sums of the router's probabilities over the same tokens, with
            gradient.
        num_positions: <float32>[] tokens that the shares are of, in this call.
        group_load_balance: <float32>[G] balance loss of each group, 0 without a real token; for
            wider scopes that of the whole scope, G times.
        group_router_z: <float32>[G] mean over the tokens of each group, 0 without any.
    """

    load_balance_sum: Tensor
    load_balance_count: Tensor
    router_z_sum: Tensor
    router_z_count: Tensor
    choices: Tensor
    prob_sums: Tensor
    num_positions: Tensor
    group_load_balance: Tensor
    group_router_z: Tensor

    @property
    def load_balance_loss(self) -> Tensor:
        """<float32>[] E * sum_i f_i P_i, mean over scopes: 1 at perfect balance (K with all
        choices), at most E.
        """
        return self.load_balance_sum / self.load_balance_count.clamp(min=1)

    @property
    def router_z_loss(self) -> Tensor:
        """<float32>[] mean over tokens of logsumexp(logits)²."""
        return self.router_z_sum / self.router_z_count.clamp(min=1)


class BalanceTotals(NamedTuple):
    """What the shares of a balance loss are of, when its scope is wider than one call.

    Attributes:
        choices: <float32>[E] choices of each expert.
        num_positions: <float32>[] tokens.
    """

    choices: Tensor
    num_positions: Tensor


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

    Trap: in Mesh-TensorFlow the z-loss sits inside the product with the balance weight, so its
    setting z there acts like 0.01 z; the weights of this library are independent factors.

    Args:
        scores: Of the router.
        plan: The plan made of them.
        config: Says which choices and positions count, and the scope.
        balanced_by_construction: Makes the balance loss 0, for routers in which experts choose.

    Source:
        ST-MoE (arXiv:2202.08906) appendix A and eq. 5; Mesh-TensorFlow transformer/moe.py at
        a32810e. Differs: the shares are of a group's real tokens by default, and the mean is over
        groups that hold one (there: of all positions, over all groups, which `balance_over`
        `all_positions` follows), so that padding changes nothing.
    """
    probs, mask = scores.probs, plan.token_mask.to(scores.probs.dtype)
    real = mask.sum(dim=-1)
    positions = (
        torch.full_like(real, mask.shape[-1]) if config.balance_over == "all_positions" else real
    )
    z, z_counts = scores.log_normalizer.square(), torch.full_like(real, mask.shape[-1])
    if config.router_z_loss_over == "real_tokens":
        z, z_counts = z * mask, real
    z_sum, z_count, group_z = z.sum(), z_counts.sum(), z.sum(dim=-1) / z_counts.clamp(min=1)
    if balanced_by_construction:
        nothing, unbalanced = probs.new_zeros(probs.shape[-1]), torch.zeros_like(real)
        none, all_positions = nothing.sum(), positions.sum()
        return RouterLosses(
            none, none, z_sum, z_count, nothing, nothing, all_positions, unbalanced, group_z
        )

    num_choices = 1 if config.balance_choices == "first" else config.num_selected_experts
    index = plan.expert_index[..., :num_choices].flatten(1)
    choices = probs.new_zeros(probs.shape[0], probs.shape[-1])
    choices = choices.scatter_add(
        1, index, mask[..., None].expand(*mask.shape, num_choices).flatten(1)
    )
    prob_sums = (probs * mask[..., None]).sum(
        dim=1
    )  # not a product of matrices, which autocast would round
    overlap = (choices * prob_sums).sum(dim=-1) / positions.clamp(min=1).square()
    balance, group_balance = probs.shape[-1] * overlap.sum(), probs.shape[-1] * overlap
    count = (positions > 0).to(probs.dtype).sum()
    choices, prob_sums, positions = choices.sum(dim=0), prob_sums.sum(dim=0), positions.sum()
    losses = RouterLosses(
        balance, count, z_sum, z_count, choices, prob_sums, positions, group_balance, group_z
    )
    return (
        losses
        if config.balance_scope == "group"
        else balance_within(losses, BalanceTotals(choices, positions))
    )


def balance_totals(losses: RouterLosses, group: ProcessGroup | None = None) -> BalanceTotals:
    """Returns what the shares are of over the ranks of `group`, without gradient; a collective of E
    + 1 numbers.

    Add the totals of several calls up with `add_totals` when the scope spans micro-batches.

    Args:
        losses: Of this rank's call.
        group: Ranks of the scope; None for all of them. Without torch.distributed there is one
            rank.
    """
    with torch.no_grad():
        both = sum_over_ranks(torch.cat([losses.choices, losses.num_positions[None]]), group)
        return BalanceTotals(both[:-1], both[-1])


def add_totals(a: BalanceTotals, b: BalanceTotals) -> BalanceTotals:
    """Returns the totals of both together."""
    return BalanceTotals(a.choices + b.choices, a.num_positions + b.num_positions)


def balance_within(losses: RouterLosses, totals: BalanceTotals) -> RouterLosses:
    """Returns the losses of a part of a scope that is wider than one call.

    The sums of all parts, divided by the sum of their counts, are the loss of the whole scope, and
    so are their
    gradients: choices carry none, and the loss is linear in the probabilities.

    Args:
        losses: Of the part.
        totals: Of the whole scope.
    """
    num_experts = losses.prob_sums.shape[-1]
    balance = (
        num_experts * (totals.choices * losses.prob_sums).sum() / totals.num_positions.clamp(min=1)
    )
    losses = losses._replace(load_balance_sum=balance, load_balance_count=losses.num_positions)
    return losses._replace(
        group_load_balance=losses.load_balance_loss.expand_as(losses.group_load_balance)
    )
