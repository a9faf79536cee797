"""Held-out loss: in total, and on text tokens beside the unigram entropy of the same tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from moe.data.pipeline import ALL_ROWS, Batch, BatchSource
from moe.data.tokenizer import SpecialIds
from moe.distributed.collectives import sum_each_over_ranks
from moe.distributed.mesh import Mesh
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


@torch.no_grad()
def evaluate_held_out(
    model: STMoEForConditionalGeneration,
    held_out: HeldOut,
    mesh: Mesh | None = None,
    *,
    bfloat16: bool = False,
) -> dict[str, float]:
    """Returns the held-out numbers, the same on every rank of a mesh; the model is in evaluation
    mode meanwhile.

    Args:
        model: Whole, or cut over `mesh`.
        held_out: What to measure on.
        mesh: The ranks; None for one process.
        bfloat16: Whether to compute in autocast, as the model is trained.

    Returns:
        `heldout/loss`: cross-entropy in nats for each target token. `heldout/text_loss`: the same
        over text tokens, without sentinels and the end token, which are easy to guess.
        `heldout/unigram_entropy`: entropy in nats of the frequencies of those text tokens
        themselves, a bound that no unigram model beats. `heldout/token_accuracy`: share of target
        tokens that are the most probable.
    """
    training, source = model.training, held_out.source
    rows = mesh.rows(source.batch_size) if mesh else ALL_ROWS
    model.eval()
    with torch.autocast(model.device.type, torch.bfloat16, enabled=bfloat16):
        batches = (
            to_device(source.batch(index, rows), model.device)
            for index in range(held_out.num_batches)
        )
        results = [token_losses(model, batch) for batch in batches]
    model.train(training)
    losses, labels, hits = (torch.cat(parts) for parts in zip(*results, strict=True))
    text = is_text(labels, held_out.ids)
    sums = torch.stack([losses.sum(), losses[text].sum(), hits.double().sum()])
    counts = torch.bincount(labels[text], minlength=model.config.vocab_size)
    num_targets = torch.tensor(labels.numel(), device=labels.device)
    if mesh:
        sums, counts, num_targets = sum_each_over_ranks([sums, counts, num_targets], mesh.data)
    loss, text_loss, num_hits = sums.tolist()
    return {
        "heldout/loss": loss / int(num_targets),
        "heldout/text_loss": text_loss / max(1, int(counts.sum())),
        "heldout/unigram_entropy": unigram_entropy(counts),
        "heldout/token_accuracy": num_hits / int(num_targets),
    }


def token_losses(
    model: STMoEForConditionalGeneration, batch: Batch
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the cross-entropy <float64>[N], label <int64>[N] and hit <bool>[N] of each target
    token of a batch.
    """
    targets = batch["labels"] != -100
    logits = model(**batch, output_router_logits=False, use_cache=False).logits[targets].double()
    labels = batch["labels"][targets]
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return losses, labels, logits.argmax(dim=-1) == labels


def is_text(labels: Tensor, ids: SpecialIds) -> Tensor:
    """Returns <bool>[N]: which of <int64>[N] tokens are neither sentinel, end nor padding."""
    return (
        (labels <= ids.first_sentinel - ids.num_sentinels)
        & (labels != ids.eos)
        & (labels != ids.pad)
    )


def unigram_entropy(counts: Tensor) -> float:
    """Returns the entropy in nats of the frequencies of tokens that occur <int64>[V] times; 0 for
    none.
    """
    share = counts.double() / counts.sum().clamp(min=1)
    return -torch.special.xlogy(share, share).sum().item()


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Returns the batch on `device`."""
    return {name: tensor.to(device) for name, tensor in batch.items()}
