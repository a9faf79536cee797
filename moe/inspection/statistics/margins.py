"""How close choices are: the gap to the next expert, and how many choices noise changes."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe.checks import check, check_integer, check_number
from moe.data.pipeline import Batch
from moe.errors import DataError
from moe.models.modeling import STMoEForConditionalGeneration
from moe.sparse.editing import LayerKey, sparse_layers
from moe.sparse.layer import real_tokens
from moe.sparse.plan import DispatchPlan, RouterScores
from moe.sparse.router import Router, RouterInputs
from moe.tracing.recorder import evaluation_mode
from moe.tracing.trace import LayerTrace, layer_name

VARIANCES = (0.25, 0.5, 1.0, 2.0)
"""Variances of the noise relative to the token's, as in REAP."""


class Margins(NamedTuple):
    """The gap in probability between the last expert that a token may choose and the next one.

    Attributes:
        layer: Stack and number.
        place: K: the gap is between places K and K + 1.
        gap: <float32>[N] of each token, from 0; exact to 0.0005, as probabilities are kept.
    """

    layer: LayerKey
    place: int
    gap: Tensor


def choice_margins(layer: LayerTrace) -> Margins:
    """Returns the margin by which the next expert is not chosen, token by token.

    Args:
        layer: The layer's part of a trace that was recorded with `num_best` above K.

    Raises:
        DataError: When it has too few probabilities, or a token may have every expert.
    """
    # There must be a next expert, and its probability.
    place = layer.facts.num_choices
    name = layer_name(layer.key)
    if place >= layer.facts.num_experts:
        raise DataError(
            f"A token of {name} may have {place} of {layer.facts.num_experts} experts (router {layer.facts.router}), "
            "so there is no next one. Look at a layer in which tokens choose among more experts."
        )
    num_best = layer.best_prob.shape[1]
    if num_best <= place:
        raise DataError(
            f"The trace has the {num_best} highest probabilities of {name}; the gap after place {place} needs "
            f"{place + 1}. Record it with num_best={place + 1}."
        )

    probs = layer.best_prob.float()  # [N, M]
    return Margins(layer.key, place, probs[:, place - 1] - probs[:, place])


class NoiseStability(NamedTuple):
    """How many choices noise at the input of one layer's router changes.

    Attributes:
        layer: Stack and number.
        variance: Variance of the noise relative to that of the token's hidden state.
        tokens: Real tokens that were routed.
        kept: Share of the requests that stay the same; NaN without requests.
        first_kept: Share of those tokens whose first choice stays the same.
    """

    layer: LayerKey
    variance: float
    tokens: int
    kept: float
    first_kept: float


@torch.inference_mode()
def noise_stability(
    model: STMoEForConditionalGeneration,
    batches: Iterable[Batch],
    *,
    variances: Sequence[float] = VARIANCES,
    seed: int = 0,
) -> list[NoiseStability]:
    """Returns how stable the choices of each sparse layer are under noise, in evaluation mode.

    The noise only reaches a second call of the router; the layer's own output stays unchanged.

    Args:
        model: The model; its training mode is restored.
        batches: Batches with labels, on the model's device.
        variances: Variances of the Gaussian noise added to a token's hidden state, relative to its own.
        seed: Seed of the noise.

    Returns:
        For each layer and each variance.

    Raises:
        ConfigError: When a variance is not above 0, or the seed is not an integer.

    Source:
        REAP (arXiv:2510.13999), router stability.
    """
    check(len(variances) > 0, "variances", variances, "at least one number")
    for variance in variances:
        check_number("variance", variance, above=0)
    check_integer("seed", seed, least=0)

    # Each router is called again, with noise, after each call.
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    counts: dict[tuple[LayerKey, float], Tensor] = {}
    handles = []
    for key, layer in sparse_layers(model).items():
        hook = partial(_count_changes, key, variances, generator, counts)
        handles.append(layer.router.register_forward_hook(hook))

    # Evaluation mode: no jitter, no dropout, and the capacity of evaluation.
    try:
        with evaluation_mode(model):
            for batch in batches:
                model(**batch, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()

    stabilities = []
    for (key, variance), total in counts.items():
        tokens, requests, kept, first_kept = total.tolist()
        stabilities.append(
            NoiseStability(
                layer=key,
                variance=variance,
                tokens=tokens,
                kept=kept / requests if requests else math.nan,
                first_kept=first_kept / tokens if tokens else math.nan,
            )
        )
    return stabilities


def _count_changes(
    key: LayerKey,
    variances: Sequence[float],
    generator: torch.Generator,
    counts: dict[tuple[LayerKey, float], Tensor],
    router: Router,
    args: tuple[Any, ...],
    scores: RouterScores,
) -> None:
    """Adds the choices that each noise changes to the counts; a hook after a router's forward."""
    # The plan without noise, and the standard deviation of the input.
    inputs: RouterInputs = args[0]
    tokens = inputs.tokens
    plan = _assigned(router, scores, inputs)
    deviation = tokens.float().std(dim=-1, keepdim=True, correction=0)

    for variance in variances:
        # The same with noise; `forward` itself calls no hook.
        noise = torch.randn(tokens.shape, generator=generator, device=tokens.device)
        noise = noise * deviation * math.sqrt(variance)
        noisy_tokens = tokens + noise.to(tokens.dtype)
        noisy_inputs = inputs._replace(tokens=noisy_tokens)
        noisy_scores = router.forward(noisy_inputs)
        noisy_plan = _assigned(router, noisy_scores, noisy_inputs)

        # Added to the counts of earlier batches.
        changes = _changes(scores, plan, noisy_scores, noisy_plan)
        counts[key, variance] = counts.get((key, variance), 0) + changes


def _assigned(router: Router, scores: RouterScores, inputs: RouterInputs) -> DispatchPlan:
    """Returns the router's plan; where it draws a choice, it draws the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return router.assign(scores, real_tokens(inputs))


def _changes(
    scores: RouterScores, plan: DispatchPlan, noisy_scores: RouterScores, noisy_plan: DispatchPlan
) -> Tensor:
    """Returns <int64>[4]: tokens that were routed, their requests, requests that two plans <...>[G,
    S, K] have in common, and tokens with the same first choice in both.
    """
    before = _requested_experts(plan, scores)  # [G, S, E]
    after = _requested_experts(noisy_plan, noisy_scores)
    is_routed = before.any(dim=-1)  # [G, S]

    # First choice: of the experts that a token requests, the one with the highest logit.
    logits = scores.logits.masked_fill(~before, -math.inf)
    noisy_logits = noisy_scores.logits.masked_fill(~after, -math.inf)
    first_before = logits.argmax(dim=-1)
    first_after = noisy_logits.argmax(dim=-1)
    is_same = (first_before == first_after) & after.any(dim=-1)
    first_kept = is_routed & is_same
    return torch.stack([is_routed.sum(), before.sum(), (before & after).sum(), first_kept.sum()])


def _requested_experts(plan: DispatchPlan, scores: RouterScores) -> Tensor:
    """Returns <bool>[G, S, E]: the experts that each token requests."""
    requested = torch.zeros_like(scores.logits)
    requested.scatter_add_(-1, plan.expert_index, plan.requested.to(requested.dtype))
    return requested > 0
