"""What the script of the routing view reads: records that become JSON.

Comes before `view_trace`, which fills those of a trace. Numbers of single tokens are packed: one
byte each mostly, in base64.
"""

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from moe.inspection.view.view_data import AblationBar, LayerClasses, SaturationPoint
from moe.parsing import printable

# Inside a script element these could end it, or begin a comment or an entity.
_ESCAPED = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}


@dataclass(frozen=True)
class Packed:
    """Integers from 0 in base64, little-endian.

    Attributes:
        size: Bytes of each: 1, 2 or 4.
        data: All of them.
    """

    size: int
    data: str


@dataclass(frozen=True)
class LayerTotals:
    """What a layer did with all tokens of the trace.

    Attributes:
        stack: `encoder` or `decoder`.
        layer: Number of the layer in its stack, from 0.
        router: Name of the router.
        num_experts: E.
        num_choices: K.
        num_tokens: Tokens.
        dropped_tokens: Those of them that reached no expert.
        load: E counts of choices, before capacity.
        accepted: E counts of choices that got a slot.
        first: E counts of first choices.
        entropy: Mean entropy of the router's probabilities, in nats.
    """

    stack: str
    layer: int
    router: str
    num_experts: int
    num_choices: int
    num_tokens: int
    dropped_tokens: int
    load: list[int]
    accepted: list[int]
    first: list[int]
    entropy: float


@dataclass(frozen=True)
class LayerTokens:
    """What a layer did with the N tokens that are shown, R choices together.

    Attributes:
        num_choices: [N] choices of each token that were requested.
        expert: [R] their experts; of each token the first choice first.
        weight: [R] 0 for refused; else 1 + 254 of the combine weight over `largest_weight`.
        largest_weight: What 255 stands for.
        num_best: M; 0 where no probabilities were recorded.
        best_expert: [N * M] experts of highest probability, the highest first.
        best_prob: [N * M] their probabilities, 255 for 1.
    """

    num_choices: Packed
    expert: Packed
    weight: Packed
    largest_weight: float
    num_best: int
    best_expert: Packed
    best_prob: Packed


@dataclass(frozen=True)
class Flow:
    """How first choices of a layer go on to those of the next in its stack, over all tokens.

    Attributes:
        stack: `encoder` or `decoder`.
        layer: Number of the first of the two layers.
        nodes: Experts of the first layer, each a node; -1 is all others, -2 no expert.
        next_nodes: The same of the second.
        counts: Tokens from each node to each.
        next_experts: For each expert of the first layer the most frequent next ones, each with its
            count.
    """

    stack: str
    layer: int
    nodes: list[int]
    next_nodes: list[int]
    counts: list[list[int]]
    next_experts: list[list[list[int]]]


@dataclass(frozen=True)
class ModelContent:
    """A model that read the text.

    Attributes:
        name: Of the model.
        layers: Its sparse layers, the encoder's first.
        flows: From each layer to the next.
        matches: For each layer and expert the number that it has in the first model, -1 for none;
            an empty list where numbers are the same.
        tokens: The same layers, for the tokens that are shown.
    """

    name: str
    layers: list[LayerTotals]
    flows: list[Flow]
    matches: list[list[int]]
    tokens: list[LayerTokens] = field(default_factory=list)


@dataclass(frozen=True)
class StackText:
    """The tokens of a stack in the examples that are shown.

    Attributes:
        stack: `encoder` or `decoder`.
        token: [N] indices into the texts of tokens.
        target: [N] the same of the labels; empty in the encoder.
        starts: Where each example starts, and N.
        lengths: Tokens of each example, shown or not.
    """

    stack: str
    token: Packed
    target: Packed
    starts: list[int]
    lengths: list[int]


@dataclass(frozen=True)
class Agreement:
    """How two models agree on first choices in a layer, over all tokens.

    Attributes:
        stack: `encoder` or `decoder`.
        layer: Number of the layer.
        same: Tokens with the same first choice.
        num_tokens: All tokens.
        by_chance: Share that would be the same if the models' choices were independent.
    """

    stack: str
    layer: int
    same: int
    num_tokens: int
    by_chance: float


@dataclass(frozen=True)
class PageContent:
    """All that the script reads.

    Attributes:
        num_examples: Examples of the trace.
        models: One or two models.
        agreement: Where there are two.
        classes: Class by expert.
        saturation: Points of curves.
        ablation: Bars.
        examples: Numbers of the examples that are shown, from 0.
        documents: Document of each.
        domains: Name of the kind of text of each.
        texts: Texts of tokens; a space in front begins a word.
        ids: Ids of these tokens.
        stacks: Encoder and decoder.
    """

    num_examples: int
    models: list[ModelContent]
    agreement: list[Agreement]
    classes: Sequence[LayerClasses]
    saturation: Sequence[SaturationPoint]
    ablation: Sequence[AblationBar]
    examples: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    stacks: list[StackText] = field(default_factory=list)


def pack(values: Tensor, largest: int) -> Packed:
    """Returns integers packed in as few bytes as hold all that are possible.

    Args:
        values: <integer>[...] from 0.
        largest: The largest that is possible.
    """
    # One byte for most; two where there are many experts or tokens.
    size = 1 if largest < 2**8 else 2 if largest < 2**16 else 4
    array = values.flatten().numpy().astype(np.dtype(f"<u{size}"))
    return Packed(size, base64.b64encode(array.tobytes()).decode())


def script_json(content: PageContent) -> str:
    """Returns the content as JSON that may stand in a script element."""
    text = json.dumps(
        _plain(asdict(content)), ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )

    # Nothing in it may end the script element.
    for character, escape in _ESCAPED.items():
        text = text.replace(character, escape)
    return printable(text)


def _plain(value: Any) -> Any:
    """Returns a value of JSON: named tuples as objects, numbers in a few digits, None for NaN."""
    # A named tuple is a tuple too.
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        names = getattr(value, "_fields")  # noqa: B009
        return _plain(dict(zip(names, value, strict=True)))

    # What holds other values; arrays, tensors and their numbers become Python's.
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(_plain, value))

    # On a page more digits would be noise.
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value
