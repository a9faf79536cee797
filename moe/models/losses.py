"""The training loss of a model: cross-entropy, its z-loss and the routers' losses.

Each is a sum over tokens or groups, divided by a count of the whole batch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import reduce
from torch import Tensor

from moe.checks import check
from moe.distributed.collectives import sum_each_over_ranks
from moe.distributed.mesh import Mesh
from moe.errors import ConfigError
from moe.kernels.cross_entropy import vocabulary_losses
from moe.models.configuration import STMoEConfig
from moe.models.inputs import IGNORED_LABEL
from moe.sparse.config import Rules
from moe.sparse.groups import sequences_per_group, to_groups, tokens_per_group
from moe.sparse.layer import RouterOutput
from moe.sparse.losses import BalanceTotals, num_scope_ranks


class StackCounts(NamedTuple):
    """Counts of one stack in a whole batch.

    Attributes:
        tokens: <int64>[] real tokens.
        load_balance: <int64>[] divisor of the sums of the balance loss: groups that hold a real
            token, or tokens if the scope is wider than a group; all groups or positions with
            `mesh_tensorflow`.
        router_z: <int64>[] tokens that the z-loss is the mean over.
    """

    tokens: Tensor
    load_balance: Tensor
    router_z: Tensor


class LossCounts(NamedTuple):
    """Divisors of the sums of a loss, for a whole batch.

    When a batch is split into micro-batches, each is given the counts of the whole batch; losses
    and gradients then add up to those of the batch for any split.

    Attributes:
        target_tokens: <int64>[] labels that are not -100.
        encoder: Counts of the encoder.
        decoder: Counts of the decoder.
        balance_totals: One for each sparse layer, the encoder's first, when the scope of the
            balance loss is wider than one call; None if each call is its own scope.
    """

    target_tokens: Tensor
    encoder: StackCounts
    decoder: StackCounts
    balance_totals: tuple[BalanceTotals, ...] | None = None


class Losses(NamedTuple):
    """The parts of the training loss, <float32>[] each; `total` is the weighted sum of the others.

    Attributes:
        total: The loss that is minimised.
        ce_loss: Cross-entropy in nats for each target token, to smoothed targets where labels are
            smoothed.
        z_loss: Mean square of the logsumexp of the vocabulary logits, unweighted.
        load_balance_loss: Sum or mean over sparse layers, as the configuration says; unweighted.
        router_z_loss: Sum or mean over sparse layers likewise; unweighted.
    """

    total: Tensor
    ce_loss: Tensor
    z_loss: Tensor
    load_balance_loss: Tensor
    router_z_loss: Tensor


# ---------------------------------------------------------------------------
# Counts


def count_losses(
    config: STMoEConfig,
    encoder_mask: Tensor,
    decoder_mask: Tensor,
    labels: Tensor,
    mesh: Mesh | None = None,
) -> LossCounts:
    """Returns the counts of a batch.

    Args:
        config: Gives the group size and the tokens that the routers' losses are over.
        encoder_mask: <bool>[B, L] real tokens.
        decoder_mask: <bool>[B, T] real tokens.
        labels: <int64>[B, T], -100 for positions without a target.
        mesh: Mesh over whose data ranks the batch is split; None when this is all of it.

    Raises:
        ConfigError: When the balance loss on the mesh needs other ranks' choices, not counts alone.
    """
    counts = LossCounts(
        target_tokens=(labels != IGNORED_LABEL).sum(),
        encoder=_count_stack(config, encoder_mask),
        decoder=_count_stack(config, decoder_mask),
    )
    if mesh is None:
        return counts

    scope = config.balance_scope
    is_local = num_scope_ranks(scope, mesh.config) == 1
    check(is_local, "balance_scope", scope, "group or micro_batch on a mesh, except in recipes")
    return sum_counts(counts, partial(sum_each_over_ranks, group=mesh.data))


def sum_counts(
    counts: LossCounts, sum_each: Callable[[Sequence[Tensor]], list[Tensor]]
) -> LossCounts:
    """Returns the counts of all ranks together; `balance_totals` stay as they are.

    Args:
        counts: Counts of this rank's part.
        sum_each: Returns the sum of each tensor over the ranks.
    """
    local = [counts.target_tokens, *counts.encoder, *counts.decoder]
    target_tokens, *sums = sum_each(local)

    # In the order in which they were listed.
    num_fields = len(StackCounts._fields)
    return counts._replace(
        target_tokens=target_tokens,
        encoder=StackCounts(*sums[:num_fields]),
        decoder=StackCounts(*sums[num_fields:]),
    )


def add_counts(a: LossCounts, b: LossCounts) -> LossCounts:
    """Returns the counts of two parts of a batch together, without `balance_totals`."""
    return LossCounts(
        target_tokens=a.target_tokens + b.target_tokens,
        encoder=StackCounts(*map(torch.add, a.encoder, b.encoder)),
        decoder=StackCounts(*map(torch.add, a.decoder, b.decoder)),
    )


def _count_stack(config: STMoEConfig, mask: Tensor) -> StackCounts:
    """Returns the counts of a stack with real tokens <bool>[B, L]."""
    tokens = mask.sum()
    positions = torch.full_like(tokens, mask.numel())

    # The balance loss is a mean over groups, or over tokens where its scope is wider.
    counts_padding = config.rules.balance_over == "all_positions"
    if config.balance_scope == "group":
        counted = torch.ones_like(mask, dtype=torch.bool) if counts_padding else mask
        load_balance = _count_groups(counted, tokens_per_group(config))
    else:
        load_balance = positions if counts_padding else tokens

    # The z-loss is a mean over tokens.
    router_z = positions if config.rules.router_z_loss_over == "all_positions" else tokens
    return StackCounts(tokens, load_balance, router_z)


def _count_groups(mask: Tensor, group_size: int) -> Tensor:
    """Returns <int64>[]: groups of <bool>[B, L] that hold a real token."""
    num_sequences = sequences_per_group(mask.shape[0], mask.shape[1], group_size)
    groups = to_groups(mask, num_sequences)  # [G, S]
    return groups.any(dim=1).sum()


# ---------------------------------------------------------------------------
# Losses


def model_losses(
    config: STMoEConfig,
    logits: Tensor,
    labels: Tensor,
    encoder_routers: Sequence[RouterOutput],
    decoder_routers: Sequence[RouterOutput],
    counts: LossCounts | Tensor,
    label_smoothing: float = 0.0,
) -> Losses:
    """Returns the training loss and its parts.

    transformers' Trainer knows only the number of targets of a whole batch. Given that number
    alone, a group's router losses are weighted by its sequences' share of those targets, so that
    they add up over the parts of a batch too; with equally long groups and targets that is the
    plain mean. A balance loss with a scope wider than a group is then that of this part of the
    batch, weighted by its share.

    Args:
        config: Gives the weights, and whether the routers' losses are summed over layers.
        logits: <any float>[B, T, V]; the loss is computed in float32.
        labels: <int64>[B, T], -100 for positions without a target.
        encoder_routers: One for each sparse layer of the encoder.
        decoder_routers: The same for the decoder.
        counts: Divisors; of the whole batch when this is a part of it. Or its number of targets
            <any>[] alone.
        label_smoothing: Probability that the targets of the cross-entropy give to all V tokens in
            equal parts.

    Source:
        ST-MoE (arXiv:2202.08906) eq. 6: L = L_CE + c_B L_B + c_z L_z, by default with router losses
        summed over layers as in Mesh-TensorFlow; z-loss 1e-4 on the vocabulary logits as in
        Mesh-TensorFlow and T5X. Differs: no.
    """
    target_tokens = counts if isinstance(counts, Tensor) else counts.target_tokens
    target_tokens = target_tokens.clamp(min=1)

    # L_CE, and the z-loss on the vocabulary logits.
    is_target = labels != IGNORED_LABEL
    sums = vocabulary_losses(
        logits.flatten(0, -2),
        labels.masked_fill(~is_target, 0).flatten().long(),
        is_target.flatten(),
        label_smoothing,
    )
    ce_loss = sums.cross_entropy / target_tokens
    z_loss = sums.z / target_tokens

    # L_B and L_z of the routers.
    layer_losses: list[tuple[Tensor, Tensor]] = []
    if isinstance(counts, Tensor):
        for router in (*encoder_routers, *decoder_routers):
            layer_losses.append(share_of_targets(router, labels, target_tokens))
    else:
        stacks = ((counts.encoder, encoder_routers), (counts.decoder, decoder_routers))
        for divisors, routers in stacks:
            num_balanced = divisors.load_balance.clamp(min=1)
            num_z = divisors.router_z.clamp(min=1)
            for losses in (router.losses for router in routers):
                pair = (losses.load_balance_sum / num_balanced, losses.router_z_sum / num_z)
                layer_losses.append(pair)
    load_balance, router_z = over_layers(layer_losses, config.rules, like=ce_loss)

    # Eq. 6.
    total = (
        ce_loss
        + config.z_loss_weight * z_loss
        + config.load_balance_loss_weight * load_balance
        + config.router_z_loss_weight * router_z
    )
    return Losses(
        total=total,
        ce_loss=ce_loss,
        z_loss=z_loss,
        load_balance_loss=load_balance,
        router_z_loss=router_z,
    )


def over_layers(
    layer_losses: Sequence[tuple[Tensor, Tensor]], rules: Rules, *, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the balance loss and the z-loss <float32>[] of all layers; 0 without layers.

    Args:
        layer_losses: Both losses <float32>[] of each layer.
        rules: Mesh-TensorFlow sums over layers, T5X takes the mean.
        like: A loss <float32>[] of the same model.
    """
    load_balance = torch.zeros_like(like)
    router_z = torch.zeros_like(like)
    for layer_balance, layer_z in layer_losses:
        load_balance = load_balance + layer_balance
        router_z = router_z + layer_z
    num_layers = max(1, len(layer_losses)) if rules.router_loss_reduction == "mean" else 1
    return load_balance / num_layers, router_z / num_layers


def share_of_targets(
    router: RouterOutput, labels: Tensor, target_tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns a layer's balance loss and z-loss <float32>[], each group by its share of targets.

    Args:
        router: Results of the layer.
        labels: <int64>[B, T], -100 for positions without a target.
        target_tokens: <any>[] targets of the whole batch.
    """
    losses = router.losses
    targets = (labels != IGNORED_LABEL).long()
    num_groups = losses.group_router_z.shape[0]
    targets_per_group = reduce(targets, "(g b) t -> g", "sum", g=num_groups)  # [G]

    load_balance = (losses.group_load_balance * targets_per_group).sum() / target_tokens
    router_z = (losses.group_router_z * targets_per_group).sum() / target_tokens
    return load_balance, router_z


def refuse_missing_labels(config: Any, *, decoder_masked: bool) -> None:
    """Raises for a training step from which transformers' Trainer removed the labels.

    The Trainer does this for its own label smoothing and for a `compute_loss_func`, and then
    computes the loss from logits alone.

    Args:
        config: Config of a model of ours, or the settings of a host.
        decoder_masked: Whether a mask marks the decoder's padding without labels, or need not.

    Raises:
        ConfigError: When weighted losses would be left out silently, or padding would be routed.
    """
    # A model without experts has one auxiliary loss, a host with experts the other two.
    names = ["load_balance_loss_weight", "router_z_loss_weight"] if config.num_experts else []
    weights = {name: getattr(config, name, 0) for name in [*names, "z_loss_weight"]}
    lost = [f"{name} {weight}" for name, weight in weights.items() if weight]
    if lost:
        raise ConfigError(
            f"The Trainer gave num_items_in_batch without labels, so the losses of {', '.join(lost)} would be left "
            "out. Set label_smoothing_factor in the training arguments to 0 (our own models have label_smoothing in "
            "their config); with your own compute_loss_func, set these weights to 0."
        )

    # The labels would also have marked the decoder's padding.
    if not decoder_masked:
        raise ConfigError(
            "The Trainer gave num_items_in_batch without labels, and without a decoder_attention_mask, so padding "
            "would be routed and use expert capacity. Let the data collator add one."
        )


def target_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross-entropy <float64>[N] of each target token in nats, row by row.

    Args:
        logits: <any float>[B, T, V]
        labels: <int64>[B, T] target tokens; IGNORED_LABEL is none.
    """
    is_target = labels != IGNORED_LABEL
    return F.cross_entropy(logits[is_target].double(), labels[is_target], reduction="none")
