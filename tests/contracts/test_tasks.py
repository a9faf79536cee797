"""What every task promises; a new file in eval/tasks is tested without an edit here.

Tasks of the hub are asked with their fixtures; those that come with Python promise more, since all
their rows are here.
"""

import pytest

from eval.source import HubData
from eval.task import SPLITS, TASKS
from eval.text.preprocess import HIDDEN_TARGET
from moe import DataError
from tests.eval.rows import OFFLINE, ON_THE_HUB, examples_of, folder_of

NAMES = TASKS.names()
CLASSIFICATIONS = [
    name for name in NAMES if isinstance(TASKS.get(name).choices, tuple) and TASKS.get(name).choices
]


@pytest.mark.parametrize("name", NAMES)
def test_a_task_says_what_it_is(name):
    task = TASKS.get(name)
    assert task.name == name
    assert task.version >= 1
    for text in (task.description, task.licence, task.prompt_source, task.family):
        assert text.strip() == text != ""
    assert task.description.endswith(".")
    names = [metric.name for metric in task.metrics]
    assert names
    assert len(set(names)) == len(names)
    assert task.inputs_length > 1
    assert task.targets_length > 1
    assert task.decoding.max_tokens > 0
    assert task.decoding.num_beams > 0


@pytest.mark.parametrize("name", NAMES)
def test_the_split_that_is_reported_on_exists_and_its_labels_are_known(name):
    task = TASKS.get(name)
    assert list(task.source.splits) == [split for split in SPLITS if split in task.source.splits]
    assert task.split in task.source.splits
    assert task.split != "train"
    assert set(task.source.hidden) <= {"test"}
    # A diagnostic may have no split but a hidden one; it is scored on rows with labels.
    assert task.split not in task.source.hidden or set(task.source.splits) == {"test"}


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_a_dataset_of_the_hub_has_an_owner_and_a_count_for_each_split(name):
    source = TASKS.get(name).source
    assert isinstance(source, HubData)
    assert source.repository.count("/") == 1
    assert all(source.expected(split) > 50 for split in source.splits)
    assert set(source.hub_splits) <= set(source.splits)
    assert set(source.labels) <= set(source.columns)


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_is_another_prompt_of_the_same_rows(name):
    task = TASKS.get(name)
    assert ("." in name) == (task.variant_of is not None)
    if task.variant_of is not None:
        varied = TASKS.get(task.variant_of)
        assert name.startswith(f"{varied.name}.")
        assert (varied.source, varied.split, varied.variant_of) == (task.source, task.split, None)
        assert varied.prompt_source != task.prompt_source
        assert examples_of(varied, task.split)[0].inputs != examples_of(task, task.split)[0].inputs


def test_only_variants_read_the_same_rows():
    """WinoGrande's sizes share what they are evaluated on, and differ in what they are trained on."""
    owners = {}
    for task in map(TASKS.get, ON_THE_HUB):
        for split in task.source.splits:
            place = (
                task.source.repository,
                task.source.config,
                task.source.hub_splits.get(split, split),
            )
            owners.setdefault(place, set()).add(task.variant_of or task.name)
    assert {place: names for place, names in owners.items() if len(names) > 1} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ids_are_unique_within_a_split(name):
    task = TASKS.get(name)
    for split in task.source.splits:
        examples = examples_of(task, split)
        assert examples
        assert len({example.id for example in examples}) == len(examples)
        assert all(example.inputs for example in examples)


@pytest.mark.parametrize("name", NAMES)
def test_no_id_or_group_is_made_of_the_answer(name):
    """A model is asked by the id: it must not hold the target."""
    assert not {"targets", "label", "answers"} & {*TASKS.get(name).ids, *TASKS.get(name).groups}


@pytest.mark.parametrize("name", NAMES)
def test_targets_are_among_the_choices_and_choices_have_values_of_their_own(name):
    task = TASKS.get(name)
    for split in task.source.splits:
        for example in examples_of(task, split):
            if example.choices:
                assert example.targets in (
                    *example.choices,
                    *[HIDDEN_TARGET] * (split in task.source.hidden),
                )
                values = [
                    str(task.postprocess(choice, example.fields, False))
                    for choice in example.choices
                ]
                assert len(set(values)) == len(values) > 1
                assert str(-1) not in values


@pytest.mark.parametrize("name", NAMES)
def test_training_has_targets_and_no_hidden_one(name):
    task = TASKS.get(name)
    if "train" in task.source.splits:
        assert all(
            example.targets not in ("", HIDDEN_TARGET) for example in examples_of(task, "train")
        )


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_the_same_each_time_and_the_caller_cannot_change_them(name):
    task = TASKS.get(name)
    first = examples_of(task, task.split)
    first.pop()
    assert len(examples_of(task, task.split)) == len(first) + 1
    assert examples_of(task, task.split)[: len(first)] == first


def test_an_unknown_split_is_refused():
    task = TASKS.get(NAMES[0])
    with pytest.raises(DataError, match="There is no split 'dev'"):
        task.examples("dev", folder_of(task))


# ---- what comes with Python ----


@pytest.mark.parametrize("name", OFFLINE)
def test_offline_splits_share_no_group_no_id_and_no_input(name):
    task = TASKS.get(name)
    splits = {split: task.examples(split) for split in SPLITS}
    for field in ("group", "id", "inputs"):
        seen = [{getattr(example, field) for example in examples} for examples in splits.values()]
        assert sum(map(len, seen)) == len(set.union(*seen)), field
    assert all(splits.values())


@pytest.mark.parametrize("name", [name for name in OFFLINE if name in CLASSIFICATIONS])
def test_every_choice_of_an_offline_classification_is_trained_and_tested(name):
    task = TASKS.get(name)
    for split in ("train", "test"):
        assert {example.targets for example in task.examples(split)} == set(task.choices)


def test_unicode_category_has_the_words_of_the_standard():
    examples = {
        example.id: example
        for split in SPLITS
        for example in TASKS.get("unicode_category").examples(split)
    }
    assert len(examples) > 9000
    assert examples["U+0028"].inputs == "unicode category name: left parenthesis"
    assert examples["U+0028"].targets == "open punctuation"
