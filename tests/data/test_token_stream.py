"""A text that is streamed in blocks gives the tokens of the same text in memory, in whatever order it is read."""

import json
from itertools import chain, count, takewhile
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from moe import DataError
from moe.data import blocks as blocks_module
from moe.data import token_stream
from moe.data.batches_ahead import batches_ahead
from moe.data.blocks import open_blocks, stream_blocks
from moe.data.chunks import MixedText, WholeText
from moe.data.pipeline import SpanCorruptionSource
from moe.data.token_stream import TokenStream
from moe.data.tokenizer import SpecialIds
from tests.data.test_pipeline import same
from tests.data.test_rows import write

NUM_ROWS = 131
NUM_WORDS = 900
ROWS = [
    {"text": " ".join(f"w{(7 * row + word) % NUM_WORDS}" for word in range(row % 13))}
    for row in range(NUM_ROWS)
]


@pytest.fixture(scope="module")
def tokenizer():
    words = ["<pad>", "</s>", *(f"w{number}" for number in range(NUM_WORDS))]
    words += [f"<extra_id_{number}>" for number in reversed(range(50))]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")


def write_source(folder: Path, kind: str) -> Path:
    """Writes the rows as one kind of source."""
    match kind:
        case "files.parquet":
            folder.mkdir()
            for number, start in enumerate((0, 50, 50)):
                stop = (50, 50, NUM_ROWS)[number]
                table = pyarrow.Table.from_pylist(
                    ROWS[start:stop], pyarrow.schema({"text": "string"})
                )
                pyarrow.parquet.write_table(table, folder / f"{number}.parquet", row_group_size=17)
            return folder
        case "files.jsonl":
            folder.mkdir()
            for number, rows in enumerate((ROWS[:40], ROWS[40:])):
                write(folder / f"{number}.jsonl", rows)
            return folder
        case "mixed":
            folder.mkdir()
            write(folder / "0.csv", ROWS[:40])
            write(folder / "1.parquet", ROWS[40:-1])
            (folder / "2.txt").write_text(ROWS[-1]["text"])
            return folder
        case "splits":
            rows = datasets.Dataset.from_list(ROWS)
            datasets.DatasetDict({"some": rows.select(range(9)), "all": rows}).save_to_disk(folder)
            return Path(f"{folder}:all")
    return write(folder.with_name(kind), ROWS)


KINDS = ("a.parquet", "files.parquet", "files.jsonl", "a.csv", "saved", "splits", "mixed")


def stream_of(source, tokenizer, folder: Path) -> TokenStream:
    blocks = open_blocks(source, "text") if isinstance(source, Path) else source
    return TokenStream(blocks, tokenizer, folder, column="text")


def expected_tokens(tokenizer) -> list[int]:
    return tokenizer(" ".join(row["text"] for row in ROWS), add_special_tokens=False)["input_ids"]


def blocks_of(stream: TokenStream) -> list[int]:
    if stream.shards is None:
        windows = (stream.window(0, 0, number) for number in count())
        return [0, *chain.from_iterable(takewhile(bool, windows))]
    return [block for shard in stream.shards for block in shard]


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 10 rows also where the number of rows is not known, and windows of 4 blocks."""
    monkeypatch.setattr(blocks_module, "BLOCK_ROWS", 10)
    monkeypatch.setattr(token_stream, "BLOCK_ROWS", 10)
    monkeypatch.setattr(token_stream, "SHUFFLE_ROWS", 40)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", KINDS)
def test_the_blocks_of_every_kind_of_source_hold_its_tokens_once(tmp_path, tokenizer, kind):
    source = write_source(tmp_path / "source", kind)
    stream = stream_of(source, tokenizer, tmp_path / "cache")
    blocks = blocks_of(stream)
    assert len(blocks) >= 10

    # In any order of the blocks, by another process that has nothing in memory.
    for order in (blocks, blocks[::-1], sorted(blocks, key=lambda block: block * 7 % 11)):
        again = stream_of(source, tokenizer, tmp_path / repr(order)[:40])
        tokens = {block: again.tokens(block) for block in order}
        whole = np.concatenate([tokens[block] for block in blocks]).tolist()
        assert whole == expected_tokens(tokenizer)


@pytest.mark.usefixtures("small_blocks")
def test_a_stream_of_datasets_holds_the_rows_of_its_table(tmp_path, tokenizer):
    file = write(tmp_path / "a.parquet", ROWS)
    dataset = datasets.load_dataset(
        "parquet",
        data_files=str(file),
        split="train",
        streaming=True,
        cache_dir=str(tmp_path / "hf"),
    )
    stream = stream_of(stream_blocks(dataset, "a", "text"), tokenizer, tmp_path / "cache")
    whole = [stream.tokens(block) for block in blocks_of(stream)]
    assert np.concatenate(whole).tolist() == expected_tokens(tokenizer)
    assert stream.window(0, 0, 9) == []


LENGTH = 17
SETTINGS = {"inputs_length": 16, "batch_size": 5, "seed": 3}


def source_of(stream, tokenizer) -> SpanCorruptionSource:
    return SpanCorruptionSource(stream, SpecialIds.of(tokenizer), **SETTINGS)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", ["a.parquet", "a.jsonl", "a.csv"])
def test_every_epoch_has_each_chunk_of_every_block_once_in_another_order(tmp_path, tokenizer, kind):
    source = write_source(tmp_path / "source", kind)
    stream = stream_of(source, tokenizer, tmp_path / "cache")
    expected = []
    for block in blocks_of(stream)[1:]:
        tokens = stream.tokens(block)
        whole = tokens[: len(tokens) // LENGTH * LENGTH]
        expected += whole.reshape(-1, LENGTH).tolist()

    chunks = stream.chunks(LENGTH, 3)
    size = len(expected)
    epochs = [[chunks.at(e * size + i).tolist() for i in range(size)] for e in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(expected)] * 3
    assert epochs[0] != epochs[1] != epochs[2] != expected
    held_out = set(stream.held_out().tolist())
    assert held_out


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", ["files.parquet", "a.jsonl", "a.csv"])
def test_a_batch_depends_on_the_step_alone(tmp_path, tokenizer, kind):
    """Another order of steps, other rows, workers, and a run that resumes with or without tokens on disk."""
    path = write_source(tmp_path / "source", kind)
    source = source_of(stream_of(path, tokenizer, tmp_path / "cache"), tokenizer)
    batches = [source.batch(step) for step in range(24)]

    for cache in ("cache", "empty"):
        resumed = source_of(stream_of(path, tokenizer, tmp_path / cache), tokenizer)
        assert same(resumed.batch(23), batches[23])
        assert same(resumed.batch(2), batches[2])
        assert resumed.fingerprint == source.fingerprint
        part = resumed.batch(11, slice(3, 5))
        assert torch.equal(part["labels"], batches[11]["labels"][3:5])

    fresh = source_of(stream_of(path, tokenizer, tmp_path / "third"), tokenizer)
    for step, batch in enumerate(batches_ahead(fresh, slice(None), range(24), workers=2)):
        assert same(batch, batches[step])


def test_a_file_that_is_written_again_gives_its_new_tokens(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", ROWS)
    before = stream_of(path, tokenizer, tmp_path / "cache").tokens(5).tolist()
    write(tmp_path / "a.jsonl", [{"text": row["text"].replace("w2", "w3")} for row in ROWS])
    assert stream_of(path, tokenizer, tmp_path / "cache").tokens(5).tolist() != before


@pytest.mark.parametrize("line", ["[1]", '{"text": 7}', '{"Text": ""}', '{"text": "\\ud800"}'])
def test_a_bad_row_is_named_by_file_and_line(tmp_path, tokenizer, line):
    rows = [json.dumps(row) for row in ROWS]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*rows[:77], line, *rows[77:], ""]))
    stream = stream_of(path, tokenizer, tmp_path / "cache")
    with pytest.raises(DataError, match="line 78: "):
        stream.prepare(blocks_of(stream))


@pytest.mark.usefixtures("small_blocks")
def test_a_bad_row_of_parquet_is_named_too(tmp_path, tokenizer):
    path = tmp_path / "a.parquet"
    texts = [row["text"] for row in ROWS]
    pyarrow.parquet.write_table(pyarrow.table({"text": [*texts[:60], None, *texts[60:]]}), path)
    stream = stream_of(path, tokenizer, tmp_path / "refused")
    with pytest.raises(DataError, match="row 61"):
        stream.prepare(blocks_of(stream))


def test_a_text_without_an_example_is_refused(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"text": "w1"}] * 60)
    with pytest.raises(DataError, match="gives a training example"):
        stream_of(path, tokenizer, tmp_path).chunks(LENGTH, 0).at(0)
    one = write(tmp_path / "one.csv", [{"text": "w1"}] * 3)
    with pytest.raises(DataError, match="512 rows"):
        stream_of(one, tokenizer, tmp_path).held_out()


def test_texts_are_mixed_by_their_rates(tmp_path, tokenizer):
    path = write_source(tmp_path / "source", "a.parquet")
    stream = stream_of(path, tokenizer, tmp_path / "cache")
    whole = WholeText(np.full(40 * LENGTH, 5, dtype=np.int32))
    chunks = MixedText([whole, stream], [1.0, 3.0]).chunks(LENGTH, 0)
    drawn = [chunks.at(position) for position in range(4096)]
    is_whole = [bool((chunk == 5).all()) for chunk in drawn]
    assert sum(is_whole) == 1024

    # Each text continues in its own order.
    alone = stream.chunks(LENGTH, 0)
    streamed = [chunk.tolist() for chunk, whole in zip(drawn, is_whole, strict=True) if not whole]
    assert streamed[:200] == [alone.at(position).tolist() for position in range(200)]
    assert (
        chunks.at(5000) == MixedText([whole, stream], [1.0, 3.0]).chunks(LENGTH, 0).at(5000)
    ).all()


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_file_that_shrinks_while_it_is_streamed_is_refused(tmp_path, tokenizer, name):
    path = write(tmp_path / name, ROWS)
    stream = stream_of(path, tokenizer, tmp_path / "cache")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2].rpartition(b"\n")[0] + b"\n")
    with pytest.raises(DataError, match="is smaller than"):
        stream.prepare(blocks_of(stream))
