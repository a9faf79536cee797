"""Which tokens go to which expert: counts over many batches."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
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
        accepted: <int64>[V, E] how often a token id got a slot of an expert, over all places.
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
        model: Its training mode is restored.
        batches: With labels, on the model's device.

    Source:
        ST-MoE (arXiv:2202.08906) §7: tokens by expert and layer.
    """
    training = model.training
    model.eval()
    layers: list[LayerTrace] = []
    for batch in batches:
        output = model(**batch, output_router_logits=True, use_cache=False)
        decoder_ids = model.prepare_decoder_input_ids_from_labels(
            batch["labels"], batch.get("decoder_segment_ids")
        )
        found = [
            _trace_layer(stack, layer, ids, router, model.config.vocab_size)
            for stack, ids, routers in (
                ("encoder", batch["input_ids"], output.encoder_router_outputs),
                ("decoder", decoder_ids, output.decoder_router_outputs),
            )
            for layer, router in enumerate(routers or ())  # None of a stack without sparse layers
        ]
        layers = [_add(a, b) for a, b in zip(layers, found, strict=True)] if layers else found
    model.train(training)
    return tuple(layers)


def _trace_layer(
    stack: str, layer: int, ids: Tensor, router: RouterOutput, vocab_size: int
) -> LayerTrace:
    """Returns the counts of one layer in one batch; ids are <int64>[B, L]."""
    plan = router.plan
    num_experts, num_places = router.router_logits.shape[-1], plan.expert_index.shape[-1]
    cell = ids.flatten()[:, None] * num_experts + plan.expert_index.reshape(-1, num_places)
    accepted, wanted = (x.reshape(-1, num_places) for x in (plan.accepted, plan.requested))
    scores = router.router_logits.gather(-1, plan.expert_index).reshape(-1, num_places)
    first = scores.masked_fill(~wanted, float("-inf")).argmax(dim=-1)

    def count(cells: Tensor) -> Tensor:
        return torch.bincount(cells, minlength=vocab_size * num_experts).reshape(
            vocab_size, num_experts
        )

    return LayerTrace(
        stack,
        layer,
        count(cell.gather(1, first[:, None])[wanted.any(dim=-1)].flatten()),
        count(cell[accepted]),
        router.stats,
    )


def _add(a: LayerTrace, b: LayerTrace) -> LayerTrace:
    """Returns the counts of both."""
    return a._replace(
        first_choice=a.first_choice + b.first_choice,
        accepted=a.accepted + b.accepted,
        stats=add_stats(a.stats, b.stats),
    )
