"""The training loss of a model: cross-entropy, its z-loss and the routers' losses, as sums over
whole-batch counts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from einops import reduce
from torch import Tensor
from torch.distributed import ProcessGroup

from moe.distributed.collectives import sum_each_over_ranks
from moe.errors import ConfigError
from moe.models.configuration import STMoEConfig
from moe.sparse.groups import sequences_per_group, to_groups, tokens_per_group
from moe.sparse.layer import RouterOutput
from moe.sparse.losses import BalanceTotals


class StackCounts(NamedTuple):
    """Counts of one stack in a whole batch.

    Attributes:
        tokens: <int64>[] real tokens.
        load_balance: <int64>[] what sums of the balance loss are divided by: groups that hold a
            real token, or tokens when the scope is wider than a group; with `balance_over`
            `all_positions` all groups or positions.
        router_z: <int64>[] tokens that the z-loss is the mean over.
    """

    tokens: Tensor
    load_balance: Tensor
    router_z: Tensor


class LossCounts(NamedTuple):
    """What the sums of a loss are divided by, for a whole batch.

    When a batch is cut into micro-batches, each is given the counts of the whole batch; losses and
    gradients then add up to those of the batch, however it was cut.

    Attributes:
        target_tokens: <int64>[] labels that are not -100.
        encoder: Of the encoder.
        decoder: Of the decoder.
        balance_totals: One for each sparse layer, the encoder's first, when the scope of the
            balance loss is wider than one call; None when each call is a scope of its own.
    """

    target_tokens: Tensor
    encoder: StackCounts
    decoder: StackCounts
    balance_totals: tuple[BalanceTotals, ...] | None = None


class Losses(NamedTuple):
    """The parts of the training loss, <float32>[] each; `total` holds the weighted sum of the
    others.

    Attributes:
        total: What is minimised.
        ce_loss: Cross-entropy in nats for each target token, to smoothed targets where labels are
            smoothed.
        z_loss: Mean square of the logsumexp of the vocabulary logits, unweighted.
        load_balance_loss: Sum or mean over sparse layers, as the configuration says; unweighted.
        router_z_loss: The same.
    """

    total: Tensor
    ce_loss: Tensor
    z_loss: Tensor
    load_balance_loss: Tensor
    router_z_loss: Tensor


def count_losses(
    config: STMoEConfig, encoder_mask: Tensor, decoder_mask: Tensor, labels: Tensor
) -> LossCounts:
    """Returns the counts of a batch.

    Args:
        config: Gives the group size and what the routers' losses are over.
        encoder_mask: <bool>[B, L] real tokens.
        decoder_mask: <bool>[B, T] real tokens.
        labels: <int64>[B, T], -100 for no target.
    """
    return LossCounts(
        target_tokens=(labels != -100).sum(),
        encoder=_count_stack(config, encoder_mask),
        decoder=_count_stack(config, decoder_mask),
    )


def sum_counts(counts: LossCounts, group: ProcessGroup | None) -> LossCounts:
    """Returns the counts of the parts that all ranks of `group` hold; `balance_totals` stay as they
    are.
    """
    numbers = iter(
        sum_each_over_ranks([counts.target_tokens, *counts.encoder, *counts.decoder], group)
    )
    target_tokens = next(numbers)
    encoder, decoder = (
        StackCounts(*(next(numbers) for _ in StackCounts._fields)) for _ in range(2)
    )
    return counts._replace(target_tokens=target_tokens, encoder=encoder, decoder=decoder)


def _count_stack(config: STMoEConfig, mask: Tensor) -> StackCounts:
    """Returns the counts of a stack with real tokens <bool>[B, L]."""
    tokens, positions = mask.sum(), torch.full_like(mask.sum(), mask.numel())
    balance = tokens if config.balance_over == "real_tokens" else positions
    if config.balance_scope == "group":
        counted = (
            mask
            if config.balance_over == "real_tokens"
            else torch.ones_like(mask, dtype=torch.bool)
        )
        balance = _count_groups(counted, tokens_per_group(config))
    return StackCounts(
        tokens, balance, tokens if config.router_z_loss_over == "real_tokens" else positions
    )


def _count_groups(mask: Tensor, group_size: int) -> Tensor:
    """Returns <int64>[]: groups of <bool>[B, L] that hold a real token."""
    return (
        to_groups(mask, sequences_per_group(mask.shape[0], mask.shape[1], group_size))
        .any(dim=1)
        .sum()
    )


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

    Who knows no more of a whole batch than how many targets it has, as transformers' Trainer does,
    gives that number alone. The routers' losses of a group of tokens then weigh as much as its
    sequences' share of those targets, so that they too add up over the parts of a batch; with
    equally long groups and targets that is the plain mean. A balance loss of a scope wider than a
    group is that of the part at hand, and weighs as its share.

    Args:
        config: Gives the weights, and whether the routers' losses are summed over layers.
        logits: <any float>[B, T, V]; the loss is computed in float32.
        labels: <int64>[B, T], -100 for no target.
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
    target_tokens = (counts if isinstance(counts, Tensor) else counts.target_tokens).clamp(min=1)
    cross_entropy, z = _cross_entropy_sums(logits, labels, label_smoothing)
    ce_loss, z_loss = cross_entropy / target_tokens, z / target_tokens
    balance = router_z = torch.zeros_like(ce_loss)
    if isinstance(counts, Tensor):
        for router in (*encoder_routers, *decoder_routers):
            targets = reduce(
                (labels != -100).long(),
                "(g b) t -> g",
                "sum",
                g=router.losses.group_router_z.shape[0],
            )
            balance = balance + (router.losses.group_load_balance * targets).sum() / target_tokens
            router_z = router_z + (router.losses.group_router_z * targets).sum() / target_tokens
    else:
        for stack, routers in (
            (counts.encoder, encoder_routers),
            (counts.decoder, decoder_routers),
        ):
            for router in routers:
                balance = balance + router.losses.load_balance_sum / stack.load_balance.clamp(min=1)
                router_z = router_z + router.losses.router_z_sum / stack.router_z.clamp(min=1)
    if config.router_loss_reduction == "mean":
        num_layers = max(1, len(encoder_routers) + len(decoder_routers))
        balance, router_z = balance / num_layers, router_z / num_layers
    total = (
        ce_loss
        + config.z_loss_weight * z_loss
        + config.load_balance_loss_weight * balance
        + config.router_z_loss_weight * router_z
    )
    return Losses(total, ce_loss, z_loss, balance, router_z)


def refuse_missing_labels(config: STMoEConfig, *, decoder_masked: bool) -> None:
    """Refuses a training step from which transformers' Trainer took the labels away.

    It does so for its own label smoothing and for a `compute_loss_func`, and sees nothing but
    logits then.

    Args:
        config: Of the model.
        decoder_masked: Whether the decoder's padding is known all the same.

    Raises:
        ConfigError: When losses that have a weight would be left out in silence, or padding would
            be routed.
    """
    names = ("load_balance_loss_weight", "router_z_loss_weight", "z_loss_weight")
    names = names if config.num_experts else names[-1:]
    lost = [f"{name} {getattr(config, name)}" for name in names if getattr(config, name)]
    if lost:
        raise ConfigError(
            f"The Trainer gave num_items_in_batch without labels, so that the losses of {', '.join(lost)} would be "
            "left out. In place of label_smoothing_factor of the training arguments, set label_smoothing of the "
            "model's config; with a compute_loss_func of your own, set these weights to 0."
        )
    if config.num_sparse_decoder_layers and not decoder_masked:
        raise ConfigError(
            "The Trainer gave num_items_in_batch without labels, and no decoder_attention_mask tells the decoder's "
            "tokens from padding, which would be routed and take capacity. Let the data collator add one."
        )


def _cross_entropy_sums(
    logits: Tensor, labels: Tensor, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Returns sums <float32>[] over targets of the cross-entropy and of logsumexp(logits)²."""
    targets = labels != -100
    index = labels.masked_fill(~targets, 0)[..., None].long()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_prob = logits.log_softmax(dim=-1).gather(-1, index).squeeze(-1)
    normalizer = logits.gather(-1, index).squeeze(-1) - log_prob
    if label_smoothing:
        log_prob = (1 - label_smoothing) * log_prob + label_smoothing * (
            logits.mean(dim=-1) - normalizer
        )
    return -(log_prob * targets).sum(), (normalizer.square() * targets).sum()
