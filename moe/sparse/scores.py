"""The scores of a router: logits and what is computed from them once, for the plan, the losses and
the statistics.
"""

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
    """Returns the scores that belong to logits <float32>[G, S, E].

    The exponential of a log-softmax would be cheaper; but its rounding tears tokens apart that tie
    in a softmax.
    """
    return RouterScores(logits, logits.softmax(dim=-1), logits.logsumexp(dim=-1))
