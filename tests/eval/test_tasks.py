"""Single tasks: what sets each apart. What all tasks promise is in tests/contracts/test_tasks.py."""

import json

import pytest

from stmoe_eval.task import TASKS
from tests.eval.rows import FIXTURES, examples_of, fixture_rows


@pytest.mark.parametrize(
    ("name", "column"), [("arc_easy", "choices"), ("squad", "answers"), ("squad_v2", "answers")]
)
def test_structs_of_lists_and_lists_of_structs_are_the_same(name, column, tmp_path):
    source, split = TASKS.get(name).source, "validation"
    rows = fixture_rows(FIXTURES / name / f"{split}.jsonl")
    for row in rows:
        row[column] = [
            dict(zip(row[column], values, strict=True))
            for values in zip(*row[column].values(), strict=True)
        ]
    (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert source.rows(split, tmp_path) == source.rows(split, FIXTURES / name)


def test_tasks_have_their_own_training_rows_groups_and_orders_of_labels():
    wsc = TASKS.get("wsc")
    assert [example.targets for example in examples_of(wsc, "train")] == ["Sofie", "The crate"]
    assert len(examples_of(wsc, "validation")) == 4

    axg = TASKS.get("axg")
    examples = examples_of(axg, "test")
    assert [example.group for example in examples] == ["0", "0", "1", "1"]
    found = axg.scores(examples, ["entailment"] * 4)
    assert found == {"accuracy": 50.0, "gender_parity": 100.0}

    anli = TASKS.get("anli_r3")
    labels = [example.targets for example in examples_of(anli, anli.split)[:3]]
    assert labels == ["entailment", "neutral", "contradiction"]


def test_record_trains_on_every_answer_asks_each_query_once_and_sorts_entities():
    task = TASKS.get("record")
    train = examples_of(task, "train")
    assert [example.targets for example in train] == ["Jon Reed", "Mira Holt", "Holt", "Oslin"]
    assert train[1].inputs == train[2].inputs
    assert train[1].group == train[2].group
    validation = examples_of(task, "validation")
    assert [example.id for example in validation] == ["0/0/0", "0/1/0", "1/2/0"]
    assert validation[0].choices == ("Bergdorf", "Oslin", "Tarn Lake")
    assert "entities: Bergdorf, Oslin, Tarn Lake passage:" in validation[0].inputs
    assert task.scores(validation, ["Tarn Lake", "Bergdorf", "Holt"]) == {"em": 100.0, "f1": 100.0}


def test_arc_keys_may_be_digits_and_choices_three_to_five():
    examples = examples_of(TASKS.get("arc_easy"), "test")
    found = [(example.targets, len(example.choices)) for example in examples]
    assert found == [("B", 4), ("C", 4), ("B", 3), ("C", 5)]
    texts = examples_of(TASKS.get("arc_easy.unifiedqa"), "test")
    assert [example.targets for example in texts] == ["a candle", "water", "flower", "diamond"]
    question = "what freezes at 0 degrees celsius? \\n (a) iron (b) oil (c) water (d) salt"
    assert texts[1].inputs == question


def test_squad_v2_counts_an_unanswerable_question_as_the_official_script_does():
    """Right is `unanswerable`, or what normalisation leaves nothing of; every other answer scores 0
    in both.
    """
    task = TASKS.get("squad_v2")
    examples = examples_of(task, "validation")
    targets = [example.targets for example in examples]
    assert targets == ["heron", "unanswerable", "ninety crowns", "unanswerable"]
    overlap = (100 + 0 + 100 * 2 / 3 + 100) / 4
    for outputs, f1, exact in (
        (["unanswerable"] * 4, 50, 50),
        ([""] * 4, 50, 50),
        (["a heron", "The.", "ninety", "heron"], 75, 75),
        (["heron", "the island", "crowns", ""], overlap, 50),
    ):
        expected = {"f1": pytest.approx(f1), "em": exact}
        assert task.scores(examples, outputs) == expected


def test_the_beams_and_lengths_are_those_of_t5():
    for name in ("xsum", "cnn_dailymail"):
        assert TASKS.get(name).decoding == (128, 4, 0.6)
        assert (TASKS.get(name).inputs_length, TASKS.get(name).targets_length) == (512, 512)
    assert (TASKS.get("rte").inputs_length, TASKS.get("rte").targets_length) == (512, 62)
    assert TASKS.get("squad").targets_length == 97
    assert TASKS.get("rte").decoding == (128, 1, 0.0)


SENTENCE = "The shelf broke under the vase since the _ was weak."
PREMISE = "Mei Tan opened a workshop for clocks in Split in 1953 and sold it nine years later."
HYPOTHESIS = "There was a workshop in Split."
PROMPTS = {
    "winogrande_xl": (f"winogrande option1: shelf option2: vase sentence: {SENTENCE}", "option1"),
    "winogrande_xl.unifiedqa": (f"{SENTENCE.lower()} \\n (a) shelf (b) vase", "shelf"),
    "winogrande_xl.rainbow": (
        f"[winogrande]:\n<sentence>{SENTENCE}</sentence>\n<option1>shelf</option1>\n<option2>vase</option2>",
        "1",
    ),
    "winogrande_xl.flan": (
        "How does the sentence end?\n\nThe shelf broke under the vase since the \n\n"
        "OPTIONS:\n- shelf was weak.\n- vase was weak.",
        "shelf was weak.",
    ),
    "anli_r3": (f"anli_r3 hypothesis: {HYPOTHESIS} premise: {PREMISE}", "entailment"),
    "anli_r3.gpt3": (
        f"{PREMISE}\nQuestion: {HYPOTHESIS} True, False, or Neither?\nAnswer:",
        "True",
    ),
    "anli_r3.flan": (
        f'{PREMISE}\n\nBased on the paragraph above can we conclude that "{HYPOTHESIS}"?\n\n'
        "OPTIONS:\n- Yes\n- It's impossible to say\n- No",
        "Yes",
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_the_prompts_of_this_library_and_their_variants(name):
    example = examples_of(TASKS.get(name), TASKS.get(name).split)[0]
    assert (example.inputs, example.targets) == PROMPTS[name]
