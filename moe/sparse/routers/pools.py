"""Pools: in training, the tokens of an example choose from a few experts that its first token draws."""

from typing import ClassVar

import torch
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
    is worse with any other. Outside training there is no pool.

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
        in_pool = self.draw_pools(scores.logits.detach(), inputs.starts)
        logits = scores.logits.masked_fill(~in_pool, lowest_logit(scores.logits))
        return router_scores(logits)

    def draw_pools(self, logits: Tensor, starts: Tensor) -> Tensor:
        """Returns which experts are in the pool of each token's example.

        Args:
            logits: <float32>[G, S, E] of all experts.
            starts: <bool>[G, S] first tokens of examples.

        Returns:
            <bool>[G, S, E].
        """
        K, E = self.config.num_selected_experts, self.config.num_experts
        d = torch.randint(K, E + 1, (*starts.shape, 1), device=logits.device)  # [G, S, 1]
        least = logits.sort(dim=-1, descending=True).values.gather(-1, d - 1)  # [G, S, 1]
        return of_first_token(logits >= least, starts)

    def preference(self, scores: RouterScores) -> Tensor:
        """Returns logits in training, where probabilities in a pool may round to the 0 of other experts."""
        return scores.logits if self.training else super().preference(scores)
