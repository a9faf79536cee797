"""The two auxiliary losses of a router, as sums and counts."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.sparse.plan import DispatchPlan


class RouterLosses(NamedTuple):
    """Auxiliary losses of one layer, unweighted; each loss is its sum divided by its count.

    Sums and counts add up over micro-batches and ranks exactly; means do not.

    Attributes:
        load_balance_sum: <float32>[] sum over groups.
        num_groups: <float32>[] groups that hold a real token.
        router_z_sum: <float32>[] sum over real tokens.
        num_tokens: <float32>[] real tokens.
    """

    load_balance_sum: Tensor
    num_groups: Tensor
    router_z_sum: Tensor
    num_tokens: Tensor

    @property
    def load_balance_loss(self) -> Tensor:
        """<float32>[] E * sum_i f_i P_i, mean over groups: 1 at perfect balance, at most E."""
        return self.load_balance_sum / self.num_groups.clamp(min=1)

    @property
    def router_z_loss(self) -> Tensor:
        """<float32>[] mean over real tokens of logsumexp(logits)²."""
        return self.router_z_sum / self.num_tokens.clamp(min=1)


def router_losses(router_logits: Tensor, plan: DispatchPlan) -> RouterLosses:
    """Returns both auxiliary losses of a layer.

    The balance loss counts first choices only, before anything is dropped, and only the mean probability carries a
    gradient. Padding enters neither loss.

    Trap: in Mesh-TensorFlow the z-loss sits inside the product with the balance weight, so its setting z there
    acts like 0.01 z; the weights of this library are independent factors.

    Args:
        router_logits: <float32>[G, S, E].
        plan: The plan made of them.

    Source:
        ST-MoE (arXiv:2202.08906) appendix A and eq. 5; Mesh-TensorFlow transformer/moe.py at a32810e. Differs: the
        shares are of a group's real tokens (there: of all positions), so that padding changes nothing.
    """
    mask = plan.token_mask.to(router_logits.dtype)
    tokens = mask.sum(dim=-1)
    first = F.one_hot(plan.expert_index[..., 0], router_logits.shape[-1]) * mask[..., None]
    probs = router_logits.softmax(dim=-1) * mask[..., None]
    share = tokens.clamp(min=1)[:, None]
    balance = router_logits.shape[-1] * ((first.sum(dim=1) / share) * (probs.sum(dim=1) / share)).sum(dim=-1)
    z = torch.logsumexp(router_logits, dim=-1).square() * mask
    return RouterLosses(balance.sum(), (tokens > 0).to(mask.dtype).sum(), z.sum(), tokens.sum())
