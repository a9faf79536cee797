"""Expert choice: every expert takes its best tokens. Encoder only."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from moe.sparse.config import SparseConfig
from moe.sparse.losses import RouterLosses, router_losses
from moe.sparse.plan import DispatchPlan
from moe.sparse.router import ROUTERS, Router
from moe.sparse.scores import RouterScores

Over = Literal["experts", "tokens"]


@dataclass(frozen=True)
class ExpertChoiceOptions:
    """Options of expert choice.

    Attributes:
        softmax_over: `experts`: the weight is the router's probability (Flaxformer). `tokens`:
            scores are a softmax over the real tokens of the group, and a token's weights are
            divided by the experts that took it (Mesh-TensorFlow).
    """

    softmax_over: Over = "experts"


@ROUTERS.register("expert_choice")
class ExpertChoiceRouter(Router):
    """Every expert takes the C tokens of the group that score highest with it; a token may go to
    any number of experts.

    Load is balanced by construction, so that the balance loss is 0. `num_selected_experts` plays no
    part; the capacity factor is the mean number of experts a token has. In the plan, place e of a
    token is expert e.

    What a token gets depends on its batch mates: experts compare the tokens of a group. Without a
    capacity every expert takes every token, at E / C times the cost and far from what was trained;
    with `softmax_over` `experts` a token's output is then its own, with `tokens` it depends on
    batch mates even so. A model that must answer for each sequence alone is better served by
    another router.

    Source:
        Expert Choice (arXiv:2202.09368); google/flaxformer architectures/moe/routing.py at
        399ea3a8; Mesh-TensorFlow transformer/moe.py at a32810e, `expert_selection`. Differs: Mesh's
        additional loss on the evenness of tokens is not here.
    """

    Options: ClassVar[type[ExpertChoiceOptions]] = ExpertChoiceOptions
    causal: ClassVar[bool] = False

    @classmethod
    def num_choices(cls, config: SparseConfig) -> int:
        """Returns the choices of a token in a plan: one for each expert that may take it."""
        return config.num_experts

    def assign(
        self, scores: RouterScores, token_mask: Tensor, *, drop_tokens: bool = True
    ) -> DispatchPlan:
        """Returns the plan for these scores; see `Router.assign`."""
        groups, size, num_experts = scores.logits.shape
        capacity = self.capacity(size, drop_tokens)
        real = token_mask[..., None]
        over_tokens = self.options.softmax_over == "tokens"
        weights = scores.probs
        if over_tokens:
            never = torch.finfo(
                scores.logits.dtype
            ).min  # finite, so that a group of padding has no NaN
            weights = scores.logits.masked_fill(~real, never).softmax(dim=1)

        ranked = (
            weights.detach().masked_fill(~real, -1).argsort(dim=1, descending=True, stable=True)
        )
        rank = torch.arange(size, device=ranked.device)[None, :, None].expand_as(ranked)
        slot = torch.empty_like(ranked).scatter(1, ranked, rank)
        accepted = real.expand_as(slot) if capacity is None else real & (slot < capacity)
        if over_tokens:
            weights = weights / accepted.sum(dim=-1, keepdim=True).clamp(min=1)
        expert_index = torch.arange(num_experts, device=slot.device).expand(
            groups, size, num_experts
        )
        weights = weights.masked_fill(~accepted, 0)
        return DispatchPlan(expert_index, slot, accepted, weights, accepted, token_mask, capacity)

    def losses(self, scores: RouterScores, plan: DispatchPlan) -> RouterLosses:
        """Returns the auxiliary losses of a plan: only the z-loss."""
        return router_losses(scores, plan, self.config, balanced_by_construction=True)
