"""Pruning: a model that keeps only some experts of each sparse layer.

A score from SCORES rates the experts on calibration batches. A fixed number of each layer stays, or
a budget is shared among the layers. The weights of the kept experts and their rows of the router
are copied; nothing is trained.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe.checkpoint.loading import empty_model
from moe.checks import check, check_choice
from moe.convert.formats import rewrite_checkpoint
from moe.convert.weight_map import ConvertedCheckpoint
from moe.data.pipeline import Batch
from moe.errors import ConfigError
from moe.models.configuration_checks import refuse_quantized
from moe.models.weight_files import LazyTensor
from moe.sparse.all_routers import load_routers
from moe.sparse.config import SparseConfig
from moe.sparse.editing import STACKS, LayerKey, sparse_layers
from moe.surgery.expert_statistics import ExpertStatistics, expert_statistics
from moe.tracing.trace import layer_name


@dataclass(frozen=True)
class Pruning:
    """Settings of a pruning: how experts are rated, and how many stay.

    Attributes:
        score: Name in SCORES, or `random`.
        keep: Base experts that stay in each sparse layer; two numbers are for those of the encoder and of
            the decoder. Experts of a prefix stay in any case.
        budget: Instead: base experts that stay in all layers together. Every layer keeps the fewest of
            its best experts whose scores add up to a share of all its scores, and the share is the
            same in every layer.
        floor: With a budget, least experts of a layer.
        seed: Seed of the score `random`.

    Source:
        NLLB pruning (arXiv:2212.09811) §3: a fixed number for each layer, or a global threshold with
        at least 4 experts in a layer.
    """

    score: str = "reap"
    keep: int | Sequence[int] | None = None
    budget: int | None = None
    floor: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises a ConfigError when a value is out of range, or the number that stays is not given once."""
        check_choice("score", self.score, SCORE_NAMES)
        if isinstance(self.keep, Sequence):
            check(len(self.keep) == 2, "keep", self.keep, "one number, or two: encoder, decoder")
        if (self.keep is None) == (self.budget is None):
            raise ConfigError(
                f"keep is {self.keep} and budget is {self.budget}; expected one of them: how many experts stay."
            )

    def numbers(self, model: nn.Module) -> dict[LayerKey, int] | None:
        """Returns how many experts each layer keeps; None with a budget, where the scores decide.

        Args:
            model: The model, which needs no memory.

        Raises:
            ConfigError: When the model is dense, a router cannot lose experts, or a number does not
                fit the model.
        """
        layers = prunable_layers(model)
        least = self.floor if self.keep is None else self.keep
        pair = (least, least) if isinstance(least, int) else least
        least_of = dict(zip(STACKS, pair, strict=True))
        numbers: dict[LayerKey, int] = {}
        for key, layer in layers.items():
            E, K = layer.num_base_experts, layer.num_selected_experts
            numbers[key] = min(least_of[key[0]], E)
            if numbers[key] < K:
                raise ConfigError(
                    f"{layer_name(key)} would keep {numbers[key]} of {E} experts, and each token "
                    f"chooses {K} (num_selected_experts). Keep {K} to {E}."
                )

        total = sum(layer.num_base_experts for layer in layers.values())
        smallest = sum(numbers.values())
        if self.keep is not None:
            largest = max(layer.num_base_experts for layer in layers.values())
            fits = smallest < total and set(pair) <= set(numbers.values())
            check(fits, "keep", self.keep, f"less than the {largest} there are")
            return numbers

        # Every layer gets the floor first.
        expected = (
            f"{smallest} to {total - 1}, at least {self.floor} in each of {len(layers)} layers"
        )
        check(smallest <= (self.budget or 0) < total, "budget", self.budget, expected)
        return None


def prunable_layers(model: nn.Module) -> dict[LayerKey, SparseConfig]:
    """Returns the settings of every sparse layer of a model, which needs no memory.

    Raises:
        ConfigError: When the model is dense, or no expert of a layer can be removed.
    """
    configs = {key: layer.config for key, layer in sparse_layers(model).items()}
    if not configs:
        raise ConfigError(
            "The model has 0 sparse layers and no expert to remove. Give a sparse model, or make one "
            "from it by stmoe upcycle."
        )
    for config in configs.values():
        refuse_quantized(config, "pruned")
        if not load_routers().get(config.router).num_parameters(config):
            raise ConfigError(
                f"Router {config.router!r} has no weights for each of its {config.num_experts} "
                "experts that could be removed: with fewer experts it would send most tokens "
                "to another one. Prune a model with another router."
            )
    return configs


# ---------------------------------------------------------------------------
# Which experts


class ChosenExperts(NamedTuple):
    """The experts that stay.

    Attributes:
        scores: <float64>[E] score of each base expert, by layer.
        kept: <int64>[n] experts that stay, in ascending order, by layer.
    """

    scores: Mapping[LayerKey, Tensor]
    kept: Mapping[LayerKey, Tensor]


def choose_experts(
    model: Any,
    batches: Sequence[Batch],
    pruning: Pruning,
    decoder_batches: Sequence[Batch] | None = None,
) -> ChosenExperts:
    """Returns which experts stay, by their scores on calibration batches.

    Args:
        model: Ours or a host with sparse layers.
        batches: Keyword arguments of its forward, with labels.
        pruning: The settings.
        decoder_batches: Others that rate the decoder's experts, so that the encoder may be rated
            on all texts in the source language and the decoder on all in the target language.

    Raises:
        ConfigError: When the settings do not fit the model.
        DataError: When the batches hold no token.
    """
    numbers = pruning.numbers(model)
    layers = prunable_layers(model)
    scores: dict[LayerKey, Tensor] = {}
    if pruning.score == "random":
        generator = torch.Generator().manual_seed(pruning.seed)
        for key, layer in layers.items():
            num_rated = layer.num_base_experts
            scores[key] = torch.rand(num_rated, generator=generator, dtype=torch.float64)
    else:
        of_stack = dict.fromkeys(STACKS, expert_statistics(model, batches))
        if decoder_batches is not None:
            of_stack["decoder"] = expert_statistics(model, decoder_batches)
        for key, layer in layers.items():
            rated = SCORES[pruning.score](of_stack[key[0]][key])
            scores[key] = rated[: layer.num_base_experts]
    if numbers is None:
        assert pruning.budget is not None, "the budget decides without numbers"
        numbers = share_budget(scores, pruning.budget, pruning.floor)

    kept: dict[LayerKey, Tensor] = {}
    for key, layer in layers.items():
        best = best_experts(scores[key], numbers[key])
        of_prefixes = torch.arange(layer.num_base_experts, layer.num_experts, device=best.device)
        kept[key] = torch.cat([best, of_prefixes])
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
) -> Any:
    """Writes the model that has only some experts; holds one tensor or expert in memory at a time.

    Args:
        source: A folder of a sparse model of ours, a Switch or a host, or a name of the hub.
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
    """Returns the weights of the pruned model, each of which is read when it is indexed."""
    return with_chosen_experts(checkpoint, pruned_config(checkpoint.config, kept), kept)


def with_chosen_experts(
    checkpoint: ConvertedCheckpoint, config: Any, chosen: Mapping[LayerKey, Tensor]
) -> ConvertedCheckpoint:
    """Returns the weights of a model whose experts are some of another's, each read when it is indexed.

    Args:
        checkpoint: The other model.
        config: Config of the model.
        chosen: <int64>[n] the expert of the other model that each expert is, by layer: ascending
            ones, then copies of some of those. Layers not named keep theirs.
    """
    model = empty_model(config)
    keys = {id(layer): key for key, layer in sparse_layers(model).items()}
    weights = dict(checkpoint.weights)
    for path, part in model.named_modules():
        key = keys.get(id(part))
        if key is not None and key in chosen:
            for name, tensor in part.state_dict().items():
                weight = weights[f"{path}.{name}"]
                if weight.shape != tuple(tensor.shape):  # not that of shared experts
                    weights[f"{path}.{name}"] = _chosen_rows(weight, chosen[key].tolist())
    return checkpoint._replace(config=config, weights=weights)


def _chosen_rows(weight: LazyTensor, numbers: Sequence[int]) -> LazyTensor:
    """Returns the rows <any>[n, ...] of a weight with ascending numbers, then copies of some of those."""
    distinct = set(numbers)
    copied = numbers[len(distinct) :]

    def read_each() -> Iterator[Tensor]:
        held: dict[int, Tensor] = {}
        for number, row in enumerate(weight):
            if number in distinct:
                yield row
            if number in copied:
                held[number] = row
        for number in copied:
            yield held[number]

    return LazyTensor((len(numbers), *weight.shape[1:]), weight.dtype, read_each=read_each)


def pruned_config(config: Any, kept: Mapping[LayerKey, Tensor]) -> Any:
    """Returns the config of the pruned model: an STMoEConfig, or that of a host with sparse layers.

    Raises:
        ConfigError: When a router cannot lose experts, or fewer stay than a token chooses.
    """
    experts: dict[str, list[int]] = {stack: [] for stack in STACKS}
    for key, layer in prunable_layers(empty_model(config)).items():
        experts[key[0]].append(kept[key].numel() if key in kept else layer.num_experts)
    return config.replaced(
        num_experts=max(itertools.chain(*experts.values())),
        encoder_experts=experts["encoder"],
        decoder_experts=experts["decoder"],
    )
