"""Scores of experts, by which `prune` decides which of them stay; the highest do.

A new score is a function registered in SCORES.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from moe.data.pipeline import Batch
from moe.errors import ConfigError
from moe.models.modeling import STMoEForConditionalGeneration
from moe.registry import Registry
from moe.sparse.editing import LayerKey, sparse_layers
from moe.sparse.edits import choose_again
from moe.sparse.layer import RouterOutput, SparseFeedForward
from moe.sparse.plan import DispatchPlan, RouterScores, router_scores
from moe.sparse.router import Router
from moe.surgery.expert_statistics import (
    ExpertStatistics,
    expert_output,
    expert_statistics,
    read_layers,
)
from moe.tracing.trace import layer_name

_MOST_EXPERTS = 8  # whose subsets are all tried


@dataclass(frozen=True)
class Calibration:
    """Inputs of an expert's score.

    Attributes:
        model: The model.
        batches: Batches with labels.
        numbers: Experts that each layer will keep; None where the scores decide.
        seed: Seed of random scores.
    """

    model: STMoEForConditionalGeneration
    batches: Sequence[Batch]
    numbers: Mapping[LayerKey, int] | None = None
    seed: int = 0

    @cached_property
    def statistics(self) -> dict[LayerKey, ExpertStatistics]:
        """Statistics of the experts on the batches, by layer."""
        return expert_statistics(self.model, self.batches)


Score = Callable[[Calibration], dict[LayerKey, Tensor]]
"""Returns a score <float64>[E] of each expert, not negative, by layer."""

SCORES: Registry[Score] = Registry("score of experts")


@SCORES.register("reap")
def reap(calibration: Calibration) -> dict[LayerKey, Tensor]:
    """Returns the mean over an expert's tokens of gate times norm of its output; 0 without tokens.

    Source:
        REAP (arXiv:2510.13999). Differs: no.
    """
    scores: dict[LayerKey, Tensor] = {}
    for key, statistics in calibration.statistics.items():
        scores[key] = statistics.gated_norm_sum / statistics.load.clamp(min=1)
    return scores


@SCORES.register("importance")
def importance(calibration: Calibration) -> dict[LayerKey, Tensor]:
    """Returns top1(e) * exp(conf(e)).

    top1 is the share of tokens whose first choice is e, conf its mean gate there.

    Source:
        NLLB pruning (arXiv:2212.09811) §3. Differs: no.
    """
    scores = frequency(calibration)
    for key, statistics in calibration.statistics.items():
        confidence = statistics.first_gate_sum / statistics.first_load.clamp(min=1)
        scores[key] = scores[key] * confidence.exp()
    return scores


@SCORES.register("frequency")
def frequency(calibration: Calibration) -> dict[LayerKey, Tensor]:
    """Returns the share of tokens whose first choice an expert is."""
    scores: dict[LayerKey, Tensor] = {}
    for key, statistics in calibration.statistics.items():
        scores[key] = statistics.first_load / statistics.num_tokens.double()
    return scores


@SCORES.register("random")
def random(calibration: Calibration) -> dict[LayerKey, Tensor]:
    """Returns uniform random numbers: the baseline of every other score."""
    generator = torch.Generator().manual_seed(calibration.seed)
    scores: dict[LayerKey, Tensor] = {}
    for key, layer in sparse_layers(calibration.model).items():
        num_experts = layer.config.num_experts
        scores[key] = torch.rand(num_experts, generator=generator, dtype=torch.float64)
    return scores


@SCORES.register("reconstruction")
def reconstruction(calibration: Calibration) -> dict[LayerKey, Tensor]:
    """Returns 1 for the experts of the set that changes a layer's output least, 0 for all others.

    All sets of the layer's number are tried, with the other layers as they are.

    Raises:
        ConfigError: When the scores decide the numbers, a layer has more than 8 experts, or experts
            choose their tokens.

    Source:
        Lu et al. (arXiv:2402.14800) §3.2. Differs: the norm is of each token's change, so that the
        sum does not depend on the batches.
    """
    if calibration.numbers is None:
        raise ConfigError(
            "Score 'reconstruction' compares sets of as many experts as a layer keeps, so it cannot "
            "say how many that are. Give the number of each layer, or another score."
        )

    scores: dict[LayerKey, Tensor] = {}
    for key, errors in set_errors(calibration).items():
        best = min(errors, key=errors.__getitem__)
        num_experts = sparse_layers(calibration.model)[key].config.num_experts
        scores[key] = torch.zeros(num_experts, dtype=torch.float64)
        scores[key][list(best)] = 1
    return scores


def set_errors(calibration: Calibration) -> dict[LayerKey, dict[tuple[int, ...], float]]:
    """Returns for every set of experts that a layer may keep how much it changes the layer's output.

    Returns:
        Sum over tokens of the L2 norm of the change, by set, by layer.

    Raises:
        ConfigError: When a layer has more than 8 experts, or experts choose their tokens.
    """
    assert calibration.numbers is not None, "sets have a size"
    layers = sparse_layers(calibration.model)
    errors: dict[LayerKey, dict[tuple[int, ...], float]] = {}
    for key, number in calibration.numbers.items():
        num_experts = layers[key].config.num_experts
        _check_sets(key, layers[key], number)
        errors[key] = dict.fromkeys(itertools.combinations(range(num_experts), number), 0.0)

    readers = {key: partial(_add_set_errors, layer_errors) for key, layer_errors in errors.items()}
    read_layers(calibration.model, calibration.batches, readers)
    return errors


def _check_sets(key: LayerKey, layer: SparseFeedForward, number: int) -> None:
    """Raises a ConfigError for a layer with too many sets of experts, or with sets that cannot be compared."""
    E = layer.config.num_experts
    if E > _MOST_EXPERTS:
        raise ConfigError(
            f"Score 'reconstruction' tries all sets of experts, and {layer_name(key)} has "
            f"{math.comb(E, number):,} sets of {number} of its {E} experts; expected at most "
            f"{_MOST_EXPERTS} experts. Use another score."
        )
    if layer.router.experts_choose:
        raise ConfigError(
            f"Score 'reconstruction' cannot be combined with router {layer.config.router!r}, whose "
            "experts take more tokens the fewer they are. Use another score."
        )


def _add_set_errors(
    errors: dict[tuple[int, ...], float],
    layer: SparseFeedForward,
    tokens: Tensor,
    router_output: RouterOutput,
) -> None:
    """Adds what each set of experts changes in a layer's output for tokens <any float>[G, S, D]."""
    plan = router_output.plan
    real = plan.token_mask
    outputs = _all_outputs(layer, tokens, plan)[real]  # [N, E, D]
    whole = _combined(outputs, plan)  # [N, D]

    scores = router_scores(router_output.router_logits)
    for experts in errors:
        left = torch.tensor(experts, device=outputs.device)
        rest = _combined(outputs, choose_among(layer.router, left, scores, plan))
        errors[experts] += float((rest - whole).norm(dim=-1).sum())


def choose_among(
    router: Router, experts: Tensor, scores: RouterScores, plan: DispatchPlan
) -> DispatchPlan:
    """Returns the plan of a layer that has only some experts <int64>[n].

    A token has fewer than K where fewer are left.
    """
    barred = torch.ones_like(scores.probs, dtype=torch.bool)  # [G, S, E]
    barred[..., experts] = False
    return choose_again(router, scores, plan, barred)


def _all_outputs(layer: SparseFeedForward, tokens: Tensor, plan: DispatchPlan) -> Tensor:
    """Returns the output <float64>[G, S, E, D] of every expert for every token."""
    outputs = []
    for expert in range(layer.config.num_experts):
        outputs.append(expert_output(layer, tokens, plan, expert))
    return torch.stack(outputs, dim=2).double()


def _combined(outputs: Tensor, plan: DispatchPlan) -> Tensor:
    """Returns the layer's output <float64>[N, D] for real tokens, from <float64>[N, E, D]."""
    weights = outputs.new_zeros(outputs.shape[:2])  # [N, E]
    real = plan.token_mask
    weights = weights.scatter_add(1, plan.expert_index[real], plan.combine_weight[real].double())
    return torch.einsum("ne,ned->nd", weights, outputs)
