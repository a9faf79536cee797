"""The sparse feed-forward layer: the whole journey in one forward."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe.sparse.config import SparseConfig
from moe.sparse.dispatch import combine, dispatch
from moe.sparse.experts import Experts
from moe.sparse.groups import from_groups, sequences_per_group, to_groups
from moe.sparse.losses import RouterLosses, router_losses
from moe.sparse.plan import DispatchPlan
from moe.sparse.router import TokenChoiceRouter
from moe.sparse.stats import RouterStats, router_stats


class RouterOutput(NamedTuple):
    """What a sparse layer returns beside its output.

    Attributes:
        router_logits: <float32>[G, S, E].
        plan: Which token went where.
        losses: Auxiliary losses, unweighted, with gradient.
        stats: Sums and counts, without gradient.
    """

    router_logits: Tensor
    plan: DispatchPlan
    losses: RouterLosses
    stats: RouterStats


class SparseFeedForward(nn.Module):
    """A feed-forward layer in which every token uses K of E experts; fits any Transformer's feed-forward slot.

    Example:
        layer = SparseFeedForward(SparseConfig(d_model=512, d_ff=2048, num_experts=8))
        y, router = layer(x, token_mask)
        loss = task_loss + 0.01 * router.losses.load_balance_loss + 0.001 * router.losses.router_z_loss

    Source:
        ST-MoE (arXiv:2202.08906) §2 and §3. Differs: padding is never routed.
    """

    def __init__(self, config: SparseConfig) -> None:
        super().__init__()
        self.config = config
        self.router = TokenChoiceRouter(config)
        self.experts = Experts(config)

    def forward(
        self, x: Tensor, token_mask: Tensor | None = None, *, drop_tokens: bool = True
    ) -> tuple[Tensor, RouterOutput]:
        """Returns the layer's output and what its router did.

        A token that reaches no expert, and padding, come out as zeros: only the residual path carries them.

        Args:
            x: <any float>[B, L, D] tokens.
            token_mask: <bool>[B, L] real tokens; None means that all are.
            drop_tokens: False ignores the capacity factor, so that no token is lost (incremental decoding).

        Returns:
            <dtype of x>[B, L, D], and the RouterOutput.
        """
        if token_mask is None:
            token_mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        sequences = sequences_per_group(x.shape[0], x.shape[1], self.config.group_size)
        tokens, mask = to_groups(x, sequences), to_groups(token_mask.bool(), sequences)

        router_logits = self.router(tokens)
        plan = self.router.assign(router_logits, mask, drop_tokens=drop_tokens)
        buffers = dispatch(tokens, plan, self.config.num_experts)
        outputs = buffers._replace(rows=self.experts(buffers.rows, buffers.counts))
        y = from_groups(combine(outputs, plan), sequences).to(x.dtype)

        losses = router_losses(router_logits, plan)
        return y, RouterOutput(router_logits, plan, losses, router_stats(router_logits, plan, losses))
