"""Merging: a model in which several rows of a router share one stored expert.

A grouping from GROUPINGS divides the experts of each sparse layer into groups, by calibration
batches. The experts of a group are aligned unit by unit with the one that is used most, and
replaced by their mean, weighted by use. The router keeps all rows, and those of a group point to
the mean. Nothing is trained; `stmoe distill` recovers quality.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from einops import rearrange
from scipy.cluster.hierarchy import cut_tree, linkage
from torch import Tensor

from moe.checks import check, check_integer
from moe.convert.formats import rewrite_checkpoint
from moe.convert.weight_map import ConvertedCheckpoint
from moe.data.pipeline import Batch
from moe.errors import ConfigError
from moe.models.configuration import STMoEConfig
from moe.models.configuration_checks import refuse_quantized
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.weight_files import LazyTensor
from moe.registry import Registry
from moe.sparse.editing import LayerKey, sparse_layers
from moe.sparse.experts import Experts
from moe.sparse.layer import RouterOutput, SparseFeedForward
from moe.surgery.add_experts import scaled_capacity
from moe.surgery.alignment import aligned_units
from moe.surgery.expert_scores import Calibration
from moe.surgery.expert_statistics import expert_output, read_layers
from moe.surgery.prune import experts_of_layers, share_budget, with_other_experts

Grouping = Callable[[Calibration, Mapping[LayerKey, int]], dict[LayerKey, Tensor]]
"""Returns the group <int64>[E] of each expert, from 0, given the number of groups of each layer."""

GROUPINGS: Registry[Grouping] = Registry("method of merging")


@dataclass(frozen=True)
class Merging:
    """Settings of a merging.

    Attributes:
        method: Name in GROUPINGS.
        keep: Experts that each sparse layer stores afterwards; layers with fewer stay as they are.
        budget: Instead: experts that all layers store together. In every layer the most used
            experts that get the same share of its tokens then are the heads of groups.

    Source:
        M-SMoE (arXiv:2310.01334). Differs: the budget is shared as in `share_budget`; the first
        sparse layer is merged, too; units are aligned with the most used expert of the group.
    """

    method: str = "m_smoe"
    keep: int | None = None
    budget: int | None = None

    def __post_init__(self) -> None:
        """Raises a ConfigError when a value is out of range, or nothing says how many are stored."""
        GROUPINGS.get(self.method)
        for name in ("keep", "budget"):
            check_integer(name, getattr(self, name), least=1, optional="None")
        if (self.keep is None) == (self.budget is None):
            raise ConfigError(
                f"keep is {self.keep} and budget {self.budget}; expected a number of experts for "
                "each layer, or a budget for all layers."
            )

    def check_model(self, config: STMoEConfig) -> None:
        """Raises a ConfigError when the model is dense or merged, or the numbers do not fit it."""
        num_experts = experts_of_layers(config)
        refuse_quantized(config, "merged")
        if config.encoder_expert_maps is not None or config.decoder_expert_maps is not None:
            raise ConfigError(
                "The model has merged experts already. Merge the model that they were merged from."
            )

        # Every token chooses K experts, and at least one is to be merged.
        K = config.num_selected_experts
        most = max(num_experts.values())
        reason = f"num_selected_experts is {K}, and the largest layer has {most} experts"
        if self.keep is not None:
            check_integer("keep", self.keep, least=K, most=most - 1, reason=reason)
        if self.budget is not None:
            least = K * len(num_experts)
            total = sum(num_experts.values())
            expected = (
                f"{least} to {total - 1}: {len(num_experts)} layers store at least {K} experts each"
            )
            check(least <= self.budget < total, "budget", self.budget, expected)

        # The router must support it.
        expert_maps = {}
        for key, number in num_experts.items():
            expert_maps[key] = torch.arange(number).clamp(max=(self.keep or K) - 1)
        merged_config(config, expert_maps)

    def numbers(self, calibration: Calibration) -> dict[LayerKey, int]:
        """Returns the number of stored experts of each layer that is merged."""
        num_experts = experts_of_layers(calibration.model.config)
        numbers = dict.fromkeys(num_experts, self.keep or 0)
        if self.budget is not None:
            loads = {key: layer.load for key, layer in calibration.statistics.items()}
            least = calibration.model.config.num_selected_experts
            numbers = share_budget(loads, self.budget, least)
        return {key: number for key, number in numbers.items() if number < num_experts[key]}


# ---------------------------------------------------------------------------
# Groups


@GROUPINGS.register("m_smoe")
def m_smoe(calibration: Calibration, numbers: Mapping[LayerKey, int]) -> dict[LayerKey, Tensor]:
    """Returns a group for each of the most used experts; others join the one most like them.

    Experts are alike whose router logits have a large cosine over the tokens.

    Source:
        M-SMoE (arXiv:2310.01334) §3.2; UNITES-Lab/MC-SMoE at 4a195b1, mcsmoe/merging/grouping.py.
        Differs: no.
    """
    groups: dict[LayerKey, Tensor] = {}
    for key, number in numbers.items():
        statistics = calibration.statistics[key]
        dominant = statistics.load.argsort(descending=True, stable=True)[:number]
        products = statistics.logit_products  # [E, E]
        norm = products.diagonal().sqrt()
        cosine = products / norm.outer(norm).clamp(min=1e-300)
        groups[key] = cosine[:, dominant].argmax(dim=1)
        groups[key][dominant] = torch.arange(number, device=dominant.device)
    return groups


@GROUPINGS.register("output_clusters")
def output_clusters(
    calibration: Calibration, numbers: Mapping[LayerKey, int]
) -> dict[LayerKey, Tensor]:
    """Returns the clusters of the experts' mean outputs: average linkage, Euclidean distance.

    Source:
        HC-SMoE (arXiv:2410.08589); wazenmai/HC-SMoE at bd77eba, hcsmoe/merging/clustering.py.
        Differs: units are aligned before the mean.
    """
    outputs = mean_outputs(calibration)
    groups: dict[LayerKey, Tensor] = {}
    for key, number in numbers.items():
        tree = linkage(outputs[key].numpy(), method="average")
        groups[key] = torch.from_numpy(cut_tree(tree, n_clusters=number)[:, 0]).long()
    return groups


def mean_outputs(calibration: Calibration) -> dict[LayerKey, Tensor]:
    """Returns the mean output <float64>[E, D] of every expert over all tokens, by layer.

    Every expert reads every token, whichever it was routed to.
    """
    sums: dict[LayerKey, Tensor] = {}

    def add(
        key: LayerKey, layer: SparseFeedForward, tokens: Tensor, router_output: RouterOutput
    ) -> None:
        plan = router_output.plan
        total = []
        for expert in range(layer.config.num_experts):
            output = expert_output(layer, tokens, plan, expert)  # [G, S, D], 0 for padding
            total.append(output.double().sum(dim=(0, 1)))
        sums[key] = sums.get(key, 0) + torch.stack(total).cpu()  # [E, D]

    readers = {key: partial(add, key) for key in calibration.statistics}
    read_layers(calibration.model, calibration.batches, readers)
    for key, statistics in calibration.statistics.items():
        sums[key] = sums[key] / statistics.num_tokens.cpu()
    return sums


# ---------------------------------------------------------------------------
# From a group to one expert


class MergedLayer(NamedTuple):
    """How the experts of a layer become fewer.

    Attributes:
        expert_map: <int64>[E] stored expert of each expert. Stored ones are in the order of the
            most used experts of their groups.
        weight: <float64>[E] weight of each expert in the mean of its group.
        units: <int64>[E, F] unit of each expert that takes each place in the mean.
    """

    expert_map: Tensor
    weight: Tensor
    units: Tensor


def choose_merges(
    model: STMoEForConditionalGeneration, batches: Sequence[Batch], merging: Merging
) -> dict[LayerKey, MergedLayer]:
    """Returns how each layer that gets fewer experts is merged, by calibration batches.

    Raises:
        ConfigError: When the settings do not fit the model.
        DataError: When the batches hold no token.
    """
    merging.check_model(model.config)
    calibration = Calibration(model, batches)
    groups = GROUPINGS.get(merging.method)(calibration, merging.numbers(calibration))
    layers = sparse_layers(model)
    merges: dict[LayerKey, MergedLayer] = {}
    for key, group in groups.items():
        merges[key] = merge_groups(layers[key].experts, group, calibration.statistics[key].load)
    return merges


def merge_groups(experts: Experts, group: Tensor, load: Tensor) -> MergedLayer:
    """Returns how groups of experts become one expert each.

    Args:
        experts: The experts.
        group: <int64>[E] group of each.
        load: <int64>[E] tokens that each received.
    """
    # The most used expert of each group, the first of equals.
    E = load.numel()
    group = group.cpu()
    load = load.cpu()
    is_member = group == group[:, None]  # [E, E]
    leader = load.expand(E, E).masked_fill(~is_member, -1).argmax(dim=1)  # [E]
    _, expert_map = leader.unique(return_inverse=True)

    # Weights by use; equal ones in a group that no token used.
    use = load.expand(E, E).masked_fill(~is_member, 0).sum(dim=1)  # [E]
    weight = torch.where(use > 0, load / use.clamp(min=1).double(), 1 / is_member.sum(dim=1))

    up = rearrange(
        experts.first_proj.detach().float(), "e (h f) d -> e h f d", f=experts.config.d_ff
    )
    down = experts.down_proj.detach().float()  # [E, D, F]
    units = []
    for expert, other in enumerate(leader.tolist()):
        units.append(aligned_units(up[expert], down[expert], up[other], down[other]).cpu())
    return MergedLayer(expert_map, weight, torch.stack(units))


def reordered_units(name: str, weight: Tensor, units: Tensor) -> Tensor:
    """Returns a weight of one expert with its hidden units in another order.

    Args:
        name: Its name in `Experts`.
        weight: <any float>[2F or F, D], [D, F] (down_proj) or [F] (bias).
        units: <int64>[F].
    """
    if name == "down_proj":
        return weight.index_select(1, units)
    parts = weight.unflatten(0, (-1, units.numel()))  # gate above up: [2 or 1, F, ...]
    return parts.index_select(1, units).flatten(0, 1)


def merged_weight(name: str, weight: Tensor, layer: MergedLayer) -> Tensor:
    """Returns the stored experts' weight <dtype of weight>[E stored, ...].

    Args:
        name: Its name in `Experts`.
        weight: <any float>[E, ...] of the experts before.
        layer: How they are merged.
    """
    num_stored = int(layer.expert_map.max()) + 1
    dtype = torch.promote_types(weight.dtype, torch.float32)
    merged = torch.zeros(num_stored, *weight.shape[1:], dtype=dtype)
    for expert, stored in enumerate(layer.expert_map.tolist()):
        aligned = reordered_units(name, weight[expert].to(dtype), layer.units[expert])
        merged[stored] += float(layer.weight[expert]) * aligned
    return merged.to(weight.dtype)


# ---------------------------------------------------------------------------
# The model of them


def merge_checkpoint(
    source: Path | str, folder: Path, merges: Mapping[LayerKey, MergedLayer], **download: Any
) -> STMoEConfig:
    """Writes the model with merged experts; holds one tensor in memory at a time.

    Args:
        source: A folder of a sparse model of ours or a Switch, or a name of the hub.
        folder: Exists, and is empty.
        merges: By layer; layers not named stay as they are.
        download: `revision`, `token`, `cache_dir` and the like.

    Returns:
        The config of the merged model.

    Raises:
        ConfigError: When a router cannot have merged experts.
        CheckpointError: When a tensor of the source is not accounted for.
    """
    return rewrite_checkpoint(source, folder, partial(merged, merges=merges), **download)


def merged(
    checkpoint: ConvertedCheckpoint, merges: Mapping[LayerKey, MergedLayer]
) -> ConvertedCheckpoint:
    """Returns the weights of the merged model, each of which is computed when it is read."""
    expert_maps = {key: layer.expert_map for key, layer in merges.items()}

    def merge(name: str, weight: LazyTensor, key: LayerKey) -> Tensor:
        return merged_weight(name.rpartition(".")[2], weight.read(), merges[key])

    return with_other_experts(checkpoint, merged_config(checkpoint.config, expert_maps), merge)


def merged_config(config: STMoEConfig, expert_maps: Mapping[LayerKey, Tensor]) -> STMoEConfig:
    """Returns the config of the merged model; a stored expert has at least the slots of all its rows.

    Args:
        config: Config of the original model.
        expert_maps: <int64>[E] by layer; layers not named stay as they are.

    Raises:
        ConfigError: When a router cannot have merged experts, or fewer are stored than a token
            chooses.
    """
    maps: dict[str, list[list[int]]] = {"encoder": [], "decoder": []}
    most_rows = 1
    factor = 1.0
    for key, number in experts_of_layers(config).items():
        expert_map = expert_maps.get(key, torch.arange(number))
        maps[key[0]].append(expert_map.tolist())

        # All experts of a layer have equally many slots: those of the largest group.
        rows = torch.bincount(expert_map)
        most_rows = max(most_rows, int(rows.max()))
        factor = max(factor, rows.numel() * int(rows.max()) / number)

    expert_capacity = config.expert_capacity
    return config.replaced(
        encoder_expert_maps=maps["encoder"],
        decoder_expert_maps=maps["decoder"],
        min_expert_capacity=config.min_expert_capacity * most_rows,
        expert_capacity=None if expert_capacity is None else expert_capacity * most_rows,
        **scaled_capacity(config, factor),
    )
