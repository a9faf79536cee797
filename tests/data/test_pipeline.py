"""Batches by step. Oracles: undoing the corruption; counting which text stands where; asking in
another order.
"""

from itertools import chain

import datasets
import numpy as np
import pytest
import torch

from moe.data.pipeline import PairSource, ShortExamplesFirst, SpanCorruptionSource, stack_rows
from moe.data.span_corruption import Noise
from moe.data.tokenizer import SpecialIds
from moe.data.tokens import tokenize_corpus
from moe.errors import ConfigError, DataError
from tests.data.test_span_corruption import splice

IDS = SpecialIds(pad=0, eos=1, first_sentinel=999, num_sentinels=31)
LENGTH = 34  # 32 inputs and 8 targets
NUM_CHUNKS = 11


def text(num_tokens: int = NUM_CHUNKS * LENGTH + 13) -> np.ndarray:
    return (np.arange(num_tokens, dtype=np.int32) % 887) + 2


def source(**changes) -> SpanCorruptionSource:
    settings = {"inputs_length": 32, "batch_size": 5, "seed": 3, **changes}
    return SpanCorruptionSource(text(), IDS, **settings)


def restored(batch) -> list[list[int]]:
    rows = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
    return [splice(inputs, targets) for inputs, targets in rows]


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_every_epoch_has_each_chunk_of_the_text_once_corrupted_anew():
    chunks = text()[: NUM_CHUNKS * LENGTH].reshape(NUM_CHUNKS, LENGTH).tolist()
    batches = [source(batch_size=NUM_CHUNKS).batch(epoch) for epoch in range(3)]
    epochs = [restored(batch) for batch in batches]
    assert [sorted(epoch) for epoch in epochs] == [sorted(chunks)] * 3
    assert epochs[0] != epochs[1] != epochs[2] != chunks

    first, second = (
        sorted(zip(epoch, batch["labels"].tolist(), strict=True))
        for epoch, batch in zip(epochs[:2], batches[:2], strict=True)
    )
    changed = [one != other for (_, one), (_, other) in zip(first, second, strict=True)]
    assert sum(changed) > NUM_CHUNKS // 2
    masks = [source(batch_size=NUM_CHUNKS).masked_text(epoch)[1] for epoch in range(2)]
    assert (masks[0] != masks[1]).any()


def test_a_batch_depends_on_the_step_alone():
    straight = source()
    batches = [straight.batch(step) for step in range(7)]
    assert (batches[0]["input_ids"].shape, batches[0]["labels"].shape) == ((5, 32), (5, 8))
    resumed = source()
    assert all(same(resumed.batch(step), batches[step]) for step in (6, 2, 2, 0, 5))
    assert not same(source(seed=4).batch(0), batches[0])


def test_the_examples_do_not_depend_on_how_they_are_cut_into_batches():
    small, large = source(batch_size=3), source(batch_size=6)
    for step in range(5):
        halves = [small.batch(2 * step), small.batch(2 * step + 1)]
        joined = {name: torch.cat([half[name] for half in halves]) for name in halves[0]}
        assert same(joined, large.batch(step))


def test_the_fingerprint_tells_settings_and_texts_apart():
    fingerprints = [source().fingerprint, source().fingerprint]
    for noise in (Noise(0.2), Noise(0.15, 2.0)):
        fingerprints.append(source(noise=noise).fingerprint)
    for changes in ({"seed": 4}, {"batch_size": 7}, {"inputs_length": 31}):
        fingerprints.append(source(**changes).fingerprint)
    changed = text()
    changed[7] += 1
    settings = {"inputs_length": 32, "batch_size": 5, "seed": 3}
    fingerprints.append(SpanCorruptionSource(changed, IDS, **settings).fingerprint)
    fingerprints += [short_first().fingerprint, short_first(steps=3).fingerprint]
    assert len(set(fingerprints)) == len(fingerprints) - 1 == 9


def short_first(steps: int = 2) -> ShortExamplesFirst:
    """Two short examples of 9 inputs and 3 targets in a row for the first steps."""
    return ShortExamplesFirst(source(), 9, steps)


def test_rows_hold_several_short_examples_for_the_first_steps():
    short = source(inputs_length=9, batch_size=10)
    for step in range(2):
        batch = short_first().batch(step)
        assert batch["input_ids"].shape == batch["segment_ids"].shape == (5, 32)
        assert batch["labels"].shape == batch["decoder_segment_ids"].shape == (5, 8)

        # A segment is an example, and padding belongs to none.
        expected = short.batch(step)
        sides = {"input_ids": ("segment_ids", 0), "labels": ("decoder_segment_ids", -100)}
        for name, (segments, padding) in sides.items():
            for index, example in enumerate(expected[name]):
                row, number = divmod(index, 2)
                assert torch.equal(batch[name][row][batch[segments][row] == number + 1], example)
            assert (batch[name][batch[segments] == 0] == padding).all()

    assert all(same(short_first().batch(step), source().batch(step)) for step in (2, 3))


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_rank_makes_its_own_rows_of_short_examples(step):
    whole = short_first().batch(step)
    for rows in (slice(0, 2), slice(2, 5), slice(3, None)):
        part = short_first().batch(step, rows)
        assert same(part, {name: tensor[rows] for name, tensor in whole.items()})


def test_as_many_short_examples_are_in_a_row_as_fit_on_both_sides():
    assert source().lengths == (32, 8)
    assert source().shorter(9).batch_size == 2 * 5

    # The guide's: half of the row's inputs stay padding, since only two fit into its targets.
    long = source(inputs_length=64)
    assert long.lengths == (64, 14)
    assert long.shorter(16).lengths == (16, 5)
    assert long.shorter(16).batch_size == 2 * 5
    with pytest.raises(ConfigError, match="short_inputs_length is 17"):
        source().shorter(17)


def test_a_text_shorter_than_an_example_and_no_pairs_are_refused(tokenizer):
    with pytest.raises(DataError, match=f"has 33 tokens, less than one example of {LENGTH}"):
        SpanCorruptionSource(text(33), IDS, inputs_length=32, batch_size=5, seed=3)
    with pytest.raises(DataError, match="There are no training pairs"):
        pair_source(tokenizer, [])


class RecordedText:
    """Tokens that remember whether they were read; their number is known without that."""

    def __init__(self, length):
        self.length = length
        self.is_read = False

    def __len__(self):
        return self.length

    def __array__(self, dtype=None, copy=None):
        self.is_read = True
        return np.arange(self.length, dtype=dtype)


@pytest.mark.parametrize("lengths", [None, (31, 29)])
def test_a_rank_reads_the_texts_of_its_rows_alone(lengths):
    rows = []
    for row in range(7):
        rows.append([(RecordedText(3 * row + 1), RecordedText(row + 2)) for _ in range(row % 3)])
    asked = []

    def row_at(position):
        asked.append(position)
        return rows[position]

    stack_rows(row_at, range(7), lengths, 0, slice(2, 5))
    for number, row in enumerate(rows):
        is_own = number in (2, 3, 4)
        assert all(side.is_read == is_own for example in row for side in example)

    # Only a length that is that of the longest row needs to know of others.
    assert asked == ([2, 3, 4] if lengths else list(range(7)))


def test_documents_are_joined_without_anything_between_them(tokenizer, english):
    documents = [*english[:17], "this is </s> text and so is <extra_id_3>"]
    tokens = tokenize_corpus(datasets.Dataset.from_dict({"text": documents}), tokenizer)
    joined = []
    for document in documents[:-1]:
        joined += tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
    assert tokens.dtype == np.int32
    assert tokens[: len(joined)].tolist() == joined
    assert tokens.min() > 1 and tokens.max() < SpecialIds.of(tokenizer).first_sentinel - 99
    settings = {"inputs_length": 32, "batch_size": 2, "seed": 0}
    SpanCorruptionSource(tokens, SpecialIds.of(tokenizer), **settings).batch(0)
    with pytest.raises(DataError, match="The corpus has no tokens"):
        tokenize_corpus(datasets.Dataset.from_dict({"text": [" ", ""]}), tokenizer)


PAIRS = [(f"the header number {'and ' * (n % 5)}{n}", f"value {n}") for n in range(23)]


def pair_source(tokenizer, pairs=PAIRS, **changes) -> PairSource:
    settings = {"inputs_length": 61, "targets_length": 29, "batch_size": 4, "seed": 3, **changes}
    return PairSource(pairs, tokenizer, **settings)


def examples_of(batch) -> list[list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Reads the tokens of the examples of each row back from their segments."""
    rows = []
    for row, segments in enumerate(batch["segment_ids"]):
        examples = []
        for number in range(1, int(segments.max()) + 1):
            inputs = batch["input_ids"][row][segments == number]
            targets = batch["labels"][row][batch["decoder_segment_ids"][row] == number]
            assert inputs[-1] == targets[-1] == 1
            examples.append((tuple(inputs.tolist()), tuple(targets.tolist())))
        rows.append(examples)
    return rows


def pairs_in(tokenizer, batch) -> list[tuple[str, ...]]:
    """Returns the texts of all examples of a batch, without end tokens."""
    examples = chain.from_iterable(examples_of(batch))
    return [tuple(tokenizer.decode(side[:-1]) for side in example) for example in examples]


@pytest.mark.parametrize("pack", [False, True])
def test_every_pair_occurs_once_in_every_epoch(tokenizer, pack):
    pairs = pair_source(tokenizer, pack=pack, batch_size=1)
    for epoch in range(2):
        found = []
        for step in range(epoch * pairs.num_rows, (epoch + 1) * pairs.num_rows):
            found += pairs_in(tokenizer, pairs.batch(step))
        assert sorted(found) == sorted(PAIRS)


@pytest.mark.parametrize("pack", [False, True])
def test_a_batch_of_pairs_depends_on_the_step_alone(tokenizer, pack):
    pairs = pair_source(tokenizer, pack=pack)
    batches = [pairs.batch(step) for step in range(5)]
    for step in (4, 1):
        assert same(pair_source(tokenizer, pack=pack).batch(step), batches[step])
    assert not same(batches[0], batches[1])


def test_padding_goes_to_the_longest_rounded_up_and_is_no_target(tokenizer):
    batch = pair_source(tokenizer).batch(0)
    for name, segments in (("input_ids", "segment_ids"), ("labels", "decoder_segment_ids")):
        longest = int(batch[segments].sum(dim=1).max())
        assert batch[name].shape == batch[segments].shape == (4, -(-longest // 8) * 8)
    assert (batch["input_ids"][batch["segment_ids"] == 0] == 0).all()
    assert (batch["labels"][batch["decoder_segment_ids"] == 0] == -100).all()
    assert (batch["labels"][batch["decoder_segment_ids"] != 0] >= 0).all()


def test_packed_rows_are_full_length_and_fewer_than_the_pairs(tokenizer):
    pairs = pair_source(tokenizer, pack=True)
    batch = pairs.batch(0)
    assert batch["input_ids"].shape == (4, 61)
    assert batch["labels"].shape == (4, 29)
    assert pairs.num_rows < len(PAIRS) == pairs.num_examples


@pytest.mark.parametrize("pack", [False, True])
def test_a_sentinel_ends_every_input_and_begins_every_target(tokenizer, pack):
    settings = {"pack": pack, "batch_size": 23}
    marked = pair_source(tokenizer, sentinels="one", **settings)
    plain = pair_source(tokenizer, sentinels="none", **settings)
    assert marked.fingerprint != plain.fingerprint

    found = set()
    for one, other in pairs_in(tokenizer, marked.batch(0)):
        assert one.endswith("<extra_id_0>") and other.startswith("<extra_id_0>")
        found.add(tuple(text.replace("<extra_id_0>", "").strip() for text in (one, other)))
    assert found == set(PAIRS)


def test_a_long_text_is_cut_before_its_sentinel(tokenizer):
    pairs = [("the " * 50, "and " * 50)]
    settings = {"inputs_length": 7, "targets_length": 5, "batch_size": 1, "sentinels": "one"}
    batch = pair_source(tokenizer, pairs, **settings).batch(0)
    first = SpecialIds.of(tokenizer).first_sentinel
    the = tokenizer("the the the and and and")["input_ids"]
    assert batch["input_ids"][0][:7].tolist() == [*[the[0]] * 5, first, 1]
    assert batch["labels"][0][:5].tolist() == [first, *[the[3]] * 3, 1]


def test_the_fingerprint_of_pairs_tells_data_and_settings_apart(tokenizer):
    fingerprint = pair_source(tokenizer).fingerprint
    assert fingerprint == pair_source(tokenizer).fingerprint
    others = [{"pairs": PAIRS[1:]}, {"seed": 4}, {"batch_size": 5}, {"pack": True}]
    others.append({"inputs_length": 59})
    found = {pair_source(tokenizer, **other).fingerprint for other in others}
    assert len({fingerprint, *found}) == 6
