"""What every task promises; a new file in eval/tasks is tested without an edit here."""

import pytest

from eval.task import SPLITS, TASKS
from moe import DataError


@pytest.mark.parametrize("name", TASKS.names())
def test_splits_share_no_group_no_id_and_no_input(name):
    task = TASKS.get(name)
    splits = {split: task.examples(split) for split in SPLITS}
    for field in ("group", "id", "inputs"):
        seen = [{getattr(example, field) for example in examples} for examples in splits.values()]
        assert sum(map(len, seen)) == len(set.union(*seen)), field
    assert all(splits.values())


@pytest.mark.parametrize("name", TASKS.names())
def test_targets_are_choices_and_every_choice_is_tested(name):
    task = TASKS.get(name)
    for split in SPLITS:
        targets = {example.targets for example in task.examples(split)}
        assert targets <= set(task.choices)
    assert {example.targets for example in task.examples("train")} == set(task.choices)
    assert {example.targets for example in task.examples("test")} == set(task.choices)


@pytest.mark.parametrize("name", TASKS.names())
def test_examples_are_the_same_each_time_and_the_caller_cannot_change_them(name):
    task = TASKS.get(name)
    first = task.examples("test")
    first.pop()
    assert len(task.examples("test")) == len(first) + 1
    assert task.examples("test")[: len(first)] == first


@pytest.mark.parametrize("name", TASKS.names())
def test_an_unknown_split_is_refused(name):
    with pytest.raises(DataError, match="There is no split 'dev'"):
        TASKS.get(name).examples("dev")


def test_unicode_category_has_the_words_of_the_standard():
    examples = {example.id: example for split in SPLITS for example in TASKS.get("unicode_category").examples(split)}
    assert len(examples) > 9000
    assert examples["U+0028"].inputs == "unicode category name: left parenthesis"
    assert examples["U+0028"].targets == "open punctuation"
