"""No token left behind: a token whose best expert is full tries its next one."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe.checks import check_integer
from moe.sparse.config import SparseConfig
from moe.sparse.plan import DispatchPlan, RouterScores, queue_position
from moe.sparse.router import Router
from moe.sparse.router_options import ROUTERS
from moe.sparse.routers.token_choice import select_experts


@dataclass(frozen=True)
class NoTokenLeftBehindOptions:
    """Options of no token left behind.

    Attributes:
        num_candidates: Experts that a token may try, best first; more leave fewer tokens without an
            expert.
    """

    num_candidates: int = 4

    def check(self, config: SparseConfig) -> None:
        """Raises a ConfigError when there are fewer experts than candidates."""
        check_integer(
            "num_candidates",
            self.num_candidates,
            least=1,
            most=config.num_experts,
            reason=f"num_experts is {config.num_experts}",
        )


@ROUTERS.register("no_token_left_behind")
class NoTokenLeftBehindRouter(Router):
    """One expert for each token, tried in turn: refused tokens try their second best expert, and so
    on.

    The weight is the raw probability of the expert that accepts. Within a round, a refused early
    token can take a slot from a later token, never the other way round; across rounds an early
    token's second try comes after every first try, so a plan depends on later tokens, and a decoder
    does not support the router.

    Source:
        Switch Transformers (arXiv:2101.03961) appendix B; Mesh-TensorFlow transformer/moe.py at
        a32810e. It did not help there: a token is best served by the expert that it chose first.
        Differs: no.
    """

    Options: ClassVar[type[NoTokenLeftBehindOptions]] = NoTokenLeftBehindOptions
    causal: ClassVar[bool] = False
    single: ClassVar[bool] = True

    def assign(
        self, scores: RouterScores, token_mask: Tensor, *, drop_tokens: bool = True
    ) -> DispatchPlan:
        """Returns the plan for scores <float32>[G, S, E]; see `Router.assign`."""
        num_experts = self.config.num_experts
        num_groups, group_size = token_mask.shape
        capacity = self.capacity(group_size, drop_tokens)
        num_candidates = self.options.num_candidates
        expert_index = select_experts(scores.probs, num_candidates)  # [G, S, K]

        # Tokens without an expert, and the number of filled slots of each expert.
        unserved = token_mask  # [G, S]
        filled_slots = expert_index.new_zeros(num_groups, num_experts)  # [G, E]
        slots: list[Tensor] = []
        requests: list[Tensor] = []
        acceptances: list[Tensor] = []

        # One round for each candidate: tokens without an expert queue up after the filled slots.
        for candidate in expert_index.unbind(-1):
            position = queue_position(candidate, unserved, num_experts)
            slot = position + filled_slots.gather(-1, candidate)  # [G, S]
            accepted = unserved if capacity is None else unserved & (slot < capacity)

            requests.append(unserved)
            slots.append(slot)
            acceptances.append(accepted)

            num_accepted = accepted.to(filled_slots.dtype)
            filled_slots = filled_slots.scatter_add(-1, candidate, num_accepted)
            unserved = unserved & ~accepted

        # Each round is a choice of the plan.
        accepted = torch.stack(acceptances, dim=-1)  # [G, S, K]
        gates = self.gates(scores, expert_index)  # [G, S, K]
        return DispatchPlan(
            expert_index=expert_index,
            slot=torch.stack(slots, dim=-1),
            accepted=accepted,
            combine_weight=gates * accepted,
            requested=torch.stack(requests, dim=-1),
            token_mask=token_mask,
            capacity=capacity,
        )
