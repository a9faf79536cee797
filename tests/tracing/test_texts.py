"""Texts to trace: files, a corpus, the language reference."""

import pytest

from moe.commands import build_corpus
from moe.errors import DataError
from moe.tracing import texts
from moe.tracing.texts import REFERENCE, corpus_texts, file_texts, find_texts, reference_texts
from tests.training.tiny_run import write_texts


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "news.txt").write_text("It rains.\n")
    (tmp_path / "two.jsonl").write_text('{"text": "One line."}\n{"text": "Another."}\n')
    return tmp_path


def test_every_file_and_every_line_is_a_document_of_its_kind(folder):
    read = file_texts([f"{folder}/news.txt", f"lines={folder}/two.jsonl"])
    assert [text.text for text in read] == ["It rains.", "One line.", "Another."]
    assert [text.domain for text in read] == ["news", "lines", "lines"]
    assert [text.document for text in read] == [0, 1, 2]


def test_files_come_before_the_corpus_and_the_corpus_before_the_reference(folder, tmp_path):
    corpus = tmp_path / "corpus"
    missing = tmp_path / "no corpus"
    argv = ["--data", str(write_texts(tmp_path / "texts", 7)), "--out", str(corpus)]
    build_corpus.main([*argv, "--held-out", "0.5"])

    held_out = corpus_texts(corpus)
    assert held_out
    assert find_texts([], corpus) == held_out
    assert [text.text for text in find_texts([f"{folder}/news.txt"], corpus)] == ["It rains."]
    assert find_texts([], missing) == reference_texts()


def test_the_reference_has_a_document_for_each_topic_and_no_empty_one():
    read = reference_texts()
    assert len(read) > 50
    assert {text.domain for text in read} == {REFERENCE}
    assert [text.document for text in read] == list(range(len(read)))
    assert all(text.text for text in read)


def test_a_python_without_its_reference_is_told(monkeypatch):
    monkeypatch.setattr(texts, "topic_documents", list)
    with pytest.raises(
        DataError, match=r"does not include its language reference\. Give text files"
    ):
        reference_texts()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.txt"):
        file_texts([f"mine={tmp_path}/none.txt"])
