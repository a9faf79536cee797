"""One update of the weights: the same result however the batch is cut into micro-batches."""

from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from moe.data.pipeline import Batch
from moe.errors import ConfigError
from moe.models.losses import LossCounts
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.outputs import STMoEOutput
from moe.optim.adafactor import Adafactor
from moe.sparse.groups import sequences_per_group
from moe.sparse.layer import RouterOutput
from moe.sparse.losses import add_totals, balance_totals
from moe.sparse.stats import RouterStats, add_stats
from moe.training.recipe import Recipe


class StepMetrics(NamedTuple):
    """What one update did.

    Attributes:
        loss: <float32>[] total that was minimised.
        ce_loss: <float32>[] cross-entropy in nats for each target token.
        grad_norm: <float32>[] global norm of the gradient, before clipping.
        lr: Learning rate of the update.
        tokens: <int64>[] real tokens of encoder inputs and targets.
        encoder_stats: Of the encoder's routers, added up over layers; None without sparse layers.
        decoder_stats: The same for the decoder.
    """

    loss: Tensor
    ce_loss: Tensor
    grad_norm: Tensor
    lr: float
    tokens: Tensor
    encoder_stats: RouterStats | None
    decoder_stats: RouterStats | None


def train_step(
    model: STMoEForConditionalGeneration, optimizer: Adafactor, recipe: Recipe, batch: Batch, step: int
) -> StepMetrics:
    """Updates the weights once and returns what happened.

    All randomness is a function of `recipe.seed` and `step`, so that a resumed run needs no generator state. With
    dropout or the random second-expert policy, another cut of the batch draws other numbers.

    Args:
        model: In training mode.
        optimizer: Of the model's parameters.
        recipe: Gives schedule, micro-batch size, precision and clipping.
        batch: Of the whole update, on the model's device.
        step: Number of the update, from 0.

    Raises:
        ConfigError: When the micro-batch size would change which tokens are routed together.
    """
    training = recipe.training
    parts = list(cut_batch(batch, training.micro_batch_size, model.config.group_size))

    def run_parts(counts: LossCounts) -> Iterator[STMoEOutput]:
        torch.manual_seed(recipe.seed * 1_000_003 + step)
        for part in parts:
            with torch.autocast(model.device.type, torch.bfloat16, enabled=training.precision == "bfloat16"):
                output = model(**part, loss_counts=counts, output_router_logits=True)
            yield output  # outside: a backward pass in autocast would round the router's gradient

    counts = model.loss_counts(batch)
    if model.config.balance_scope in ("ranks", "global") and len(parts) > 1:
        with torch.no_grad():
            totals = [[balance_totals(router.losses) for router in _routers(output)] for output in run_parts(counts)]
        counts = counts._replace(balance_totals=tuple(reduce(add_totals, layer) for layer in zip(*totals, strict=True)))

    losses: list[tuple[Tensor, Tensor]] = []
    stats: list[list[RouterStats]] = []
    for output in run_parts(counts):
        assert output.loss is not None and output.ce_loss is not None, "a batch has labels"
        output.loss.backward()
        losses.append((output.loss.detach(), output.ce_loss.detach()))
        stats.append([router.stats for router in _routers(output)])

    grad_norm = _clip_gradient(model, recipe.optim.max_grad_norm)
    lr = recipe.build_schedule()(step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    layer_stats = [reduce(add_stats, layer) for layer in zip(*stats, strict=True)]
    for layer, layer_stat in zip(model.sparse_layers(), layer_stats, strict=True):
        layer.router.update(layer_stat)
    loss, ce_loss = (torch.stack(values).sum() for values in zip(*losses, strict=True))
    tokens = counts.encoder.tokens + counts.target_tokens
    encoder = model.config.num_sparse_encoder_layers
    return StepMetrics(loss, ce_loss, grad_norm, lr, tokens, _sum(layer_stats[:encoder]), _sum(layer_stats[encoder:]))


def cut_batch(batch: Batch, micro_batch_size: int | None, group_size: int) -> Iterator[Batch]:
    """Yields micro-batches of `micro_batch_size` rows; the whole batch when that is None.

    Raises:
        ConfigError: When a micro-batch would group tokens for routing otherwise than the whole batch does.
    """
    rows = batch["labels"].shape[0]
    micro = micro_batch_size or rows
    for name in ("input_ids", "labels"):
        length = batch[name].shape[1]
        whole, part = (sequences_per_group(size, length, group_size) for size in (rows, micro))
        if whole != part:
            raise ConfigError(
                f"training.micro_batch_size is {micro}: the whole batch of {rows} rows of {length} tokens is routed in "
                f"groups of {whole} sequences (model.group_size {group_size}), a micro-batch in groups of {part}. "
                f"Choose a micro-batch size that is a multiple of {whole}, or model.group_size {part * length}."
            )
    for start in range(0, rows, micro):
        yield {name: tensor[start : start + micro] for name, tensor in batch.items()}


def _clip_gradient(model: torch.nn.Module, max_grad_norm: float | None) -> Tensor:
    """Returns the global norm of the gradient <float32>[]; scales the gradient down to `max_grad_norm` if given."""
    limit = float("inf") if max_grad_norm is None else max_grad_norm
    return torch.nn.utils.clip_grad_norm_(model.parameters(), limit)


def _routers(output: STMoEOutput) -> tuple[RouterOutput, ...]:
    """Returns what each router did, the encoder's first."""
    return (*(output.encoder_router_outputs or ()), *(output.decoder_router_outputs or ()))


def _sum(stats: list[RouterStats]) -> RouterStats | None:
    """Returns all statistics added up; None when there are none."""
    return reduce(add_stats, stats) if stats else None
