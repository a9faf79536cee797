"""Minimal pairs: chance is 50 % for whoever ignores the sentence, and gaps are sentinels."""

from collections import Counter

from eval.task import TASKS
from eval.tasks.minimal_pairs import PHENOMENA
from moe.data.tokenizer import SpecialIds, load_tokenizer
from tests.training.tiny_run import write_inputs

TASK = TASKS.get("minimal_pairs")


def test_every_question_has_a_counterpart_in_which_the_other_word_is_right():
    examples = TASK.examples("test")
    answers = Counter((example.choices, example.targets) for example in examples)
    for (choices, right), number in answers.items():
        (wrong,) = set(choices) - {right}
        assert answers[choices, wrong] == number

    # So a choice that ignores the sentence has exactly 50 %.
    always_first = [example.choices[0] for example in examples]
    assert TASK.scores(examples, always_first)["accuracy"] == 50
    assert TASK.scores(examples, [example.targets for example in examples])["accuracy"] == 100


def test_every_phenomenon_is_asked_often_enough():
    rows = TASK.source.rows("test")
    asked = Counter(row["phenomenon"] for row in rows)
    assert asked.keys() == PHENOMENA.keys()
    assert min(asked.values()) >= 20
    assert len({(row["phenomenon"], row["sentence"], row["right"]) for row in rows}) == len(rows)
    assert all(row["sentence"].count("_") == 1 for row in rows)
    assert not any({"{", "}"} & set(row["sentence"] + row["right"]) for row in rows)


def test_the_gap_is_one_sentinel_and_each_choice_begins_with_it(tmp_path):
    tokenizer = load_tokenizer(write_inputs(tmp_path)["tokenizer"])
    sentinel = SpecialIds.of(tokenizer).first_sentinel
    for example in TASK.examples("test")[::7]:
        assert tokenizer(example.inputs).input_ids.count(sentinel) == 1
        for choice in example.choices:
            assert tokenizer(choice).input_ids.index(sentinel) == 0
