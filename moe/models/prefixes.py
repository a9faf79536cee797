"""Experts of a prefix: which texts begin with one, so that the routers let them use its experts.

The encoder finds the prefix of each example, and the decoder's tokens take that of their example.
"""

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.checks import check, check_integer, is_kind, shown
from moe.errors import ConfigError, DataError
from moe.sparse.examples import example_starts, of_first_token


def find_prefixes(
    records: Sequence[Mapping[str, Any]],
    token_ids: Tensor | None,
    token_mask: Tensor,
    segment_ids: Tensor | None,
) -> Tensor:
    """Returns the number of the prefix of each token's example <int64>[B, L], from 1, or 0 for none.

    Args:
        records: `prefix_experts` of the config.
        token_ids: <int64>[B, L] of the encoder; None for examples without a prefix.
        token_mask: <bool>[B, L] real tokens.
        segment_ids: <int64>[B, L] example of each token; None when each row is one example.
    """
    numbers = torch.zeros_like(token_mask, dtype=torch.int64)
    if token_ids is None:
        return numbers

    # Every place where the tokens of an example are those of a prefix. Padding is of no example.
    segments = token_mask.long() if segment_ids is None else segment_ids * token_mask
    is_real = segments != 0
    tokens = torch.stack([token_ids, segments])  # [2, B, L]
    for number, record in enumerate(records, start=1):
        matches = is_real
        for offset, token in enumerate(record["token_ids"]):
            later_ids, later_segments = F.pad(tokens, (0, offset))[..., offset:]  # [B, L]
            matches = matches & (later_ids == token) & (later_segments == segments)
        numbers = numbers.masked_fill(matches, number)

    # Those where an example starts.
    return of_first_token(numbers, example_starts(token_mask, segment_ids)) * is_real


def decoder_prefixes(
    memory_prefixes: Tensor | None,
    memory_segment_ids: Tensor | None,
    segment_ids: Tensor | None,
    length: int,
) -> Tensor:
    """Returns the number of the prefix of each decoder token's example <int64>[B, T].

    Args:
        memory_prefixes: <int64>[B, M] those of the encoder's tokens, see `find_prefixes`.
        memory_segment_ids: <int64>[B, M] example of each encoder token; None when each row is one.
        segment_ids: <int64>[B, T] example of each decoder token.
        length: Decoder tokens, T.

    Raises:
        DataError: When the encoder's output has no such numbers.
    """
    if memory_prefixes is None:
        raise DataError(
            "encoder_outputs has no prefix_numbers, which say whose texts may use the experts of a prefix. Pass what "
            "the encoder returned."
        )
    if memory_segment_ids is None or segment_ids is None:
        return memory_prefixes.amax(dim=1, keepdim=True).expand(-1, length)  # padding has 0

    # The segment's own tokens have its number, all others 0.
    is_same = segment_ids[:, :, None] == memory_segment_ids[:, None, :]  # [B, T, M]
    return (memory_prefixes[:, None, :] * is_same).amax(dim=2)


def check_prefixes(config: Any) -> None:
    """Raises a ConfigError unless `prefix_experts`, a list of mappings or None, can be told apart."""
    records = config.prefix_experts
    if records is None:
        return
    expected = 'a list such as [{"prefix": "mk:", "token_ids": [12, 7], "num_experts": 8}], or null'
    check(len(records) > 0, "prefix_experts", records, expected)
    check_integer("num_experts", config.num_experts, least=1, reason="there are prefix_experts")
    for number, record in enumerate(records):
        name = f"prefix_experts[{number}]"
        check(set(record) == {"prefix", "token_ids", "num_experts"}, name, record, expected)
        prefix, ids = record["prefix"], record["token_ids"]
        is_text = isinstance(prefix, str) and bool(prefix)
        check(is_text, f"prefix of {name}", prefix, "a text such as mk:")
        check_integer(f"num_experts of {name}", record["num_experts"], least=1)
        are_ids = isinstance(ids, list) and len(ids) > 0
        are_ids = are_ids and all(is_kind(i, int) and 0 <= i < config.vocab_size for i in ids)
        expected_ids = f"a list of token ids below vocab_size, {config.vocab_size}"
        check(are_ids, f"token_ids of {name}", ids, expected_ids)

    # A text would begin with both.
    for record, other in permutations(records, 2):
        ids = record["token_ids"]
        if other["token_ids"][: len(ids)] == ids:
            raise ConfigError(
                f"A text with the prefix {shown(other['prefix'])} begins with the tokens of the prefix "
                f"{shown(record['prefix'])}, too. Choose prefixes that differ, e.g. by a colon at the end."
            )
