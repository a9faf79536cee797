"""Converts a trace to the JSON that the script of the routing view reads.

Totals cover all tokens; not all tokens may be shown one by one. Their numbers are packed, mostly one
byte each, in base64; templates/view_data.js unpacks them.
"""

import base64
import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from moe.data.tokenizer import SPACE, piece_texts
from moe.parsing import printable
from moe.sparse.editing import STACKS, LayerKey
from moe.tracing.trace import ACCEPTED, NOT_REQUESTED, LayerTrace, StackTrace, Trace

START = -1
"""Stands for the first token of a decoder, which has the id of padding."""

_START_NAME = "<start>"
_VISIBLE_SPACE = "\N{OPEN BOX}"
_MOST_CHARACTERS = 200

# Control, format, surrogate, private and unassigned characters; separators.
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}


def visible_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Returns tokens as texts; one that begins a word begins with a space.

    Args:
        tokenizer: Names the tokens; unknown ids are shown as numbers.
        ids: Token ids, or START.
    """
    # A model may have more ids than its tokenizer has tokens.
    known = [token_id for token_id in ids if START < token_id < len(tokenizer)]
    names = {START: _START_NAME}
    for token_id, text in zip(known, piece_texts(tokenizer, known), strict=True):
        names[token_id] = visible_text(text)
    return [names.get(token_id, f"<id {token_id}>") for token_id in ids]


def visible_text(token: str) -> str:
    """Returns a token with every character made visible.

    A mark at the start of a word becomes a space; spaces elsewhere, control characters and those
    that change the direction of a text become symbols; a combining character that comes first gets
    a dotted circle as its base.
    """
    begins_word = token.startswith(SPACE) and token != SPACE
    characters = token[1:] if begins_word else token
    text = "".join(map(_visible_character, characters[:_MOST_CHARACTERS]))
    if len(characters) > _MOST_CHARACTERS:
        text += "…"

    if not text:
        text = "⟨empty⟩"
    if unicodedata.category(text[0]).startswith("M"):
        text = "◌" + text
    return " " + text if begins_word else text


def _visible_character(character: str) -> str:
    code = ord(character)
    if character in (" ", SPACE):
        return _VISIBLE_SPACE
    if code < 0x20:
        return chr(0x2400 + code)  # the block of control pictures
    if unicodedata.category(character) in _UNSEEN:
        return f"⟨U+{code:04X}⟩"
    return character


Json = dict[str, Any]
"""An object of the page's JSON; docstrings list its fields."""

# Experts of a layer with their own node in the flow; all others share one.
_MOST_NODES = 16
_REST = -1
_NO_EXPERT = -2
_NEXT_EXPERTS = 3

_LARGEST_BYTE = 255

# Inside a script element these could end it, or begin a comment or an entity.
_ESCAPED = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}


class Shown(NamedTuple):
    """Tokens that are shown one by one.

    Attributes:
        examples: Numbers of the examples.
        most_tokens: Number of first tokens of each that are shown, in each stack; None for all.
    """

    examples: Sequence[int]
    most_tokens: int | None


# ---------------------------------------------------------------------------
# Tokens shown one by one


def shown_content(
    traces: Sequence[Trace],
    totals: Sequence[Json],
    tokenizer: PreTrainedTokenizerBase,
    shown: Shown,
) -> Json:
    """Returns the shown tokens, and their routing in the layers of one or two models.

    `texts` and `ids` list distinct tokens, to which `stacks` refer. `examples` are numbers from 0,
    with their `documents` and `domains`. `models` are the totals, with `tokens` added.

    Args:
        traces: One trace per model, of the same text.
        totals: One `model_totals` per model.
        tokenizer: Names the tokens.
        shown: The tokens to show.
    """
    trace = traces[0]
    ids = {
        name: trace.stack(name).ids[_shown_rows(trace.stack(name), shown)].long() for name in STACKS
    }
    targets = trace.decoder.targets[_shown_rows(trace.decoder, shown)].long()  # [N]

    # A decoder starts with the padding token, which is a real token there.
    pad_id = tokenizer.pad_token_id
    if isinstance(pad_id, int):
        ids["decoder"] = ids["decoder"].masked_fill(ids["decoder"] == pad_id, START)

    # Each distinct token is listed once.
    used = torch.cat([ids["encoder"], ids["decoder"], targets]).unique()  # [T]
    stacks = []
    for name in STACKS:
        part = trace.stack(name)
        labels = targets if name == "decoder" else targets[:0]
        stacks.append(
            {
                "stack": name,
                "token": _pack(torch.searchsorted(used, ids[name]), used.numel()),
                "target": _pack(torch.searchsorted(used, labels), used.numel()),
                "starts": [0, *_shown_lengths(part, shown).cumsum(0).tolist()],
                "lengths": part.starts.diff()[list(shown.examples)].tolist(),
            }
        )

    models = []
    for traced, of_model in zip(traces, totals, strict=True):
        tokens = []
        for layer in traced.layers:
            rows = _shown_rows(traced.stack(layer.facts.stack), shown)
            tokens.append(_layer_tokens(layer, rows))
        models.append({**of_model, "tokens": tokens})

    numbers = list(shown.examples)
    domains = trace.domain[numbers].tolist()
    return {
        "examples": numbers,
        "documents": trace.document[numbers].tolist(),
        "domains": [trace.facts.domains[number] for number in domains],
        "texts": visible_tokens(tokenizer, used.tolist()),
        "ids": used.tolist(),
        "stacks": stacks,
        "models": models,
    }


def _shown_rows(stack: StackTrace, shown: Shown) -> Tensor:
    """Returns <int64>[N]: the rows of a stack that are shown."""
    starts = stack.starts[list(shown.examples)]  # [num_examples]
    lengths = _shown_lengths(stack, shown)  # [num_examples]

    # Rows count up from the start of each example.
    ends = lengths.cumsum(0)
    offsets = torch.repeat_interleave(starts - (ends - lengths), lengths)
    return torch.arange(offsets.numel()) + offsets


def _shown_lengths(stack: StackTrace, shown: Shown) -> Tensor:
    """Returns <int64>[num_examples]: how many tokens of each example are shown."""
    lengths = stack.starts.diff()[list(shown.examples)]
    return lengths if shown.most_tokens is None else lengths.clamp(max=shown.most_tokens)


def _layer_tokens(layer: LayerTrace, rows: Tensor) -> Json:
    """Returns the routing of <int64>[N] rows of a layer's stack, with R requested choices in all.

    - num_choices: [N] number of requested choices of each token.
    - expert: [R] their experts; the first choice of each token comes first.
    - weight: [R] 0 if refused; else 1 + 254 times the combine weight over `largest_weight`.
    - num_best: M; 0 where no probabilities were recorded.
    - best_expert: [N * M] experts of highest probability, the highest first.
    - best_prob: [N * M] their probabilities, 255 for 1.
    """
    expert = layer.expert[rows].long()  # [N, K]
    state = layer.state[rows]  # [N, K]
    gate = layer.gate[rows]  # [N, K]
    requested = state != NOT_REQUESTED

    # The first choice of each token, then its other requests in their order.
    is_other = (expert != layer.first[rows, None]).long()  # [N, K]
    order = (is_other + 2 * ~requested).argsort(dim=1, stable=True)  # [N, K]
    expert = expert.gather(1, order)
    gate = gate.gather(1, order)
    accepted = (state == ACCEPTED).gather(1, order)
    requested = requested.gather(1, order)

    # Weights from 1, since 0 means "refused".
    largest_weight = max(float(gate.max()) if gate.numel() else 0.0, 1e-6)
    weight = 1 + (gate / largest_weight * (_LARGEST_BYTE - 1)).round().long()
    weight = weight.masked_fill(~accepted, 0)

    best_prob = (layer.best_prob[rows].float() * _LARGEST_BYTE).round().long()  # [N, M]
    last_expert = layer.facts.num_experts - 1
    return {
        "num_choices": _pack(requested.sum(dim=1), layer.facts.num_choices),
        "expert": _pack(expert[requested], last_expert),
        "weight": _pack(weight[requested], _LARGEST_BYTE),
        "largest_weight": largest_weight,
        "num_best": layer.best_expert.shape[1],
        "best_expert": _pack(layer.best_expert[rows].long(), last_expert),
        "best_prob": _pack(best_prob, _LARGEST_BYTE),
    }


# ---------------------------------------------------------------------------
# Totals of all tokens


def model_totals(trace: Trace, matching: Mapping[LayerKey, Sequence[int]]) -> Json:
    """Returns the totals of a model's layers over all tokens.

    Args:
        trace: Trace of the model.
        matching: For its layers, the number that each expert has in the first model, -1 for none.
    """
    layers = []
    matches = []
    for layer in trace.layers:
        facts = layer.facts
        stats = layer.stats
        num_tokens = int(stats.num_tokens)
        matches.append(list(matching.get(layer.key, ())))
        layers.append(
            {
                "stack": facts.stack,
                "layer": facts.layer,
                "router": facts.router,
                "num_experts": facts.num_experts,
                "num_choices": facts.num_choices,
                "num_tokens": num_tokens,
                "dropped_tokens": int(stats.dropped_tokens),
                "load": stats.expert_load.tolist(),
                "accepted": stats.accepted_load.tolist(),
                "first": _count_first(layer)[:-1].tolist(),
                "entropy": float(stats.entropy_sum) / max(1, num_tokens),
            }
        )

    flows = []
    for name in STACKS:
        for layer, next_layer in pairwise(trace.stack(name).layers):
            flows.append(_flow(layer, next_layer))
    name = trace.facts.model or "a model in memory"
    return {"name": name, "layers": layers, "flows": flows, "matches": matches}


def _flow(layer: LayerTrace, next_layer: LayerTrace) -> Json:
    """Returns the flow of tokens from first choices in a layer to those in the next.

    - nodes, next_nodes: Experts of each layer with a node; -1 is all others, -2 no expert.
    - counts: Tokens from each node to each.
    - next_experts: For each expert of the first layer the most frequent next ones, with counts.
    """
    # From every expert to every expert.
    counts = _count_pairs(layer, next_layer)  # [E + 1, F + 1]
    nodes = _nodes(layer)
    next_nodes = _nodes(next_layer)

    # For each expert the most frequent next ones.
    num_next = min(_NEXT_EXPERTS, next_layer.facts.num_experts)
    most = counts[:-1, :-1].topk(num_next, dim=1)
    pairs = torch.stack([most.indices, most.values], dim=-1)  # [E, num_next, 2]

    # Experts without their own node are summed.
    node_of = _node_of(nodes, layer.facts.num_experts)  # [E + 1]
    next_node_of = _node_of(next_nodes, next_layer.facts.num_experts)  # [F + 1]
    by_node = counts.new_zeros(len(nodes), counts.shape[1]).index_add(0, node_of, counts)
    by_nodes = counts.new_zeros(len(nodes), len(next_nodes)).index_add(1, next_node_of, by_node)
    return {
        "stack": layer.facts.stack,
        "layer": layer.facts.layer,
        "nodes": nodes,
        "next_nodes": next_nodes,
        "counts": by_nodes.tolist(),
        "next_experts": pairs.tolist(),
    }


def _count_first(layer: LayerTrace) -> Tensor:
    """Returns <int64>[E + 1] counts of first choices; the last is of tokens without one."""
    return torch.bincount(_first(layer), minlength=layer.facts.num_experts + 1)


def _count_pairs(layer: LayerTrace, other: LayerTrace) -> Tensor:
    """Returns <int64>[E + 1, F + 1]: tokens by first choice in two layers, the last index means no choice."""
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

    # More nodes would be indistinguishable.
    nodes = list(range(num_experts))
    if num_experts > _MOST_NODES:
        busiest = first[:-1].argsort(descending=True, stable=True)[: _MOST_NODES - 1]
        nodes = [*sorted(busiest.tolist()), _REST]

    # If experts choose tokens, some tokens are not chosen.
    return [*nodes, _NO_EXPERT] if first[-1] else nodes


def _node_of(nodes: list[int], num_experts: int) -> Tensor:
    """Returns <int64>[E + 1]: the index of each expert's node; the last means no expert."""
    rest = nodes.index(_REST) if _REST in nodes else 0
    node_of = torch.full((num_experts + 1,), rest)
    for index, node in enumerate(nodes):
        if node != _REST:
            node_of[num_experts if node == _NO_EXPERT else node] = index
    return node_of


def agreements(
    trace: Trace, other: Trace, matching: Mapping[LayerKey, Sequence[int]]
) -> list[Json]:
    """Returns the agreement of two models on first choices in their common layers.

    `same` of `num_tokens` have the same expert; `by_chance` is the share that would if the choices
    of the models were independent.

    Args:
        trace: Trace of the first model.
        other: Trace of the second model on the same text.
        matching: For layers of the second, the number that each expert has in the first, -1 for
            none; experts of layers not listed have the same numbers.
    """
    layers = {layer.key: layer for layer in trace.layers}
    rows = []
    for second in other.layers:
        first = layers.get(second.key)
        if first is None:
            continue
        counts = _count_pairs(first, second)[:, :-1]  # [E + 1, F]
        num_tokens = first.first.numel()
        shares = counts.sum(dim=1).double() / max(1, num_tokens)  # [E + 1]
        other_shares = counts.sum(dim=0).double() / max(1, num_tokens)  # [F]

        # Experts that correspond in both models.
        same = 0
        by_chance = 0.0
        for expert, number in enumerate(matching.get(second.key, range(len(other_shares)))):
            if 0 <= number < first.facts.num_experts:
                same += int(counts[number, expert])
                by_chance += float(shares[number] * other_shares[expert])
        stack, layer = second.key
        rows.append(
            {
                "stack": stack,
                "layer": layer,
                "same": same,
                "num_tokens": num_tokens,
                "by_chance": by_chance,
            }
        )
    return rows


# ---------------------------------------------------------------------------
# JSON


def _pack(values: Tensor, largest: int) -> Json:
    """Returns <integer>[...] from 0 to `largest` in base64, little-endian, with the bytes of each."""
    # One byte for most; two where there are many experts or tokens.
    size = 1 if largest < 2**8 else 2 if largest < 2**16 else 4
    array = values.flatten().numpy().astype(np.dtype(f"<u{size}"))
    return {"size": size, "data": base64.b64encode(array.tobytes()).decode()}


def script_json(content: Json) -> str:
    """Returns the content as JSON that is safe inside a script element."""
    text = json.dumps(_plain(content), ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    # Nothing in it may end the script element.
    for character, escape in _ESCAPED.items():
        text = text.replace(character, escape)
    return printable(text)


def _plain(value: Any) -> Any:
    """Returns a value of JSON: named tuples as objects, numbers in a few digits, None for NaN."""
    # A named tuple is a tuple too.
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = getattr(value, "_asdict")()  # noqa: B009

    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(_plain, value))

    # More digits would be noise on a page.
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value
