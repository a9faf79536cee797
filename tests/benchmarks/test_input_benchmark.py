"""The benchmark of input at a tiny size. What the peer makes is checked by undoing it, as ours is:
a race against a reader that does less would say nothing.
"""

import json

import datasets
import numpy as np
import pytest

from benchmarks.data.batches import OURS, PEER, READERS, InputBenchmark, InputCase, run_input
from benchmarks.data.batches_peer import T5Collator, packed_batches, prepare_rows
from moe.data.pipeline import PairSource
from moe.data.span_corruption import Noise, corrupted_lengths
from moe.data.tokenizer import SpecialIds, train_tokenizer
from tests.data.test_mixture import examples_of
from tests.data.test_span_corruption import splice

TINY = InputCase(
    num_documents=19,
    document_words=(11, 37),
    num_pairs=(31, 7),
    pair_words=(3, 17),
    lengths=(128, 64),
    inputs_length=64,
    batch_size=3,
    num_batches=2,
)
IDS = SpecialIds(pad=0, eos=1, first_sentinel=999, num_sentinels=31)
PAIRS = [(f"the header number {'and ' * (n % 5)}{n}", f"value {n}") for n in range(23)]


@pytest.mark.slow
def test_the_table_has_a_row_for_every_stage_and_reader(tmp_path, capsys):
    path = tmp_path / "input.json"
    run_input(InputBenchmark(rounds=1, json=path, case=TINY))
    assert "times as fast" in capsys.readouterr().out

    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    stages = ("prepare", "prepare again", "batches")
    named = {(row["data"], row["stage"], row["system"]) for row in rows}
    expected = {
        (data, stage, system) for data in READERS for stage in stages for system in (OURS, PEER)
    }
    assert named == expected
    for row in rows:
        assert row["cpu_seconds"] > 0
        assert ("tokens_per_core_second" in row) == (row["stage"] == "batches")
        if row["system"] == PEER:
            assert row["times_as_fast"] == 1


def test_the_peers_spans_are_t5s_and_hide_every_token_once():
    length = 173
    chunks = np.random.default_rng(0).integers(2, 900, (5, length))
    batch = T5Collator(IDS, Noise(), seed=0)([{"input_ids": chunk} for chunk in chunks])

    inputs_length, targets_length = corrupted_lengths(length, Noise())
    assert batch["input_ids"].shape == (5, inputs_length)
    assert batch["labels"].shape == (5, targets_length)
    for row, chunk in enumerate(chunks.tolist()):
        sides = (batch["input_ids"][row].tolist(), batch["labels"][row].tolist())
        assert splice(*sides) == chunk


def test_the_peers_packed_rows_hold_the_examples_that_ours_hold(tmp_path):
    words = [word for pair in PAIRS for word in pair]
    tokenizer = train_tokenizer(words, 128, tmp_path / "tokenizer")
    columns = {"inputs": [pair[0] for pair in PAIRS], "targets": [pair[1] for pair in PAIRS]}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "pairs")
    pairs = datasets.load_from_disk(tmp_path / "pairs")

    lengths = (97, 61)
    rows = prepare_rows({"pairs": pairs}, tokenizer, lengths, {"pairs": 1.0}, keep=False)
    [batch] = packed_batches(rows, len(rows))
    ours = PairSource(
        PAIRS,
        tokenizer,
        inputs_length=lengths[0],
        targets_length=lengths[1],
        batch_size=1,
        seed=0,
        pack=True,
    )
    epoch = [examples_of(ours.batch(step))[0] for step in range(ours.num_rows)]

    assert batch["input_ids"].shape == (len(rows), lengths[0])
    assert _sorted(examples_of(batch)) == _sorted(epoch)
    assert 1 < len(rows) < len(PAIRS)


def _sorted(rows):
    examples = [example for row in rows for example in row]
    return sorted(examples)
