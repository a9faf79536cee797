"""Pairs that are streamed are the pairs in memory, whatever was read before."""

import gzip
from collections import Counter
from typing import Any

import pytest
import torch

from moe import DataError
from moe.data.block_stream import HELD_OUT_BLOCK
from moe.data.blocks import open_blocks
from moe.data.pair_files import read_pairs
from moe.data.pair_stream import PairStream, StreamedPairSource
from moe.data.pairs import Sentinels, encode_pairs
from tests.data.test_rows import write
from tests.data.test_token_stream import tokenizer as tokenizer  # a fixture

NUM_PAIRS = 97
ROWS = [
    {
        "question": " ".join(f"w{row + word}" for word in range(row % 7)),
        "answer": f"w{row}",
        "n": row,
    }
    for row in range(NUM_PAIRS)
]
COLUMNS = {"inputs": "question", "targets": "answer"}
LENGTHS = (6, 4)  # some inputs are truncated


def stream_of(path, tokenizer, folder, sentinels: Sentinels = "none") -> PairStream:
    return PairStream(
        open_blocks(path, list(COLUMNS.values())),
        tokenizer,
        folder,
        columns=COLUMNS,
        lengths=LENGTHS,
        sentinels=sentinels,
    )


def source_of(stream, **changes) -> StreamedPairSource:
    settings = {"inputs_length": 12, "targets_length": 8, "batch_size": 3, "seed": 1, **changes}
    return StreamedPairSource(stream, **settings)


def examples_in(batch: dict[str, Any]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns the examples of a batch without padding."""
    examples = []
    for row in range(len(batch["input_ids"])):
        for segment in range(1, int(batch["segment_ids"][row].max()) + 1):
            inputs = batch["input_ids"][row][batch["segment_ids"][row] == segment]
            targets = batch["labels"][row][batch["decoder_segment_ids"][row] == segment]
            examples.append((tuple(inputs.tolist()), tuple(targets.tolist())))
    return examples


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("sentinels", ["none", "one"])
def test_every_epoch_has_each_pair_once_but_those_that_are_held_out(
    tmp_path, tokenizer, pack, sentinels
):
    path = write(tmp_path / "a.parquet", ROWS)
    stream = stream_of(path, tokenizer, tmp_path / "cache", sentinels)
    held_out = stream.held_out()
    assert held_out == read_pairs(path, COLUMNS)[: stream.num_pairs(HELD_OUT_BLOCK)]
    texts = [(row["question"], row["answer"]) for row in ROWS[len(held_out) :]]
    expected = Counter(
        (tuple(inputs.tolist()), tuple(targets.tolist()))
        for inputs, targets in encode_pairs(texts, tokenizer, LENGTHS, sentinels)
    )

    # Rows of one batch after the other, until two epochs have passed.
    source = source_of(stream, pack=pack)
    drawn: list[Any] = []
    step = 0
    while len(drawn) < 2 * len(texts):
        drawn += examples_in(source.batch(step))
        step += 1
    assert Counter(drawn[: len(texts)]) == expected
    assert Counter(drawn[len(texts) : 2 * len(texts)]) == expected
    assert drawn[: len(texts)] != drawn[len(texts) : 2 * len(texts)]


@pytest.mark.parametrize("pack", [False, True])
def test_a_batch_depends_on_the_step_alone(tmp_path, tokenizer, pack):
    path = write(tmp_path / "a.jsonl", ROWS)
    source = source_of(stream_of(path, tokenizer, tmp_path / "cache"), pack=pack)
    batches = [source.batch(step) for step in range(50)]
    for cache in ("cache", "empty"):
        again = source_of(stream_of(path, tokenizer, tmp_path / cache), pack=pack)
        for step in (49, 3, 17):
            batch = again.batch(step)
            assert all(torch.equal(batch[name], batches[step][name]) for name in batch)
            part = again.batch(step, slice(1, 2))
            assert all(torch.equal(part[name], batches[step][name][1:2]) for name in part)
        assert again.fingerprint == source.fingerprint


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.jsonl.gz"])
def test_a_row_that_is_not_utf8_is_named_in_a_stream_and_in_memory(tmp_path, tokenizer, name):
    rows = [{**row, "n": "0"} for row in ROWS]
    rows[50:50] = [{"question": "w1", "answer": "BAD", "n": "0"}]
    path = tmp_path / name
    plain = write(path.with_suffix("") if path.suffix == ".gz" else path, rows)
    content = plain.read_bytes().replace(b"BAD", b"caf\xe9")
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)

    message = r"line 5[12] is not UTF-8: byte 0xe9"
    with pytest.raises(DataError, match=message):
        read_pairs(path, COLUMNS)
    with pytest.raises(DataError, match=message):
        stream = stream_of(path, tokenizer, tmp_path / "cache")
        stream.prepare([block for shard in stream.shards or [range(1)] for block in shard])


def test_a_missing_text_is_named_in_a_stream_and_in_memory(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [*ROWS[:50], {"question": "w1", "answer": None}, *ROWS])
    with pytest.raises(DataError, match="line 51: answer is None"):
        read_pairs(path, COLUMNS)
    with pytest.raises(DataError, match="line 51: answer is None"):
        source_of(stream_of(path, tokenizer, tmp_path / "cache")).batch(40)


def test_a_missing_column_is_named(tmp_path, tokenizer):
    path = write(tmp_path / "a.parquet", [{"question": "w1", "n": 1}])
    with pytest.raises(DataError, match="no column 'answer'; it has question, n"):
        stream_of(path, tokenizer, tmp_path)
