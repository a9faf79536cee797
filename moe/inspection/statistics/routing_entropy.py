"""Entropy of the routing of a token class; exp(entropy) is the effective number of experts.

Comes after token_classes.py. Hard counts of first choices, before capacity.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from moe.checks import check_number
from moe.estimates import student_half_width
from moe.inspection.statistics.permutations import check_tokens
from moe.inspection.statistics.specialization import chosen_experts
from moe.inspection.statistics.token_classes import classify
from moe.sparse.editing import LayerKey
from moe.tracing.trace import STACKS, LayerTrace, Trace


class EntropyEstimate(NamedTuple):
    """An entropy in nats with its interval.

    Attributes:
        value: With Miller and Madow's correction, (experts - 1) / (2 tokens), and at most ln E; NaN
            without tokens.
        plug_in: Without the correction.
        low: Lower end of the interval over documents; NaN with fewer than two documents.
        high: Its upper end.
        tokens: Tokens of the class that chose an expert.
        experts: Experts that they chose.
        documents: Documents that they are in.
    """

    value: float
    plug_in: float
    low: float
    high: float
    tokens: int
    experts: int
    documents: int


class SentinelEntropy(NamedTuple):
    """A row of Table 14: one sparse layer.

    Attributes:
        layer: Its stack and number.
        num_experts: E.
        even: ln E: the entropy of a routing that prefers no expert.
        sentinels: Entropy of the sentinels.
        all_tokens: Entropy of all tokens, sentinels included.
    """

    layer: LayerKey
    num_experts: int
    even: float
    sentinels: EntropyEstimate
    all_tokens: EntropyEstimate


def sentinel_entropies(
    trace: Trace, tokenizer: PreTrainedTokenizerFast, *, confidence: float = 0.95
) -> list[SentinelEntropy]:
    """Returns the routing entropy of sentinels and of all tokens in each sparse layer.

    The decoder's tokens are its inputs.

    Args:
        trace: Where the tokens went.
        tokenizer: The model's.
        confidence: Confidence of the intervals, e.g. 0.95.

    Raises:
        ConfigError: When `confidence` is not between 0 and 1.
        DataError: When the tokenizer is not the model's.

    Source:
        ST-MoE (arXiv:2202.08906) Table 14. Differs: entropy of counted first choices, corrected for
        their number, with an interval.
    """
    rows = []
    for stack in STACKS:
        part = trace.stack(stack)
        if not part.layers:
            continue

        # Sentinels, and all tokens.
        classes = classify(part, tokenizer, ["sentinel"])
        is_sentinel = classes.of("sentinel")
        is_token = torch.ones_like(is_sentinel)
        document = trace.document[part.example]

        for layer in part.layers:
            of_class = partial(class_entropy, layer, document=document, confidence=confidence)
            num_experts = layer.facts.num_experts
            rows.append(
                SentinelEntropy(
                    layer=layer.key,
                    num_experts=num_experts,
                    even=math.log(num_experts),
                    sentinels=of_class(is_sentinel),
                    all_tokens=of_class(is_token),
                )
            )
    return rows


def class_entropy(
    layer: LayerTrace, members: Tensor, document: Tensor, *, confidence: float = 0.95
) -> EntropyEstimate:
    """Returns the entropy of the experts that a class of tokens chooses first.

    The interval is Student's with the jackknife's deviation over documents: tokens of one document
    may depend on each other. In simulations with 20 to 200 documents it covered the true value in 93 to 96 %
    of the cases; the percentiles of a bootstrap over documents did so in 78 to 93 %, since fewer
    distinct documents have less entropy. If all documents are routed alike, its width is zero.

    Args:
        layer: The layer's part of a trace.
        members: <bool>[N] tokens of the class.
        document: <any integer>[N] document of each token.
        confidence: Confidence of the interval, e.g. 0.95.

    Raises:
        ConfigError: When `confidence` is not between 0 and 1.
        DataError: When members or documents belong to other tokens.

    Source:
        Miller, Note on the bias of information estimates (1955).
    """
    check_number("confidence", confidence, above=0, below=1)
    check_tokens("The members", len(members), len(layer.first))
    check_tokens("The documents", len(document), len(layer.first))

    # Counts of each document that has such tokens.
    chosen = chosen_experts(layer, "first")  # [N, E]
    is_counted = members & (layer.first >= 0)
    distinct, row = document[is_counted].unique(return_inverse=True)
    by_document = torch.zeros(len(distinct), chosen.shape[1], dtype=torch.float64)
    by_document.index_add_(0, row, chosen[is_counted])  # [D, E]
    counts = by_document.sum(dim=0)  # [E]

    # The interval is symmetric, but within the range of entropies.
    value = float(corrected_entropy(counts))
    most = math.log(len(counts))
    half = math.nan
    if len(distinct) > 1:
        # Each document left out once.
        left = _plug_in_entropy(counts - by_document)  # [D]
        freedom = torch.tensor(len(distinct) - 1)
        stderr = (left.var(correction=0) * freedom).sqrt()
        half = float(student_half_width(stderr, freedom, confidence))
    return EntropyEstimate(
        value=value,
        plug_in=float(_plug_in_entropy(counts)),
        low=min(max(value - half, 0.0), most),
        high=max(min(value + half, most), 0.0),
        tokens=int(counts.sum()),
        experts=int((counts > 0).sum()),
        documents=len(distinct),
    )


def corrected_entropy(counts: Tensor) -> Tensor:
    """Returns <float64>[...]: the entropy in nats of counts <any>[..., E], corrected for few counts.

    At most ln E; NaN where all counts are 0.
    """
    # Miller and Madow: (m - 1) / (2 N) for m experts in N counts.
    counts = counts.double()
    experts = (counts > 0).sum(dim=-1)
    correction = (experts - 1) / (2 * counts.sum(dim=-1))
    return (_plug_in_entropy(counts) + correction).clamp(max=math.log(counts.shape[-1]))


def _plug_in_entropy(counts: Tensor) -> Tensor:
    share = counts.double() / counts.sum(dim=-1, keepdim=True)
    return torch.special.entr(share).sum(dim=-1)
