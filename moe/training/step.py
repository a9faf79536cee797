"""One update of the weights: the same result however the batch is split into micro-batches.

The loop (loop.py) calls `train_step` once for each batch and reports what it returns.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe.data.pipeline import Batch
from moe.distributed.collectives import sum_each_over_ranks
from moe.distributed.mesh import Mesh, MeshConfig, divisors
from moe.distributed.sharding import clip_gradient, sum_gradients_now
from moe.errors import ConfigError
from moe.models.losses import LossCounts, sum_counts
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.outputs import STMoEOutput
from moe.sparse.config import BalanceScope
from moe.sparse.groups import has_same_groups, sequences_per_group, tokens_per_group
from moe.sparse.layer import RouterOutput, SparseFeedForward
from moe.sparse.losses import (
    BalanceTotals,
    RouterLosses,
    add_totals,
    balance_totals,
    num_scope_ranks,
)
from moe.sparse.router import Router
from moe.sparse.stats import RouterStats, add_stats
from moe.training.recipe import Recipe


class StepMetrics(NamedTuple):
    """What one update did, summed over all ranks.

    Attributes:
        loss: <float32>[] total that was minimised.
        ce_loss: <float32>[] cross-entropy in nats for each target token.
        grad_norm: <float32>[] global norm of the gradient, before clipping.
        lr: Learning rate of the update.
        tokens: <int64>[] real tokens of encoder inputs and targets.
        encoder_stats: The encoder's routers, added up over layers; None without sparse layers.
        decoder_stats: The same for the decoder.
        layer_stats: The same of each sparse layer, the encoder's first.
    """

    loss: Tensor
    ce_loss: Tensor
    grad_norm: Tensor
    lr: float
    tokens: Tensor
    encoder_stats: RouterStats | None
    decoder_stats: RouterStats | None
    layer_stats: Sequence[RouterStats]


class _BatchResult(NamedTuple):
    """Losses and statistics of a whole batch, after its last backward pass.

    Attributes:
        loss: <float32>[] total loss.
        ce_loss: <float32>[] cross-entropy in nats for each target token.
        layer_stats: Statistics of each sparse layer, the encoder's first.
    """

    loss: Tensor
    ce_loss: Tensor
    layer_stats: list[RouterStats]


def train_step(
    model: STMoEForConditionalGeneration,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    batch: Batch,
    step: int,
    mesh: Mesh | None = None,
) -> StepMetrics:
    """Updates the weights once and returns the metrics of the update.

    All randomness is a function of `recipe.seed` and `step`, so that a resumed run needs no
    generator state. With dropout or the random second-expert policy, another split of the batch
    draws other numbers.

    Args:
        model: In training mode.
        optimizer: Optimizer of the model's parameters.
        recipe: Gives schedule, micro-batch size, precision and clipping.
        batch: Batch of the whole update, on the model's device; on a mesh the rows of this rank.
        step: Number of the update, from 0.
        mesh: Mesh that `shard_model` has sharded the model over; None for one process.

    Raises:
        ConfigError: When the micro-batch size would change which tokens are routed together.
    """
    micro_batches = _split_for_model(model, batch, recipe, mesh)

    # Every loss is a sum over tokens (or groups) divided by a count. With the counts of the whole
    # batch, of all ranks, losses and gradients of its parts add up to those of the batch.
    counts = model.loss_counts(batch)
    if mesh:
        counts = sum_counts(counts, mesh.data)

    # f_i, the share of the tokens that chose expert i, over more than one pass: the choices of all
    # passes must be known before the first loss.
    scope = model.config.balance_scope
    num_passes = len(micro_batches) * num_scope_ranks(scope, mesh.config if mesh else MeshConfig())
    if scope in ("ranks", "global") and num_passes > 1:
        with torch.no_grad():
            passes = _forward_passes(model, micro_batches, counts, recipe, step, mesh)
            totals = _sum_balance_totals(passes, scope, mesh)
        counts = counts._replace(balance_totals=totals)

    # Gradient of L = L_CE + c_B L_B + c_z L_z (eq. 6), added up over the micro-batches.
    passes = _forward_passes(model, micro_batches, counts, recipe, step, mesh)
    result = _backward_passes(passes)

    # Global norm, and the update at this step's learning rate.
    grad_norm = clip_gradient(model.parameters(), recipe.optim.max_grad_norm)
    lr = recipe.build_schedule()(step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    if mesh:
        result = _sum_over_ranks(result, mesh.data)

    # Routers that balance without a loss see the load of the whole batch, once for each update.
    update_routers(model.sparse_layers(), result.layer_stats)

    num_encoder_layers = model.config.num_sparse_encoder_layers
    return StepMetrics(
        loss=result.loss,
        ce_loss=result.ce_loss,
        grad_norm=grad_norm,
        lr=lr,
        tokens=counts.encoder.tokens + counts.target_tokens,
        encoder_stats=_sum_layers(result.layer_stats[:num_encoder_layers]),
        decoder_stats=_sum_layers(result.layer_stats[num_encoder_layers:]),
        layer_stats=result.layer_stats,
    )


# ---------------------------------------------------------------------------
# Micro-batches


def split_batch(
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
    num_rows = batch["labels"].shape[0]
    micro_batch_size = micro_batch_size or num_rows

    # Tokens must not be routed together with others because a batch is split.
    if group_size is not None:
        lengths = [batch[name].shape[1] for name in ("input_ids", "labels")]
        check_groups(lengths, num_rows * data_ranks, micro_batch_size, group_size)

    for start in range(0, num_rows, micro_batch_size):
        rows = slice(start, start + micro_batch_size)
        yield {name: tensor[rows] for name, tensor in batch.items()}


def check_groups(lengths: Sequence[int], batch_size: int, rows: int, group_size: int) -> None:
    """Refuses a split of the batch that would change which tokens are routed together.

    Args:
        lengths: Tokens of a row in the encoder and the decoder.
        batch_size: Rows of the whole batch.
        rows: Rows of a forward pass on one rank.
        group_size: Most tokens that are routed together.

    Raises:
        ConfigError: Names a `group_size` that goes with the split.
    """
    if has_same_groups(lengths, batch_size, rows, group_size):
        return

    # Groups change where one more sequence fits: just below such a size lies the largest with the
    # same groups. A group of one token is always one sequence.
    most = min(group_size, rows * max(lengths))
    candidates = {1, most}
    for length in lengths:
        for count in (*divisors(batch_size), *divisors(rows)):
            candidates.add(count * length - 1)
    fitting = 1
    for size in candidates:
        if fitting < size <= most and has_same_groups(lengths, batch_size, rows, size):
            fitting = size

    whole = [sequences_per_group(batch_size, length, group_size) for length in lengths]
    raise ConfigError(
        f"A batch of {batch_size} rows of {lengths[0]} and {lengths[1]} tokens is routed in groups of {whole[0]} "
        f"and {whole[1]} sequences (model.group_size {group_size}), but a forward pass has {rows} rows "
        "(training.micro_batch_size, or the batch's share of a data rank) and would group them otherwise. Set "
        f"model.group_size to {fitting}, the largest that fits, or choose more rows for a forward pass."
    )


def _split_for_model(
    model: STMoEForConditionalGeneration, batch: Batch, recipe: Recipe, mesh: Mesh | None
) -> list[Batch]:
    """Returns the micro-batches of this rank, which group tokens as the whole batch does."""
    group_size = tokens_per_group(model.config) if model.sparse_layers() else None
    data_ranks = mesh.config.num_data_ranks if mesh else 1
    micro_batch_size = recipe.training.micro_batch_size
    return list(split_batch(batch, micro_batch_size, group_size, data_ranks))


# ---------------------------------------------------------------------------
# Forward and backward passes


def _forward_passes(
    model: STMoEForConditionalGeneration,
    micro_batches: Sequence[Batch],
    counts: LossCounts,
    recipe: Recipe,
    step: int,
    mesh: Mesh | None,
) -> Iterator[STMoEOutput]:
    """Yields the output of each micro-batch; every call draws the same random numbers.

    Outputs leave the region of autocast: a backward pass inside it would round the router's
    gradient.
    """
    data_ranks = mesh.config.num_data_ranks if mesh else 1
    data_rank = mesh.data_rank if mesh else 0
    seed = (recipe.seed * 1_000_003 + step) * data_ranks + data_rank
    torch.manual_seed(seed % 2**63)

    device_type = model.device.type
    bfloat16 = recipe.training.precision == "bfloat16"
    for number, micro_batch in enumerate(micro_batches, start=1):
        # Ranks exchange gradients once, in the backward pass of the last micro-batch.
        sum_gradients_now(model, number == len(micro_batches))
        with torch.autocast(device_type, torch.bfloat16, enabled=bfloat16):
            output = model(**micro_batch, loss_counts=counts, output_router_logits=True)
        yield output


def _backward_passes(passes: Iterator[STMoEOutput]) -> _BatchResult:
    """Runs the backward pass of each output before the next forward pass, and adds up losses."""
    losses: list[Tensor] = []
    ce_losses: list[Tensor] = []
    layer_stats: list[RouterStats] = []
    for output in passes:
        assert output.loss is not None and output.ce_loss is not None, "a batch has labels"
        output.loss.backward()

        # Without their graphs, which would keep the activations of all micro-batches.
        losses.append(output.loss.detach())
        ce_losses.append(output.ce_loss.detach())
        stats = [router.stats for router in router_outputs(output)]
        layer_stats = add_layer_stats(layer_stats, stats)
    return _BatchResult(torch.stack(losses).sum(), torch.stack(ce_losses).sum(), layer_stats)


def _sum_balance_totals(
    passes: Iterator[STMoEOutput], scope: BalanceScope, mesh: Mesh | None
) -> tuple[BalanceTotals, ...]:
    """Returns choices and tokens of each sparse layer over all passes of the scope."""
    totals: list[BalanceTotals] = []
    for output in passes:
        for layer, router in enumerate(router_outputs(output)):
            pass_totals = _balance_totals(router.losses, scope, mesh)
            if layer < len(totals):
                totals[layer] = add_totals(totals[layer], pass_totals)
            else:
                totals.append(pass_totals)
    return tuple(totals)


def _balance_totals(losses: RouterLosses, scope: BalanceScope, mesh: Mesh | None) -> BalanceTotals:
    """Returns choices and tokens of one pass over the ranks of the scope."""
    if mesh:
        return balance_totals(losses, mesh.data if scope == "global" else mesh.replica)
    return BalanceTotals(losses.choices, losses.num_share_tokens)


def _sum_over_ranks(result: _BatchResult, group: ProcessGroup | None) -> _BatchResult:
    """Returns losses and statistics of all ranks of a group together, in one exchange."""
    numbers = [result.loss, result.ce_loss, *chain.from_iterable(result.layer_stats)]
    sums = iter(sum_each_over_ranks(numbers, group))
    loss = next(sums)
    ce_loss = next(sums)
    layer_stats = [RouterStats(*islice(sums, len(stats))) for stats in result.layer_stats]
    return _BatchResult(loss, ce_loss, layer_stats)


# ---------------------------------------------------------------------------
# Routers


def router_outputs(output: STMoEOutput) -> tuple[RouterOutput, ...]:
    """Returns the outputs of all routers, the encoder's first."""
    encoder = output.encoder_router_outputs or ()
    decoder = output.decoder_router_outputs or ()
    return (*encoder, *decoder)


def update_routers(layers: Sequence[SparseFeedForward], stats: Sequence[RouterStats]) -> None:
    """Lets each router that learns from its load see the statistics of an update.

    A router whose parameters are frozen stays as it is.

    Args:
        layers: Sparse layers of a model, the encoder's first.
        stats: Statistics of each layer over a whole batch.
    """
    for layer, layer_stats in zip(layers, stats, strict=True):
        if learns_from_load(layer):
            layer.router.update(layer_stats)


def learns_from_load(layer: SparseFeedForward) -> bool:
    """Returns whether a layer's router has an `update` of its own and is not frozen."""
    router = layer.router
    if not isinstance(router, Router) or type(router).update is Router.update:
        return False
    return any(parameter.requires_grad for parameter in router.parameters())


def add_layer_stats(total: list[RouterStats], stats: list[RouterStats]) -> list[RouterStats]:
    """Returns the statistics of each layer added up; an empty list stands for zero."""
    if not total or not stats:
        return total or stats
    return [add_stats(a, b) for a, b in zip(total, stats, strict=True)]


def _sum_layers(stats: list[RouterStats]) -> RouterStats | None:
    """Returns the statistics added up over layers; None when there are no layers."""
    return reduce(add_stats, stats) if stats else None
