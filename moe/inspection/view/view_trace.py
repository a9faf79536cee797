"""From a trace to what the routing view shows of it.

Totals are of all tokens; only tokens that are shown one by one may be fewer.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from moe.inspection.view.view_content import (
    Agreement,
    Flow,
    LayerTokens,
    LayerTotals,
    StackText,
    pack,
)
from moe.inspection.view.visible_text import START, visible_tokens
from moe.sparse.editing import LayerKey, Stack
from moe.tracing.trace import ACCEPTED, NOT_REQUESTED, STACKS, LayerTrace, StackTrace, Trace

# Nodes of a layer in the flow; other experts stand together.
_MOST_NODES = 16
_REST = -1
_NO_EXPERT = -2
_NEXT_EXPERTS = 3

_LARGEST_BYTE = 255


class Shown(NamedTuple):
    """Which tokens are shown one by one.

    Attributes:
        examples: Numbers of the examples.
        most_tokens: The first tokens of each that are shown, in each stack; None for all.
    """

    examples: Sequence[int]
    most_tokens: int | None


class ShownText(NamedTuple):
    """The text that is shown.

    Attributes:
        texts: Texts of tokens.
        ids: Their ids.
        stacks: Encoder and decoder.
    """

    texts: list[str]
    ids: list[int]
    stacks: list[StackText]


# ---------------------------------------------------------------------------
# What is shown of the tokens


def shown_text(trace: Trace, tokenizer: PreTrainedTokenizerBase, shown: Shown) -> ShownText:
    """Returns the tokens that are shown, and their texts."""
    ids = {}
    for name in STACKS:
        stack = trace.stack(name)
        ids[name] = stack.ids[shown_rows(stack, shown)].long()  # [N]
    targets = trace.decoder.targets[shown_rows(trace.decoder, shown)].long()  # [N]

    # A decoder starts with padding, which is no padding there.
    ids["decoder"] = ids["decoder"].masked_fill(ids["decoder"] == _pad_id(tokenizer), START)

    # Each text stands there once.
    used = torch.cat([ids["encoder"], ids["decoder"], targets]).unique()  # [T]
    stacks = []
    for name in STACKS:
        rows = shown_lengths(trace.stack(name), shown)
        labels = targets if name == "decoder" else targets[:0]
        stacks.append(
            StackText(
                stack=name,
                token=pack(torch.searchsorted(used, ids[name]), used.numel()),
                target=pack(torch.searchsorted(used, labels), used.numel()),
                starts=[0, *rows.cumsum(0).tolist()],
                lengths=trace.stack(name).starts.diff()[list(shown.examples)].tolist(),
            )
        )
    return ShownText(visible_tokens(tokenizer, used.tolist()), used.tolist(), stacks)


def shown_rows(stack: StackTrace, shown: Shown) -> Tensor:
    """Returns <int64>[N]: the rows of a stack that are shown."""
    starts = stack.starts[list(shown.examples)]  # [num_examples]
    lengths = shown_lengths(stack, shown)  # [num_examples]

    # Rows count up from the start of each example.
    ends = lengths.cumsum(0)
    offsets = torch.repeat_interleave(starts - (ends - lengths), lengths)
    return torch.arange(offsets.numel()) + offsets


def shown_lengths(stack: StackTrace, shown: Shown) -> Tensor:
    """Returns <int64>[num_examples]: how many tokens of each example are shown."""
    lengths = stack.starts.diff()[list(shown.examples)]
    return lengths if shown.most_tokens is None else lengths.clamp(max=shown.most_tokens)


def layer_tokens(layer: LayerTrace, rows: Tensor) -> LayerTokens:
    """Returns what a layer did with <int64>[N] rows of its stack."""
    expert = layer.expert[rows].long()  # [N, K]
    state = layer.state[rows]  # [N, K]
    gate = layer.gate[rows]  # [N, K]
    requested = state != NOT_REQUESTED

    # Of each token first the first choice, then the other requests in their order.
    is_other = (expert != layer.first[rows, None]).long()  # [N, K]
    order = (is_other + 2 * ~requested).argsort(dim=1, stable=True)  # [N, K]
    expert = expert.gather(1, order)
    gate = gate.gather(1, order)
    accepted = (state == ACCEPTED).gather(1, order)
    requested = requested.gather(1, order)

    # Weights from 1, so that 0 can stand for "refused".
    largest_weight = max(float(gate.max()) if gate.numel() else 0.0, 1e-6)
    weight = 1 + (gate / largest_weight * (_LARGEST_BYTE - 1)).round().long()
    weight = weight.masked_fill(~accepted, 0)

    best_prob = (layer.best_prob[rows].float() * _LARGEST_BYTE).round().long()  # [N, M]
    last_expert = layer.facts.num_experts - 1
    return LayerTokens(
        num_choices=pack(requested.sum(dim=1), layer.facts.num_choices),
        expert=pack(expert[requested], last_expert),
        weight=pack(weight[requested], _LARGEST_BYTE),
        largest_weight=largest_weight,
        num_best=layer.best_expert.shape[1],
        best_expert=pack(layer.best_expert[rows].long(), last_expert),
        best_prob=pack(best_prob, _LARGEST_BYTE),
    )


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    pad_id = tokenizer.pad_token_id
    return pad_id if isinstance(pad_id, int) else START


# ---------------------------------------------------------------------------
# Totals of all tokens


def layer_totals(layer: LayerTrace) -> LayerTotals:
    """Returns what a layer did with all tokens."""
    facts = layer.facts
    stats = layer.stats

    # A trace without a decoder's token has no mean.
    num_tokens = int(stats.num_tokens)
    return LayerTotals(
        stack=facts.stack,
        layer=facts.layer,
        router=facts.router,
        num_experts=facts.num_experts,
        num_choices=facts.num_choices,
        num_tokens=num_tokens,
        dropped_tokens=int(stats.dropped_tokens),
        load=stats.expert_load.tolist(),
        accepted=stats.accepted_load.tolist(),
        first=_count_first(layer)[:-1].tolist(),
        entropy=float(stats.entropy_sum) / max(1, num_tokens),
    )


def flows(trace: Trace) -> list[Flow]:
    """Returns the flow from each sparse layer to the next in its stack."""
    flows = []
    for name in STACKS:
        layers = trace.stack(name).layers
        for layer, next_layer in pairwise(layers):
            flows.append(_flow(name, layer, next_layer))
    return flows


def _flow(stack: Stack, layer: LayerTrace, next_layer: LayerTrace) -> Flow:
    # From every expert to every expert.
    counts = _count_pairs(layer, next_layer)  # [E + 1, F + 1]
    nodes = _nodes(layer)
    next_nodes = _nodes(next_layer)

    # For each expert the most frequent next ones.
    num_next = min(_NEXT_EXPERTS, next_layer.facts.num_experts)
    most = counts[:-1, :-1].topk(num_next, dim=1)
    pairs = torch.stack([most.indices, most.values], dim=-1)  # [E, num_next, 2]

    # Experts without a node of their own are added up.
    node_of = _node_of(nodes, layer.facts.num_experts)  # [E + 1]
    next_node_of = _node_of(next_nodes, next_layer.facts.num_experts)  # [F + 1]
    by_node = counts.new_zeros(len(nodes), counts.shape[1]).index_add(0, node_of, counts)
    by_nodes = counts.new_zeros(len(nodes), len(next_nodes)).index_add(1, next_node_of, by_node)
    return Flow(
        stack=stack,
        layer=layer.facts.layer,
        nodes=nodes,
        next_nodes=next_nodes,
        counts=by_nodes.tolist(),
        next_experts=pairs.tolist(),
    )


def _count_first(layer: LayerTrace) -> Tensor:
    """Returns <int64>[E + 1] counts of first choices; the last is of tokens without one."""
    num_experts = layer.facts.num_experts
    return torch.bincount(_first(layer), minlength=num_experts + 1)


def _count_pairs(layer: LayerTrace, other: LayerTrace) -> Tensor:
    """Returns <int64>[E + 1, F + 1]: tokens by first choice in two layers, last for no choice."""
    columns = other.facts.num_experts + 1
    cells = _first(layer) * columns + _first(other)  # [N]
    counts = torch.bincount(cells, minlength=(layer.facts.num_experts + 1) * columns)
    return rearrange(counts, "(e f) -> e f", f=columns)


def _first(layer: LayerTrace) -> Tensor:
    """Returns <int64>[N] first choices, E for none."""
    first = layer.first.long()
    return first.masked_fill(first < 0, layer.facts.num_experts)


def _nodes(layer: LayerTrace) -> list[int]:
    """Returns the nodes of a layer: the busiest experts by number, the rest, and no expert."""
    first = _count_first(layer)  # [E + 1]
    num_experts = layer.facts.num_experts

    # More nodes could not be told apart.
    if num_experts <= _MOST_NODES:
        nodes = list(range(num_experts))
    else:
        busiest = first[:-1].argsort(descending=True, stable=True)[: _MOST_NODES - 1]
        nodes = [*sorted(busiest.tolist()), _REST]

    # Where an expert chooses tokens, some are chosen by none.
    if first[-1]:
        nodes.append(_NO_EXPERT)
    return nodes


def _node_of(nodes: list[int], num_experts: int) -> Tensor:
    """Returns <int64>[E + 1]: the place of each expert among the nodes, last of no expert."""
    # Experts without a node of their own are in the rest.
    rest = nodes.index(_REST) if _REST in nodes else 0
    node_of = torch.full((num_experts + 1,), rest)
    for place, node in enumerate(nodes):
        if node >= 0:
            node_of[node] = place
        elif node == _NO_EXPERT:
            node_of[num_experts] = place
    return node_of


# ---------------------------------------------------------------------------
# Two models


def agreements(
    trace: Trace, other: Trace, matching: Mapping[LayerKey, Sequence[int]]
) -> list[Agreement]:
    """Returns how two models agree in the layers that both have.

    Args:
        trace: Of the first model.
        other: Of the second, on the same text.
        matching: For layers of the second, the number that each expert has in the first, -1 for
            none; layers that it lacks have the same numbers.
    """
    # Only layers that both have can agree.
    layers = {layer.key: layer for layer in trace.layers}
    agreements = []
    for layer in other.layers:
        if layer.key in layers:
            match = matching.get(layer.key)
            agreements.append(_agreement(layers[layer.key], layer, match))
    return agreements


def _agreement(layer: LayerTrace, other: LayerTrace, match: Sequence[int] | None) -> Agreement:
    # A pair of choices, over all tokens.
    counts = _count_pairs(layer, other)[:, :-1]  # [E + 1, F]
    num_tokens = layer.first.numel()
    shares = counts.sum(dim=1).double() / max(1, num_tokens)  # [E + 1]
    other_shares = counts.sum(dim=0).double() / max(1, num_tokens)  # [F]

    # Over experts that are the same in both.
    same = 0
    by_chance = 0.0
    for expert in range(other.facts.num_experts):
        number = expert if match is None else match[expert]
        if 0 <= number < layer.facts.num_experts:
            same += int(counts[number, expert])
            by_chance += float(shares[number] * other_shares[expert])

    stack, number = layer.key
    return Agreement(
        stack=stack, layer=number, same=same, num_tokens=num_tokens, by_chance=by_chance
    )
