"""What every task promises; a new file in eval/stmoe_eval/tasks is tested without an edit here.

Tasks of the hub are asked with their fixtures, and go from their rows to scores of a tiny model.
Oracles of the scores: targets given back score 100 on every metric, unparsable or unrelated answers
0, and the order of the examples changes nothing. WSC is right when a row of label 0 is *not*
answered by its candidate. A pair of AX-g counts as equal when both answers are, right or wrong, so
its worst answers differ within each pair. The worst similarities are mirrored ones, whose
correlation is -100; equal ones have none.
"""

import json
import math
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from moe.data.tokenizer import train_tokenizer
from stmoe_eval.answers.batches import requests_of
from stmoe_eval.answers.predict import modes_of, predict
from stmoe_eval.answers.seq2seq import load_seq2seq
from stmoe_eval.reports.run_folder import read_examples, write_examples
from stmoe_eval.run import read_task
from stmoe_eval.scores.metrics import GENDER_PARITY, MATTHEWS, PEARSON, SPEARMAN
from stmoe_eval.source import HubData
from stmoe_eval.task import SPLITS, TASKS, Example, Task
from stmoe_eval.text.preprocess import HIDDEN_TARGET
from tests.eval.results import a_task
from tests.eval.rows import FIXTURES, OFFLINE, ON_THE_HUB, examples_of, fixture_rows, write_parquet

CORRELATIONS = {metric.name for metric in (MATTHEWS, PEARSON, SPEARMAN)}
MAX_CHECKED = 101  # examples of a split whose choices are looked at one by one


@cache
def examples_by_split(name):
    """Returns the examples of every split, read once for all tests."""
    task = TASKS.get(name)
    return {split: examples_of(task, split) for split in task.source.splits}


@pytest.mark.parametrize("name", TASKS.names())
def test_a_task_describes_itself_and_its_examples_fit_it(name, tmp_path):
    task = TASKS.get(name)
    assert task.name == name
    assert task.version >= 1
    names = [metric.name for metric in task.metrics]
    assert len(set(names)) == len(names) > 0

    # The split that is reported on exists; only the test split of others may be hidden.
    splits = task.source.splits
    assert list(splits) == [split for split in SPLITS if split in splits]
    assert task.split in splits
    assert task.split != "train"
    assert set(task.source.hidden) <= {"test"}
    assert task.split not in task.source.hidden or set(splits) == {"test"}

    # A model is asked by the id: it must not hold the target.
    assert not {"targets", "label", "answers"} & {*task.ids, *task.groups}

    by_split = examples_by_split(name)
    for split, examples in by_split.items():
        assert len({example.id for example in examples}) == len(examples) > 0
        hidden = [HIDDEN_TARGET] if split in task.source.hidden else []
        for example in examples[:MAX_CHECKED]:
            assert example.inputs
            assert split != "train" or example.targets not in ("", HIDDEN_TARGET)
            if example.choices:
                assert example.targets in (*example.choices, *hidden)
                values = {
                    str(task.postprocess(one, example.fields, False)) for one in example.choices
                }
                assert len(values) == len(example.choices) > 1
                assert str(-1) not in values

    # They are the same each time, and when they are read back from a run.
    examples = by_split[task.split][:MAX_CHECKED]
    assert examples_of(task, task.split)[:MAX_CHECKED] == examples
    digest = write_examples(tmp_path, task, examples)
    saved = read_examples(tmp_path, replace(a_task(name), version=task.version, digest=digest))
    assert [example[:5] for example in saved] == [example[:5] for example in examples]
    outputs = [example.targets if number % 2 else "no" for number, example in enumerate(examples)]
    expected = pytest.approx(task.scores(examples, outputs), nan_ok=True)
    assert task.scores(saved, outputs) == expected


def test_only_variants_read_the_same_rows_and_have_another_prompt():
    """WinoGrande's sizes share what they are evaluated on, and differ in what they are trained on."""
    owners = {}
    for task in map(TASKS.get, ON_THE_HUB):
        source = task.source
        assert isinstance(source, HubData)
        assert source.repository.count("/") == 1
        assert all(source.expected(split) > 50 for split in source.splits)
        assert set(source.hub_splits) <= set(source.splits)
        assert set(source.labels) <= set(source.columns)
        for split in source.splits:
            place = (source.repository, source.config, source.hub_splits.get(split, split))
            owners.setdefault(place, set()).add(task.variant_of or task.name)

        assert ("." in task.name) == (task.variant_of is not None)
        if task.variant_of is not None:
            varied = TASKS.get(task.variant_of)
            assert task.name.startswith(f"{varied.name}.")
            assert (varied.source, varied.split, varied.variant_of) == (source, task.split, None)
            assert varied.prompt_source != task.prompt_source
            first = examples_of(varied, task.split)[0]
            assert first.inputs != examples_of(task, task.split)[0].inputs
    assert {place: names for place, names in owners.items() if len(names) > 1} == {}


@pytest.mark.parametrize("name", OFFLINE)
def test_offline_splits_share_no_id_and_no_input_and_test_every_choice(name):
    """Groups may be shared: names of one thing are trained on in other languages."""
    task = TASKS.get(name)
    splits = examples_by_split(name)
    assert list(splits) == list(SPLITS)
    for field in ("id", "inputs"):
        seen = [{getattr(example, field) for example in examples} for examples in splits.values()]
        assert sum(map(len, seen)) == len(set.union(*seen)), field
    if isinstance(task.choices, tuple) and task.choices:
        for split in ("train", "test"):
            assert {example.targets for example in splits[split]} == set(task.choices)


# ---- from the rows of the hub to scores ----


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    texts = []
    for task in map(TASKS.get, ON_THE_HUB):
        texts += [f"{made.inputs} {made.targets}" for made in examples_of(task, task.split)]
    folder = tmp_path_factory.mktemp("model")
    train_tokenizer(texts, 331, folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": 331, "d_model": 29, "d_kv": 5, "d_ff": 31, "num_layers": 2}
    config = T5Config(**sizes, num_heads=3, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(folder)
    return load_seq2seq(folder)


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_a_task_of_the_hub_goes_from_rows_to_scores(name, system, tmp_path):
    task = TASKS.get(name)
    home = FIXTURES / (task.variant_of or name)
    for split in task.source.splits:
        write_parquet(tmp_path / f"{split}.parquet", fixture_rows(home / f"{split}.jsonl"))
        assert task.source.rows(split, tmp_path) == task.source.rows(split, home)
    if "test" in task.source.hidden and task.split != "test":
        check_hidden_labels(task, tmp_path)

    # A model answers in every mode.
    examples = examples_of(task, task.split)
    assert 3 <= len(examples) <= 5
    short = replace(task, decoding=task.decoding._replace(max_tokens=3))
    for mode in modes_of(task):
        path = tmp_path / f"{mode}.jsonl"
        outputs = predict(system, short, requests_of(examples), mode, path).outputs
        for output, example in zip(outputs, examples, strict=True):
            assert mode == "generate" or output in example.choices
        for metric, score in task.scores(examples, outputs).items():
            is_constant = metric in CORRELATIONS and math.isnan(score)
            assert is_constant or (-100 if metric in CORRELATIONS else 0) <= score <= 100

    right, wrong = best(task, examples), worst(task, examples)
    for score in task.scores(examples, right).values():
        assert score == pytest.approx(100)
    lowest = -100.0 if PEARSON in task.metrics else 0.0
    for metric, score in task.scores(examples, wrong).items():
        # Any two sentences share letters, and chrF counts them.
        assert score == pytest.approx(lowest, abs=1.0 if metric == "chrf" else 1e-12)

    # Every third answer is wrong; pairs stay together.
    outputs = [wrong[i] if i % 3 == 0 else right[i] for i in range(len(examples))]
    expected = task.scores(examples, outputs)
    assert 0 < expected[task.metrics[0].name] < 100
    size = 2 if GENDER_PARITY in task.metrics else 1
    units = [list(range(start, start + size)) for start in range(0, len(examples), size)]
    random.Random(1).shuffle(units)
    order = [number for unit in units for number in unit]
    shuffled = task.scores([examples[i] for i in order], [outputs[i] for i in order])
    assert shuffled == pytest.approx(expected, abs=1e-9)

    # The mean of the scores of examples is the score of the task.
    targets, answers = task.values(examples, outputs)
    for metric in task.metrics:
        if metric.score_examples is not None:
            each = metric.score_examples(targets, answers)
            assert each.shape == (len(examples),)
            assert np.nanmean(each) == pytest.approx(metric.score(targets, answers))


def check_hidden_labels(task: Task, folder):
    """Hidden labels are counted, and may be absent, as in the sites' own files."""
    expected = read_task(task, "test", data=FIXTURES)
    assert expected.num_hidden == 2
    home = task.variant_of or task.name
    (folder / home).mkdir()
    with (folder / home / "test.jsonl").open("w") as file:
        for row in fixture_rows(FIXTURES / home / "test.jsonl"):
            absent = row.keys() & task.source.hidden_values.keys()
            assert absent or task.name == "trivia_qa"
            print(json.dumps({key: row[key] for key in row.keys() - absent}), file=file)
    bare = read_task(task, "test", data=folder)
    assert bare.num_hidden == 2
    assert bare.examples == expected.examples


def best(task: Task, examples: list[Example]) -> list[str]:
    """Returns answers that are all right."""
    answers = [example.targets for example in examples]
    if task.name == "wsc":
        for number, example in enumerate(examples):
            if not example.fields["label"]:
                answers[number] = "somebody else"
    return answers


def worst(task: Task, examples: list[Example]) -> list[str]:
    """Returns answers that are all wrong, and unlike each other within a pair of AX-g."""
    if PEARSON in task.metrics:
        return [f"{5 - float(example.targets):.1f}" for example in examples]
    answers = ["" if task.name == "wsc" else "zzz qqq"] * len(examples)
    if GENDER_PARITY in task.metrics:
        for number, example in enumerate(examples[::2]):
            answers[2 * number] = next(c for c in example.choices if c != example.targets)
    return answers
