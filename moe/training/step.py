"""One update of the weights: the same result however the batch is cut into micro-batches."""

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor

from moe.data.pipeline import Batch
from moe.distributed.collectives import sum_each_over_ranks
from moe.distributed.mesh import Mesh, divisors
from moe.distributed.sharding import clip_gradient, sum_gradients_now
from moe.errors import ConfigError
from moe.models.losses import LossCounts, sum_counts
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.outputs import STMoEOutput
from moe.sparse.groups import groups_alike, sequences_per_group, tokens_per_group
from moe.sparse.layer import RouterOutput, SparseFeedForward
from moe.sparse.losses import BalanceTotals, RouterLosses, add_totals, balance_totals
from moe.sparse.router import Router
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
    model: STMoEForConditionalGeneration,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    batch: Batch,
    step: int,
    mesh: Mesh | None = None,
) -> StepMetrics:
    """Updates the weights once and returns what happened.

    All randomness is a function of `recipe.seed` and `step`, so that a resumed run needs no
    generator state. With dropout or the random second-expert policy, another cut of the batch draws
    other numbers.

    Args:
        model: In training mode.
        optimizer: Of the model's parameters.
        recipe: Gives schedule, micro-batch size, precision and clipping.
        batch: Of the whole update, on the model's device; on a mesh the rows of this rank.
        step: Number of the update, from 0.
        mesh: What the model is cut over by `shard_model`; None for one process. Whatever is
            returned is of all ranks.

    Raises:
        ConfigError: When the micro-batch size would change which tokens are routed together.
    """
    training = recipe.training
    ranks = mesh.data if mesh else None
    data_ranks, data_rank = (mesh.config.num_data_ranks, mesh.data_rank) if mesh else (1, 0)
    group_size = tokens_per_group(model.config) if model.sparse_layers() else None
    parts = list(cut_batch(batch, training.micro_batch_size, group_size, data_ranks))

    def run_parts(counts: LossCounts) -> Iterator[STMoEOutput]:
        torch.manual_seed(((recipe.seed * 1_000_003 + step) * data_ranks + data_rank) % 2**63)
        for number, part in enumerate(parts, start=1):
            sum_gradients_now(model, number == len(parts))
            with torch.autocast(
                model.device.type, torch.bfloat16, enabled=training.precision == "bfloat16"
            ):
                output = model(**part, loss_counts=counts, output_router_logits=True)
            yield output  # outside: a backward pass in autocast would round the router's gradient

    counts = sum_counts(model.loss_counts(batch), ranks) if mesh else model.loss_counts(batch)
    if model.config.balance_scope in ("ranks", "global") and len(parts) * data_ranks > 1:
        with torch.no_grad():
            totals = [
                [_totals(router.losses, mesh) for router in _routers(output)]
                for output in run_parts(counts)
            ]
        counts = counts._replace(
            balance_totals=tuple(reduce(add_totals, layer) for layer in zip(*totals, strict=True))
        )

    losses: list[tuple[Tensor, Tensor]] = []
    stats: list[list[RouterStats]] = []
    for output in run_parts(counts):
        assert output.loss is not None and output.ce_loss is not None, "a batch has labels"
        output.loss.backward()
        losses.append((output.loss.detach(), output.ce_loss.detach()))
        stats.append([router.stats for router in _routers(output)])

    grad_norm = clip_gradient(model.parameters(), recipe.optim.max_grad_norm)
    lr = recipe.build_schedule()(step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    layer_stats = [reduce(add_stats, layer) for layer in zip(*stats, strict=True)]
    loss, ce_loss = (torch.stack(values).sum() for values in zip(*losses, strict=True))
    if mesh:
        remaining = iter(
            sum_each_over_ranks([loss, ce_loss, *chain.from_iterable(layer_stats)], ranks)
        )
        loss, ce_loss = next(remaining), next(remaining)
        layer_stats = [RouterStats(*islice(remaining, len(layer))) for layer in layer_stats]
    for layer, layer_stat in zip(model.sparse_layers(), layer_stats, strict=True):
        if router_learns(layer):
            layer.router.update(layer_stat)
    tokens = counts.encoder.tokens + counts.target_tokens
    encoder = model.config.num_sparse_encoder_layers
    return StepMetrics(
        loss,
        ce_loss,
        grad_norm,
        lr,
        tokens,
        _sum(layer_stats[:encoder]),
        _sum(layer_stats[encoder:]),
    )


def router_learns(layer: SparseFeedForward) -> bool:
    """Returns whether the router of a layer learns of its load after an update; a frozen one does
    not.
    """
    router = layer.router
    learns = isinstance(router, Router) and type(router).update is not Router.update
    return learns and any(parameter.requires_grad for parameter in router.parameters())


def cut_batch(
    batch: Batch, micro_batch_size: int | None, group_size: int | None, data_ranks: int = 1
) -> Iterator[Batch]:
    """Yields micro-batches of `micro_batch_size` rows; all rows when that is None.

    Args:
        batch: Rows of this rank.
        micro_batch_size: Rows in a micro-batch.
        group_size: Most tokens that are routed together; None when none are.
        data_ranks: Ranks with as many rows each.

    Raises:
        ConfigError: When a micro-batch would group tokens for routing otherwise than the whole
            batch does.
    """
    rows = batch["labels"].shape[0]
    micro = micro_batch_size or rows
    if group_size is not None:
        lengths = [batch[name].shape[1] for name in ("input_ids", "labels")]
        check_groups(lengths, rows * data_ranks, micro, group_size)
    for start in range(0, rows, micro):
        yield {name: tensor[start : start + micro] for name, tensor in batch.items()}


def check_groups(lengths: Sequence[int], batch_size: int, rows: int, group_size: int) -> None:
    """Refuses to cut a batch where tokens would be routed in other groups than those of the whole
    batch.

    Args:
        lengths: Tokens of a row in the encoder and the decoder.
        batch_size: Rows of the whole batch.
        rows: Rows of a forward pass on one rank.
        group_size: Most tokens that are routed together.

    Raises:
        ConfigError: Names a `group_size` that goes with the cut.
    """
    if not groups_alike(lengths, batch_size, rows, group_size):
        whole = [sequences_per_group(batch_size, length, group_size) for length in lengths]
        # Groups change where one more sequence fits: just below such a size lies the largest with
        # the same groups.
        most = min(group_size, rows * max(lengths))
        sizes = {1, most}
        for length in lengths:
            sizes.update(count * length - 1 for count in (*divisors(batch_size), *divisors(rows)))
        fitting = max(
            size
            for size in sizes
            if 1 <= size <= most and groups_alike(lengths, batch_size, rows, size)
        )
        raise ConfigError(
            f"A batch of {batch_size} rows of {lengths[0]} and {lengths[1]} tokens is routed in groups of {whole[0]} "
            f"and {whole[1]} sequences (model.group_size {group_size}), but a forward pass has {rows} rows "
            "(training.micro_batch_size, or the batch's share of a data rank) and would group them otherwise. Set "
            f"model.group_size to {fitting}, the largest that fits, or choose more rows for a forward pass."
        )


def _totals(losses: RouterLosses, mesh: Mesh | None) -> BalanceTotals:
    """Returns what the shares of a balance loss are of, over all data ranks."""
    return (
        balance_totals(losses, mesh.data)
        if mesh
        else BalanceTotals(losses.choices, losses.num_positions)
    )


def _routers(output: STMoEOutput) -> tuple[RouterOutput, ...]:
    """Returns what each router did, the encoder's first."""
    return (*(output.encoder_router_outputs or ()), *(output.decoder_router_outputs or ()))


def _sum(stats: list[RouterStats]) -> RouterStats | None:
    """Returns all statistics added up; None when there are none."""
    return reduce(add_stats, stats) if stats else None
