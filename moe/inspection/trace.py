"""Which tokens go to which expert: counts over many batches."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from moe.data.pipeline import Batch
from moe.models.modeling import STMoEForConditionalGeneration
from moe.sparse.layer import RouterOutput
from moe.sparse.stats import RouterStats, add_stats


class LayerTrace(NamedTuple):
    """What one sparse layer's router did.

    Attributes:
        stack: `encoder` or `decoder`.
        layer: Number of the sparse layer within its stack, from 0.
        first_choice: <int64>[V, E] how often a token id had an expert as its first choice: of those
            that it asked for, or that chose it, the one of highest probability.
        accepted: <int64>[V, E] how often a token id got a slot of an expert, over all choices.
        stats: Summed statistics.
    """

    stack: str
    layer: int
    first_choice: Tensor
    accepted: Tensor
    stats: RouterStats


RoutingTrace = tuple[LayerTrace, ...]
"""One LayerTrace for each sparse layer, the encoder's first."""


@torch.inference_mode()
def trace_tokens(model: STMoEForConditionalGeneration, batches: Iterable[Batch]) -> RoutingTrace:
    """Returns the counts of all batches, in evaluation mode.

    The decoder's token at a position is its input there: the label before it, or the start token.
    Padding is not counted.

    Args:
        model: The model; its training mode is restored.
        batches: Batches with labels, on the model's device.

    Source:
        ST-MoE (arXiv:2202.08906) §7: tokens by expert and layer.
    """
    # Evaluation mode: no jitter, no dropout, and the capacity of evaluation.
    training = model.training
    model.eval()

    layers: list[LayerTrace] = []
    for batch in batches:
        output = model(**batch, output_router_logits=True, use_cache=False)
        decoder_ids = model.prepare_decoder_input_ids_from_labels(
            batch["labels"], batch.get("decoder_segment_ids")
        )
        vocab_size = model.config.vocab_size
        batch_layers = [
            *_trace_stack("encoder", batch["input_ids"], output.encoder_router_outputs, vocab_size),
            *_trace_stack("decoder", decoder_ids, output.decoder_router_outputs, vocab_size),
        ]
        layers = list(map(_add_counts, layers, batch_layers)) if layers else batch_layers

    model.train(training)
    return tuple(layers)


def _trace_stack(
    stack: str, ids: Tensor, routers: Sequence[RouterOutput] | None, vocab_size: int
) -> list[LayerTrace]:
    """Returns the counts of each sparse layer of a stack in one batch.

    Args:
        stack: `encoder` or `decoder`.
        ids: <int64>[B, L] token ids.
        routers: Outputs of its routers; None of a stack without sparse layers.
        vocab_size: V.
    """
    layers = []
    for layer, router in enumerate(routers or ()):
        layers.append(_trace_layer(stack, layer, ids, router, vocab_size))
    return layers


def _trace_layer(
    stack: str, layer: int, ids: Tensor, router: RouterOutput, vocab_size: int
) -> LayerTrace:
    """Returns the counts of one layer in one batch; ids are <int64>[B, L], N tokens."""
    plan = router.plan
    num_experts = router.router_logits.shape[-1]
    requested = rearrange(plan.requested, "g s k -> (g s) k")  # [N, K]
    accepted = rearrange(plan.accepted, "g s k -> (g s) k")  # [N, K]
    expert = rearrange(plan.expert_index, "g s k -> (g s) k")  # [N, K]

    # The cell of the table [V, E] that a choice of a token counts in.
    cell = ids.flatten()[:, None] * num_experts + expert  # [N, K]

    # First choice: of the experts that a token asked for, the one of the highest logit.
    logits = router.router_logits.gather(-1, plan.expert_index)  # [G, S, K]
    logits = rearrange(logits, "g s k -> (g s) k").masked_fill(~requested, float("-inf"))
    first = logits.argmax(dim=-1, keepdim=True)  # [N, 1]
    first_cell = cell.gather(1, first)[requested.any(dim=-1)]

    def count(cells: Tensor) -> Tensor:
        counts = torch.bincount(cells, minlength=vocab_size * num_experts)
        return rearrange(counts, "(v e) -> v e", e=num_experts)  # [V, E]

    return LayerTrace(
        stack=stack,
        layer=layer,
        first_choice=count(first_cell.flatten()),
        accepted=count(cell[accepted]),
        stats=router.stats,
    )


def _add_counts(a: LayerTrace, b: LayerTrace) -> LayerTrace:
    """Returns the counts of both."""
    return a._replace(
        first_choice=a.first_choice + b.first_choice,
        accepted=a.accepted + b.accepted,
        stats=add_stats(a.stats, b.stats),
    )
