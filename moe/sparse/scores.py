"""The scores of a router: logits and what is computed from them once, for the plan, the losses and the statistics."""

from typing import NamedTuple

from torch import Tensor


class RouterScores(NamedTuple):
    """Scores of every expert for every token, <float32> (<float64> in a float64 model).

    Attributes:
        logits: <float32>[G, S, E] `router_logits`.
        probs: <float32>[G, S, E] `router_probs`, their softmax over experts.
        log_normalizer: <float32>[G, S] logsumexp of the logits.
    """

    logits: Tensor
    probs: Tensor
    log_normalizer: Tensor


def router_scores(logits: Tensor) -> RouterScores:
    """Returns the scores that belong to logits <float32>[G, S, E]; all from one pass over them."""
    log_probs = logits.log_softmax(dim=-1)
    return RouterScores(logits, log_probs.exp(), logits[..., 0] - log_probs[..., 0])
