"""Scores of one task by hand, and reports of made-up results, without a model."""

import json
import re
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest

from stmoe_eval.commands.run import print_scores
from stmoe_eval.reports.published import SYSTEMS, published_scores
from stmoe_eval.reports.records import AverageScore, ClassCount, DataInfo, FailedTask, Selection
from stmoe_eval.reports.report_files import write_reports
from stmoe_eval.reports.report_text import markdown_report
from stmoe_eval.reports.run_folder import read_report
from stmoe_eval.reports.scoreboard import board_chart, board_legend, board_lines
from stmoe_eval.reports.task_summary import (
    class_counts,
    comparability_notes,
    count_unparsable,
    input_lengths,
    score_system,
    superglue_averages,
    worst_answers,
)
from stmoe_eval.scores.calibration import Calibration
from stmoe_eval.scores.superglue import SUPERGLUE
from stmoe_eval.task import TASKS, Example, limit_examples
from tests.eval.results import HUB, a_model, a_report, a_router, a_score, a_task

FIXTURES = Path(__file__).parent / "fixtures"


def test_classes_count_right_answers_examples_and_answers(task):
    examples = [e for e in task.examples("validation") if e.targets != "dark blue"][:5]
    found = {row.target: row for row in class_counts(task, examples, ["red"] * 5)}
    num_red = sum(example.targets == "red" for example in examples)
    assert found["red"] == ClassCount("red", right=num_red, total=num_red, answered=5)
    assert found["green"].right == found["green"].answered == 0
    assert "dark blue" not in found


def test_the_worst_answers_are_wrong_ones_from_all_over_the_split(task, tokenizer):
    examples = task.examples("validation")

    def worst_of(outputs):
        scored = score_system(task, examples, outputs, "ours", "generate")
        return worst_answers(examples, outputs, scored.example_scores)

    assert worst_of([example.targets for example in examples]) == []
    found = worst_of(["nonsense"] * 25)
    assert len(found) == 10
    assert [row.id for row in found][::9] == [examples[0].id, examples[22].id]
    only = worst_of([example.targets for example in examples[:-1]] + ["x"])
    assert [row.id for row in only] == [examples[-1].id]

    # Empty answers are counted, and inputs that are cut.
    found = score_system(task, examples, ["", "red"] + ["pink"] * 23, "ours", "generate").result
    assert (found.num_unparsable, found.num_empty) == (24, 1)
    lengths = sorted(len(tokenizer(example.inputs)["input_ids"]) for example in examples)
    found = input_lengths(examples, tokenizer, lengths[20])
    assert (found.longest, found.median) == (lengths[-1], lengths[12])
    assert found.num_cut == sum(length > lengths[20] for length in lengths)


@pytest.mark.parametrize(
    ("name", "outputs", "expected"),
    [
        ("boolq", ["True", "true", "", "False"], 2),
        ("multirc", ["True", "no", "False", "False", "?"], 2),
        ("wsc", ["the", "a heron", "", "she"], 2),
        ("squad", ["", "?", "-1", "heron"], None),
        ("record", ["", "?", "-1"], None),
    ],
)
def test_answers_without_a_value_are_counted_where_values_are_numbers(name, outputs, expected):
    task = TASKS.get(name)
    examples = task.examples(task.split, FIXTURES)
    assert count_unparsable(*task.values(examples, outputs)) == expected


def test_a_limit_takes_whole_groups_from_all_over(task):
    examples = [Example(str(i), str(i // 3), "", "", (), {}) for i in range(21)]
    expected = {7: ["0", "1", "2", "9", "10", "11"], 1: ["0", "1", "2"]}
    for limit, ids in expected.items():
        assert [example.id for example in limit_examples(examples, limit)] == ids
    assert limit_examples(examples, 21) == limit_examples(examples, None) == examples
    alone = [example._replace(group=example.id) for example in examples]
    for limit in range(1, 21):
        assert len(limit_examples(alone, limit)) == limit
        assert len(limit_examples(examples, limit)) <= max(limit, 3)


def test_what_was_published_has_a_known_system_and_the_average_of_its_parts():
    for name in SUPERGLUE:
        assert any(published_scores(name, metric) for metric in ("accuracy", "f1", "em")), name
    average = {one.system: one for one in published_scores("superglue", "average")}
    assert set(average) == set(SYSTEMS)
    assert (average["ST-MoE-32B"].value, average["ST-MoE-32B"].split) == (93.2, "validation")


def test_notes_say_what_is_not_comparable():
    chosen = a_model(chosen_by=Selection("best", ["boolq"]))
    none_cut = replace(a_task().inputs, num_cut=0)
    plain = a_task("boolq", inputs=none_cut)
    assert comparability_notes(plain, {"ours": a_model()}) == []
    for changes, text in (
        ({"data": replace(HUB, folder="here")}, "from here, not from the hub"),
        ({"num_rows": 24}, "24 rows of 25"),
        ({"limit": 5, "num_examples": 5}, "--limit 5: 5 of 25"),
        ({"prompt_source": "this library"}, "The prompt is of this library"),
        ({"inputs": replace(none_cut, num_cut=3)}, "3 inputs were cut to 8 tokens"),
    ):
        (note,) = comparability_notes(replace(plain, **changes), {})
        assert text in note
    (note,) = comparability_notes(plain, {"ours": chosen})
    assert "`ours` is the best of its run on this same split" in note
    assert comparability_notes(replace(plain, split="test"), {"ours": chosen}) == []
    assert comparability_notes(replace(plain, task="rte"), {"ours": chosen}) == []


def test_published_scores_stand_beside_ours_with_a_sign_where_the_split_differs():
    text = markdown_report(a_report(a_task("boolq"), a_task("colour")))
    assert "| ours, generate | other, generate | ST-MoE-32B | previous best |" in text
    ours = "80.0 (70.0 to 90.0)"
    row = f"| boolq | accuracy | validation | {ours} | {ours} | 92.4† | 92.0† | 88.6 | 87.1 |"
    assert row in text
    assert f"| colour | accuracy | validation | {ours} | {ours} |  |  |  |  |" in text
    assert "published on another split" in text

    # A variant and rows of a folder are marked too.
    varied = a_task("anli_r3.flan", variant_of="anli_r3", prompt_source="FLAN")
    local = a_task("boolq", data=replace(HUB, folder="here"))
    assert [line.marks for line in board_lines(a_report(varied, local))] == ["‡", "§"]


def test_the_reports_are_whole_are_read_back_and_need_nothing_outside(tmp_path):
    average = {"value": 81.0, "stderr": 1.0, "low": 79.0, "high": 83.0}
    averages = [AverageScore(average="superglue", name="ours", mode="generate", **average)]
    failed = [FailedTask("rte", "The hub is <away>.")]
    calibration = Calibration(ece=12.34, brier=0.5678, num_examples=1025, bins=[])
    task = a_task(signatures={"bleu": "sacreBLEU, tok:intl"})
    first, second = task.systems
    ranked = replace(first, mode="rank", calibration=calibration)
    far = replace(second, scores=[a_score("accuracy", 20.0, 10.0, 30.0)])
    task = replace(task, systems=[first, second, far, ranked])
    report = a_report(task, a_task("boolq"), averages=averages, failed=failed)
    write_reports(report, tmp_path)
    assert read_report(tmp_path) == report
    assert not list(tmp_path.glob(".*"))

    html = (tmp_path / "report.html").read_text()
    for outside in ("url(", "src=", 'href="http'):
        assert outside not in html
    text = (tmp_path / "report.md").read_text()
    for word in (
        *("superglue", "81.0", "70.0 to 90.0", "1.23 %", "dead experts", "[... ", "ST-MoE-32B"),
        *("3 inputs were cut to 8 tokens", "A note.", "CC0-1.0", "By class (ours by generate)"),
        *("Calibration of ranked choices", "12.3", "0.568", "1,025", "bleu: sacreBLEU, tok:intl."),
        "`ours` is 60.0 points above `other`; their 95 % intervals do not overlap",
        "overlap; `stmoe eval compare` tests the difference",
    ):
        assert word in text, word
        assert word.replace("`", "") in html.replace("<code>", "").replace("</code>", ""), word
    assert "rte failed: The hub is &lt;away&gt;." in html and "a|b &lt;i&gt;" in html
    assert "rte failed: The hub is <away>." in text
    assert "| ours | generate | accuracy | 80.0 | 70.0 to 90.0 | 1.00 | 2 | 1 |" in text
    assert "a\\|b" in text
    assert max(map(len, text.splitlines())) < 1500


def test_a_bar_begins_at_zero_and_its_interval_has_the_same_scale():
    scores = [a_score("accuracy", 50.0, 10.0, 100.0), a_score("f1", -20.0)]
    report = a_report(a_task(scores=scores[:1]), a_task("other", scores=scores[1:]))
    chart = board_chart(board_lines(report))
    places = re.findall(r'<rect class="ours" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', chart)
    whiskers = re.findall(r'd="M([\d.]+) [\d.]+H([\d.]+)"', chart)
    zero, width = map(float, places[0])
    scale = width / 50
    low, high = map(float, whiskers[0])
    assert (low, high) == pytest.approx((zero + 10 * scale, zero + 100 * scale), abs=0.2)
    left, negative = map(float, places[2])
    assert left + negative == pytest.approx(zero, abs=0.2)
    assert negative == pytest.approx(20 * scale, abs=0.2)


def test_a_report_says_only_what_it_has_computed(tmp_path):
    record = a_task("record", scores=[a_score("em", 50.0, 40.0, 60.0)])
    text = markdown_report(a_report(a_task("boolq"), record))
    assert "Metrics under other names in the papers: acc of record is our em." in text
    assert "closed-book" not in text

    # A score that is not defined is a dash everywhere, and no number that is not finite is written.
    router = a_router(load_cv=float("nan"))
    write_reports(a_report(a_task(scores=[a_score("accuracy", None)], router=router)), tmp_path)
    json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda _: 1 / 0)
    assert read_report(tmp_path).tasks[0].systems[0].router["encoder"].load_cv is None
    page = (tmp_path / "report.html").read_text()
    for word in ("Published", "published", "Metrics under other names", "Calibration"):
        assert word not in page
    assert "| ours | generate | accuracy | - | - |" in (tmp_path / "report.md").read_text()
    assert "value" not in (tmp_path / "card.md").read_text()

    # Failures alone are a report.
    write_reports(a_report(failed=[FailedTask("rte", "No hub.")]), tmp_path)
    for name in ("report.html", "report.md"):
        assert "No hub." in (tmp_path / name).read_text()


def test_the_hub_reads_a_card_with_each_task_apart(tmp_path):
    first = a_task("anli_r1", data=replace(HUB, split="test_r1"))
    third = a_task("anli_r3", data=replace(HUB, split="test_r3"))
    varied = replace(third, task="anli_r3.flan", variant_of="anli_r3", prompt_source="FLAN")
    offline = DataInfo(folder=None, repository=None, config=None, split="test", revision=None)
    without = [a_task(name, data=offline) for name in ("names", "own_task")]
    local = a_task("rte", data=replace(HUB, folder="here"), limit=3)
    write_reports(a_report(first, third, varied, *without, local), tmp_path)
    card = huggingface_hub.ModelCard.load(tmp_path / "card.md")
    assert "| anli_r1 | validation | accuracy | 80.0 | 70.0 to 90.0 | generate | 25 |" in card.text
    results = card.data.eval_results
    assert [(one.dataset_name, one.dataset_split, one.metric_name) for one in results] == [
        ("anli_r1", "test_r1", "accuracy by generate"),
        ("anli_r3", "test_r3", "accuracy by generate"),
        ("anli_r3", "test_r3", "accuracy by generate with the prompt of FLAN"),
        ("names", "validation", "accuracy by generate"),
        ("own_task", "validation", "accuracy by generate"),
        ("rte (rows of a local folder)", "validation", "accuracy by generate"),
    ]
    assert (results[0].dataset_type, results[0].metric_value) == ("owner/colours", 80.0)
    assert (results[-1].dataset_type, results[-1].dataset_args) == ("local", {"limit": 3})


def test_scores_are_printed_in_columns_and_notes_once(capsys):
    note = "all bootstrap draws score 100.0, so no spread was seen"
    certain = replace(a_score("accuracy", 100.0, 93.6, 100.0), note=note)
    task = a_task(scores=[certain, a_score("f1", 80.0, 70.0, 90.0)])
    names = ["short", "a-model-of-a-name-that-is-longer-than-most"]
    systems = [replace(task.systems[0], name=name) for name in names]
    report = a_report(replace(task, systems=systems))
    print_scores(report)
    *rows, last = capsys.readouterr().out.splitlines()
    assert len({line.index("generate") for line in rows}) == 1
    assert "accuracy  100.0  (93.6 to 100.0 *)" in rows[0]
    assert last == f"* colour accuracy: {note}."
    legend = "* the interval has a note, below the scores of the task."
    assert legend in board_legend(board_lines(report))
    assert f"short by generate, accuracy: {note}." in markdown_report(report)


def test_the_average_is_of_headline_scores_and_says_which_tasks_add_no_spread():
    rng = np.random.default_rng(0)
    draws = {("ours", "generate", name): rng.normal(80, 1, size=50) for name in SUPERGLUE}
    draws["ours", "generate", "cb"] = np.full(50, 100.0)
    tasks = []
    for name in SUPERGLUE:
        # Two metrics of some tasks are one part of the average.
        values = zip(TASKS.get(name).metrics, (80.0, 60.0), strict=False)
        task = a_task(name, scores=[a_score(metric.name, value) for metric, value in values])
        tasks.append(replace(task, systems=task.systems[:1]))
    (average,) = superglue_averages(tasks, draws)
    assert average.value == pytest.approx((5 * 80 + 3 * 70) / 8)
    assert average.note == "the draws of cb show no spread, so the interval is too narrow"
