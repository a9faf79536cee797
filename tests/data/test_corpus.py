"""The corpus and its folder. Oracle: set arithmetic on documents written by the test."""

import datasets
import pytest

import stmoe
from moe.data.corpus import build_corpus, corpus_rows, load_corpus, save_corpus
from moe.data.documents import Document
from moe.data.tokenizer import load_tokenizer
from moe.data.tokens import tokenize_corpus
from moe.errors import ConfigError, DataError

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six"]


def documents(count: int = 211) -> list[Document]:
    return [
        Document(f"Text {n}.\n\nMore {n}.", f"file{n}.py", "own" if n % 3 else "other", "MIT")
        for n in range(count)
    ]


def sources(dataset: datasets.Dataset) -> set[str]:
    return set(dataset["source"])


def test_every_document_is_on_exactly_one_side_in_about_the_right_share():
    corpus = build_corpus(documents(), held_out_fraction=0.1, seed=5)
    everything = {document.source for document in documents()}
    assert sources(corpus.train) | sources(corpus.held_out) == everything
    assert not sources(corpus.train) & sources(corpus.held_out)
    assert 0.04 < corpus.held_out.num_rows / 211 < 0.17

    # Neither side is ever empty.
    for fraction in (1e-9, 1 - 1e-9):
        corpus = build_corpus(documents(2), fraction)
        assert (corpus.train.num_rows, corpus.held_out.num_rows) == (1, 1)


def test_the_split_depends_on_the_seed_and_not_on_the_other_documents():
    small = build_corpus(documents(101), 0.2, seed=1)
    large = build_corpus(documents(211), 0.2, seed=1)
    shared = {document.source for document in documents(101)}
    assert sources(small.held_out) == sources(large.held_out) & shared
    assert sources(build_corpus(documents(101), 0.2, seed=2).held_out) != sources(small.held_out)


def test_a_repeated_paragraph_stays_only_where_it_came_first():
    corpus = build_corpus(
        [
            Document("The same words.\n\nOnly here.", "a", "own", "MIT"),
            Document("the  SAME words!\n\nOnly there.", "b", "own", "MIT"),
            Document("Only here.", "c", "own", "MIT"),
        ]
    )
    expected = {"a": "The same words.\n\nOnly here.", "b": "Only there."}
    rows = [*corpus.train, *corpus.held_out]
    assert {row["source"]: row["text"] for row in rows} == expected
    assert corpus.num_repeated == 2

    # Paragraphs without letters, and letters without case.
    marks = ("+++", "---")
    some = [Document(f"{mark}\n\n漢字{mark}", mark, "own", "MIT") for mark in marks]
    assert build_corpus(some).num_repeated == 1


def test_the_paragraphs_of_a_single_document_are_divided():
    text = "\n\n".join(f"Paragraph {number}." for number in NUMBERS)
    corpus = build_corpus([Document(text, "my.txt", "my", "MIT")], 0.3)
    divided = [*corpus.train["source"], *corpus.held_out["source"]]
    assert sorted(divided) == sorted(f"my.txt:{n}" for n in range(1, len(NUMBERS) + 1))
    assert corpus.held_out.num_rows > 0


def test_one_paragraph_cannot_be_divided():
    with pytest.raises(DataError, match=r"1 document\(s\)"):
        build_corpus([Document("One.", "my.txt", "my", "MIT")])
    with pytest.raises(DataError, match=r"has 1 document\(s\)"):
        build_corpus([Document(text, "same.txt", text, "MIT") for text in ("One.", "Two.")])
    for fraction in (0, 1):
        with pytest.raises(ConfigError, match=f"held_out_fraction is {fraction}"):
            build_corpus(documents(), fraction)


def test_a_saved_corpus_comes_back_and_replaces_an_earlier_one(tmp_path):
    save_corpus(build_corpus(documents(7)), tmp_path / "corpus")
    corpus = build_corpus(documents(13))
    save_corpus(corpus, tmp_path / "corpus")
    loaded = load_corpus(tmp_path / "corpus")
    assert loaded.train.to_list() == corpus.train.to_list()
    assert loaded.held_out.to_list() == corpus.held_out.to_list()
    assert loaded.num_repeated == corpus.num_repeated
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_the_table_adds_up():
    rows = corpus_rows(build_corpus(documents(), 0.3))
    assert [row[:2] for row in rows] == [["other", "MIT"], ["own", "MIT"], ["total", ""]]
    numbers = [row[2:] for row in rows]
    assert [sum(column) for column in zip(*numbers[:2], strict=True)] == numbers[2]
    assert numbers[2][0] + numbers[2][1] == 211
    assert numbers[2][2] + numbers[2][3] == sum(len(document.text) for document in documents())


def test_the_command_builds_a_corpus_from_the_users_files(tmp_path, capsys):
    folder = tmp_path / "mine"
    folder.mkdir()
    for number in NUMBERS:
        (folder / f"{number}.txt").write_text(f"The number {number} is written here.", "utf-8")
    stmoe.main(["corpus", "--out", str(tmp_path / "corpus"), "--data", str(folder)])
    assert load_corpus(tmp_path / "corpus").train.num_rows + 1 >= len(NUMBERS) - 1
    printed = capsys.readouterr().out
    assert "mine" in printed
    assert "0 repeated paragraphs" in printed
    assert str(tmp_path / "corpus") in printed


# ---------------------------------------------------------------------------
# Tokens


def test_tokens_are_kept_beside_the_corpus(tokenizer_folder, tmp_path):
    """What is true of every kept file is tested in test_pairs."""
    folder = tmp_path / "corpus"
    save_corpus(build_corpus(documents()), folder)
    tokenizer = load_tokenizer(tokenizer_folder)
    expected = tokenize_corpus(build_corpus(documents()).train, tokenizer).tolist()
    assert tokenize_corpus(load_corpus(folder).train, tokenizer).tolist() == expected

    # The second call reads the file, and a corpus with it may be replaced.
    [kept] = (folder / "train").glob("tokens-*.safetensors")
    written = kept.stat().st_mtime_ns
    assert tokenize_corpus(load_corpus(folder).train, tokenizer).tolist() == expected
    assert kept.stat().st_mtime_ns == written
    save_corpus(build_corpus(documents()), folder)
    assert not kept.exists()
