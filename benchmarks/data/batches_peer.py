"""Batches by Hugging Face `datasets`, as its users make them: `map` once, then torch's DataLoader.

For span corruption the texts are tokenized, joined and divided into chunks, and T5's algorithm
masks each batch on demand. For a mixture the tasks are tokenized, interleaved and packed into rows
on disk.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from moe.data.pipeline import Batch
from moe.data.span_corruption import Noise
from moe.data.tokenizer import SpecialIds

if TYPE_CHECKING:
    import datasets

Columns = Mapping[str, list[Any]]
"""Rows as `map` gives them: a list for each column."""

_ROWS_AT_ONCE = 1_000
_PACKED_AT_ONCE = 4_096
_NOT_A_TARGET = -100


# ---------------------------------------------------------------------------
# Span corruption


def prepare_chunks(
    documents: "datasets.Dataset",
    tokenizer: PreTrainedTokenizerFast,
    tokens_per_example: int,
    *,
    keep: bool,
) -> "datasets.Dataset":
    """Returns chunks of the documents' tokens.

    Args:
        documents: Texts on disk.
        tokenizer: Tokenizer.
        tokens_per_example: Tokens of a chunk.
        keep: Whether files of an earlier call may be used.
    """
    options: dict[str, Any] = {
        "batched": True,
        "batch_size": _ROWS_AT_ONCE,
        "load_from_cache_file": keep,
    }
    tokenized = documents.map(
        partial(_tokenize_documents, tokenizer=tokenizer),
        remove_columns=documents.column_names,
        **options,
    )
    divide = partial(_divide_into_chunks, length=tokens_per_example)
    return tokenized.map(divide, **options).with_format("numpy")


def _tokenize_documents(columns: Columns, tokenizer: PreTrainedTokenizerFast) -> Columns:
    encoded = tokenizer(columns["text"], add_special_tokens=False, verbose=False)
    return {"input_ids": encoded["input_ids"]}


def _divide_into_chunks(columns: Columns, length: int) -> Columns:
    """Returns chunks of the joined texts; the remainder of each thousand texts is dropped."""
    joined = list(chain.from_iterable(columns["input_ids"]))
    whole = len(joined) // length * length
    chunks = [joined[start : start + length] for start in range(0, whole, length)]
    return {"input_ids": chunks}


def corrupted_batches(
    chunks: "datasets.Dataset", ids: SpecialIds, noise: Noise, batch_size: int
) -> Iterable[Batch]:
    """Returns the batches of an epoch, in a random order."""
    return _shuffled_batches(chunks, batch_size, T5Collator(ids, noise, seed=0))


class T5Collator:
    """Corrupts spans of a batch of chunks of one length.

    Args:
        ids: End token and sentinels.
        noise: How much is masked.
        seed: Seed of the masks.

    Source:
        T5 preprocessors.py `random_spans_noise_mask` at e081111, over a batch as transformers'
        run_t5_mlm_flax.py does. Differs: the generator is numpy's present one.
    """

    def __init__(self, ids: SpecialIds, noise: Noise, seed: int) -> None:
        self._ids = ids
        self._noise = noise
        self._rng = np.random.default_rng(seed)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """Returns `input_ids` and `labels` <int64>[B, L] and [B, T]."""
        tokens = np.stack([example["input_ids"] for example in examples])  # [B, N]
        masks = [self._draw_mask(tokens.shape[1]) for _ in examples]
        mask = np.stack(masks)  # [B, N]
        return {
            "input_ids": torch.from_numpy(self._hide(tokens, mask)),
            "labels": torch.from_numpy(self._hide(tokens, ~mask)),
        }

    def _draw_mask(self, length: int) -> NDArray[np.bool_]:
        """Returns <bool>[length] whether a token is masked."""
        num_masked = int(np.round(length * self._noise.density))
        num_masked = min(max(num_masked, 1), length - 1)
        num_spans = max(1, int(np.round(num_masked / self._noise.mean_span_length)))

        # Kept and masked spans in turn, of random lengths.
        masked_lengths = self._draw_lengths(num_masked, num_spans)
        kept_lengths = self._draw_lengths(length - num_masked, num_spans)
        span_lengths = np.stack([kept_lengths, masked_lengths], axis=1).reshape(-1)

        # A span starts where the one before it ends; every second one is masked.
        is_start = np.zeros(length, dtype=np.int8)
        is_start[np.cumsum(span_lengths)[:-1]] = True
        span_number = np.cumsum(is_start)
        return span_number % 2 == 1

    def _draw_lengths(self, num_items: int, num_segments: int) -> NDArray[np.int64]:
        """Returns <int64>[num_segments] positive numbers that sum to `num_items`."""
        is_first = np.arange(num_items - 1) < num_segments - 1
        self._rng.shuffle(is_first)
        segment = np.cumsum(np.pad(is_first, [[1, 0]]))
        _, lengths = np.unique(segment, return_counts=True)
        return lengths

    def _hide(self, tokens: NDArray[np.int64], mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Returns the rows with each masked span as one sentinel, and an end token."""
        # A span is masked tokens without a masked one before them.
        is_start = mask.copy()
        is_start[:, 1:] &= ~mask[:, :-1]
        sentinels = self._ids.first_sentinel + 1 - np.cumsum(is_start, axis=1)

        # All rows have as many spans and masked tokens.
        replaced = np.where(is_start, sentinels, tokens)
        shown = replaced[is_start | ~mask].reshape(len(tokens), -1)
        ends = np.full((len(tokens), 1), self._ids.eos)
        return np.concatenate([shown, ends], axis=1)


# ---------------------------------------------------------------------------
# A packed mixture


def prepare_rows(
    tasks: "Mapping[str, datasets.Dataset]",
    tokenizer: PreTrainedTokenizerFast,
    lengths: tuple[int, int],
    shares: Mapping[str, float],
    *,
    keep: bool,
) -> "datasets.Dataset":
    """Returns the packed rows of an epoch of the mixture.

    Args:
        tasks: Pairs of texts on disk, by task.
        tokenizer: Tokenizer with an end token.
        lengths: Tokens of a row in the encoder and the decoder.
        shares: Share of each task.
        keep: Whether what an earlier call has left on disk may be used.
    """
    import datasets

    options: dict[str, Any] = {"batched": True, "load_from_cache_file": keep}
    encode = partial(_tokenize_pairs, tokenizer=tokenizer, lengths=lengths)
    tokenized: list[datasets.Dataset] = []
    for pairs in tasks.values():
        encoded = pairs.map(
            encode, batch_size=_ROWS_AT_ONCE, remove_columns=pairs.column_names, **options
        )
        tokenized.append(encoded)

    mixture = datasets.interleave_datasets(
        tokenized,
        probabilities=[shares[name] for name in tasks],
        seed=0,
        stopping_strategy="all_exhausted",
    )
    rows = mixture.map(
        partial(_pack, lengths=lengths, padding=SpecialIds.of(tokenizer).pad),
        batch_size=_PACKED_AT_ONCE,
        remove_columns=mixture.column_names,
        **options,
    )
    return rows.with_format("numpy")


def _tokenize_pairs(
    columns: Columns, tokenizer: PreTrainedTokenizerFast, lengths: tuple[int, int]
) -> Columns:
    encoded: dict[str, list[list[int]]] = {}
    for name, length in zip(("inputs", "targets"), lengths, strict=True):
        encoded[name] = tokenizer(columns[name], truncation=True, max_length=length)["input_ids"]
    return encoded


def _pack(columns: Columns, lengths: tuple[int, int], padding: int) -> Columns:
    """Returns padded rows, each with the examples that fit, in order."""
    sides = ("inputs", "targets")
    rows: dict[str, list[NDArray[np.int32]]] = {}
    for name in (*sides, "inputs_segments", "targets_segments"):
        rows[name] = []

    used = list(lengths)  # so that the first example starts a row
    number = 0
    for example in zip(columns["inputs"], columns["targets"], strict=True):
        needed = [tokens + len(part) for tokens, part in zip(used, example, strict=True)]
        if needed[0] > lengths[0] or needed[1] > lengths[1]:
            rows["inputs"].append(np.full(lengths[0], padding, dtype=np.int32))
            rows["targets"].append(np.full(lengths[1], _NOT_A_TARGET, dtype=np.int32))
            for side, length in zip(sides, lengths, strict=True):
                rows[f"{side}_segments"].append(np.zeros(length, dtype=np.int32))
            used = [0, 0]
            number = 0

        # Append the example to the row.
        number += 1
        for index, side in enumerate(sides):
            end = used[index] + len(example[index])
            rows[side][-1][used[index] : end] = example[index]
            rows[f"{side}_segments"][-1][used[index] : end] = number
            used[index] = end
    return rows


def packed_batches(rows: "datasets.Dataset", batch_size: int) -> Iterable[Batch]:
    """Returns the batches of an epoch, in a random order."""
    return _shuffled_batches(rows, batch_size, _stack_rows)


def _stack_rows(examples: Sequence[Mapping[str, Any]]) -> Batch:
    """Returns a batch under the names that a model has for its inputs."""
    names = {
        "input_ids": "inputs",
        "segment_ids": "inputs_segments",
        "labels": "targets",
        "decoder_segment_ids": "targets_segments",
    }
    batch: Batch = {}
    for name, column in names.items():
        rows = np.stack([example[column] for example in examples])
        batch[name] = torch.from_numpy(rows.astype(np.int64))
    return batch


# ---------------------------------------------------------------------------
# Both


def _shuffled_batches(
    rows: "datasets.Dataset",
    batch_size: int,
    collate: Callable[[Sequence[Mapping[str, Any]]], Batch],
) -> Iterable[Batch]:
    """Returns the whole batches of an epoch, in a random order."""
    return DataLoader(
        rows,  # pyright: ignore[reportArgumentType]  it has what a loader asks of a Dataset
        batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(0),
    )
