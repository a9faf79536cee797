"""Expert choice: every expert takes its best tokens. For encoders only."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from moe.sparse.config import SparseConfig
from moe.sparse.losses import RouterLosses, router_losses
from moe.sparse.plan import DispatchPlan, RouterScores
from moe.sparse.router import Router
from moe.sparse.router_options import ROUTERS

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
    """Every expert takes the C tokens of the group that score highest with it.

    A token may go to any number of experts. Load is balanced by construction, so that the balance
    loss is 0. `num_selected_experts` is not used; the capacity factor is the mean number of experts
    a token has. In the plan, choice e of a token is expert e.

    The experts of a token depend on its batch mates: experts compare the tokens of a group. Without
    a capacity every expert takes every token, at E / C times the cost and far from the training
    conditions; with `softmax_over` `experts` a token's output is then its own, with `tokens` it
    depends on batch mates even so. A model that must answer for each sequence alone is better
    served by another router.

    Source:
        Expert Choice (arXiv:2202.09368); google/flaxformer architectures/moe/routing.py at
        399ea3a8; Mesh-TensorFlow transformer/moe.py at a32810e, `expert_selection`. Differs: Mesh's
        additional loss on the evenness of tokens is omitted.
    """

    Options: ClassVar[type[ExpertChoiceOptions]] = ExpertChoiceOptions
    causal: ClassVar[bool] = False
    experts_choose: ClassVar[bool] = True

    @classmethod
    def num_choices(cls, config: SparseConfig) -> int:
        """Returns the choices of a token in a plan: one for each expert that may take it."""
        return config.num_experts

    def assign(
        self, scores: RouterScores, token_mask: Tensor, *, drop_tokens: bool = True
    ) -> DispatchPlan:
        """Returns the plan for scores <float32>[G, S, E]; see `Router.assign`."""
        num_groups, group_size, num_experts = scores.logits.shape
        is_real = token_mask[..., None]  # [G, S, 1]

        # A token's slot is its rank in the expert's order; padding comes last, and ties go to the earlier token.
        weights = self._weights(scores, token_mask)  # [G, S, E]
        preference = weights.detach().masked_fill(~is_real, -1)
        order = preference.argsort(dim=1, descending=True, stable=True)  # [G, S, E]
        rank = torch.arange(group_size, device=order.device)  # [S]
        rank = rank[None, :, None].expand_as(order)
        slot = torch.empty_like(order).scatter(1, order, rank)  # [G, S, E]

        # The best C are accepted.
        capacity = self.capacity(group_size, drop_tokens)
        accepted = is_real.expand_as(slot)  # [G, S, E]
        if capacity is not None:
            accepted = accepted & (slot < capacity)

        # Choice e of every token is expert e.
        expert = torch.arange(num_experts, device=slot.device)
        return DispatchPlan(
            expert_index=expert.expand(num_groups, group_size, num_experts),
            slot=slot,
            accepted=accepted,
            combine_weight=self._accepted_weights(weights, accepted),
            requested=accepted,
            token_mask=token_mask,
            capacity=capacity,
        )

    def combine_weight(self, scores: RouterScores, plan: DispatchPlan) -> Tensor:
        """Returns the weights <float32>[G, S, K] of a plan's choices, 0 where not accepted."""
        weights = self._weights(scores, plan.token_mask).gather(-1, plan.expert_index)
        return self._accepted_weights(weights, plan.accepted)

    def _weights(self, scores: RouterScores, token_mask: Tensor) -> Tensor:
        """Returns each expert's score for each token <float32>[G, S, E]."""
        if self.options.softmax_over == "experts":
            return scores.probs

        # Finite, so that a group of padding has no NaN.
        never = torch.finfo(scores.logits.dtype).min
        return scores.logits.masked_fill(~token_mask[..., None], never).softmax(dim=1)

    def _accepted_weights(self, weights: Tensor, accepted: Tensor) -> Tensor:
        """Returns weights <float32>[G, S, K] with 0 where not accepted <bool>[G, S, K]."""
        if self.options.softmax_over == "tokens":
            num_experts_of_token = accepted.sum(dim=-1, keepdim=True)  # [G, S, 1]
            weights = weights / num_experts_of_token.clamp(min=1)
        return weights.masked_fill(~accepted, 0)

    def losses(self, scores: RouterScores, plan: DispatchPlan) -> RouterLosses:
        """Returns the auxiliary losses of a plan: only the z-loss."""
        return router_losses(scores, plan, self.config, balanced_by_construction=True)
