"""Promises of WordNet definition -> word: no answer but from the text, and an even chance."""

from collections import Counter

import pytest

from eval.source import hash_fraction
from eval.task import SPLITS, TASKS
from eval.tasks import wordnet_supersense, wordnet_word
from tests.eval.wordnet_files import needs_wordnet, wordnet_line

TASK = TASKS.get("wordnet_word")
CONSONANTS = "bcdfghjklmnpqrstvwxz"


def made_up_words(number: int) -> list[str]:
    """Returns words of letters that no definition here begins with."""
    words = []
    for value in range(number):
        letters = [CONSONANTS[value // 20**place % 20] for place in range(4)]
        words.append("zu" + "u".join(letters))
    return words


@pytest.fixture
def small_wordnet(tmp_path, monkeypatch):
    """A function that writes a database of nouns and returns the rows by split."""
    monkeypatch.setenv("WNSEARCHDIR", str(tmp_path))
    for module in (wordnet_supersense, wordnet_word):
        monkeypatch.setattr(module, "_all_rows", module._all_rows.__wrapped__)

    def rows(nouns):
        lines = [wordnet_line(i, *noun) for i, noun in enumerate(nouns)]
        (tmp_path / "data.noun").write_text("".join(lines), encoding="utf-8")
        others = {"verb": ("verb.weather", "v"), "adj": ("adj.all", "a"), "adv": ("adv.all", "r")}
        for name, (file, kind) in others.items():
            text = wordnet_line(0, file, kind, "xx", "what is of no use here")
            (tmp_path / f"data.{name}").write_text(text)
        return wordnet_word._all_rows()

    return rows


def beasts(number: int) -> list[tuple[str, str, str, str]]:
    """Returns nouns of one kind, each with a definition of its own."""
    words = enumerate(made_up_words(number))
    return [("noun.animal", "n", word, f"a beast with {i} legs") for i, word in words]


def test_each_word_of_a_question_is_the_answer_of_another_and_they_are_of_one_kind(small_wordnet):
    kinds = {}
    nouns = []
    for number, word in enumerate(made_up_words(900)):
        kind = ("noun.animal", "noun.food", "noun.animal")[number % 3]
        name = word.capitalize() if number % 3 == 2 else word
        kinds[name] = (kind, number % 3)
        nouns.append((kind, "n", name, f"a beast or dish with {number} legs"))
    rows = small_wordnet(nouns)

    for split in SPLITS:
        answers = Counter(tuple(row["choices"]) for row in rows[split])
        assert set(answers.values()) == {4}
        for row in rows[split]:
            assert len({kinds[word] for word in row["choices"]}) == 1
            assert row["word"] in row["choices"]
        asked = [row["word"] for row in rows[split]]
        assert len(set(asked)) == len(asked)

    # A constant order of words is right in exactly one of four.
    examples = TASK.examples("test")
    first = [example.choices[0] for example in examples]
    assert TASK.scores(examples, first) == {"accuracy": 25.0}


def test_no_word_is_trained_and_tested(small_wordnet):
    rows = small_wordnet(beasts(400))
    by_split = [{row["word"] for row in rows[split]} for split in SPLITS]
    assert sum(map(len, by_split)) == len(set.union(*by_split))
    assert len(by_split[0]) > 5 * len(by_split[2]) > 0

    # An example has the definition and no choice in its input.
    example = TASK.examples("train")[0]
    assert example.inputs.startswith("which noun means: a beast with ")
    assert not any(word in example.inputs for word in example.choices)
    assert example.group == f"wordnet/{example.id}"
    wrong = [word for word in example.choices if word != example.targets]
    for output, expected in ((example.targets, 100), (wrong[0], 0), ("another word", 0)):
        assert TASK.scores([example], [output])["accuracy"] == expected


def test_what_can_be_answered_without_memory_or_was_not_in_the_text_is_not_asked(small_wordnet):
    nouns = beasts(300)
    first = nouns[0][2]
    spoilt = {
        "runner": "somebody who runs, or a running beast",
        "golden_eagle": "a large brown bird of the mountains",
        "ox": "a beast that draws a plough",
        "quick": "fast beast",
        "sibling": "a beast that has the same mother as another",
        "cousin": "a beast that has the same mother as another",
    }
    nouns += [("noun.animal", "n", word, gloss) for word, gloss in spoilt.items()]
    nouns.append(("noun.food", "n", first, "another meaning of the first word"))
    rows = small_wordnet(nouns)
    asked = [row for split in SPLITS for row in rows[split]]
    assert not {row["word"] for row in asked} & {"runner", "golden eagle", "ox", "quick", *spoilt}
    assert sum(row["word"] == first for row in asked) <= 1

    # Definitions that the other task tests are not in the text of the studies.
    other = TASKS.get("wordnet_supersense")
    tested = {example.id for split in ("validation", "test") for example in other.examples(split)}
    assert tested
    assert not tested & {row["id"] for row in asked}


@pytest.mark.slow
@needs_wordnet
def test_the_systems_wordnet_has_2000_questions_in_an_order_of_its_own():
    wordnet_word._all_rows.cache_clear()
    examples = TASK.examples("test")
    assert 1_500 < len(examples) < 2_500
    assert 300 < len(TASK.examples("validation")) < 700
    assert len(TASK.examples("train")) > 30_000

    # The same on every machine.
    order = [hash_fraction(f"wordnet-word-v1/order/{example.id}") for example in examples[:4]]
    assert order == sorted(order)
