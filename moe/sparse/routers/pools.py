"""Pools: in training, the tokens of an example choose from a few experts that its first token draws."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.sparse.examples import lowest_logit, of_first_token
from moe.sparse.plan import RouterScores, router_scores
from moe.sparse.router import RouterInputs
from moe.sparse.router_options import ROUTERS
from moe.sparse.routers.token_choice import TokenChoiceRouter


@ROUTERS.register("pools")
class PoolsRouter(TokenChoiceRouter):
    """Token choice, in training from the pool of each example alone; the options are the same.

    Examples of one domain then share experts, and a model that is pruned to the experts of a domain
    keeps most of what it knows of it. The pool is the d experts that the first token finds
    likeliest; d is drawn for each example from K to E, since a model that is trained with one size
    is worse with any other. Outside training there is no pool. Experts of a prefix are in no pool:
    E counts the others, and a text with the prefix has its experts in addition.

    Source:
        EMO (arXiv:2605.06663) §3.2 and §3.3. Differs: the first token draws the pool instead of the
        mean over all tokens, so that a decoder's pool depends on no later token.
    """

    needs_starts: ClassVar[bool] = True

    def forward(self, inputs: RouterInputs) -> RouterScores:
        """Returns the scores; in training, experts outside of a token's pool have probability 0."""
        scores = super().forward(inputs)
        if not self.training:
            return scores
        assert inputs.starts is not None, "the layer finds them"

        # The pool of an example is the d base experts that its first token finds likeliest.
        K, num_base = self.config.num_selected_experts, self.config.num_base_experts
        logits = scores.logits
        d = torch.randint(K, num_base + 1, (*inputs.starts.shape, 1), device=logits.device)
        base = logits[..., :num_base].detach()
        least = base.sort(dim=-1, descending=True).values.gather(-1, d - 1)  # [G, S, 1]
        outside = of_first_token(base < least, inputs.starts)
        outside = F.pad(outside, (0, self.config.num_experts - num_base))  # [G, S, E]
        return router_scores(logits.masked_fill(outside, lowest_logit(logits)))

    def preference(self, scores: RouterScores) -> Tensor:
        """Returns logits in training, where probabilities in a pool may round to the 0 of other experts."""
        return scores.logits if self.training else super().preference(scores)
