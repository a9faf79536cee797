"""The loss difference of two models, split into the part due to routing and the part due to other weights.

The second model also runs with the routing of the first; the remaining difference is not due to routing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe.estimates import Estimate, TokenSums, mean_over_tokens
from moe.inspection.ablation.target_sets import Targets, list_targets
from moe.models.losses import target_losses
from moe.tracing.recorder import TracedBatch, evaluation_mode
from moe.tracing.replay import replay_routing
from moe.tracing.trace import Trace


class LossSplit(NamedTuple):
    """Reasons why the losses of two models differ on the same examples.

    Attributes:
        first: Mean loss of the first model's target tokens, in nats.
        second: Mean loss of the second model.
        replayed: Mean loss of the second model with the routing of the first.
        routing: second - replayed: the loss due to its own routing.
        weights: replayed - first: the loss due to its other weights.
    """

    first: float
    second: float
    replayed: float
    routing: Estimate
    weights: Estimate


def split_loss(
    first: PreTrainedModel, second: PreTrainedModel, trace: Trace, batches: Sequence[TracedBatch]
) -> LossSplit:
    """Returns the loss of two models on the same batches, and why they differ.

    The weights of replayed choices come from the second router: only the choice of experts comes from the first. Both
    models evaluate; their training modes are restored.

    Args:
        first: The model that was traced.
        second: Another one with the same sparse layers.
        trace: Routing of the first model on the batches.
        batches: The examples of the trace, on the device of both models.

    Raises:
        DataError: When the models have other layers than the trace, the batches are not those of the
            trace, or there is no target.
    """
    # The same targets three times; differences are of single tokens.
    targets = list_targets(batches)
    first_losses = token_losses(first, batches)
    second_losses = token_losses(second, batches)
    with replay_routing(second, trace):
        replayed_losses = token_losses(second, batches)
    return LossSplit(
        first=float(first_losses.mean()),
        second=float(second_losses.mean()),
        replayed=float(replayed_losses.mean()),
        routing=mean_change(second_losses - replayed_losses, targets),
        weights=mean_change(replayed_losses - first_losses, targets),
    )


@torch.no_grad()
def token_losses(model: PreTrainedModel, batches: Sequence[TracedBatch]) -> Tensor:
    """Returns the loss <float64>[N] of every target token in nats, on the CPU.

    Args:
        model: Evaluated; its training mode is restored.
        batches: With labels, on the model's device.
    """
    losses = []
    with evaluation_mode(model):
        for traced in batches:
            output = model(**traced.batch, use_cache=False)
            losses.append(target_losses(output.logits, traced.batch["labels"]).cpu())
    return torch.cat(losses)


def mean_change(change: Tensor, targets: Targets) -> Estimate:
    """Returns the mean of a change of the loss of each target token, with its interval.

    Args:
        change: <float64>[N] in nats, e.g. the difference of two `token_losses`.
        targets: Where the tokens come from, see `list_targets`.
    """
    # Tokens of a document are not independent: documents are the units.
    sums = torch.zeros(targets.num_documents, dtype=torch.float64)
    counts = sums.index_add(0, targets.document, torch.ones_like(change))
    sums = sums.index_add(0, targets.document, change)
    (mean,) = mean_over_tokens(TokenSums(sums, counts))
    return mean
