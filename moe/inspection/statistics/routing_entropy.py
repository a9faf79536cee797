"""Entropy of the routing of a token class; exp(entropy) is the effective number of experts.

Comes after token_classes.py. Hard counts of first choices, before capacity.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from moe.estimates import Estimate, student_half_width
from moe.inspection.statistics.specialization import one_hot_first
from moe.inspection.statistics.token_classes import classify
from moe.inspection.tables import format_table
from moe.sparse.editing import STACKS
from moe.tracing.trace import LayerTrace, Trace, layer_name

_SENTINEL_HEADER = ["sparse layer", "sentinels", "all tokens", "even (ln E)", "sentinel tokens"]


def sentinel_entropies(trace: Trace, tokenizer: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    """Returns the routing entropy of sentinels and of all tokens in each sparse layer.

    The decoder's tokens are its inputs.

    Args:
        trace: Where the tokens went.
        tokenizer: The model's.

    Returns:
        For each layer its name (`layer`), ln E, the entropy without preference (`even`), the
        estimates for `sentinels` and `all_tokens`, and the number of `sentinel_tokens`.

    Raises:
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
        (is_sentinel,) = classify(part, tokenizer, ["sentinel"]).members
        is_token = torch.ones_like(is_sentinel)
        document = trace.document[part.example]
        for layer in part.layers:
            rows.append(
                {
                    "layer": layer_name(layer.key),
                    "even": math.log(layer.facts.num_experts),
                    "sentinels": class_entropy(layer, is_sentinel, document),
                    "all_tokens": class_entropy(layer, is_token, document),
                    "sentinel_tokens": int((is_sentinel & (layer.first >= 0)).sum()),
                }
            )
    return rows


def sentinel_table(entropies: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rows of `sentinel_entropies` as text."""
    rows = []
    for row in entropies:
        cells = []
        for estimate in (row["sentinels"], row["all_tokens"]):
            is_known = not math.isnan(estimate.value)
            interval = f"({estimate.low:.2f} to {estimate.high:.2f})"
            cells.append(f"{estimate.value:.2f} {interval}" if is_known else "-")
        rows.append([row["layer"], *cells, f"{row['even']:.2f}", f"{row['sentinel_tokens']:,}"])
    return format_table(_SENTINEL_HEADER, rows)


def class_entropy(layer: LayerTrace, members: Tensor, document: Tensor) -> Estimate:
    """Returns the entropy of the experts that a class of tokens chooses first, at most ln E.

    The value has Miller and Madow's correction; it is NaN without tokens. The interval is Student's
    with the jackknife's deviation over documents: tokens of one document may depend on each other.
    In simulations with 20 to 200 documents it covered the true value in 93 to 96 % of the cases; the
    percentiles of a bootstrap over documents did so in 78 to 93 %, since fewer distinct documents
    have less entropy. If all documents are routed alike, its width is zero. Its ends are NaN with
    fewer than two documents.

    Args:
        layer: The layer's part of a trace.
        members: <bool>[N] tokens of the class.
        document: <any integer>[N] document of each token.

    Source:
        Miller, Note on the bias of information estimates (1955).
    """
    # Counts of each document that has such tokens.
    chosen = one_hot_first(layer)  # [N, E]
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
        half = float(student_half_width(stderr, freedom))
    return Estimate(value, min(max(value - half, 0.0), most), max(min(value + half, most), 0.0))


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
