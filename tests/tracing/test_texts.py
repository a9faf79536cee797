"""Texts to trace: files, a corpus."""

import pytest

from moe.commands import build_corpus
from moe.errors import DataError
from moe.tracing.texts import corpus_texts, file_texts
from tests.training.tiny_run import write_texts


def test_every_file_and_every_line_is_a_document_of_its_kind(tmp_path):
    (tmp_path / "news.txt").write_text("It rains.\n")
    (tmp_path / "two.jsonl").write_text('{"text": "One line."}\n{"text": "Another."}\n')
    read = file_texts([f"{tmp_path}/news.txt", f"lines={tmp_path}/two.jsonl"])
    assert [text.text for text in read] == ["It rains.", "One line.", "Another."]
    assert [text.domain for text in read] == ["news", "lines", "lines"]
    assert [text.document for text in read] == [0, 1, 2]


def test_the_texts_of_a_corpus_are_held_out(tmp_path):
    corpus = tmp_path / "corpus"
    argv = ["--data", str(write_texts(tmp_path / "texts", 7)), "--out", str(corpus)]
    build_corpus.main([*argv, "--held-out", "0.5"])

    assert 0 < len(corpus_texts(corpus)) < 7
    with pytest.raises(DataError, match="no corpus is not a corpus"):
        corpus_texts(tmp_path / "no corpus")
