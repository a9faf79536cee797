"""Experts of a prefix: which texts begin with one, so that the routers let them use its experts.

The encoder finds the prefix of each example, and the decoder's tokens take that of their example.
"""

from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.checks import check, check_integer, is_kind, shown
from moe.errors import ConfigError, DataError
from moe.models.inputs import check_segments, real_tokens
from moe.sparse.examples import example_starts, of_first_token


def find_prefixes(
    config: Any,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    segment_ids: Tensor | None,
    embedded: Tensor,
) -> Tensor | None:
    """Returns the number of the prefix of each token's example <int64>[B, L], from 1, or 0 for none.

    None when the model has no experts of a prefix. Without token ids no example has a prefix.

    Args:
        config: An STMoEConfig.
        input_ids: <int64>[B, L] of the encoder.
        attention_mask: <int64 or bool>[B, L], 0 for padding; None for the segments' or no padding.
        segment_ids: <int64>[B, L] example of each token; None when each row is one example.
        embedded: <float>[B, L, D] of the same tokens.
    """
    if not config.prefix_experts:
        return None
    numbers = torch.zeros(embedded.shape[:2], dtype=torch.int64, device=embedded.device)
    if input_ids is None:
        return numbers

    # Padding is of no example.
    shape = (numbers.shape[0], numbers.shape[1])
    mask = real_tokens("attention_mask", attention_mask, shape)
    check_segments("segment_ids", segment_ids, shape)
    segments = torch.ones_like(numbers) if segment_ids is None else segment_ids.long()
    segments = segments if mask is None else segments * mask
    is_real = segments != 0

    # Every place where the tokens of an example are those of a prefix ...
    tokens = torch.stack([input_ids, segments])  # [2, B, L]
    for number, record in enumerate(config.prefix_experts, start=1):
        matches = is_real
        for offset, token in enumerate(record["token_ids"]):
            later_ids, later_segments = F.pad(tokens, (0, offset))[..., offset:]  # [B, L]
            matches = matches & (later_ids == token) & (later_segments == segments)
        numbers = numbers.masked_fill(matches, number)

    # ... and those where one starts.
    return of_first_token(numbers, example_starts(is_real, segments)) * is_real


def decoder_prefixes(
    config: Any,
    encoder_outputs: Any,
    segment_ids: Tensor | None,
    decoder_segment_ids: Tensor | None,
    length: int,
) -> Tensor | None:
    """Returns the number of the prefix of each decoder token's example <int64>[B, T]; see `find_prefixes`.

    Args:
        config: An STMoEConfig.
        encoder_outputs: The encoder's output, with its `prefix_numbers` <int64>[B, L].
        segment_ids: <int64>[B, L] example of each encoder token; None when each row is one.
        decoder_segment_ids: <int64>[B, T] example of each decoder token.
        length: Decoder tokens, T.

    Raises:
        DataError: When the encoder's output has no such numbers.
    """
    if not config.prefix_experts:
        return None
    numbers = getattr(encoder_outputs, "prefix_numbers", None)
    if numbers is None:
        raise DataError(
            "encoder_outputs has no prefix_numbers, which say whose texts may use the experts of a prefix. Pass what "
            "the encoder returned."
        )
    if segment_ids is None or decoder_segment_ids is None:
        return numbers.amax(dim=1, keepdim=True).expand(-1, length)  # padding has 0

    # The segment's own tokens have its number, all others 0.
    check_segments("segment_ids", segment_ids, (numbers.shape[0], numbers.shape[1]))
    check_segments("decoder_segment_ids", decoder_segment_ids, (numbers.shape[0], length))
    is_same = decoder_segment_ids[:, :, None] == segment_ids[:, None, :]  # [B, T, L]
    return (numbers[:, None, :] * is_same).amax(dim=2)


def check_prefixes(config: Any) -> None:
    """Raises a ConfigError unless `prefix_experts`, a list of mappings or None, can be told apart."""
    records = config.prefix_experts
    if records is None:
        return
    expected = 'a list such as [{"prefix": "mk:", "token_ids": [12, 7], "num_experts": 8}], or null'
    check(len(records) > 0, "prefix_experts", records, expected)
    is_sparse = config.num_experts > 0
    check(is_sparse, "num_experts", config.num_experts, "at least 1 beside prefix_experts")
    for number, record in enumerate(records):
        is_record = set(record) == {"prefix", "token_ids", "num_experts"}
        check(is_record, f"prefix_experts[{number}]", record, expected)
        prefix, ids = record["prefix"], record["token_ids"]
        is_text = isinstance(prefix, str) and bool(prefix)
        check(is_text, f"prefix of prefix_experts[{number}]", prefix, "a text such as mk:")
        check_integer(f"num_experts of prefix_experts[{number}]", record["num_experts"], least=1)
        are_ids = isinstance(ids, list) and len(ids) > 0
        are_ids = are_ids and all(is_kind(i, int) and 0 <= i < config.vocab_size for i in ids)
        expected_ids = f"a list of token ids below vocab_size, {config.vocab_size}"
        check(are_ids, f"token_ids of prefix_experts[{number}]", ids, expected_ids)

    # A text would begin with both.
    for record, other in permutations(records, 2):
        ids = record["token_ids"]
        if other["token_ids"][: len(ids)] == ids:
            raise ConfigError(
                f"A text with the prefix {shown(other['prefix'])} begins with the tokens of the prefix "
                f"{shown(record['prefix'])}, too. Choose prefixes that differ, e.g. by a colon at the end."
            )
