"""Cases of the training data for conformance.py: span corruption, packing, shifting, mixtures,
sentinels.
"""

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]

from moe import DataError, STMoEConfig, STMoEForConditionalGeneration
from moe.checks import check_integer, check_number
from moe.data.mixture import mixing_rate
from moe.data.packing import fill_row, pack_rows
from moe.data.pipeline import enclose
from moe.data.span_corruption import (
    Noise,
    corrupt,
    corrupted_lengths,
    count_noise,
    random_spans_mask,
    tokens_length,
)
from moe.data.tokenizer import EOS, PAD, UNK, SpecialIds, to_transformers

Input = dict[str, Any]

MOST_TOKENS = 1 << 16
REASON = "a case is computed token by token"
_NO_TARGET = -100
_ANY_NUMBER = 10**9
_VOCABULARY = 2**26  # the largest that a model can have


class Deviation(NamedTuple):
    """A value where this library departs from T5 on purpose: what T5 has, and why the library has
    another.
    """

    theirs: Any
    reason: str


def _planned_lengths(given: Input) -> Input | Deviation:
    """Returns how many tokens, corrupted, fill the inputs, and the length of their targets."""
    extras = [given.get(f"extra_tokens_per_span_{side}", 1) for side in ("inputs", "targets")]
    if extras != [1, 1]:
        raise DataError(
            f"{extras} extra tokens a span; this library puts one sentinel for each on both sides."
        )
    noise = _noise(given)
    inputs_length = given["inputs_length"]
    check_integer("inputs_length", inputs_length, least=2, most=MOST_TOKENS, reason=REASON)
    check_number(
        "the text that fills inputs_length at this noise_density",
        inputs_length / (1 - noise.density),
        most=2 * MOST_TOKENS,
        reason=REASON,
    )
    theirs = dict(
        zip(("tokens_length", "targets_length"), _t5_lengths(inputs_length, noise), strict=True)
    )
    masked, spans = _unbounded_counts(theirs["tokens_length"], noise)
    if noise.density == 0.5 or (masked, spans) != count_noise(theirs["tokens_length"], noise):
        return Deviation(theirs, "T5 plans lengths that its own masks do not have")
    length = tokens_length(inputs_length, noise, _ANY_NUMBER)
    return {"tokens_length": length, "targets_length": corrupted_lengths(length, noise)[1]}


def _t5_lengths(inputs_length: int, noise: Noise) -> tuple[int, int]:
    """Returns the tokens and targets that T5's `random_spans_helper` plans, spans or none, masks or
    none.
    """
    length = inputs_length - 1
    while True:
        masked, spans = _unbounded_counts(length + 1, noise)
        if length + 1 - masked + spans + 1 > inputs_length:
            break
        length += 1
    masked, spans = _unbounded_counts(length, noise)
    too_long = noise.density == 0.5 and masked + spans > length - masked + spans
    return length - too_long, masked + spans + 1 - too_long


def _unbounded_counts(length: int, noise: Noise) -> tuple[int, int]:
    """Returns masked tokens and spans as rounded, though there may be none, or too many to keep
    apart.
    """
    masked = round(length * noise.density)
    return masked, round(masked / noise.mean_span_length)


def _mask_counts(given: Input) -> Input | Deviation:
    """Returns the masked tokens and spans of a random mask, and whether its ends are masked."""
    length, noise = given["length"], _noise(given)
    counts, theirs = count_noise(length, noise), _float32_counts(length, noise)
    half = (2 * length * Fraction(str(noise.density))).denominator == 1
    mask = random_spans_mask(length, *(theirs if half else counts), np.random.default_rng(0))
    value = {
        "noise_tokens": int(mask.sum()),
        "noise_spans": int((np.diff(mask.astype(int), prepend=0) == 1).sum()),
        "first_is_noise": bool(mask[0]),
        "last_is_noise": bool(mask[-1]),
    }
    if half and theirs != counts:
        return Deviation(
            value, f"half a token is rounded to even here ({counts[0]} masked), in float32 there"
        )
    return value


def _float32_counts(length: int, noise: Noise) -> tuple[int, int]:
    """Returns the counts of T5's `random_spans_noise_mask`, which multiplies in float32."""
    if length < 2:
        return 0, 0
    masked = min(max(int(np.round(np.float32(length) * np.float32(noise.density))), 1), length - 1)
    return masked, max(1, int(np.round(np.float32(masked) / np.float32(noise.mean_span_length))))


def _noise(given: Input) -> Noise:
    """Returns the noise of a case.

    Raises:
        ConfigError: When there is no such noise.
    """
    noise = Noise(given.get("noise_density", 0.15), given.get("mean_noise_span_length", 3.0))
    check_number("noise_density", noise.density, above=0, below=1)
    check_number("mean_noise_span_length", noise.mean_span_length, least=1)
    return noise


def _corrupted(given: Input) -> dict[str, list[int]]:
    """Returns inputs and targets of a mask, without the end token."""
    ids = SpecialIds(0, 1, given.get("vocab_size", _ANY_NUMBER) - 1, _ANY_NUMBER)
    inputs, targets = corrupt(
        np.asarray(given["tokens"]), np.asarray(given["noise_mask"], dtype=np.bool_), ids
    )
    return {"inputs": inputs[:-1].tolist(), "targets": targets[:-1].tolist()}


def _without_sentinels(side: str) -> Callable[[Input], list[int]]:
    """Returns what gives one side of a corrupted text without its sentinels."""

    def call(given: Input) -> list[int]:
        tokens = _corrupted({"tokens": given["tokens"], "noise_mask": given["noise_mask"]})[side]
        largest = max(given["tokens"])
        return [token for token in tokens if token <= largest]

    return call


def _rows(given: Input) -> list[dict[str, list[int]]]:
    """Returns what a model gets of examples, packed when the case says so, under the names of
    seqio.
    """
    pack = "pack=True" in given["fn"].replace(" ", "")
    lengths = [given["task_feature_lengths"][side] for side in ("inputs", "targets")]
    examples = [(e["inputs"][: lengths[0]], e["targets"][: lengths[1]]) for e in given["examples"]]
    rows = (
        pack_rows(examples, lengths[0], lengths[1])
        if pack
        else [[number] for number in range(len(examples))]
    )
    return [_features([examples[number] for number in row], lengths, pack) for row in rows]


def _features(examples: list[Any], lengths: list[int], pack: bool) -> dict[str, list[int]]:
    """Returns one row under the names of seqio."""
    inputs, segments = fill_row([inputs for inputs, _ in examples], lengths[0], 0)
    targets, target_segments = fill_row([targets for _, targets in examples], lengths[1], 0)
    features = {
        "encoder_input_tokens": inputs.tolist(),
        "decoder_target_tokens": targets.tolist(),
        "decoder_input_tokens": _shift(
            targets.tolist(), target_segments.tolist() if pack else None
        ),
        "decoder_loss_weights": (target_segments > 0).astype(int).tolist(),
    }
    if pack:
        for side, numbers in (("encoder", segments), ("decoder", target_segments)):
            features[f"{side}_segment_ids"] = numbers.tolist()
            features[f"{side}_positions"] = _positions(numbers.tolist())
    return features


def _positions(segments: list[int]) -> list[int]:
    """Returns places counted from 0 in each segment, 0 for padding."""
    starts: dict[int, int] = {}
    positions = []
    for place, number in enumerate(segments):
        start = starts.setdefault(number, place)
        positions.append(place - start if number else 0)
    return positions


def _shift(targets: list[int], segments: list[int] | None) -> list[int]:
    """Returns the decoder's inputs of targets that 0 pads, as the model makes them."""
    labels = torch.tensor([targets])
    labels = labels.masked_fill(labels == 0, _NO_TARGET)
    numbers = None if segments is None else torch.tensor([segments])
    return _model().prepare_decoder_input_ids_from_labels(labels, numbers)[0].tolist()


@cache
def _model() -> STMoEForConditionalGeneration:
    """Returns a model without weights; how it shifts labels does not depend on its size."""
    with torch.device("meta"):
        return STMoEForConditionalGeneration(
            STMoEConfig(
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
        )


def _sentinel_vocabulary(given: Input) -> Input:
    """Returns a text's ids in a vocabulary of the word start and letters from a on, with sentinels
    above them.
    """
    letters = [chr(ord("a") + number) for number in range(given["base_pieces"] - 4)]
    model, kinds = ModelProto(), ModelProto.SentencePiece.Type
    for piece in (PAD, EOS, UNK, "\u2581", *letters):
        kind = {PAD: kinds.CONTROL, EOS: kinds.CONTROL, UNK: kinds.UNKNOWN}.get(piece, kinds.NORMAL)
        model.pieces.add(piece=piece, score=-1.0, type=kind)
    tokenizer = to_transformers(model, given["extra_ids"])
    return {
        "ids": tokenizer(given["text"], add_special_tokens=False)["input_ids"],
        "vocab_size": len(tokenizer),
    }


def _with_sentinels(given: Input) -> dict[str, list[int]]:
    """Returns inputs that end with sentinels and targets that begin with them."""
    sentinels = [
        given["vocab_size"] - 1 - number for number in range(given.get("num_sentinels", 1))
    ]
    return {
        "inputs": enclose(given["inputs"], given.get("max_length"), end=sentinels),
        "targets": enclose(given["targets"], given.get("max_length"), start=sentinels),
    }


DATA: dict[str, Callable[[Input], Any]] = {
    "random_spans_helper": _planned_lengths,
    "random_spans_noise_mask": _mask_counts,
    "noise/nonnoise_span_to_unique_sentinel": _corrupted,
    "noise_span_to_unique_sentinel": lambda given: _corrupted(given)["inputs"],
    "nonnoise_span_to_unique_sentinel": lambda given: _corrupted(given)["targets"],
    "drop_noise_tokens": _without_sentinels("inputs"),
    "drop_nonnoise_tokens": _without_sentinels("targets"),
    "EncDecFeatureConverter": _rows,
    "shift_right": lambda given: _shift(given["targets"], given.get("segment_ids")),
    "append_eos_after_trim": lambda given: enclose(
        given["tokens"], given.get("max_length"), end=[given["eos_id"]]
    ),
    "mixture_rate": lambda given: mixing_rate(
        **{key: value for key, value in given.items() if key != "fn"}
    ),
    "sentinel vocabulary": _sentinel_vocabulary,
    "sentinel fine-tuning variant": _with_sentinels,
}
"""What is called, by the name of a function or task."""
