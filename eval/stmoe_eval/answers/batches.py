"""Requests to a model, their batches, and padded tensors of tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stmoe_eval.task import Example

_SIMILAR_LENGTH = 0.8
"""Share of the longest input's tokens above which an input is of similar length."""


class Request(NamedTuple):
    """The model's input for an example, without its reference."""

    id: str
    inputs: str
    choices: tuple[str, ...] = ()


def requests_of(examples: Sequence[Example]) -> list[Request]:
    """Returns the requests of examples."""
    return [Request(example.id, example.inputs, example.choices) for example in examples]


class TokenizedRequest(NamedTuple):
    """A tokenized request; its fields are part of the digest of a run's batches.

    Attributes:
        request: The request.
        tokens: Tokens of its inputs.
        truncated: Whether the inputs were truncated.
    """

    request: Request
    tokens: list[int]
    truncated: bool


def make_batches(
    requests: Sequence[TokenizedRequest], *, max_rows: int, max_tokens: int, min_rows: int
) -> list[list[TokenizedRequest]]:
    """Returns all requests in batches, the longest first, so that a batch needs little padding.

    Padding costs as much as tokens, so a batch with more than `min_rows` rows holds only inputs of
    similar length.

    Args:
        requests: Requests with unique ids.
        max_rows: Largest number of requests in a batch.
        max_tokens: Largest number of tokens in a batch, padding included; a longer request is a separate batch.
        min_rows: Number of requests that may share a batch regardless of their lengths. More decode
            together; fewer need less padding.
    """
    remaining = sorted(requests, key=_longest_first)
    batches: list[list[TokenizedRequest]] = []
    while remaining:
        # The longest comes first, so that those of similar length follow it.
        longest = len(remaining[0].tokens)
        num_similar = 0
        for request in remaining[:max_rows]:
            num_similar += len(request.tokens) >= _SIMILAR_LENGTH * longest

        # A single request that is too long is still a batch.
        size = min(max_rows, max_tokens // longest, max(min_rows, num_similar))
        size = max(1, size)
        batches.append(remaining[:size])
        remaining = remaining[size:]
    return batches


def _longest_first(request: TokenizedRequest) -> tuple[int, str]:
    return -len(request.tokens), request.request.id


class PaddedTokens(NamedTuple):
    """Rows of tokens of different lengths as tensors.

    Attributes:
        tokens: <int64>[N, L] padded after the end of a row.
        mask: <int64>[N, L] 1 at real tokens, 0 at padding.
    """

    tokens: Tensor
    mask: Tensor


def pad_tokens(rows: Sequence[Sequence[int]], pad: int, device: torch.device | str) -> PaddedTokens:
    """Returns rows of tokens as tensors <int64>[N, L], as long as the longest of them."""
    longest = max(map(len, rows))
    padded: list[list[int]] = []
    mask: list[list[int]] = []
    for row in rows:
        num_padding = longest - len(row)
        padded.append([*row, *[pad] * num_padding])
        mask.append([1] * len(row) + [0] * num_padding)
    return PaddedTokens(torch.tensor(padded, device=device), torch.tensor(mask, device=device))
