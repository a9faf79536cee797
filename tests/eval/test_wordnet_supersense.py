"""Promises of WordNet definition -> supersense; a WordNet written by hand, and the system's own."""

import json

import pytest

from eval.corpora import wordnet
from eval.source import split_by_hash
from eval.task import SPLITS, TASKS
from eval.tasks import wordnet_supersense, wordnet_word
from moe.errors import DataError
from tests.eval.wordnet_files import needs_wordnet, wordnet_line

TASK = TASKS.get("wordnet_supersense")


def _line(offset: int, lexicographer: str, kind: str, gloss: str) -> str:
    return wordnet_line(offset, lexicographer, kind, f"word{offset}", gloss)


@pytest.fixture
def small_wordnet(tmp_path, monkeypatch):
    """A function that writes a database of nouns and verbs and returns the rows by split."""
    monkeypatch.setenv("WNSEARCHDIR", str(tmp_path))
    read = wordnet_supersense._all_rows.__wrapped__
    monkeypatch.setattr(wordnet_supersense, "_all_rows", read)

    def rows(nouns, verbs=()):
        files = {
            "noun": [_line(i, file, "n", gloss) for i, (file, gloss) in enumerate(nouns)],
            "verb": [_line(i, file, "v", gloss) for i, (file, gloss) in enumerate(verbs)],
        }
        files["verb"].append(_line(999, "verb.weather", "v", "fall as frozen rain"))
        files["adj"] = [_line(0, "adj.all", "a", "having the necessary means")]
        files["adv"] = [_line(0, "adv.all", "r", "in a necessary way")]
        for name, lines in files.items():
            (tmp_path / f"data.{name}").write_text("".join(lines), encoding="utf-8")
        return read()

    return rows


def test_the_classes_are_words_one_for_each_large_lexicographer_file():
    assert len(TASK.choices) == len(set(TASK.choices)) == 38
    assert wordnet_supersense.SUPERSENSES["noun.animal"] == "animal"
    assert wordnet_supersense.SUPERSENSES["verb.motion"] == "motion (verb)"
    assert "noun.Tops" not in wordnet_supersense.SUPERSENSES
    assert not any(file.startswith("ad") for file in wordnet_supersense.SUPERSENSES)


def test_an_example_is_a_definition_without_its_word(small_wordnet):
    small_wordnet(
        [("noun.animal", "a small beast of the field; it digs")],
        [("verb.motion", 'go up in the air; "the kite rose"')],
    )
    examples = {example.id: example for split in SPLITS for example in TASK.examples(split)}
    dog = examples["data.noun#00000000"]
    assert dog.inputs == "supersense of: a small beast of the field; it digs"
    assert dog.targets == "animal"
    assert dog.group == "wordnet/data.noun#00000000"
    rise = examples["data.verb#00000000"]
    assert (rise.inputs, rise.targets) == ("supersense of: go up in the air", "motion (verb)")
    assert len(examples) == 2


def test_definitions_that_are_shared_or_too_short_have_no_row(small_wordnet):
    rows = small_wordnet(
        [
            ("noun.animal", "a small beast"),
            ("noun.food", "A small - beast"),
            ("noun.plant", "a necessary way, in"),
            ("noun.plant", "tall tree"),
            ("noun.Tops", "what there is at all"),
            ("noun.act", "in a necessary way"),  # an adverb has the same
        ]
    )
    assert [row["definition"] for split in SPLITS for row in rows[split]] == ["a necessary way, in"]


def test_splits_follow_from_the_definition_and_a_large_class_is_capped(small_wordnet, monkeypatch):
    glosses = [f"a beast with {number} legs" for number in range(1, 900)]
    rows = small_wordnet([("noun.animal", gloss) for gloss in glosses])
    cap = wordnet_supersense.MAX_SYNSETS_PER_CLASS
    assert sum(map(len, rows.values())) == cap
    for split in SPLITS:
        for row in rows[split]:
            letters = row["definition"].replace(" ", "")
            key = f"wordnet-supersense-v1/{letters}"
            assert split == split_by_hash(key, test=0.09, validation=0.022)

    # The same definitions under other numbers, as in another version.
    again = small_wordnet([("noun.animal", gloss) for gloss in reversed(glosses)])
    for split in SPLITS:
        definitions = {row["definition"] for row in rows[split]}
        assert {row["definition"] for row in again[split]} == definitions


@pytest.mark.parametrize("module", [wordnet_supersense, wordnet_word])
def test_without_wordnet_the_error_says_what_to_install_or_give(module, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_all_rows", module._all_rows.__wrapped__)
    monkeypatch.delenv("WNSEARCHDIR", raising=False)
    monkeypatch.setattr(wordnet, "SYSTEM_FOLDERS", (tmp_path,))
    name = module.__name__.rpartition(".")[2]
    message = rf"apt-get install wordnet-base.*--data FOLDER.*/{name}/test.jsonl"
    with pytest.raises(DataError, match=message):
        TASKS.get(name).examples("test")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "wordnet_supersense",
            {"lexicographer": "noun.beast"},
            r"'noun\.beast'\. Expected one of 'noun\.act'",
        ),
        (
            "wordnet_word",
            {"part_of_speech": "noun", "word": "ox", "choices": ["cow", "cow"]},
            r"word 'ox' and the choices .*one of them the word",
        ),
    ],
)
def test_rows_of_ones_own_are_checked(tmp_path, name, changes, message):
    (tmp_path / name).mkdir()
    row = {"id": "1", "definition": "a beast", **changes}
    (tmp_path / name / "test.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=message):
        TASKS.get(name).examples("test", tmp_path)


@pytest.mark.slow
@needs_wordnet
def test_the_systems_wordnet_has_2000_test_examples_of_all_classes_and_no_definition_twice():
    wordnet_supersense._all_rows.cache_clear()
    examples = {split: TASK.examples(split) for split in SPLITS}
    assert 1_500 < len(examples["test"]) < 2_500
    assert 300 < len(examples["validation"]) < 700
    assert len(examples["train"]) > 15_000
    for split in ("train", "test"):
        assert {example.targets for example in examples[split]} == set(TASK.choices)

    inputs = []
    for made in examples.values():
        inputs += ["".join(filter(str.isalnum, example.inputs.casefold())) for example in made]
    assert len(set(inputs)) == len(inputs)
