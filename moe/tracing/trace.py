"""A trace: the routing of every token of some examples, layer by layer.

`recorder` creates it, `trace_file` stores it, `replay` executes it again; `moe.inspection` explains
it.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.sparse.editing import STACKS, LayerKey, Stack
from moe.sparse.stats import RouterStats

FORMAT_VERSION = 2

NOT_REQUESTED = 0
REFUSED = 1
ACCEPTED = 2


class LayerFacts(NamedTuple):
    """Settings of a sparse layer.

    Attributes:
        stack: `encoder` or `decoder`.
        layer: Number of the sparse layer within its stack, from 0.
        num_experts: E.
        num_choices: K, the choices of a token in a plan.
        router: Name of the router.
    """

    stack: Stack
    layer: int
    num_experts: int
    num_choices: int
    router: str


class TraceFacts(NamedTuple):
    """Facts about a trace; in the metadata of its file.

    Attributes:
        version: Version of the format.
        library: Version of this library.
        model: Where the model came from, as the user named it.
        model_fingerprint: Identifies the model's files; empty for a model in memory.
        tokenizer_fingerprint: The same of the tokenizer.
        inputs_fingerprint: SHA-256 of the token ids of all examples.
        text: Description of the examples.
        command: The command that recorded it; empty where none did.
        num_examples: Number of examples.
        domains: Names of the kinds of text.
        layers: The sparse layers, the encoder's first.
        loss: Cross-entropy in nats of the model for each target.
    """

    version: int
    library: str
    model: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    inputs_fingerprint: str
    text: str
    command: str
    num_examples: int
    domains: list[str]
    layers: list[LayerFacts]
    loss: float


class LayerTrace(NamedTuple):
    """Decisions of one sparse layer about the N tokens of its stack.

    Attributes:
        facts: Settings of the layer.
        expert: <int8 or int16>[N, K] expert of each choice, requested or not.
        state: <uint8>[N, K] NOT_REQUESTED, REFUSED or ACCEPTED.
        gate: <float32>[N, K] combine weight; 0 where not accepted.
        first: <int8 or int16>[N] first choice: of the experts that a token requested, or that chose
            it, the one with the highest probability; -1 if there is none.
        best_expert: <int8 or int16>[N, M] experts of the M highest probabilities, the highest first;
            M = 0 if they were not requested.
        best_prob: <float16>[N, M] those probabilities.
        stats: Summed statistics.
    """

    facts: LayerFacts
    expert: Tensor
    state: Tensor
    gate: Tensor
    first: Tensor
    best_expert: Tensor
    best_prob: Tensor
    stats: RouterStats

    @property
    def key(self) -> LayerKey:
        """Returns the name of the layer: its stack and number."""
        return self.facts.stack, self.facts.layer

    @property
    def choices(self) -> Tensor:
        """Returns <int8 or int16>[N, K]: the requested experts, -1 if not requested."""
        return self.expert.masked_fill(self.state == NOT_REQUESTED, -1)

    @property
    def accepted(self) -> Tensor:
        """Returns <bool>[N, K]."""
        return self.state == ACCEPTED


class StackTrace(NamedTuple):
    """Decisions of the routers of one stack.

    Attributes:
        ids: <int32>[N] token ids, without padding, one example after the other. The decoder's are
            its inputs: the label before, or the start token.
        targets: <int32>[N] the label at each position, in the decoder; empty in the encoder.
        starts: <int64>[num_examples + 1] where each example starts, and N.
        layers: Its sparse layers.
    """

    ids: Tensor
    targets: Tensor
    starts: Tensor
    layers: tuple[LayerTrace, ...]

    @property
    def example(self) -> Tensor:
        """Returns <int64>[N]: the number of each token's example."""
        # Each number as often as its example has tokens.
        lengths = self.starts.diff()
        return torch.repeat_interleave(torch.arange(lengths.numel()), lengths)

    @property
    def position(self) -> Tensor:
        """Returns <int64>[N]: the position of each token in its example, from 0."""
        return torch.arange(self.ids.numel()) - self.starts[self.example]


class Trace(NamedTuple):
    """Routing of every token of some examples.

    Attributes:
        facts: Facts about the trace.
        encoder: The encoder's tokens and sparse layers.
        decoder: The decoder's.
        document: <int32>[num_examples] document of each example; documents are independent, as
            intervals require.
        domain: <int32>[num_examples] kind of text of each example, an index into `facts.domains`.
    """

    facts: TraceFacts
    encoder: StackTrace
    decoder: StackTrace
    document: Tensor
    domain: Tensor

    def stack(self, name: Stack) -> StackTrace:
        """Returns the part of one stack."""
        return self.encoder if name == "encoder" else self.decoder

    @property
    def layers(self) -> tuple[LayerTrace, ...]:
        """Returns all sparse layers, the encoder's first."""
        return self.encoder.layers + self.decoder.layers


def layer_name(key: LayerKey) -> str:
    """Returns e.g. `encoder 1`: the stack and the number of the sparse layer, for people from 1."""
    stack, layer = key
    return f"{stack} {layer + 1}"


def expert_dtype(num_experts: int) -> torch.dtype:
    """Returns the smallest dtype that holds the numbers of experts and -1."""
    return torch.int8 if num_experts <= torch.iinfo(torch.int8).max + 1 else torch.int16


CHOICES = ("expert", "state", "gate", "first", "best_expert", "best_prob")
"""Fields of a `LayerTrace` with a row for each token."""


def trace_from(
    facts: TraceFacts, rows: Mapping[str, Tensor], stats: Mapping[LayerKey, RouterStats]
) -> Trace:
    """Returns the trace of rows by name, as `Recording.record` gives them.

    Raises:
        KeyError: When one is missing.
        ValueError: When one names an expert that the layer does not have.
    """
    parts = {}
    for stack in STACKS:
        layers = []
        for layer in facts.layers:
            if layer.stack == stack:
                layers.append(_layer_from(layer, rows, stats[layer.stack, layer.layer]))
        starts = F.pad(rows[f"{stack}.lengths"].cumsum(0), (1, 0))
        ids = rows[f"{stack}.ids"].int()
        targets = rows.get(f"{stack}.targets", ids[:0]).int()
        parts[stack] = StackTrace(ids, targets, starts, tuple(layers))
    return Trace(facts, **parts, document=rows["document"], domain=rows["domain"])


def _layer_from(facts: LayerFacts, rows: Mapping[str, Tensor], stats: RouterStats) -> LayerTrace:
    prefix = f"{facts.stack}.{facts.layer}"
    choices = {name: rows[f"{prefix}.{name}"] for name in CHOICES if f"{prefix}.{name}" in rows}

    # No best experts were kept.
    choices.setdefault("best_expert", choices["expert"][:, :0])
    choices.setdefault("best_prob", choices["gate"][:, :0].half())
    last = facts.num_experts - 1  # fits the dtype, unlike the number of experts
    for name in ("expert", "first", "best_expert"):
        if ((choices[name] < -1) | (choices[name] > last)).any():
            raise ValueError(f"{prefix}.{name} names an expert beyond {last}")
    return LayerTrace(facts, **choices, stats=stats)
