"""Traces and a tokenizer made by hand, so that every number of a table can be counted."""

import torch
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from moe.data.tokenizer import to_transformers
from moe.sparse.stats import RouterStats
from moe.tracing.trace import (
    ACCEPTED,
    NOT_REQUESTED,
    LayerFacts,
    LayerTrace,
    StackTrace,
    Trace,
    TraceFacts,
)

NO_STATS = RouterStats(*[torch.zeros(()) for _ in RouterStats._fields])


def a_layer(choices, num_experts, *, stack="encoder", layer=0, gate=None):
    """Returns a layer of <int>[N] or <int>[N, K] choices, the first one first; -1 for none."""
    choices = torch.as_tensor(choices)
    choices = choices[:, None] if choices.ndim == 1 else choices
    is_requested = choices >= 0
    state = torch.where(is_requested, ACCEPTED, NOT_REQUESTED).to(torch.uint8)
    if gate is None:
        gate = is_requested / is_requested.sum(dim=1, keepdim=True).clamp(min=1)
    num_tokens, num_choices = choices.shape
    return LayerTrace(
        facts=LayerFacts(stack, layer, num_experts, num_choices, "token_choice"),
        expert=choices.clamp(min=0).to(torch.int8),
        state=state,
        gate=torch.as_tensor(gate).float(),
        first=choices[:, 0].to(torch.int8),
        best_expert=torch.empty(num_tokens, 0, dtype=torch.int8),
        best_prob=torch.empty(num_tokens, 0, dtype=torch.float16),
        stats=NO_STATS,
    )


def a_stack(lengths, *layers, ids=None, targets=()):
    """Returns a stack of examples of these lengths."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.zeros(int(starts[-1])) if ids is None else torch.as_tensor(ids)
    return StackTrace(ids.int(), torch.as_tensor(targets).int(), starts, layers)


def a_trace(encoder, decoder=None, *, domains=("",), domain=None, document=None, inputs="abc"):
    """Returns a trace; each example is a document of the first domain where nothing else is said."""
    num_examples = len(encoder.starts) - 1
    decoder = a_stack([0] * num_examples) if decoder is None else decoder
    facts = TraceFacts(
        version=1,
        library="0",
        model="",
        model_fingerprint="",
        tokenizer_fingerprint="",
        inputs_fingerprint=inputs,
        text="",
        command="",
        num_examples=num_examples,
        domains=list(domains),
        layers=[layer.facts for layer in (*encoder.layers, *decoder.layers)],
        loss=1.0,
    )
    document = torch.arange(num_examples) if document is None else torch.tensor(document)
    domain = torch.zeros(num_examples) if domain is None else torch.tensor(domain)
    return Trace(facts, encoder, decoder, document.int(), domain.int())


def renamed(layer, order):
    """Returns a layer whose expert e is called order[e]."""
    order = torch.as_tensor(order)

    def rename(expert):
        return torch.where(expert >= 0, order[expert.long()], -1).to(expert.dtype)

    return layer._replace(expert=rename(layer.expert), first=rename(layer.first))


def a_tokenizer(*pieces):
    """Returns a tokenizer of these pieces, `~` in front for a space."""
    model = ModelProto()
    kinds = ModelProto.SentencePiece.Type
    specials = [("<pad>", kinds.CONTROL), ("</s>", kinds.CONTROL), ("<unk>", kinds.UNKNOWN)]
    for name, kind in specials:
        model.pieces.add(piece=name, score=0.0, type=kind)
    for piece in dict.fromkeys(pieces):
        model.pieces.add(piece=spaced(piece), score=-1.0, type=kinds.NORMAL)
    return to_transformers(model, num_sentinels=3)


def spaced(piece):
    """Returns a piece whose first character, where it is `~`, is the mark of a space."""
    return "\u2581" + piece[1:] if piece.startswith("~") else piece


def ids_of(tokenizer, pieces):
    """Returns the ids of pieces."""
    ids = [tokenizer.convert_tokens_to_ids(spaced(piece)) for piece in pieces]
    unknown = [piece for piece, number in zip(pieces, ids, strict=True) if number == 2]
    assert set(unknown) <= {"<unk>"}, unknown
    return ids
