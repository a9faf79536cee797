"""The training loss of a model: cross-entropy, its z-loss and the routers' losses, as sums over whole-batch counts."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe.models.configuration import STMoEConfig
from moe.sparse.groups import sequences_per_group, to_groups
from moe.sparse.layer import RouterOutput


class LossCounts(NamedTuple):
    """What the sums of a loss are divided by, for a whole batch.

    When a batch is cut into micro-batches, each is given the counts of the whole batch; losses and gradients then
    add up to those of the batch, however it was cut.

    Attributes:
        target_tokens: <int64>[] labels that are not -100.
        encoder_tokens: <int64>[] real tokens of the encoder.
        decoder_tokens: <int64>[] real tokens of the decoder.
        encoder_groups: <int64>[] groups of the encoder that hold a real token.
        decoder_groups: <int64>[] the same for the decoder.
    """

    target_tokens: Tensor
    encoder_tokens: Tensor
    decoder_tokens: Tensor
    encoder_groups: Tensor
    decoder_groups: Tensor


class Losses(NamedTuple):
    """The parts of the training loss, <float32>[] each; `total` holds the weighted sum of the others.

    Attributes:
        total: What is minimised.
        ce_loss: Cross-entropy in nats for each target token.
        z_loss: Mean square of the logsumexp of the vocabulary logits, unweighted.
        load_balance_loss: Summed over sparse layers, unweighted.
        router_z_loss: Summed over sparse layers, unweighted.
    """

    total: Tensor
    ce_loss: Tensor
    z_loss: Tensor
    load_balance_loss: Tensor
    router_z_loss: Tensor


def count_losses(config: STMoEConfig, encoder_mask: Tensor, decoder_mask: Tensor, labels: Tensor) -> LossCounts:
    """Returns the counts of a batch.

    Args:
        config: Gives the group size.
        encoder_mask: <bool>[B, L] real tokens.
        decoder_mask: <bool>[B, T] real tokens.
        labels: <int64>[B, T], -100 for no target.
    """
    return LossCounts(
        target_tokens=(labels != -100).sum(),
        encoder_tokens=encoder_mask.sum(),
        decoder_tokens=decoder_mask.sum(),
        encoder_groups=_count_groups(encoder_mask, config.group_size),
        decoder_groups=_count_groups(decoder_mask, config.group_size),
    )


def _count_groups(mask: Tensor, group_size: int) -> Tensor:
    """Returns <int64>[]: groups of <bool>[B, L] that hold a real token."""
    return to_groups(mask, sequences_per_group(mask.shape[0], mask.shape[1], group_size)).any(dim=1).sum()


def model_losses(
    config: STMoEConfig,
    logits: Tensor,
    labels: Tensor,
    encoder_routers: Sequence[RouterOutput],
    decoder_routers: Sequence[RouterOutput],
    counts: LossCounts,
) -> Losses:
    """Returns the training loss and its parts.

    Args:
        config: Gives the weights.
        logits: <any float>[B, T, V]; the loss is computed in float32.
        labels: <int64>[B, T], -100 for no target.
        encoder_routers: One for each sparse layer of the encoder.
        decoder_routers: The same for the decoder.
        counts: Divisors; of the whole batch when this is a part of it.

    Source:
        ST-MoE (arXiv:2202.08906) eq. 6: L = L_CE + c_B L_B + c_z L_z, router losses summed over layers as in
        Mesh-TensorFlow; z-loss 1e-4 on the vocabulary logits as in Mesh-TensorFlow and T5X. Differs: no.
    """
    cross_entropy, z = _cross_entropy_sums(logits, labels)
    ce_loss, z_loss = cross_entropy / counts.target_tokens.clamp(min=1), z / counts.target_tokens.clamp(min=1)
    balance, router_z = torch.zeros_like(ce_loss), torch.zeros_like(ce_loss)
    for routers, groups, tokens in (
        (encoder_routers, counts.encoder_groups, counts.encoder_tokens),
        (decoder_routers, counts.decoder_groups, counts.decoder_tokens),
    ):
        for router in routers:
            balance = balance + router.losses.load_balance_sum / groups.clamp(min=1)
            router_z = router_z + router.losses.router_z_sum / tokens.clamp(min=1)
    total = (
        ce_loss
        + config.z_loss_weight * z_loss
        + config.load_balance_loss_weight * balance
        + config.router_z_loss_weight * router_z
    )
    return Losses(total, ce_loss, z_loss, balance, router_z)


def _cross_entropy_sums(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns sums <float32>[] over targets of the cross-entropy and of logsumexp(logits)²."""
    targets = labels != -100
    index = labels.clamp(min=0)[..., None]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_prob = logits.log_softmax(dim=-1).gather(-1, index).squeeze(-1)
    normalizer = logits.gather(-1, index).squeeze(-1) - log_prob
    return -(log_prob * targets).sum(), (normalizer.square() * targets).sum()
