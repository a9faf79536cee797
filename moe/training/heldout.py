"""Held-out loss: in total, and on text tokens beside the unigram entropy of the same tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from moe.data.pipeline import Batch, BatchSource
from moe.data.tokenizer import SpecialIds
from moe.models.modeling import STMoEForConditionalGeneration


class HeldOut(NamedTuple):
    """What a run is measured on.

    Attributes:
        source: Batches that training never sees; the first `num_batches` are used each time.
        num_batches: How many.
        ids: Tells text from sentinels and the end token.
    """

    source: BatchSource
    num_batches: int
    ids: SpecialIds


@torch.inference_mode()
def evaluate_held_out(model: STMoEForConditionalGeneration, held_out: HeldOut) -> dict[str, float]:
    """Returns the held-out numbers; the model is in evaluation mode meanwhile.

    Returns:
        `heldout/loss`: cross-entropy in nats for each target token. `heldout/text_loss`: the same over text tokens,
        without sentinels and the end token, which are easy to guess. `heldout/unigram_entropy`: entropy in nats of
        the frequencies of those text tokens themselves, a bound that no unigram model beats.
        `heldout/token_accuracy`: share of target tokens that are the most probable.
    """
    training = model.training
    model.eval()
    results = [
        token_losses(model, to_device(held_out.source.batch(index), model.device))
        for index in range(held_out.num_batches)
    ]
    model.train(training)
    losses, labels, hits = (torch.cat(parts) for parts in zip(*results, strict=True))
    text = is_text(labels, held_out.ids)
    return {
        "heldout/loss": losses.mean().item(),
        "heldout/text_loss": losses[text].mean().item(),
        "heldout/unigram_entropy": unigram_entropy(labels[text]),
        "heldout/token_accuracy": hits.double().mean().item(),
    }


def token_losses(model: STMoEForConditionalGeneration, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the cross-entropy <float64>[N], label <int64>[N] and hit <bool>[N] of each target token of a batch."""
    targets = batch["labels"] != -100
    logits = model(**batch, output_router_logits=False).logits[targets].double()
    labels = batch["labels"][targets]
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return losses, labels, logits.argmax(dim=-1) == labels


def is_text(labels: Tensor, ids: SpecialIds) -> Tensor:
    """Returns <bool>[N]: which of <int64>[N] tokens are neither sentinel, end nor padding."""
    return (labels <= ids.first_sentinel - ids.num_sentinels) & (labels != ids.eos) & (labels != ids.pad)


def unigram_entropy(tokens: Tensor) -> float:
    """Returns the entropy in nats of the frequencies of <int64>[N] tokens; 0 for none."""
    share = torch.bincount(tokens).double() / max(1, tokens.numel())
    return -torch.special.xlogy(share, share).sum().item()


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Returns the batch on `device`."""
    return {name: tensor.to(device) for name, tensor in batch.items()}
