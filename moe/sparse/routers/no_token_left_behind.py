"""No token left behind: a token that its best expert has no room for tries the next."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe.checks import check_integer
from moe.sparse.config import SparseConfig
from moe.sparse.plan import DispatchPlan, queue_position
from moe.sparse.router import ROUTERS, Router
from moe.sparse.routers.token_choice import select_experts
from moe.sparse.scores import RouterScores


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
        reason = f"num_experts is {config.num_experts}"
        check_integer(
            "num_candidates", self.num_candidates, least=1, most=config.num_experts, reason=reason
        )


@ROUTERS.register("no_token_left_behind")
class NoTokenLeftBehindRouter(Router):
    """One expert for each token, tried in turn: all tokens ask their best, the refused their
    second, and so on.

    The weight is the raw probability of the expert that accepts. A refused token of an early
    position can take the room that a later one would have had, never the other way round within a
    round; across rounds an early token's second try comes after every first try, so a plan depends
    on later tokens, and a decoder refuses the router.

    Source:
        Switch Transformers (arXiv:2101.03961) appendix B; Mesh-TensorFlow transformer/moe.py at
        a32810e. It did not
        help there: a token is best served by the expert that it chose first. Differs: no.
    """

    Options: ClassVar[type[NoTokenLeftBehindOptions]] = NoTokenLeftBehindOptions
    causal: ClassVar[bool] = False
    single: ClassVar[bool] = True

    def assign(
        self, scores: RouterScores, token_mask: Tensor, *, drop_tokens: bool = True
    ) -> DispatchPlan:
        """Returns the plan for these scores; see `Router.assign`."""
        num_experts = self.config.num_experts
        capacity = self.capacity(token_mask.shape[1], drop_tokens)
        expert_index = select_experts(scores.probs, self.options.num_candidates)
        taken = expert_index.new_zeros(expert_index.shape[0], num_experts)
        asking, slots, wanted, accepts = token_mask, [], [], []
        for candidate in expert_index.unbind(-1):
            slot = queue_position(candidate, asking, num_experts) + taken.gather(-1, candidate)
            accepted = asking if capacity is None else asking & (slot < capacity)
            taken = taken.scatter_add(-1, candidate, accepted.to(taken.dtype))
            wanted.append(asking)
            slots.append(slot)
            accepts.append(accepted)
            asking = asking & ~accepted
        accepted = torch.stack(accepts, dim=-1)
        weight = scores.probs.gather(-1, expert_index) * accepted
        slot, asked = torch.stack(slots, dim=-1), torch.stack(wanted, dim=-1)
        return DispatchPlan(expert_index, slot, accepted, weight, asked, token_mask, capacity)
