"""Training data by T5's and seqio's names: span corruption, packing, shifting, mixtures, sentinels.

The functions here turn the input of a case into calls of moe.data, and the results into T5's form.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]

from moe.data.mixture import mixing_rate
from moe.data.packing import fill_row, pack_rows
from moe.data.span_corruption import (
    Noise,
    corrupt,
    corrupted_lengths,
    count_noise,
    random_spans_masks,
    tokens_length,
)
from moe.data.tokenizer import EOS, PAD, UNK, SpecialIds, enclose, to_transformers
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration
from tests.conformance.case import CaseFunctions, CaseInput, Deviation

_NO_TARGET = -100
_UNLIMITED = 10**9
_VOCABULARY = 2**26  # the largest that a model can have

Features = dict[str, list[int]]
"""A row under the names of seqio."""


# ---------------------------------------------------------------------------
# Span corruption: lengths


class _NoiseCounts(NamedTuple):
    """Masked tokens of a text, and the spans that they form."""

    num_masked: int
    num_spans: int


class _PlannedLengths(NamedTuple):
    """Tokens that, corrupted, fill the inputs, and the length of their targets."""

    tokens_length: int
    targets_length: int


def _random_spans_helper(given: CaseInput) -> CaseInput | Deviation:
    """Returns how many tokens, corrupted, fill the inputs, and the length of their targets."""
    noise = _noise(given)
    inputs_length = given["inputs_length"]

    # T5 plans with counts that its masks do not have; at one half it corrects the plan again.
    planned = _t5_lengths(inputs_length, noise)
    counts = _t5_planned_counts(planned.tokens_length, noise)
    if noise.density == 0.5 or counts != count_noise(planned.tokens_length, noise):
        return Deviation(planned._asdict(), "T5 plans lengths that its own masks do not have")

    length = tokens_length(inputs_length, noise, _UNLIMITED)
    _, targets_length = corrupted_lengths(length, noise)
    return _PlannedLengths(length, targets_length)._asdict()


def _t5_lengths(inputs_length: int, noise: Noise) -> _PlannedLengths:
    """Returns the lengths that T5's `random_spans_helper` plans."""
    # The longest text whose inputs fit; a sentinel stands for each span, and an end token closes.
    length = inputs_length - 1
    while True:
        counts = _t5_planned_counts(length + 1, noise)
        if length + 1 - counts.num_masked + counts.num_spans + 1 > inputs_length:
            break
        length += 1

    # At a density of one half T5 keeps targets from being longer than inputs.
    counts = _t5_planned_counts(length, noise)
    targets_length = counts.num_masked + counts.num_spans + 1
    num_inputs = length - counts.num_masked + counts.num_spans + 1
    if noise.density == 0.5 and targets_length > num_inputs:
        length -= 1
        targets_length -= 1
    return _PlannedLengths(length, targets_length)


def _t5_planned_counts(length: int, noise: Noise) -> _NoiseCounts:
    """Returns counts as T5 plans with them: there may be none, or too many spans to keep apart."""
    num_masked = round(length * noise.density)
    return _NoiseCounts(num_masked, round(num_masked / noise.mean_span_length))


# ---------------------------------------------------------------------------
# Span corruption: masks


def _random_spans_noise_mask(given: CaseInput) -> CaseInput | Deviation:
    """Returns the masked tokens and spans of a random mask, and whether its ends are masked."""
    length = given["length"]
    noise = _noise(given)
    counts = _NoiseCounts(*count_noise(length, noise))
    t5_counts = _t5_mask_counts(length, noise)

    # Where half a token is to be masked, float32 rounds otherwise: T5's counts are taken.
    is_half = (2 * length * Fraction(str(noise.density))).denominator == 1
    used = t5_counts if is_half else counts
    [mask] = random_spans_masks(length, *used, [np.random.default_rng(0)])  # <bool>[length]
    span_starts = np.diff(mask.astype(int), prepend=0) == 1

    value = {
        "noise_tokens": int(mask.sum()),
        "noise_spans": int(span_starts.sum()),
        "first_is_noise": bool(mask[0]),
        "last_is_noise": bool(mask[-1]),
    }
    if is_half and t5_counts != counts:
        return Deviation(
            value,
            f"half a token is rounded to even here ({counts.num_masked} masked), in float32 there",
        )
    return value


def _t5_mask_counts(length: int, noise: Noise) -> _NoiseCounts:
    """Returns the counts of T5's `random_spans_noise_mask`, which multiplies in float32."""
    if length < 2:
        return _NoiseCounts(0, 0)

    num_masked = int(np.round(np.float32(length) * np.float32(noise.density)))
    num_masked = min(max(num_masked, 1), length - 1)
    num_spans = int(np.round(np.float32(num_masked) / np.float32(noise.mean_span_length)))
    return _NoiseCounts(num_masked, max(1, num_spans))


def _noise(given: CaseInput) -> Noise:
    return Noise(given.get("noise_density", 0.15), given.get("mean_noise_span_length", 3.0))


# ---------------------------------------------------------------------------
# Span corruption: tokens


def _spans_to_sentinels(given: CaseInput) -> Features:
    """Returns inputs and targets of a mask, without the end token."""
    first_sentinel = given.get("vocab_size", _UNLIMITED) - 1
    ids = SpecialIds(0, 1, first_sentinel, _UNLIMITED)
    noise_mask = np.asarray(given["noise_mask"], dtype=np.bool_)
    inputs, targets = corrupt(np.asarray(given["tokens"]), noise_mask, ids)
    return {"inputs": inputs[:-1].tolist(), "targets": targets[:-1].tolist()}


def _noise_spans_to_sentinels(given: CaseInput) -> list[int]:
    return _spans_to_sentinels(given)["inputs"]


def _nonnoise_spans_to_sentinels(given: CaseInput) -> list[int]:
    return _spans_to_sentinels(given)["targets"]


def _drop_noise_tokens(given: CaseInput) -> list[int]:
    return _without_sentinels(given, "inputs")


def _drop_nonnoise_tokens(given: CaseInput) -> list[int]:
    return _without_sentinels(given, "targets")


def _without_sentinels(given: CaseInput, side: str) -> list[int]:
    """Returns one side of a corrupted text without its sentinels, which are above all tokens."""
    corrupted = _spans_to_sentinels({"tokens": given["tokens"], "noise_mask": given["noise_mask"]})
    largest_token = max(given["tokens"])
    return [token for token in corrupted[side] if token <= largest_token]


# ---------------------------------------------------------------------------
# Rows for a model


class _Pair(NamedTuple):
    """Tokens of the two sides of an example."""

    inputs: list[int]
    targets: list[int]


def _feature_converter(given: CaseInput) -> list[Features]:
    """Returns what a model gets of examples, packed when the case says so."""
    packs = "pack=True" in given["fn"].replace(" ", "")
    inputs_length = given["task_feature_lengths"]["inputs"]
    targets_length = given["task_feature_lengths"]["targets"]

    # Both sides truncated to their lengths.
    pairs: list[_Pair] = []
    for example in given["examples"]:
        inputs = example["inputs"][:inputs_length]
        pairs.append(_Pair(inputs, example["targets"][:targets_length]))

    # Which examples share a row.
    rows = [[number] for number in range(len(pairs))]
    if packs:
        rows = pack_rows(pairs, inputs_length, targets_length)

    features: list[Features] = []
    for row in rows:
        inputs_of_row = [pairs[number].inputs for number in row]
        targets_of_row = [pairs[number].targets for number in row]
        inputs = _fill(inputs_of_row, inputs_length)
        targets = _fill(targets_of_row, targets_length)
        features.append(_row_features(inputs, targets, packs))
    return features


class _FilledRow(NamedTuple):
    """Tokens of one side of a row, and the number of the segment that each belongs to, from 1."""

    tokens: list[int]
    segments: list[int]


def _fill(parts: Sequence[list[int]], length: int) -> _FilledRow:
    """Returns one side of a row, padded with 0."""
    tokens, segments = fill_row(parts, length, 0)
    return _FilledRow(tokens.tolist(), segments.tolist())


def _row_features(inputs: _FilledRow, targets: _FilledRow, packs: bool) -> Features:
    """Returns one row under the names of seqio."""
    shift_segments = targets.segments if packs else None
    features = {
        "encoder_input_tokens": inputs.tokens,
        "decoder_target_tokens": targets.tokens,
        "decoder_input_tokens": _shift(targets.tokens, shift_segments),
        "decoder_loss_weights": [int(segment > 0) for segment in targets.segments],
    }

    # Only a packed row needs to tell its examples apart.
    if packs:
        features["encoder_segment_ids"] = inputs.segments
        features["encoder_positions"] = _positions(inputs.segments)
        features["decoder_segment_ids"] = targets.segments
        features["decoder_positions"] = _positions(targets.segments)
    return features


def _positions(segments: list[int]) -> list[int]:
    """Returns positions counted from 0 in each segment; those of padding are 0."""
    starts: dict[int, int] = {}
    positions: list[int] = []
    for position, segment in enumerate(segments):
        start = starts.setdefault(segment, position)
        positions.append(position - start if segment else 0)
    return positions


def _shift_right(given: CaseInput) -> list[int]:
    return _shift(given["targets"], given.get("segment_ids"))


def _shift(targets: list[int], segments: list[int] | None) -> list[int]:
    """Returns the decoder's inputs of targets that 0 pads, as the model makes them."""
    labels = torch.tensor([targets])  # [1, L]
    labels = labels.masked_fill(labels == 0, _NO_TARGET)
    segment_ids = None if segments is None else torch.tensor([segments])
    inputs = _meta_model().prepare_decoder_input_ids_from_labels(labels, segment_ids)
    return inputs[0].tolist()


@cache
def _meta_model() -> STMoEForConditionalGeneration:
    """Returns a model without weights; how it shifts labels does not depend on its size."""
    config = STMoEConfig(
        vocab_size=_VOCABULARY,
        d_model=2,
        d_kv=1,
        d_ff=2,
        num_heads=2,
        num_layers=1,
        num_decoder_layers=1,
        num_experts=0,
        num_sparse_encoder_layers=0,
        num_sparse_decoder_layers=0,
    )
    with torch.device("meta"):
        return STMoEForConditionalGeneration(config)


def _append_eos_after_trim(given: CaseInput) -> list[int]:
    return enclose(given["tokens"], given.get("max_length"), end=[given["eos_id"]])


# ---------------------------------------------------------------------------
# Sentinels and mixtures


def _sentinel_vocabulary(given: CaseInput) -> CaseInput:
    """Returns a text's ids in a vocabulary of letters with sentinels above them.

    The pieces are the special tokens, the start of a word, and the letters from a on.
    """
    letters = [chr(ord("a") + number) for number in range(given["base_pieces"] - 4)]
    kinds = ModelProto.SentencePiece.Type
    special = {PAD: kinds.CONTROL, EOS: kinds.CONTROL, UNK: kinds.UNKNOWN}

    model = ModelProto()
    for piece in (PAD, EOS, UNK, "\u2581", *letters):
        model.pieces.add(piece=piece, score=-1.0, type=special.get(piece, kinds.NORMAL))
    tokenizer: Any = to_transformers(model, given["extra_ids"])
    return {
        "ids": tokenizer(given["text"], add_special_tokens=False)["input_ids"],
        "vocab_size": len(tokenizer),
    }


def _with_sentinels(given: CaseInput) -> Features:
    """Returns inputs that end with sentinels and targets that begin with them."""
    end = given["vocab_size"]
    sentinels = list(range(end - 1, end - 1 - given.get("num_sentinels", 1), -1))
    max_length = given.get("max_length")
    return {
        "inputs": enclose(given["inputs"], max_length, end=sentinels),
        "targets": enclose(given["targets"], max_length, start=sentinels),
    }


def _mixture_rate(given: CaseInput) -> float:
    options = dict(given)
    options.pop("fn", None)
    return mixing_rate(**options)


# ---------------------------------------------------------------------------
# The table

TRAINING_DATA: CaseFunctions = {
    "random_spans_helper": _random_spans_helper,
    "random_spans_noise_mask": _random_spans_noise_mask,
    "noise/nonnoise_span_to_unique_sentinel": _spans_to_sentinels,
    "noise_span_to_unique_sentinel": _noise_spans_to_sentinels,
    "nonnoise_span_to_unique_sentinel": _nonnoise_spans_to_sentinels,
    "drop_noise_tokens": _drop_noise_tokens,
    "drop_nonnoise_tokens": _drop_nonnoise_tokens,
    "EncDecFeatureConverter": _feature_converter,
    "shift_right": _shift_right,
    "append_eos_after_trim": _append_eos_after_trim,
    "mixture_rate": _mixture_rate,
    "sentinel vocabulary": _sentinel_vocabulary,
    "sentinel fine-tuning variant": _with_sentinels,
}
