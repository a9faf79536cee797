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

from moe.checks import check, check_integer, check_number
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
from moe.surgery.expert_scores import SCORES, Calibration
from moe.tracing.trace import STACKS, layer_name

_RULES = ("keep", "encoder_keep", "decoder_keep", "budget", "least_share")


@dataclass(frozen=True)
class Pruning:
    """Settings of a pruning: how experts are rated, and how many stay.

    Attributes:
        score: Name in SCORES.
        keep: Experts that stay in each sparse layer.
        encoder_keep: Instead: experts that stay in each sparse layer of the encoder; None keeps all.
        decoder_keep: The same for the decoder.
        budget: Instead: experts that stay in all layers together. Every layer keeps the fewest of
            its best experts whose scores add up to a share of all its scores, and the share is the
            same in every layer.
        least_share: Instead: an expert stays if its score is at least this times the mean score of
            its layer.
        floor: With a budget or least share, least experts of a layer.
        seed: Seed of the score `random`.

    Source:
        NLLB pruning (arXiv:2212.09811) §3: a fixed number for each layer or stack, or a global
        threshold with at least 4 experts in a layer. Differs: no. `least_share`: task-specific
        pruning (arXiv:2206.00277), beta. Differs: the caller prunes between windows of training.
    """

    score: str = "reap"
    keep: int | None = None
    encoder_keep: int | None = None
    decoder_keep: int | None = None
    budget: int | None = None
    least_share: float | None = None
    floor: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises a ConfigError when a value is out of range, or no option says how many experts to keep."""
        SCORES.get(self.score)
        for name in ("keep", "encoder_keep", "decoder_keep", "budget"):
            check_integer(name, getattr(self, name), least=1, optional="None")
        check_integer("floor", self.floor, least=1)
        check_integer("seed", self.seed, least=0, most=2**63 - 1)
        check_number("least_share", self.least_share, above=0, most=1, optional="None")

        rules = {name: getattr(self, name) for name in _RULES}
        given = {name: value for name, value in rules.items() if value is not None}
        if len(given) != 1 and given.keys() != {"encoder_keep", "decoder_keep"}:
            shown_rules = ", ".join(f"{name} {value}" for name, value in given.items())
            raise ConfigError(
                f"{shown_rules or 'Nothing'} is given as the number of experts that stay; expected one of "
                f"{', '.join(_RULES)}, or a number for both stacks."
            )

    def numbers(self, config: STMoEConfig) -> dict[LayerKey, int] | None:
        """Returns how many experts each layer keeps; None where the scores decide.

        Raises:
            ConfigError: When the model is dense, a router cannot lose experts, or a number does not
                fit the model.
        """
        _check_layers(config)
        num_experts = experts_of_layers(config)
        total = sum(num_experts.values())
        if self.budget is None and self.least_share is None:
            numbers = self._fixed_numbers(num_experts)
            for key, number in numbers.items():
                _check_number(layer_name(key), number, num_experts[key], config)
            removes = sum(numbers.values()) < total
            check(removes, "experts to keep", total, f"fewer than the {total} that there are")
            return numbers

        # Every layer gets the floor first.
        largest = max(num_experts.values())
        _check_number("each layer", self.floor, largest, config)
        check(
            self.floor < largest, "floor", self.floor, f"less than the {largest} experts there are"
        )
        if self.budget is not None:
            least = sum(min(self.floor, number) for number in num_experts.values())
            expected = f"{least} to {total - 1}, at least {self.floor} in each of {len(num_experts)} layers"
            check(least <= self.budget < total, "budget", self.budget, expected)
        return None

    def _fixed_numbers(self, num_experts: Mapping[LayerKey, int]) -> dict[LayerKey, int]:
        keep = {"encoder": self.encoder_keep, "decoder": self.decoder_keep}
        stacks = {stack for stack, _ in num_experts}
        for stack, number in keep.items():
            if number is not None and stack not in stacks:
                raise ConfigError(
                    f"{stack}_keep is {number}, but the {stack} has 0 sparse layers. Leave it out."
                )
        return {key: self.keep or keep[key[0]] or number for key, number in num_experts.items()}


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
    calibration = Calibration(model, batches, numbers, pruning.seed)
    scores = SCORES.get(pruning.score)(calibration)
    if pruning.budget is not None:
        numbers = share_budget(scores, pruning.budget, pruning.floor)
    elif pruning.least_share is not None:
        numbers = busy_experts(scores, pruning.least_share, pruning.floor)
    assert numbers is not None, "some rule says how many stay"
    kept = {key: best_experts(scores[key], number) for key, number in numbers.items()}
    return ChosenExperts(scores, kept)


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


def busy_experts(
    scores: Mapping[LayerKey, Tensor], least_share: float, floor: int
) -> dict[LayerKey, int]:
    """Returns how many experts of each layer have a share of its mean score <float>[E], or the floor."""
    numbers: dict[LayerKey, int] = {}
    for key, layer_scores in scores.items():
        is_busy = layer_scores >= least_share * layer_scores.mean()
        numbers[key] = max(int(is_busy.sum()), min(floor, layer_scores.numel()))
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

    # The first dimension of experts and router rows shrinks.
    def cut(name: str, weight: LazyTensor, key: LayerKey) -> Tensor:
        return weight.read().index_select(0, kept[key].cpu())

    return with_other_experts(checkpoint, pruned_config(checkpoint.config, kept), cut)


def with_other_experts(
    checkpoint: ConvertedCheckpoint,
    config: STMoEConfig,
    change: Callable[[str, LazyTensor, LayerKey], Tensor],
) -> ConvertedCheckpoint:
    """Returns the weights of a model whose sparse layers have other numbers of experts.

    Args:
        checkpoint: The model before.
        config: Config of the model after.
        change: Returns a weight <any>[...] of the model after, given the one of the same name before and
            its layer; called for those whose shape changes, when they are read.
    """
    blocks = sparse_blocks(config)
    weights: dict[str, LazyTensor] = {}
    for name, tensor in empty_weights(config).items():
        weight = checkpoint.weights[name]
        if weight.shape != tensor.shape:
            key = blocks[name.partition("sparse_feed_forward.")[0]]
            weight = LazyTensor(tensor.shape, weight.dtype, partial(change, name, weight, key))
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
