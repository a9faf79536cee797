"""n-gram tables of a text: a baseline for a language model's held-out loss.

Comes after `pipeline`; `moe.training.heldout_loss` compares its losses with a model's.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe.data.pipeline import SpanCorruptionSource

LONGEST_TEXT = 2**24
"""Tokens that tables are counted on; a longer text is sampled, so that counting takes seconds."""

NAMES = {1: "unigram", 2: "bigram", 3: "trigram"}

# Tokens of a sampled piece. Few n-grams cross a border between pieces.
_PIECE = 2**16


class Level(NamedTuple):
    """Counts of the n-grams of one length, each encoded as one integer.

    Attributes:
        grams: <int64>[G] the n-grams that occur, in ascending order.
        counts: <int64>[G] their counts.
        contexts: <int64>[C] their first n - 1 tokens, in ascending order.
        totals: <int64>[C] sum of the counts after a context.
        followers: <int64>[C] number of different tokens after a context.
        discount: Taken from each count and given to tokens that were not seen after the context.
    """

    grams: NDArray[np.int64]
    counts: NDArray[np.int64]
    contexts: NDArray[np.int64]
    totals: NDArray[np.int64]
    followers: NDArray[np.int64]
    discount: float


class NgramTable(NamedTuple):
    """Interpolated Kneser-Ney estimate of a token after the n - 1 tokens to its left.

    Attributes:
        levels: Counts of n-grams from length 1 to n.
        vocab_size: Number of tokens.

    Source:
        Chen and Goodman, An Empirical Study of Smoothing Techniques for Language Modeling (1999),
        section 2.7. Differs: unigrams are interpolated with the uniform distribution.
    """

    levels: tuple[Level, ...]
    vocab_size: int

    @classmethod
    def of(cls, tokens: NDArray[np.integer], order: int, vocab_size: int) -> "NgramTable":
        """Returns the table of n-grams up to the length `order` in <int>[N] tokens, N >= order."""
        grams, counts = np.unique(_encode(tokens, order, vocab_size), return_counts=True)
        levels = [_level(grams, counts, vocab_size)]

        # Below the longest, a count is the number of different tokens to the left.
        for length in range(order - 1, 0, -1):
            suffixes = grams % vocab_size**length
            grams, counts = np.unique(suffixes, return_counts=True)
            levels.insert(0, _level(grams, counts, vocab_size))
        return cls(tuple(levels), vocab_size)

    def losses(self, text: NDArray[np.integer], masks: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Returns -log p in nats of each masked token, given the tokens to its left in the row.

        Args:
            text: <int>[B, N] rows of text.
            masks: <bool>[B, N] tokens to predict.

        Returns:
            <float64>[M] one loss for each masked token.
        """
        rows, columns = np.nonzero(masks)
        token = text[rows, columns].astype(np.int64)  # [M]

        p = np.full(len(token), 1 / self.vocab_size)
        context = np.zeros(len(token), dtype=np.int64)
        for distance, level in enumerate(self.levels):
            if distance:
                # Left of a row there is nothing, which no n-gram begins with.
                left = np.where(columns >= distance, text[rows, columns - distance], -1)
                context = context + left.astype(np.int64) * self.vocab_size ** (distance - 1)
                context = np.where(left < 0, -1, context)
            p = _interpolate(level, context, token, self.vocab_size, p)
        return -np.log(p)


def ngram_losses(
    tokens: NDArray[np.integer], held_out: SpanCorruptionSource, num_batches: int, vocab_size: int
) -> dict[str, float]:
    """Returns the mean loss in nats of unigram, bigram and trigram tables on masked held-out tokens.

    A table predicts a masked token from up to two tokens to its left in the same row of text. The
    model sees them too: in the encoder's input, or in the decoder's input if they are masked.

    Args:
        tokens: <int>[N] training text; tables whose n-grams are longer are left out. A text of more
            than `LONGEST_TEXT` tokens is sampled.
        held_out: Held-out text.
        num_batches: Number of its batches; the result is empty for 0.
        vocab_size: Number of tokens.
    """
    if num_batches == 0:
        return {}
    counted = sample_text(tokens, LONGEST_TEXT, _PIECE)
    masked_texts = [held_out.masked_text(step) for step in range(num_batches)]

    losses = {}
    for order, name in NAMES.items():
        if len(counted) < order:
            break
        table = NgramTable.of(counted, order, vocab_size)
        batches = [table.losses(text, masks) for text, masks in masked_texts]
        losses[name] = float(np.concatenate(batches).mean())
    return losses


def sample_text(tokens: NDArray[np.integer], num_tokens: int, piece: int) -> NDArray[np.integer]:
    """Returns <int>[M] evenly spaced pieces of a long text, joined; a short text is returned whole.

    A corpus lists its sources one after the other, so its beginning does not represent it.

    Args:
        tokens: <int>[N] text.
        num_tokens: Tokens of the sample, at least one piece.
        piece: Tokens of a piece.
    """
    if len(tokens) <= num_tokens:
        return tokens
    starts = np.linspace(0, len(tokens) - piece, num_tokens // piece).astype(np.int64)
    return np.concatenate([tokens[start : start + piece] for start in starts])


def _encode(tokens: NDArray[np.integer], order: int, vocab_size: int) -> NDArray[np.int64]:
    """Returns <int64>[N - n + 1] the n-grams of a text as numbers in base `vocab_size`."""
    num_grams = len(tokens) - order + 1
    grams = np.zeros(num_grams, dtype=np.int64)
    for position in range(order):
        grams = grams * vocab_size + tokens[position : position + num_grams]
    return grams


def _level(grams: NDArray[np.int64], counts: NDArray[np.int64], vocab_size: int) -> Level:
    contexts, starts, followers = np.unique(
        grams // vocab_size, return_index=True, return_counts=True
    )

    # d = n1 / (n1 + 2 n2), where n_k n-grams occur k times.
    num_once = int((counts == 1).sum())
    num_twice = int((counts == 2).sum())
    discount = num_once / (num_once + 2 * num_twice) if num_once else 0.5
    totals = np.add.reduceat(counts, starts)
    return Level(grams, counts, contexts, totals, followers, discount)


def _interpolate(
    level: Level,
    context: NDArray[np.int64],
    token: NDArray[np.int64],
    vocab_size: int,
    shorter: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Returns p(token | context), interpolated with the estimate after the shorter context.

    p(w | h) = (max(c(hw) - d, 0) + d N(h) p(w | h')) / c(h), where N(h) is the number of followers
    of h, and h' is h without its first token. An unknown context leaves p(w | h').
    """
    counts = _look_up(level.grams, level.counts, context * vocab_size + token)
    totals = _look_up(level.contexts, level.totals, context)
    followers = _look_up(level.contexts, level.followers, context)

    seen = np.maximum(counts - level.discount, 0)
    unseen = level.discount * followers * shorter
    return np.where(totals > 0, (seen + unseen) / np.maximum(totals, 1), shorter)


def _look_up(
    keys: NDArray[np.int64], values: NDArray[np.int64], wanted: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns the values of wanted keys, 0 for keys that do not exist."""
    index = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[index] == wanted, values[index], 0)


def loss_sentence(loss: float, tables: Mapping[str, float]) -> str:
    """Returns a held-out loss on text, and which n-gram tables it beats.

    Args:
        loss: Loss of a model in nats.
        tables: Losses of n-gram tables on the same tokens, by their names; may be empty.
    """
    sentence = f"Held-out loss: {loss:.2f} nats per masked token"
    sides: dict[str, list[str]] = {"better than": [], "worse than": []}
    for name, table in tables.items():
        side = "better than" if loss < table else "worse than"
        sides[side].append(f"{name} {table:.2f}")
    compared = "; ".join(f"{side} {', '.join(names)}" for side, names in sides.items() if names)
    if compared:
        sentence += f", {compared} (n-gram tables of the training text)"
    return f"{sentence}."
