"""Pruning: a model that keeps only some experts of each sparse layer.

A score from SCORES rates the experts on calibration batches. A fixed number of each layer stays, or
a budget is shared among the layers. The weights of the kept experts and their rows of the router
are copied; nothing is trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe.checkpoint.sharded_weights import stored_tensors
from moe.checks import check, check_integer
from moe.convert.formats import open_checkpoint, write_checkpoint
from moe.convert.weight_map import ConvertedCheckpoint
from moe.data.pipeline import Batch
from moe.errors import ConfigError
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.weight_files import LazyTensor
from moe.sparse.all_routers import load_routers
from moe.sparse.editing import LayerKey, sparse_layers
from moe.surgery.expert_scores import SCORES, Calibration


@dataclass(frozen=True)
class Pruning:
    """Settings of a pruning: how experts are rated, and how many stay.

    Attributes:
        score: Name in SCORES.
        encoder_keep: Experts that stay in each sparse layer of the encoder; None keeps all.
        decoder_keep: The same for the decoder.
        budget: Experts that stay in all layers together, instead of a number for each layer: every
            layer keeps the fewest of its best experts whose scores add up to a share of all its
            scores, and the share is the same in every layer.
        floor: With a budget, least experts of a layer.
        seed: Seed of the score `random`.

    Source:
        NLLB pruning (arXiv:2212.09811) §3: a fixed number for each layer or stack, or a global
        threshold with at least 4 experts in a layer. Differs: no.
    """

    score: str = "reap"
    encoder_keep: int | None = None
    decoder_keep: int | None = None
    budget: int | None = None
    floor: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises a ConfigError when a value is out of range, or nothing says how many stay."""
        SCORES.get(self.score)
        for name in ("encoder_keep", "decoder_keep", "budget"):
            check_integer(name, getattr(self, name), least=1, optional="None")
        check_integer("floor", self.floor, least=1)
        check_integer("seed", self.seed, least=0, most=2**63 - 1)
        has_numbers = self.encoder_keep is not None or self.decoder_keep is not None
        if has_numbers == (self.budget is not None):
            raise ConfigError(
                f"encoder_keep is {self.encoder_keep}, decoder_keep {self.decoder_keep} and budget "
                f"{self.budget}; expected numbers for the stacks, or a budget for all layers."
            )

    def numbers(self, config: STMoEConfig) -> dict[LayerKey, int] | None:
        """Returns how many experts each layer keeps; None where the scores decide.

        Raises:
            ConfigError: When the model is dense, a router cannot lose experts, or a number does not
                fit the model.
        """
        num_experts = experts_of_layers(config)
        _check_routers(config)
        K = config.num_selected_experts
        if self.budget is None:
            keep = {"encoder": self.encoder_keep, "decoder": self.decoder_keep}
            numbers = {key: keep[key[0]] or most for key, most in num_experts.items()}
            for (stack, layer), number in numbers.items():
                _check_number(f"{stack} layer {layer}", number, K, num_experts[stack, layer])
            return numbers

        # Every layer gets the floor first.
        _check_number("floor", self.floor, K, max(num_experts.values()))
        least = sum(min(self.floor, number) for number in num_experts.values())
        expected = (
            f"{least} to {sum(num_experts.values())}: {len(num_experts)} layers keep at least "
            f"{self.floor} each"
        )
        check(least <= self.budget <= sum(num_experts.values()), "budget", self.budget, expected)
        return None


def _check_number(name: str, number: int, K: int, num_experts: int) -> None:
    """Raises a ConfigError when a layer cannot keep that many of its experts."""
    if number < K:
        raise ConfigError(
            f"{name} would keep {number} of {num_experts} experts, but each token chooses {K} "
            f"(num_selected_experts). Keep at least {K}."
        )
    if number > num_experts:
        raise ConfigError(
            f"{name} would keep {number} experts, but has {num_experts}. Keep at most {num_experts}."
        )


def _check_routers(config: STMoEConfig) -> None:
    """Raises a ConfigError for a router without a row for each expert."""
    for decoder in (False, True):
        if not config.stack_sizes(decoder)[1]:
            continue
        layer = config.sparse_config(decoder=decoder)
        if not load_routers().get(layer.router).num_parameters(layer):
            raise ConfigError(
                f"Router {layer.router!r} has no row of weights for each of its {layer.num_experts} "
                "experts that could be removed: with fewer experts it would send most tokens "
                "elsewhere. Prune a model with another router."
            )


def experts_of_layers(config: STMoEConfig) -> dict[LayerKey, int]:
    """Returns the number of experts of every sparse layer.

    Raises:
        ConfigError: When the model is dense.
    """
    layers = sparse_layers(_without_memory(config))
    if not layers:
        raise ConfigError(
            f"The model has num_experts {config.num_experts} and no sparse layer; expected one with experts."
        )
    return {key: layer.config.num_experts for key, layer in layers.items()}


def _without_memory(config: STMoEConfig) -> STMoEForConditionalGeneration:
    with torch.device("meta"):
        return STMoEForConditionalGeneration(config)


# ---------------------------------------------------------------------------
# Which experts


class Choice(NamedTuple):
    """The experts that stay.

    Attributes:
        scores: <float64>[E] score of each expert, by layer.
        kept: <int64>[n] experts that stay, in ascending order, by layer.
    """

    scores: Mapping[LayerKey, Tensor]
    kept: Mapping[LayerKey, Tensor]


def choose_experts(
    model: STMoEForConditionalGeneration, batches: Sequence[Batch], pruning: Pruning
) -> Choice:
    """Returns which experts stay, by their scores on calibration batches.

    Raises:
        ConfigError: When the settings do not fit the model.
        DataError: When the batches hold no token.
    """
    numbers = pruning.numbers(model.config)
    calibration = Calibration(model, batches, numbers, pruning.seed)
    scores = SCORES.get(pruning.score)(calibration)
    if numbers is None:
        assert pruning.budget is not None, "numbers are None for a budget"
        numbers = share_budget(scores, pruning.budget, pruning.floor)
    kept = {key: best_experts(scores[key], number) for key, number in numbers.items()}
    return Choice(scores, kept)


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
    # An expert stays if those before it hold less than the threshold of its layer's score; so the
    # experts that stay are those with the least before them.
    layers: list[LayerKey] = []
    before: list[Tensor] = []
    for key, layer_scores in scores.items():
        share = layer_scores.sort(descending=True).values.double()
        share = share / share.sum().clamp(min=1e-300)
        before_expert = share.cumsum(0) - share  # [E]
        before_expert[:floor] = -1
        before.append(before_expert)
        layers += [key] * share.numel()

    order = torch.cat(before).argsort(stable=True)[:budget].tolist()
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
    checkpoint = open_checkpoint(source, **download)
    checkpoint.report.refuse_unexplained()
    smaller = pruned(checkpoint, kept)
    write_checkpoint(smaller, source, folder, **download)
    return smaller.config


def pruned(checkpoint: ConvertedCheckpoint, kept: Mapping[LayerKey, Tensor]) -> ConvertedCheckpoint:
    """Returns the weights of the pruned model, each of which is read and cut when it is indexed."""
    config = pruned_config(checkpoint.config, kept)
    smaller = _without_memory(config)
    shapes = stored_tensors(smaller)
    keys = {layer: key for key, layer in sparse_layers(smaller).items()}

    # Experts and router rows: tensors of a sparse layer whose first dimension shrinks.
    weights = dict(checkpoint.weights)
    for prefix, layer in smaller.named_modules():
        if layer not in keys:
            continue
        for suffix in layer.state_dict():
            name = f"{prefix}.{suffix}"
            weight = weights[name]
            shape = tuple(shapes[name].shape)
            if weight.shape != shape:
                read = partial(_kept_rows, weight, kept[keys[layer]])
                weights[name] = LazyTensor(shape, weight.dtype, read)
    return checkpoint._replace(config=config, weights=weights)


def _kept_rows(weight: LazyTensor, kept: Tensor) -> Tensor:
    return weight.read().index_select(0, kept)


def pruned_config(config: STMoEConfig, kept: Mapping[LayerKey, Tensor]) -> STMoEConfig:
    """Returns the config of the pruned model.

    Raises:
        ConfigError: When a router cannot lose experts, or fewer stay than a token chooses.
    """
    _check_routers(config)
    numbers: list[int] = []
    for key, num_experts in experts_of_layers(config).items():
        number = kept[key].numel() if key in kept else num_experts
        _check_number(f"{key[0]} layer {key[1]}", number, config.num_selected_experts, num_experts)
        numbers.append(number)
    if len(set(numbers)) > 1:
        raise ConfigError(
            f"The sparse layers would keep {numbers} experts; expected the same number in each."
        )
    return config.replaced(num_experts=numbers[0])
