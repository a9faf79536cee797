"""Held-out loss: in total, and on text tokens next to the loss of n-gram tables on the same tokens."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe.data.pipeline import ALL_ROWS, Batch, BatchSource
from moe.data.tokenizer import SpecialIds
from moe.distributed.collectives import sum_each_over_ranks
from moe.distributed.mesh import Mesh
from moe.models.inputs import IGNORED_LABEL
from moe.models.losses import target_losses
from moe.models.modeling import STMoEForConditionalGeneration
from moe.tracing.recorder import evaluation_mode

TEXT_LOSS = "heldout/text_loss"
"""Name of the held-out loss on text tokens in metrics."""


class HeldOut(NamedTuple):
    """Held-out batches of a run.

    Attributes:
        source: Batches that training never sees; each evaluation uses the first `num_batches`.
        num_batches: Number of batches in an evaluation.
        ids: Distinguishes text from sentinels and the end token.
        ngram_losses: Loss of n-gram tables of the training text on the text tokens of these
            batches, in nats, by the name of the table; empty for pairs of texts.
    """

    source: BatchSource
    num_batches: int
    ids: SpecialIds
    ngram_losses: Mapping[str, float] = MappingProxyType({})


class TokenLosses(NamedTuple):
    """The N target tokens of one batch or several, without labels of -100.

    Attributes:
        losses: <float64>[N] cross-entropy in nats.
        labels: <int64>[N] the tokens.
        hits: <bool>[N] whether the token is the most probable one.
    """

    losses: Tensor
    labels: Tensor
    hits: Tensor


@torch.no_grad()
def evaluate_held_out(
    model: STMoEForConditionalGeneration,
    held_out: HeldOut,
    mesh: Mesh | None = None,
    *,
    bfloat16: bool = False,
    shuffled: bool = False,
) -> dict[str, float]:
    """Returns the held-out numbers, the same on every rank of a mesh.

    The model evaluates; its training mode is restored.

    Args:
        model: Whole, or sharded over `mesh`.
        held_out: Batches to measure on.
        mesh: The ranks; None for one process.
        bfloat16: Whether to compute in autocast, as the model is trained.
        shuffled: Whether to measure `heldout/shuffled_encoder` too, which takes as long again. Only
            for batches of span corruption: pairs differ in length and in segments.

    Returns:
        `heldout/loss`: cross-entropy in nats for each target token. `heldout/text_loss`: the same
        over text tokens, without sentinels and the end token, which are easy to guess.
        `heldout/token_accuracy`: share of target tokens that are the most probable.
        `heldout/unigram`, `heldout/bigram`, `heldout/trigram`: the loss of n-gram tables on the same
        text tokens, if `held_out` has them. `heldout/shuffled_encoder`: `heldout/text_loss` when the
        encoder reads the inputs of the next batch. A model whose decoder ignores the encoder has
        the same loss there.
    """
    tokens = _evaluate_batches(model, held_out, mesh, bfloat16)
    numbers = _mean_numbers(tokens, held_out.ids, mesh)
    for name, ngram_loss in held_out.ngram_losses.items():
        numbers[f"heldout/{name}"] = ngram_loss

    if shuffled:
        shuffled_tokens = _evaluate_batches(model, held_out, mesh, bfloat16, shuffled=True)
        shuffled_numbers = _mean_numbers(shuffled_tokens, held_out.ids, mesh)
        numbers["heldout/shuffled_encoder"] = shuffled_numbers[TEXT_LOSS]
    return numbers


def _mean_numbers(tokens: TokenLosses, ids: SpecialIds, mesh: Mesh | None) -> dict[str, float]:
    """Returns the means over the target tokens of all ranks, under their names in metrics."""
    # Sums and counts add up over ranks; means do not.
    text = is_text(tokens.labels, ids)
    sums = torch.stack([tokens.losses.sum(), tokens.losses[text].sum(), tokens.hits.double().sum()])
    counts = torch.stack([torch.tensor(tokens.labels.numel(), device=text.device), text.sum()])
    if mesh:
        sums, counts = sum_each_over_ranks([sums, counts], mesh.data)

    loss, text_loss, num_hits = sums.tolist()
    num_targets, num_text = counts.tolist()
    return {
        "heldout/loss": loss / num_targets,
        TEXT_LOSS: text_loss / max(1, num_text),
        "heldout/token_accuracy": num_hits / num_targets,
    }


def _evaluate_batches(
    model: STMoEForConditionalGeneration,
    held_out: HeldOut,
    mesh: Mesh | None,
    bfloat16: bool,
    *,
    shuffled: bool = False,
) -> TokenLosses:
    """Returns the target tokens of all held-out batches, of this rank's rows."""
    # Each rank of a mesh measures its own rows of every batch.
    rows = mesh.rows(held_out.source.batch_size) if mesh else ALL_ROWS

    parts: list[TokenLosses] = []
    autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=bfloat16)
    with evaluation_mode(model), autocast:
        for index in range(held_out.num_batches):
            batch = held_out.source.batch(index, rows)
            if shuffled:
                batch = held_out.source.batch(index + 1, rows) | {"labels": batch["labels"]}
            parts.append(token_losses(model, to_device(batch, model.device)))
    return TokenLosses(*map(torch.cat, zip(*parts, strict=True)))


def token_losses(model: PreTrainedModel, batch: Batch) -> TokenLosses:
    """Returns cross-entropy, label and hit of each target token of a batch.

    Args:
        model: In evaluation mode.
        batch: Batch on the model's device.
    """
    labels = batch["labels"]  # [B, T]
    is_target = labels != IGNORED_LABEL
    logits = model(**batch, output_router_logits=False, use_cache=False).logits  # [B, T, V]
    hits = logits.argmax(dim=-1) == labels
    return TokenLosses(target_losses(logits, labels), labels[is_target], hits[is_target])


def is_text(labels: Tensor, ids: SpecialIds) -> Tensor:
    """Returns <bool>[N]: which of <int64>[N] tokens are neither sentinel, end nor padding."""
    # Sentinels are the last ids of the vocabulary, counted down from the first.
    is_sentinel = labels > ids.first_sentinel - ids.num_sentinels
    return ~is_sentinel & (labels != ids.eos) & (labels != ids.pad)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Returns the batch on `device`."""
    return {name: tensor.to(device) for name, tensor in batch.items()}
