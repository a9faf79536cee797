"""Pairs of texts as tokens: those that are kept on disk are those that the tokenizer gives."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from moe.data import pairs as module
from moe.data.mixture import MixtureSource
from moe.data.pairs import encode_pairs
from moe.data.tokenizer import load_tokenizer
from tests.data.test_pipeline import same

PAIRS = [(f"the header number {'and ' * (n % 5)}{n}", f"value {n}") for n in range(23)]
LENGTHS = (11, 7)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder in which few texts are kept, too."""
    monkeypatch.setattr(module, "_WORTH_KEEPING", 0)
    return tmp_path / "kept"


def encode(tokenizer, keep_in=None, pairs=PAIRS, lengths=LENGTHS, sentinels="none"):
    examples = encode_pairs(pairs, tokenizer, lengths, sentinels, keep_in)
    return [(inputs.tolist(), targets.tolist()) for inputs, targets in examples]


def files(folder) -> list[Path]:
    return sorted(folder.iterdir())


def refuse(*_):
    raise AssertionError("nothing is to tokenize")


def test_few_texts_are_not_worth_a_file(tokenizer, tmp_path):
    encode(tokenizer, tmp_path)
    assert files(tmp_path) == []


def test_the_next_run_reads_what_the_first_has_tokenized(tokenizer, folder, monkeypatch, caplog):
    expected = encode(tokenizer, sentinels="one")
    assert encode(tokenizer, folder, sentinels="one") == expected
    assert len(files(folder)) == 2

    # Truncated texts are told of in every run.
    monkeypatch.setattr(module, "tokenize_side", refuse)
    caplog.clear()
    assert encode(tokenizer, folder, sentinels="one") == expected
    assert "inputs are longer than 11 tokens and are truncated" in caplog.text
    assert "damaged" not in caplog.text


def test_texts_that_fill_their_row_are_whole_and_not_told_of(tokenizer, caplog):
    whole = encode(tokenizer, lengths=(99, 99))
    longest = [max(map(len, texts)) for texts in zip(*whole, strict=True)]
    assert encode(tokenizer, lengths=tuple(longest)) == whole
    assert "truncated" not in caplog.text


def test_characters_that_the_vocabulary_lacks_are_told_of_in_every_run(tokenizer, folder, caplog):
    pairs = [("the price", f"{number} {sign}") for number, sign in enumerate("€£a€€")]
    for _ in range(2):
        caplog.clear()
        encode(tokenizer, folder, pairs=pairs)
        assert (
            "4 of 5 targets have characters that the vocabulary lacks, such as '€'" in caplog.text
        )
        assert "inputs" not in caplog.text


def test_batches_and_fingerprint_are_those_of_texts_that_are_not_kept(tokenizer, folder):
    settings = {"inputs_length": 61, "targets_length": 29, "batch_size": 5, "seed": 0, "pack": True}
    tasks = {"first": PAIRS[:7], "second": PAIRS[7:]}
    plain = MixtureSource(tasks, tokenizer, **settings)
    for _ in range(2):
        kept = MixtureSource(tasks, tokenizer, **settings, keep_in=folder)
        assert kept.fingerprint == plain.fingerprint
        assert all(same(kept.batch(step), plain.batch(step)) for step in range(3))
    assert len(files(folder)) == 4


def test_a_file_of_32_bit_numbers_is_mapped_and_not_read(tokenizer, folder):
    encode_pairs(PAIRS, tokenizer, LENGTHS, "none", folder)
    examples = encode_pairs(PAIRS, tokenizer, LENGTHS, "none", folder)
    maps = Path("/proc/self/maps").read_text()
    assert all(str(path) in maps for path in files(folder))
    assert all(not inputs.flags.owndata and inputs.dtype == np.int32 for inputs, _ in examples)


def test_other_texts_lengths_sentinels_and_tokenizers_have_files_of_their_own(
    tokenizer, tokenizer_folder, folder
):
    other = load_tokenizer(tokenizer_folder)
    other.split_special_tokens = not tokenizer.split_special_tokens
    swapped = [(targets, inputs) for inputs, targets in PAIRS]
    joined = [("".join(inputs for inputs, _ in PAIRS), "".join(targets for _, targets in PAIRS))]
    marked = [("first <extra_id_7>", "second")]
    changed = [(f"{inputs}a", f"{targets}a") for inputs, targets in PAIRS]
    texts = [PAIRS, PAIRS[1:], swapped, joined, marked, changed]
    cases = [{"pairs": pairs} for pairs in texts]
    cases += [{"lengths": (13, 5)}, {"sentinels": "one"}, {"pairs": marked, "tokenizer": other}]
    for number, case in enumerate(cases, start=1):
        settings = {"tokenizer": tokenizer, **case}
        for _ in range(2):
            assert encode(keep_in=folder, **settings) == encode(**settings)
        assert len(files(folder)) == 2 * number


def test_what_a_call_before_has_set_changes_no_name(tokenizer_folder, folder):
    tokenizer = load_tokenizer(tokenizer_folder)
    expected = encode(tokenizer, folder)
    tokenizer(PAIRS[0][0], truncation=True, max_length=2, padding="max_length")
    assert encode(tokenizer, folder) == expected
    tokenizer("</s>", split_special_tokens=True)
    assert encode(tokenizer, folder) == expected
    assert len(files(folder)) == 2


def test_damaged_files_are_made_anew_with_a_warning(tokenizer, folder, caplog):
    expected = encode(tokenizer, folder)
    path = files(folder)[0]
    whole = path.read_bytes()
    for damage in (b"", whole[:-4], b"no tensor" * 99):
        path.write_bytes(damage)
        caplog.clear()
        assert encode(tokenizer, folder) == expected
        assert f"{path} is damaged" in caplog.text
        assert path.read_bytes() == whole


def test_a_place_that_cannot_be_written_to_and_a_full_disk_keep_nothing(
    tokenizer, folder, monkeypatch
):
    folder.touch()
    assert encode(tokenizer, folder) == encode(tokenizer)
    assert folder.read_bytes() == b""
    folder.unlink()

    def fail(arrays, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moe.data.tokens.save_file", fail)
    assert encode(tokenizer, folder) == encode(tokenizer)
    assert files(folder) == []


def test_of_processes_that_start_together_one_tokenizes(tokenizer, folder, monkeypatch):
    tokenize = module.tokenize_side
    started = threading.Barrier(3)
    calls = []

    def count(texts, tokenizer, side):
        calls.append(side.name)
        return tokenize(texts, tokenizer, side)

    def start(_):
        started.wait()
        return encode(tokenizer, folder)

    # A lock is one of an open file, so that threads exclude each other as processes do.
    monkeypatch.setattr(module, "tokenize_side", count)
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(start, range(3)))
    assert sorted(calls) == ["inputs", "targets"]
    assert results == [encode(tokenizer)] * 3
    assert len(files(folder)) == 2
