"""What every task promises; a new file in eval/tasks is tested without an edit here.

Tasks of the hub are asked with their fixtures; those that come with Python promise more, since all
their rows are here.
"""

from functools import cache

import pytest

from moe import DataError
from stmoe_eval.source import HubData
from stmoe_eval.task import SPLITS, TASKS
from stmoe_eval.text.preprocess import HIDDEN_TARGET
from tests.eval.rows import OFFLINE, ON_THE_HUB, examples_of, folder_of

NAMES = TASKS.names()
MAX_CHECKED = 101  # examples of a split whose choices are looked at one by one
by_name = pytest.mark.parametrize("name", NAMES)


@cache
def examples_by_split(name):
    """Returns the examples of every split, read once for all tests."""
    task = TASKS.get(name)
    return {split: examples_of(task, split) for split in task.source.splits}


# ---- every task ----


@by_name
def test_a_task_describes_itself(name):
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


@by_name
def test_the_split_that_is_reported_on_exists_and_no_answer_is_part_of_an_id(name):
    task = TASKS.get(name)
    assert list(task.source.splits) == [split for split in SPLITS if split in task.source.splits]
    assert task.split in task.source.splits
    assert task.split != "train"

    # A diagnostic may have no split but a hidden one; it is scored on rows with labels.
    assert set(task.source.hidden) <= {"test"}
    assert task.split not in task.source.hidden or set(task.source.splits) == {"test"}

    # A model is asked by the id: it must not hold the target.
    assert not {"targets", "label", "answers"} & {*task.ids, *task.groups}


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_a_dataset_of_the_hub_has_an_owner_and_a_count_for_each_split(name):
    source = TASKS.get(name).source
    assert isinstance(source, HubData)
    assert source.repository.count("/") == 1
    assert all(source.expected(split) > 50 for split in source.splits)
    assert set(source.hub_splits) <= set(source.splits)
    assert set(source.labels) <= set(source.columns)


@by_name
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
            hub_split = task.source.hub_splits.get(split, split)
            place = (task.source.repository, task.source.config, hub_split)
            owners.setdefault(place, set()).add(task.variant_of or task.name)
    assert {place: names for place, names in owners.items() if len(names) > 1} == {}


@by_name
def test_examples_have_ids_of_their_own_inputs_and_targets_to_train_on(name):
    for split, examples in examples_by_split(name).items():
        assert examples
        assert len({example.id for example in examples}) == len(examples)
        assert all(example.inputs for example in examples)
        if split == "train":
            assert all(example.targets not in ("", HIDDEN_TARGET) for example in examples)


@by_name
def test_targets_are_among_the_choices_and_choices_have_values_of_their_own(name):
    task = TASKS.get(name)
    for split, examples in examples_by_split(name).items():
        hidden = [HIDDEN_TARGET] if split in task.source.hidden else []
        for example in examples[:MAX_CHECKED]:
            if not example.choices:
                continue
            assert example.targets in (*example.choices, *hidden)
            values = set()
            for choice in example.choices:
                values.add(str(task.postprocess(choice, example.fields, False)))
            assert len(values) == len(example.choices) > 1
            assert str(-1) not in values


@by_name
def test_examples_are_the_same_each_time_and_the_caller_cannot_change_them(name):
    task = TASKS.get(name)
    expected = examples_by_split(name)[task.split]
    examples_of(task, task.split).clear()
    assert examples_of(task, task.split) == expected


def test_an_unknown_split_is_refused():
    task = TASKS.get(NAMES[0])
    with pytest.raises(DataError, match="There is no split 'dev'"):
        task.examples("dev", folder_of(task))


# ---- what comes with Python ----


@pytest.mark.parametrize("name", OFFLINE)
def test_offline_splits_share_no_id_and_no_input_and_test_every_choice(name):
    """Groups may be shared: names of one thing are trained on in other languages."""
    splits = examples_by_split(name)
    assert list(splits) == list(SPLITS)
    for field in ("id", "inputs"):
        seen = [{getattr(example, field) for example in examples} for examples in splits.values()]
        assert sum(map(len, seen)) == len(set.union(*seen)), field

    choices = TASKS.get(name).choices
    if isinstance(choices, tuple) and choices:
        for split in {"train", "test"} & splits.keys():
            assert {example.targets for example in splits[split]} == set(choices)
