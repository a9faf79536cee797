"""Corpora, pairs and tokenizers that are damaged, or no text: one error that names the file, or
documents.
"""

import contextlib
import json
import os
import resource
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe.data.corpus import build_corpus, corpus_table, load_corpus, save_corpus
from moe.data.documents import Document, read_files, read_pairs
from moe.data.tokenizer import load_tokenizer, train_tokenizer
from moe.data.tokens import tokenize_corpus
from moe.errors import ConfigError, DataError
from tests.data.conftest import VOCAB_SIZE

JSON_ODDITIES = ["[" * 100_000, '{"text": null}', "NaN"]


def documents(count=13):
    return [Document(f"Text {n}.\n\nMore {n}.", f"file{n}.py", "own", "MIT") for n in range(count)]


@pytest.mark.parametrize("read", [lambda path: read_files([path]), read_pairs])
def test_a_line_that_is_no_json_of_use_is_named(tmp_path, read):
    path = tmp_path / "a.jsonl"
    for line in JSON_ODDITIES:
        good = '{"text": "fine", "inputs": "a", "targets": "b"}\n'
        path.write_text(good + line + "\n")
        with pytest.raises(DataError, match=r"a\.jsonl.*line 2") as error:
            read(path)
        assert len(str(error.value)) < 600


NO_TEXT = [b"", b"\xff\xfe\x00", b"a\0b\nc", "naïve".encode("utf-16-le")]
ANY_FILE = st.tuples(
    st.sampled_from([".txt", ".md", ".jsonl"]),
    st.binary(max_size=80)
    | st.sampled_from(NO_TEXT)
    | st.text(st.characters(codec="utf-8"), max_size=40).map(str.encode),
)


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ANY_FILE, min_size=1, max_size=4))
def test_any_bytes_are_documents_that_last_or_one_error(tmp_path_factory, tokenizer_folder, files):
    folder = tmp_path_factory.mktemp("any")
    read = []
    for number, (suffix, content) in enumerate(files):
        path = folder / f"{number}{suffix}"
        path.write_bytes(content)
        try:
            read_pairs(path)
        except DataError as error:
            assert path.name in str(error)
        try:
            read += read_files([path])
        except DataError as error:
            assert path.name in str(error)

    # The corpus of what was read: with a second document, so that it can be divided.
    corpus = build_corpus(
        [
            *read,
            Document("Some words.", "first", "own", ""),
            Document("Others.", "second", "own", ""),
        ]
    )
    save_corpus(corpus, folder / "corpus")
    loaded = load_corpus(folder / "corpus")
    assert loaded.train.to_list() == corpus.train.to_list()
    corpus_table(loaded).encode()
    with contextlib.suppress(DataError):  # nothing but spaces for the tokenizer
        tokens = tokenize_corpus(loaded.train, load_tokenizer(tokenizer_folder))
        assert tokens.min() >= 0 and tokens.max() < VOCAB_SIZE
    shutil.rmtree(folder)


def test_names_that_are_no_text_are_escaped_and_last(tmp_path):
    folder = tmp_path / os.fsdecode(b"f\xff|\n")
    folder.mkdir()
    for number, name in enumerate([b"\xff.txt", b"a\nb.txt", "é.md".encode()]):
        (folder / os.fsdecode(name)).write_text(f"Number {number}.")
    save_corpus(build_corpus(read_files([folder])), tmp_path / "corpus")
    corpus = load_corpus(tmp_path / "corpus")
    assert {*corpus.train["source"], *corpus.held_out["source"]} == {
        "f\\udcff|\\n/\\udcff.txt",
        "f\\udcff|\\n/a\\nb.txt",
        "f\\udcff|\\n/é.md",
    }
    assert len(corpus_table(corpus).splitlines()) == 4


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
    os.mkfifo(folder / "d.txt")
    with pytest.raises(DataError, match=r"d\.txt cannot be read: it is a pipe"):
        read_files([folder])
    with pytest.raises(DataError, match="does not exist"):
        read_files(["nowhere.txt"])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove(path):
    path.unlink()


def empty(path):
    path.write_bytes(b"")


ARROW = "train/data-00000-of-00001.arrow"


@pytest.mark.parametrize(
    ("name", "damage"),
    [(ARROW, flip), (ARROW, remove), ("corpus.json", cut), ("corpus.json", empty)],
)
def test_a_damaged_file_of_a_corpus_is_named(tmp_path, name, damage):
    save_corpus(build_corpus(documents()), tmp_path / "corpus")
    damage(tmp_path / "corpus" / name)
    with pytest.raises(DataError, match=rf"{name.rpartition('/')[2]}.*stmoe corpus --out"):
        load_corpus(tmp_path / "corpus")


@pytest.mark.parametrize("damage", [cut, empty])
def test_a_damaged_list_of_checksums_is_noticed(tmp_path, damage):
    save_corpus(build_corpus(documents()), tmp_path / "corpus")
    damage(tmp_path / "corpus" / "SHA256SUMS")
    with pytest.raises(
        DataError, match=r"is damaged: it (is missing in SHA256SUMS|holds no checksum)"
    ):
        load_corpus(tmp_path / "corpus")


def test_a_corpus_without_checksums_loads_or_names_the_file(tmp_path):
    save_corpus(build_corpus(documents()), tmp_path / "corpus")
    (tmp_path / "corpus" / "SHA256SUMS").unlink()
    assert load_corpus(tmp_path / "corpus").train.num_rows > 0

    empty(tmp_path / "corpus" / ARROW)
    with pytest.raises(DataError, match=ARROW):
        load_corpus(tmp_path / "corpus")


@pytest.mark.parametrize(
    ("name", "damage", "has_sums"),
    [
        ("tokenizer.json", flip, True),
        ("tokenizer.json", cut, False),
        ("tokenizer_config.json", empty, True),
        ("tokenizer_config.json", flip, False),
    ],
)
def test_a_damaged_tokenizer_names_the_file(tmp_path, tokenizer_folder, name, damage, has_sums):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    if not has_sums:
        (folder / "SHA256SUMS").unlink()
    damage(folder / name)
    try:
        load_tokenizer(folder)
        assert not has_sums and damage is flip  # a letter became another
    except DataError as error:
        assert str(folder / name) in str(error)
        assert "stmoe tokenizer" in str(error)


@pytest.mark.parametrize(
    ("name", "junk"),
    [
        ("tokenizer.json", {"model": {"type": "Unigram", "unk_id": 9, "vocab": []}}),
        ("tokenizer_config.json", []),
        ("added_tokens.json", None),
    ],
)
def test_a_tokenizer_of_other_content_is_one_error(tmp_path, tokenizer_folder, name, junk):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    (folder / "SHA256SUMS").unlink()
    (folder / name).write_text(json.dumps(junk))
    with pytest.raises(DataError, match=name):
        load_tokenizer(folder)


def test_a_tokenizer_that_a_user_saves_into_a_model_is_no_damage(tmp_path, tokenizer_folder):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "SHA256SUMS").write_text("0" * 64 + "  config.json\n")
    load_tokenizer(tokenizer_folder).save_pretrained(tmp_path)
    assert len(load_tokenizer(tmp_path)) == VOCAB_SIZE


def test_a_vocabulary_of_an_impossible_size_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"vocab_size is .*expected an integer from 104 to"):
        train_tokenizer(["text"], 103, tmp_path / "none")


def test_a_full_disk_leaves_what_was_there_and_is_an_error_of_the_system(tmp_path, english):
    train_tokenizer(english, 300, tmp_path / "tokenizer")
    save_corpus(build_corpus(documents()), tmp_path / "corpus")
    before = (tmp_path / "tokenizer/tokenizer.json").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    many = build_corpus(documents(3_001))
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large|write"):
            train_tokenizer(english, 607, tmp_path / "tokenizer")
        with pytest.raises(OSError, match=r"File too large|write"):
            save_corpus(many, tmp_path / "corpus")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "tokenizer/tokenizer.json").read_bytes() == before
    assert load_corpus(tmp_path / "corpus").train.num_rows < 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "tokenizer"]
