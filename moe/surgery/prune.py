"""Pruning: a model that keeps only some experts of each sparse layer.

A score from SCORES rates the experts on calibration batches. A fixed number of each layer stays, or
a budget is shared among the layers. The weights of the kept experts and their rows of the router
are copied; nothing is trained.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe.checks import check, check_choice
from moe.convert.formats import rewrite_checkpoint
from moe.convert.weight_map import ConvertedCheckpoint, empty_weights, sparse_blocks
from moe.data.pipeline import Batch
from moe.errors import ConfigError
from moe.models.configuration import STMoEConfig
from moe.models.configuration_checks import refuse_quantized
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.weight_files import LazyTensor
from moe.sparse.all_routers import load_routers
from moe.sparse.editing import LayerKey
from moe.surgery.expert_statistics import ExpertStatistics, expert_statistics
from moe.tracing.trace import STACKS, layer_name

_SPARSE = "sparse_feed_forward."


@dataclass(frozen=True)
class Pruning:
    """Settings of a pruning: how experts are rated, and how many stay.

    Attributes:
        score: Name in SCORES, or `random`.
        keep: Experts that stay in each sparse layer.
        budget: Instead: experts that stay in all layers together. Every layer keeps the fewest of
            its best experts whose scores add up to a share of all its scores, and the share is the
            same in every layer.
        floor: With a budget, least experts of a layer.
        seed: Seed of the score `random`.

    Source:
        NLLB pruning (arXiv:2212.09811) §3: a fixed number for each layer, or a global threshold with
        at least 4 experts in a layer.
    """

    score: str = "reap"
    keep: int | None = None
    budget: int | None = None
    floor: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises a ConfigError when a value is out of range, or the number that stays is not given once."""
        check_choice("score", self.score, SCORE_NAMES)
        if (self.keep is None) == (self.budget is None):
            raise ConfigError(
                f"keep is {self.keep} and budget is {self.budget}; expected one of them: how many experts stay."
            )

    def numbers(self, config: STMoEConfig) -> dict[LayerKey, int] | None:
        """Returns how many experts each layer keeps; None with a budget, where the scores decide.

        Raises:
            ConfigError: When the model is dense, a router cannot lose experts, or a number does not
                fit the model.
        """
        _check_layers(config)
        num_experts = experts_of_layers(config)
        total = sum(num_experts.values())
        least = self.floor if self.keep is None else self.keep
        for key, number in num_experts.items():
            _check_number(layer_name(key), min(least, number), number, config)
        if self.keep is not None:
            numbers = {key: min(self.keep, number) for key, number in num_experts.items()}
            removes = sum(numbers.values()) < total
            check(
                removes, "keep", self.keep, f"less than the {max(num_experts.values())} there are"
            )
            return numbers

        # Every layer gets the floor first.
        smallest = sum(min(self.floor, number) for number in num_experts.values())
        expected = (
            f"{smallest} to {total - 1}, at least {self.floor} in each of {len(num_experts)} layers"
        )
        check(smallest <= (self.budget or 0) < total, "budget", self.budget, expected)
        return None


def _check_number(name: str, number: int, num_experts: int, config: STMoEConfig) -> None:
    """Raises a ConfigError when a layer cannot keep that many of its experts."""
    K = config.num_selected_experts
    if not K <= number <= num_experts:
        raise ConfigError(
            f"{name} would keep {number} of {num_experts} experts, and each token chooses {K} "
            f"(num_selected_experts). Keep {K} to {num_experts}."
        )


def _check_layers(config: STMoEConfig) -> None:
    """Raises a ConfigError for layers from which no expert can be removed."""
    refuse_quantized(config, "pruned")
    for layer in config.all_sparse_configs():
        if not load_routers().get(layer.router).num_parameters(layer):
            raise ConfigError(
                f"Router {layer.router!r} has no weights for each of its {layer.num_experts} "
                "experts that could be removed: with fewer experts it would send most tokens "
                "to another one. Prune a model with another router."
            )


def experts_of_layers(config: STMoEConfig) -> dict[LayerKey, int]:
    """Returns the number of experts of every sparse layer.

    Raises:
        ConfigError: When the model is dense.
    """
    numbers: dict[LayerKey, int] = {}
    for stack in STACKS:
        for layer, number in enumerate(config.layer_experts(decoder=stack == "decoder")):
            numbers[stack, layer] = number
    if not numbers:
        raise ConfigError(
            "The model has 0 sparse layers and no expert to remove. Give a sparse model, or make one "
            "from it by stmoe upcycle."
        )
    return numbers


# ---------------------------------------------------------------------------
# Which experts


class ChosenExperts(NamedTuple):
    """The experts that stay.

    Attributes:
        scores: <float64>[E] score of each expert, by layer.
        kept: <int64>[n] experts that stay, in ascending order, by layer.
    """

    scores: Mapping[LayerKey, Tensor]
    kept: Mapping[LayerKey, Tensor]


def choose_experts(
    model: STMoEForConditionalGeneration, batches: Sequence[Batch], pruning: Pruning
) -> ChosenExperts:
    """Returns which experts stay, by their scores on calibration batches.

    Raises:
        ConfigError: When the settings do not fit the model.
        DataError: When the batches hold no token.
    """
    numbers = pruning.numbers(model.config)
    scores: dict[LayerKey, Tensor] = {}
    if pruning.score == "random":
        generator = torch.Generator().manual_seed(pruning.seed)
        for key, number in experts_of_layers(model.config).items():
            scores[key] = torch.rand(number, generator=generator, dtype=torch.float64)
    else:
        for key, statistics in expert_statistics(model, batches).items():
            scores[key] = SCORES[pruning.score](statistics)
    if numbers is None:
        assert pruning.budget is not None, "the budget decides without numbers"
        numbers = share_budget(scores, pruning.budget, pruning.floor)
    kept = {key: best_experts(scores[key], number) for key, number in numbers.items()}
    return ChosenExperts(scores, kept)


def reap(statistics: ExpertStatistics) -> Tensor:
    """Returns the mean <float64>[E] over an expert's tokens of gate times norm of its output; 0 without tokens.

    Source:
        REAP (arXiv:2510.13999).
    """
    return statistics.gated_norm_sum / statistics.load.clamp(min=1)


def importance(statistics: ExpertStatistics) -> Tensor:
    """Returns top1(e) * exp(conf(e)) <float64>[E].

    top1 is the share of tokens whose first choice is e, conf its mean gate there.

    Source:
        NLLB pruning (arXiv:2212.09811) §3.
    """
    confidence = statistics.first_gate_sum / statistics.first_load.clamp(min=1)
    return frequency(statistics) * confidence.exp()


def frequency(statistics: ExpertStatistics) -> Tensor:
    """Returns the share <float64>[E] of tokens whose first choice an expert is."""
    return statistics.first_load / statistics.num_tokens.double()


SCORES: Mapping[str, Callable[[ExpertStatistics], Tensor]] = {
    "reap": reap,
    "importance": importance,
    "frequency": frequency,
}
"""Scores of experts, not negative, by name; the highest stay."""

SCORE_NAMES = (*SCORES, "random")


def best_experts(scores: Tensor, number: int) -> Tensor:
    """Returns the experts <int64>[number] of highest score <float>[E], ascending; ties go to the first."""
    return scores.argsort(descending=True, stable=True)[:number].sort().values


def share_budget(scores: Mapping[LayerKey, Tensor], budget: int, floor: int) -> dict[LayerKey, int]:
    """Returns how many experts each layer keeps, so that they are `budget` in all.

    Args:
        scores: <float>[E] of every layer, not negative.
        budget: Experts of all layers together.
        floor: Least experts of a layer.
    """
    # A threshold keeps an expert if the better ones of its layer hold a smaller share of the score.
    # So a budget keeps the experts with the smallest share before them.
    layers: list[LayerKey] = []
    shares_before: list[Tensor] = []
    for key, layer_scores in scores.items():
        share = layer_scores.sort(descending=True).values.double()
        share = share / share.sum().clamp(min=1e-300)
        share_before = share.cumsum(0) - share  # [E]
        share_before[:floor] = -1
        shares_before.append(share_before)
        layers += [key] * share.numel()

    order = torch.cat(shares_before).argsort(stable=True)[:budget].tolist()
    numbers = dict.fromkeys(scores, 0)
    for index in order:
        numbers[layers[index]] += 1
    return numbers


# ---------------------------------------------------------------------------
# The model of them


def prune_checkpoint(
    source: Path | str, folder: Path, kept: Mapping[LayerKey, Tensor], **download: Any
) -> STMoEConfig:
    """Writes the model that has only some experts; holds one tensor in memory at a time.

    Args:
        source: A folder of a sparse model of ours or a Switch, or a name of the hub.
        folder: Exists, and is empty.
        kept: <int64>[n] experts that stay, ascending, by layer; layers not named keep all.
        download: `revision`, `token`, `cache_dir` and the like.

    Returns:
        The config of the pruned model.

    Raises:
        ConfigError: When a router cannot lose experts, or fewer stay than a token chooses.
        CheckpointError: When a tensor of the source is not accounted for.
    """
    return rewrite_checkpoint(source, folder, partial(pruned, kept=kept), **download)


def pruned(checkpoint: ConvertedCheckpoint, kept: Mapping[LayerKey, Tensor]) -> ConvertedCheckpoint:
    """Returns the weights of the pruned model, each of which is read and cut when it is indexed."""
    config = pruned_config(checkpoint.config, kept)
    blocks = sparse_blocks(config)

    # The first dimension of experts and router rows shrinks.
    def cut(weight: LazyTensor, key: LayerKey) -> Tensor:
        return weight.read().index_select(0, kept[key].cpu())

    weights: dict[str, LazyTensor] = {}
    for name, tensor in empty_weights(config).items():
        weight = checkpoint.weights[name]
        if weight.shape != tensor.shape:
            key = blocks[name.partition(_SPARSE)[0]]
            weight = LazyTensor(tensor.shape, weight.dtype, partial(cut, weight, key))
        weights[name] = weight
    return checkpoint._replace(config=config, weights=weights)


def pruned_config(config: STMoEConfig, kept: Mapping[LayerKey, Tensor]) -> STMoEConfig:
    """Returns the config of the pruned model.

    Raises:
        ConfigError: When a router cannot lose experts, or fewer stay than a token chooses.
    """
    _check_layers(config)
    numbers = experts_of_layers(config)
    numbers |= {key: experts.numel() for key, experts in kept.items()}
    encoder = [number for (stack, _), number in numbers.items() if stack == "encoder"]
    decoder = [number for (stack, _), number in numbers.items() if stack == "decoder"]
    return config.with_experts(encoder, decoder)
