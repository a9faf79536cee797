"""Corpora, pairs and tokenizers that are damaged, or no text: one error that names the file, or
documents.
"""

import json
import os
import resource
import shutil

import pytest

from moe.data.corpus import build_corpus, corpus_rows, load_corpus, save_corpus
from moe.data.documents import Document, read_files
from moe.data.tokenizer import load_tokenizer, train_tokenizer
from moe.errors import DataError
from tests.data.conftest import VOCAB_SIZE


def documents(count=13):
    return [Document(f"Text {n}.\n\nMore {n}.", f"file{n}.py", "own", "MIT") for n in range(count)]


def test_names_that_are_no_text_are_escaped_and_last(tmp_path):
    folder = tmp_path / os.fsdecode(b"f\xff|")
    folder.mkdir()
    for number, name in enumerate([b"\xff.txt", b"a b.txt", "é.md".encode()]):
        (folder / os.fsdecode(name)).write_text(f"Number {number}.")
    save_corpus(build_corpus(read_files([folder])), tmp_path / "corpus")
    corpus = load_corpus(tmp_path / "corpus")
    assert {*corpus.train["source"], *corpus.held_out["source"]} == {
        "f\\udcff|/\\udcff.txt",
        "f\\udcff|/a b.txt",
        "f\\udcff|/é.md",
    }
    assert len(corpus_rows(corpus)) == 2


def test_what_is_no_file_is_named_and_links_do_not_turn_in_a_circle(tmp_path, caplog):
    folder = tmp_path / "mine"
    (folder / "folder.jsonl").mkdir(parents=True)
    (folder / "folder.jsonl" / "a.txt").write_text("One.")
    (folder / "circle").symlink_to(folder)
    assert [document.source for document in read_files([folder])] == ["mine/folder.jsonl/a.txt"]
    assert "links to folders are not followed" in caplog.text

    for name, target in (("b.txt", "b.txt"), ("c.txt", "nothing")):
        (folder / name).symlink_to(target)
        with pytest.raises(DataError, match=rf"{name} cannot be read"):
            read_files([folder])
        (folder / name).unlink()


def test_a_corpus_without_checksums_loads_or_names_the_file(tmp_path):
    save_corpus(build_corpus(documents()), tmp_path / "corpus")
    (tmp_path / "corpus" / "SHA256SUMS").unlink()
    assert load_corpus(tmp_path / "corpus").train.num_rows > 0

    arrow = "train/data-00000-of-00001.arrow"
    (tmp_path / "corpus" / arrow).write_bytes(b"")
    with pytest.raises(DataError, match="train is damaged"):
        load_corpus(tmp_path / "corpus")


def test_a_tokenizer_of_other_content_is_one_error_and_one_without_checksums_is_read(
    tmp_path, tokenizer_folder
):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    (folder / "SHA256SUMS").unlink()
    content = {"model": {"type": "Unigram", "unk_id": 9, "vocab": []}}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(folder)

    # One that a user saves to a model's folder is no damage.
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "SHA256SUMS").write_text("0" * 64 + "  config.json\n")
    load_tokenizer(tokenizer_folder).save_pretrained(tmp_path)
    assert len(load_tokenizer(tmp_path)) == VOCAB_SIZE


def test_a_full_disk_leaves_what_was_there_and_is_an_error_of_the_system(tmp_path, english):
    train_tokenizer(english[:50], 200, tmp_path / "tokenizer")
    save_corpus(build_corpus(documents()), tmp_path / "corpus")
    before = (tmp_path / "tokenizer/tokenizer.json").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    many = build_corpus(documents(301))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
    try:
        with pytest.raises(Exception, match="File too large"):  # tokenizers has no class for it
            train_tokenizer(english[:50], 300, tmp_path / "tokenizer")
        with pytest.raises(OSError, match=r"File too large|write"):
            save_corpus(many, tmp_path / "corpus")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "tokenizer/tokenizer.json").read_bytes() == before
    assert load_corpus(tmp_path / "corpus").train.num_rows < 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "tokenizer"]
