"""One update of the weights, with the same result for any split into micro-batches.

The loop (loop.py) calls `take_step` once for each batch and reports its results.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.data.pipeline import Batch
from moe.distributed.collectives import sum_each_over_ranks
from moe.distributed.mesh import Mesh, MeshConfig
from moe.distributed.replica_groups import ReplicaGroups
from moe.distributed.sharding import clip_gradient, local_shard, sum_gradients_now
from moe.errors import ConfigError
from moe.models.inputs import IGNORED_LABEL
from moe.models.losses import LossCounts, StackCounts, add_counts, sum_counts
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.outputs import STMoEOutput
from moe.sparse.adapters import unwrapped
from moe.sparse.config import BalanceScope
from moe.sparse.editing import sparse_layers
from moe.sparse.groups import has_same_groups, sequences_per_group, tokens_per_group
from moe.sparse.layer import RouterOutput, SparseFeedForward
from moe.sparse.losses import BalanceTotals, add_totals, num_scope_ranks
from moe.sparse.router import Router
from moe.sparse.stats import RouterStats
from moe.training.recipe import Recipe

_LayerTotals = tuple[BalanceTotals, ...]


class StepMetrics(NamedTuple):
    """Metrics of one update, summed over all ranks.

    Attributes:
        loss: <float32>[] total that was minimised.
        ce_loss: <float32>[] cross-entropy in nats for each target token.
        grad_norm: <float32>[] global norm of the gradient, before clipping.
        lr: Learning rate of the update.
        tokens: <int64>[] real tokens of encoder inputs and targets.
        encoder_stats: The encoder's routers, added up over layers; None without sparse layers.
        decoder_stats: The same for the decoder.
        layer_stats: The same for each sparse layer, the encoder's first.
    """

    loss: Tensor
    ce_loss: Tensor
    grad_norm: Tensor
    lr: float
    tokens: Tensor
    encoder_stats: RouterStats | None
    decoder_stats: RouterStats | None
    layer_stats: Sequence[RouterStats]


class Share(NamedTuple):
    """The part of a batch of one data rank.

    Attributes:
        data_rank: Number of the data rank, from which the random numbers of its passes follow.
        batch: Its rows, on the model's device.
    """

    data_rank: int
    batch: Batch


ForwardPass = Callable[[STMoEForConditionalGeneration, Batch, LossCounts], STMoEOutput]
"""Returns the losses of a micro-batch, given the counts of the whole batch."""


def forward_pass(
    model: STMoEForConditionalGeneration, micro_batch: Batch, counts: LossCounts
) -> STMoEOutput:
    """Returns the output of the model with its own losses."""
    return model(**micro_batch, loss_counts=counts, output_router_logits=True)


def host_forward_pass(model: Any, micro_batch: Batch, counts: LossCounts) -> Any:
    """Returns the output of another Transformer, with its part of the losses of the whole batch."""
    if sparse_layers(model):
        num_items = {"num_items_in_batch": counts.target_tokens}
        return model(**micro_batch, **num_items, output_router_logits=True)

    # Losses of dense models of transformers are means over the micro-batch.
    logits = model(**micro_batch).logits.float().flatten(0, 1)
    labels = micro_batch["labels"].flatten()
    loss = F.cross_entropy(logits, labels, reduction="sum") / counts.target_tokens.clamp(min=1)
    return STMoEOutput(loss=loss, ce_loss=loss)


def count_batch(model: Any, batch: Batch) -> LossCounts:
    """Returns the divisors of the losses of a batch; routers of a host share them out by targets."""
    if isinstance(model, STMoEForConditionalGeneration):
        return model.loss_counts(batch)
    target_tokens = (batch["labels"] != IGNORED_LABEL).sum()
    none = torch.zeros_like(target_tokens)
    encoder = StackCounts(batch["attention_mask"].sum(), none, none)
    return LossCounts(target_tokens, encoder, StackCounts(none, none, none))


class StepRanks(NamedTuple):
    """The ranks that take a step together: the ranks of a mesh, and replica groups that may be
    lost.

    Attributes:
        mesh: Mesh over which `shard_model` has sharded the model; None for one process.
        replicas: The replica groups, each of which has such a mesh; None for a single mesh.
    """

    mesh: Mesh | None = None
    replicas: ReplicaGroups | None = None

    @property
    def config(self) -> MeshConfig:
        """Sizes of the mesh of all ranks."""
        config = self.mesh.config if self.mesh else MeshConfig()
        if self.replicas is None:
            return config
        return dataclasses.replace(config, dp_replicate=self.replicas.num_groups)

    def sum_each(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Returns the sum of each tensor <any>[...] over all ranks with other rows of the batch."""
        sums = list(values)
        if self.mesh:
            sums = sum_each_over_ranks(sums, self.mesh.data)
        return self.replicas.sum_each(sums) if self.replicas else sums

    def sum_gradients(self, model: STMoEForConditionalGeneration) -> None:
        """Sums gradients over the replica groups; the backward pass has summed them inside a mesh."""
        if self.replicas is None:
            return
        grads = [parameter.grad for parameter in model.parameters()]
        self.replicas.sum_in_place([local_shard(grad) for grad in grads if grad is not None])

    def commit(self) -> None:
        """Returns when the step counts.

        Raises:
            LostStepError: When it does not, because a replica group was lost.
        """
        if self.replicas is not None:
            self.replicas.commit()


class _Passes(NamedTuple):
    """The forward passes of a share.

    Attributes:
        data_rank: Number of the share.
        micro_batches: One for each pass.
        counts: Counts of the whole batch.
    """

    data_rank: int
    micro_batches: Sequence[Batch]
    counts: LossCounts


def take_step(
    model: STMoEForConditionalGeneration,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    shares: Sequence[Share],
    step: int,
    ranks: StepRanks,
    forward: ForwardPass = forward_pass,
) -> StepMetrics:
    """Updates the weights once from shares of the batch, for any number of shares.

    All randomness is a function of `recipe.seed` and `step`, so that a resumed run needs no
    generator state. With dropout or the random second-expert policy, a different split of the batch
    draws different numbers; the rank that computes a share does not matter.

    Args:
        model: In training mode.
        optimizer: Optimizer of the model's parameters.
        recipe: Gives schedule, micro-batch size, precision and clipping.
        shares: Parts of the batch of the whole update that are this rank's.
        step: Number of the update, from 0.
        ranks: The ranks that take the step.
        forward: Computes the losses of a micro-batch; those of the model by default.

    Raises:
        ConfigError: When the micro-batch size would change which tokens are routed together.
        LostStepError: When a replica group was lost: weights and optimizer are as they were before.
    """
    # Every loss is a sum over tokens (or groups) divided by a count. With the counts of the whole
    # batch, of all ranks, losses and gradients of its parts add up to the batch's.
    counts = reduce(add_counts, [count_batch(model, share.batch) for share in shares])
    counts = sum_counts(counts, ranks.sum_each)
    data_ranks = ranks.config.num_data_ranks
    layers = sparse_layers(model)
    config = next((layer.config for layer in layers.values()), None)
    group_size = None if config is None else tokens_per_group(config)
    work: list[_Passes] = []
    for share in shares:
        micro_batches = _split(
            share.batch, recipe.training.micro_batch_size, group_size, data_ranks
        )
        work.append(_Passes(share.data_rank, micro_batches, counts))

    # If f_i, the share of tokens that chose expert i, spans several passes, the choices of all passes
    # must be known before the first loss.
    scope = "group" if config is None else config.balance_scope
    num_passes = len(work[0].micro_batches) * num_scope_ranks(scope, ranks.config)
    if scope in ("ranks", "global") and num_passes > 1:
        with torch.no_grad():
            work = _with_balance_totals(model, work, recipe, step, scope, ranks, forward)

    # Gradient of L = L_CE + c_B L_B + c_z L_z (eq. 6), added up over the micro-batches.
    passes = _forward_passes(model, work, recipe, step, ranks.config, forward)
    loss, ce_loss, layer_stats = _backward_passes(passes)
    ranks.sum_gradients(model)

    # Losses and statistics of all ranks together, in one exchange.
    sums = ranks.sum_each([loss, ce_loss, *chain.from_iterable(layer_stats)])
    loss, ce_loss, *stats = sums
    layer_stats = RouterStats.unflatten(stats)

    # Global norm, and the update at this step's learning rate.
    grad_norm = clip_gradient(model.parameters(), recipe.optim.max_grad_norm)
    lr = recipe.build_schedule()(step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    ranks.commit()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    # Routers that balance without a loss get the load of the whole batch, once per update.
    for layer, stats_of_layer in zip(layers.values(), layer_stats, strict=True):
        if learns_from_load(layer):
            unwrapped(layer.router).update(stats_of_layer)

    num_encoder_layers = sum(stack == "encoder" for stack, _ in layers)
    return StepMetrics(
        loss=loss,
        ce_loss=ce_loss,
        grad_norm=grad_norm,
        lr=lr,
        tokens=counts.encoder.tokens + counts.target_tokens,
        encoder_stats=_sum_layers(layer_stats[:num_encoder_layers]),
        decoder_stats=_sum_layers(layer_stats[num_encoder_layers:]),
        layer_stats=layer_stats,
    )


# ---------------------------------------------------------------------------
# Micro-batches


def _split(
    batch: Batch, micro_batch_size: int | None, group_size: int | None, data_ranks: int
) -> list[Batch]:
    """Returns micro-batches of `micro_batch_size` rows; all rows when that is None.

    Args:
        batch: Rows of this rank.
        micro_batch_size: Rows in a micro-batch.
        group_size: Maximum number of tokens that are routed together; None when none are.
        data_ranks: Ranks with as many rows each.

    Raises:
        ConfigError: When a micro-batch would group tokens for routing otherwise than the whole
            batch does.
    """
    num_rows = batch["labels"].shape[0]
    micro_batch_size = micro_batch_size or num_rows
    if group_size is not None:
        lengths = [batch[name].shape[1] for name in ("input_ids", "labels")]
        check_groups(lengths, num_rows * data_ranks, micro_batch_size, group_size)

    micro_batches: list[Batch] = []
    for start in range(0, num_rows, micro_batch_size):
        rows = slice(start, start + micro_batch_size)
        micro_batches.append({name: tensor[rows] for name, tensor in batch.items()})
    return micro_batches


def check_groups(lengths: Sequence[int], batch_size: int, rows: int, group_size: int) -> None:
    """Raises for a split of the batch that would change which tokens are routed together.

    Args:
        lengths: Tokens of a row in the encoder and the decoder.
        batch_size: Rows of the whole batch.
        rows: Rows of a forward pass on one rank.
        group_size: Maximum number of tokens that are routed together.

    Raises:
        ConfigError: Names a `group_size` that fits the split.
    """
    if has_same_groups(lengths, batch_size, rows, group_size):
        return

    # Groups change where one more sequence fits: the size just below is the largest with the same
    # groups. A group of one token is always one sequence.
    most = min(group_size, rows * max(lengths))
    sizes = [most]
    for count in range(1, batch_size + 1):
        if batch_size % count == 0 or rows % count == 0:
            sizes += [count * length - 1 for length in lengths]
    same = [size for size in sizes if 0 < size <= most]
    same = [size for size in same if has_same_groups(lengths, batch_size, rows, size)]
    fitting = max(same, default=1)

    whole = [sequences_per_group(batch_size, length, group_size) for length in lengths]
    raise ConfigError(
        f"A batch of {batch_size} rows of {lengths[0]} and {lengths[1]} tokens is routed in groups of {whole[0]} and "
        f"{whole[1]} sequences (model.group_size {group_size}), but a forward pass has {rows} rows "
        "(training.micro_batch_size, or the batch's share of a data rank) and would group them differently. Set "
        f"model.group_size to {fitting}, the largest that fits, or choose more rows for a forward pass."
    )


# ---------------------------------------------------------------------------
# Forward and backward passes


def _forward_passes(
    model: STMoEForConditionalGeneration,
    work: Sequence[_Passes],
    recipe: Recipe,
    step: int,
    config: MeshConfig,
    forward: ForwardPass,
) -> Iterator[STMoEOutput]:
    """Yields the output of each micro-batch; every call draws the same random numbers.

    They are yielded outside of autocast, in which a backward pass would round the router's gradient.
    """
    device_type = model.device.type
    bfloat16 = recipe.training.precision == "bfloat16"
    for share in work:
        seed = (recipe.seed * 1_000_003 + step) * config.num_data_ranks + share.data_rank
        torch.manual_seed(seed % 2**63)

        for number, micro_batch in enumerate(share.micro_batches, start=1):
            # Ranks exchange gradients once, in the backward pass of the last micro-batch.
            is_last = share is work[-1] and number == len(share.micro_batches)
            sum_gradients_now(model, is_last)
            with torch.autocast(device_type, torch.bfloat16, enabled=bfloat16):
                output = forward(model, micro_batch, share.counts)
            yield output


def _backward_passes(passes: Iterator[STMoEOutput]) -> tuple[Tensor, Tensor, list[RouterStats]]:
    """Runs the backward pass of each output before the next forward pass, and adds up losses.

    Returns:
        <float32>[] total loss, <float32>[] cross-entropy, and the statistics of each sparse layer.
    """
    losses: list[Tensor] = []
    ce_losses: list[Tensor] = []
    layer_stats: list[RouterStats] = []
    for output in passes:
        assert output.loss is not None and output.ce_loss is not None, "a batch has labels"
        output.loss.backward()

        # Detached: their graphs would keep the activations of all micro-batches.
        losses.append(output.loss.detach())
        ce_losses.append(output.ce_loss.detach())
        stats = [router.stats for router in router_outputs(output)]
        layer_stats = add_layer_stats(layer_stats, stats)
    return torch.stack(losses).sum(), torch.stack(ce_losses).sum(), layer_stats


def _with_balance_totals(
    model: STMoEForConditionalGeneration,
    work: Sequence[_Passes],
    recipe: Recipe,
    step: int,
    scope: BalanceScope,
    ranks: StepRanks,
    forward: ForwardPass,
) -> list[_Passes]:
    """Returns the passes with choices and tokens of each sparse layer in their counts."""
    totals_by_share: list[_LayerTotals] = []
    for share in work:
        passes = _forward_passes(model, [share], recipe, step, ranks.config, forward)
        totals_by_share.append(_add_balance_totals(passes))

    # Scope `global` covers all rows; `ranks` covers a share on all ranks of its replica.
    if scope == "global":
        totals = _add_layer_totals(totals_by_share)
        totals_by_share = [_sum_balance_totals(totals, ranks.sum_each)] * len(work)
    elif ranks.mesh:
        sum_over_replica = partial(sum_each_over_ranks, group=ranks.mesh.replica)
        totals_by_share = [
            _sum_balance_totals(totals, sum_over_replica) for totals in totals_by_share
        ]

    counted: list[_Passes] = []
    for share, totals in zip(work, totals_by_share, strict=True):
        counts = share.counts._replace(balance_totals=totals)
        counted.append(share._replace(counts=counts))
    return counted


def _add_balance_totals(passes: Iterator[STMoEOutput]) -> _LayerTotals:
    """Returns choices and tokens of each sparse layer over some passes of this rank."""
    totals: list[_LayerTotals] = []
    for output in passes:
        layers: list[BalanceTotals] = []
        for router in router_outputs(output):
            layers.append(BalanceTotals(router.losses.choices, router.losses.num_share_tokens))
        totals.append(tuple(layers))
    return _add_layer_totals(totals)


def _add_layer_totals(parts: Sequence[_LayerTotals]) -> _LayerTotals:
    return tuple(reduce(add_totals, layer) for layer in zip(*parts, strict=True))


def _sum_balance_totals(
    totals: _LayerTotals, sum_each: Callable[[Sequence[Tensor]], list[Tensor]]
) -> _LayerTotals:
    """Returns the totals of each layer over ranks, in one exchange."""
    sums = sum_each(list(chain.from_iterable(totals)))
    return tuple(map(BalanceTotals, sums[::2], sums[1::2]))


# ---------------------------------------------------------------------------
# Routers


def router_outputs(output: STMoEOutput) -> tuple[RouterOutput, ...]:
    """Returns the outputs of all routers, the encoder's first."""
    encoder = output.encoder_router_outputs or ()
    decoder = output.decoder_router_outputs or ()
    return (*encoder, *decoder)


def learns_from_load(layer: SparseFeedForward) -> bool:
    """Returns whether a layer's router has its own `update` and is not frozen."""
    router = unwrapped(layer.router)
    if not isinstance(router, Router) or type(router).update is Router.update:
        return False
    return any(parameter.requires_grad for parameter in layer.router.parameters())


def add_layer_stats(total: list[RouterStats], stats: list[RouterStats]) -> list[RouterStats]:
    """Returns the statistics of each layer added up; an empty list means zero."""
    if not total or not stats:
        return total or stats
    return [a + b for a, b in zip(total, stats, strict=True)]


def _sum_layers(stats: list[RouterStats]) -> RouterStats | None:
    return RouterStats.sum(stats) if stats else None
