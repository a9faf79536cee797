"""Where the tokens of a request were routed, for the page of the server."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from moe.data.tokenizer import piece_texts
from moe.sparse.editing import sparse_layers
from moe.tracing.recorder import record_routing, traced_batches
from moe.tracing.trace import STACKS, StackTrace, layer_name


def routes_of(
    model: PreTrainedModel, tokenizer: Any, inputs: Sequence[int], answer: Sequence[int]
) -> list[dict[str, Any]]:
    """Returns the experts of every token.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        inputs: The encoder's tokens, at least one.
        answer: Tokens of the answer, at least one. The decoder reads its start token and all but
            the last of them.

    Returns:
        For each stack with sparse layers its `name`, its `tokens` as texts, and its `layers`: the
        name of each, its number of experts, and the `experts` that accepted each token.
    """
    if not sparse_layers(model):
        return []
    batch = {
        "input_ids": torch.tensor([list(inputs)], device=model.device),
        "labels": torch.tensor([list(answer)], device=model.device),
    }
    trace = record_routing(model, traced_batches([batch]))
    return [
        {
            "name": name,
            "tokens": piece_texts(tokenizer, trace.stack(name).ids.tolist()),
            "layers": _layers(trace.stack(name)),
        }
        for name in STACKS
        if trace.stack(name).layers
    ]


def _layers(stack: StackTrace) -> list[dict[str, Any]]:
    layers = []
    for layer in stack.layers:
        experts = [
            [expert for expert, is_accepted in zip(row, accepted, strict=True) if is_accepted]
            for row, accepted in zip(layer.expert.tolist(), layer.accepted.tolist(), strict=True)
        ]
        facts = layer.facts
        layers.append(
            {"name": layer_name(layer.key), "num_experts": facts.num_experts, "experts": experts}
        )
    return layers
