"""Scores of one task by hand, and reports of made-up results, without a model."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import yaml

from moe.parsing import to_json
from stmoe_eval.commands.run import print_scores
from stmoe_eval.reports.card import model_card
from stmoe_eval.reports.published import SYSTEMS, published_scores
from stmoe_eval.reports.records import AverageScore, ClassCount, DataInfo, FailedTask, Selection
from stmoe_eval.reports.report_files import write_reports
from stmoe_eval.reports.report_text import html_report, markdown_report, model_comparisons
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


class Page(HTMLParser):
    """Collects text and references, and checks that every tag is closed."""

    EMPTY = frozenset({"meta", "br"})

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.references = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("src", "href", "srcset") and value and not value.startswith("#"):
                self.references.append(value)
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_a_row_holds_every_metric_with_its_interval_and_counts_what_cannot_be_read(task):
    examples = task.examples("validation")
    outputs = [example.targets for example in examples]
    outputs[:3] = ["", "pink", "green"]
    router = a_router()
    row, draws, _ = score_system(task, examples, outputs, "ours", "generate", router)
    assert [one.metric for one in row.scores] == [metric.name for metric in task.metrics]
    assert row.scores[0].value == pytest.approx(task.scores(examples, outputs)["accuracy"])
    assert row.scores[0].low < row.scores[0].value
    assert (row.num_unparsable, row.num_empty, row.router) == (2, 1, router)
    assert len(draws["accuracy"]) == 1000


def test_classes_count_right_answers_examples_and_answers(task):
    examples = [e for e in task.examples("validation") if e.targets != "dark blue"][:5]
    found = {row.target: row for row in class_counts(task, examples, ["red"] * 5)}
    num_red = sum(example.targets == "red" for example in examples)
    assert found["red"] == ClassCount("red", right=num_red, total=num_red, answered=5)
    assert found["green"].right == found["green"].answered == 0
    assert "dark blue" not in found


def test_the_worst_answers_are_wrong_ones_from_all_over_the_split(task):
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


def test_lengths_count_the_inputs_that_are_cut(task, tokenizer):
    examples = task.examples("validation")
    lengths = sorted(len(tokenizer(example.inputs)["input_ids"]) for example in examples)
    found = input_lengths(examples, tokenizer, lengths[20])
    assert found.longest == lengths[-1]
    assert found.num_cut == sum(length > lengths[20] for length in lengths)


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


def test_two_metrics_of_some_tasks_are_one_part_of_the_average():
    assert TASKS.get("boolq").headline_score({"accuracy": 70.0}) == 70
    cb = TASKS.get("cb")
    assert cb.headline_score({"accuracy": 60.0, "mean_3class_f1": 80.0}) == 70
    assert TASKS.get("squad").headline_score({"f1": 60.0, "em": 80.0}) == 60
    assert np.isnan(cb.headline_score({"accuracy": 60.0, "mean_3class_f1": None}))
    draws = {"accuracy": np.asarray([50.0, 60.0]), "mean_3class_f1": np.asarray([70.0, 60.0])}
    assert cb.headline_score(draws).tolist() == [60, 60]


def test_what_was_published_has_a_known_system_and_the_average_of_its_parts():
    for name in SUPERGLUE:
        assert any(published_scores(name, metric) for metric in ("accuracy", "f1", "em")), name
    average = {one.system: one for one in published_scores("superglue", "average")}
    assert set(average) == set(SYSTEMS)
    assert (average["ST-MoE-32B"].value, average["ST-MoE-32B"].split) == (93.2, "validation")
    boolq = {one.system: one for one in published_scores("boolq", "accuracy")}
    assert (boolq["ST-MoE-32B"].value, boolq["ST-MoE-32B"].split) == (92.4, "test")
    assert (boolq["ST-MoE-L"].value, boolq["ST-MoE-L"].split) == (88.6, "validation")
    assert published_scores("colour", "accuracy") == []


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
    report = a_report(a_task(), a_task("boolq"), averages=averages, failed=failed)
    write_reports(report, tmp_path)
    assert read_report(tmp_path) == report
    assert not list(tmp_path.glob(".*"))

    html = (tmp_path / "report.html").read_text()
    page = Page(html)
    assert page.open == page.references == []
    assert "url(" not in html
    text = " ".join(page.text)
    for word in (
        *("The hub is <away>.", "superglue", "81.0", "70.0 to 90.0", "1.23 %", "dead experts"),
        *("3 inputs were cut to 8 tokens", "A note.", "a|b <i>", "CC0-1.0", "ST-MoE-32B", "[... "),
        "By class (ours by generate)",
    ):
        assert word in text, word

    text = (tmp_path / "report.md").read_text()
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

    # A score that is not defined is a dash everywhere.
    write_reports(a_report(a_task(scores=[a_score("accuracy", None)])), tmp_path)
    page = (tmp_path / "report.html").read_text()
    for word in ("Published", "published", "Metrics under other names", "Calibration"):
        assert word not in page
    assert "| ours | generate | accuracy | - | - |" in (tmp_path / "report.md").read_text()
    assert "value" not in (tmp_path / "card.md").read_text()

    # Failures alone are a report.
    write_reports(a_report(failed=[FailedTask("rte", "No hub.")]), tmp_path)
    for name in ("report.html", "report.md"):
        assert "No hub." in (tmp_path / name).read_text()


def test_a_router_that_saw_no_token_makes_no_invalid_json(tmp_path):
    write_reports(a_report(a_task(router=a_router(load_cv=float("nan")))), tmp_path)
    text = (tmp_path / "report.json").read_text()
    saved = json.loads(text, parse_constant=lambda _: 1 / 0)
    assert saved["tasks"][0]["systems"][0]["router"]["encoder"]["load_cv"] is None
    assert read_report(tmp_path).tasks[0].systems[0].router["encoder"].load_cv is None


def test_the_card_is_read_by_the_hub(tmp_path):
    local = a_task("rte", data=replace(HUB, folder="here"), limit=3)
    write_reports(a_report(a_task("boolq"), local), tmp_path)
    card = huggingface_hub.ModelCard.load(tmp_path / "card.md")
    first, second = card.data.eval_results
    assert (first.dataset_type, first.dataset_config) == ("owner/colours", "plain")
    assert first.dataset_split == "validation"
    assert (first.metric_type, first.metric_value) == ("accuracy", 80.0)
    assert (second.dataset_type, second.dataset_args) == ("local", {"limit": 3})
    assert model_index(tmp_path)["name"] == "ours"
    assert "| boolq | validation | accuracy | 80.0 | 70.0 to 90.0 | generate | 25 |" in card.text


def model_index(folder):
    header = (folder / "card.md").read_text().split("---")[1]
    return yaml.safe_load(header)["model-index"][0]


def test_the_cards_header_keeps_tasks_apart_that_share_a_repository_or_have_none(tmp_path):
    first = a_task("anli_r1", data=replace(HUB, split="test_r1"))
    third = a_task("anli_r3", data=replace(HUB, split="test_r3"))
    varied = replace(third, task="anli_r3.flan", variant_of="anli_r3", prompt_source="FLAN")
    offline = DataInfo(folder=None, repository=None, config=None, split="test", revision=None)
    without = [a_task(name, data=offline) for name in ("names", "own_task")]
    local = [a_task(name, data=replace(HUB, folder="here")) for name in ("rte", "boolq")]
    write_reports(a_report(first, third, varied, *without, *local), tmp_path)
    results = model_index(tmp_path)["results"]
    names = ["anli_r1", "anli_r3", "names", "own_task"]
    names += [f"{name} (rows of a local folder)" for name in ("rte", "boolq")]
    assert [one["dataset"]["name"] for one in results] == names
    assert [one["dataset"]["split"] for one in results[:2]] == ["test_r1", "test_r3"]
    of_third = [(metric["name"], metric["args"]["task"]) for metric in results[1]["metrics"]]
    assert of_third == [
        ("accuracy by generate", "anli_r3"),
        ("accuracy by generate with the prompt of FLAN", "anli_r3.flan"),
    ]


def test_models_are_compared_by_their_intervals():
    first, second = a_task().systems
    far = replace(second, scores=[a_score("accuracy", 20.0, 10.0, 30.0)])
    assert (
        "overlap; `stmoe eval compare` tests the difference"
        in model_comparisons([first, second])[0]
    )
    expected = "`ours` is 60.0 points above `other`; their 95 % intervals do not overlap"
    assert expected in model_comparisons([first, far])[0]


def test_an_interval_that_saw_no_spread_is_marked_in_tables_page_and_terminal(capsys):
    note = "all bootstrap draws score 100.0, so no spread was seen"
    certain = replace(a_score("accuracy", 100.0, 93.6, 100.0), note=note)
    usual = a_score("f1", 80.0, 70.0, 90.0)
    report = a_report(a_task(scores=[certain, usual]))
    legend = "* the interval has a note, below the scores of the task."
    assert legend in board_legend(board_lines(report))
    assert legend not in board_legend(board_lines(a_report(a_task(scores=[usual]))))

    for text in (markdown_report(report), html_report(report)):
        assert "100.0 (93.6 to 100.0 *)" in text
        assert "80.0 (70.0 to 90.0)" in text
        assert f"ours by generate, accuracy: {note}." in text

    print_scores(report)
    printed = capsys.readouterr().out
    assert "accuracy  100.0  (93.6 to 100.0 *)" in printed
    assert f"* colour accuracy: {note}." in printed
    assert "* the report has a note" in model_card(report).lower()


def test_calibration_and_signatures_stand_in_both_reports():
    task = a_task(signatures={"bleu": "sacreBLEU, tok:intl"})
    calibration = Calibration(ece=12.34, brier=0.5678, num_examples=1025, bins=[])
    ranked = replace(task.systems[0], mode="rank", calibration=calibration)
    report = a_report(replace(task, systems=[*task.systems, ranked]))
    for text in (markdown_report(report), html_report(report)):
        assert "Calibration of ranked choices" in text
        for part in ("12.3", "0.568", "1,025", "bleu: sacreBLEU, tok:intl."):
            assert part in text
    saved = to_json(report)["tasks"][0]["systems"]
    assert saved[2]["calibration"]["ece"] == 12.34
    assert "calibration" not in saved[0]


def test_columns_of_the_terminal_are_as_wide_as_the_longest_name(capsys):
    names = ["short", "a-model-of-a-name-that-is-longer-than-most"]
    task = a_task()
    systems = [replace(task.systems[0], name=name) for name in names]
    print_scores(a_report(replace(task, systems=systems)))
    lines = capsys.readouterr().out.splitlines()
    assert len({line.index("generate") for line in lines}) == 1
    assert len({line.index("80.0") for line in lines}) == 1


def test_the_average_says_which_tasks_add_no_spread():
    rng = np.random.default_rng(0)
    draws = {("ours", "generate", name): rng.normal(80, 1, size=50) for name in SUPERGLUE}
    draws["ours", "generate", "cb"] = np.full(50, 100.0)
    tasks = []
    for name in SUPERGLUE:
        scores = [a_score(metric.name, 80.0) for metric in TASKS.get(name).metrics]
        task = a_task(name, scores=scores)
        tasks.append(replace(task, systems=task.systems[:1]))
    (average,) = superglue_averages(tasks, draws)
    assert average.note == "the draws of cb show no spread, so the interval is too narrow"
