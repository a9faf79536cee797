"""Batch-prioritized routing: tokens with the highest router probability get slots first.

For encoders only.
"""

from typing import ClassVar

from torch import Tensor

from moe.sparse.plan import RouterScores
from moe.sparse.router_options import ROUTERS
from moe.sparse.routers.token_choice import TokenChoiceRouter


@ROUTERS.register("batch_prioritized")
class BatchPrioritizedRouter(TokenChoiceRouter):
    """Token choice in which tokens are served in descending order of their first choice's
    probability.

    All first choices come before any second choice, as in token choice.

    Source:
        ST-MoE (arXiv:2202.08906) appendix D, after V-MoE (arXiv:2106.05974); google/flaxformer
        architectures/moe/routing.py at 399ea3a8. In the paper it helps at capacity factors up to 1
        with one expert per token, and is worse than two experts at 1.25. Differs: no.
    """

    causal: ClassVar[bool] = False

    def priority(self, scores: RouterScores, token_mask: Tensor) -> Tensor:
        """Returns the probability of the first choice <float32>[G, S]; padding requests nothing."""
        return scores.probs.detach().amax(dim=-1)
