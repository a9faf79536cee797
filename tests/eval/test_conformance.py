"""The conformance command. Oracle: values computed by T5, t5_cbqa and seqio themselves."""

import json
from pathlib import Path

import pytest

from eval.__main__ import main
from eval.commands.conformance import agrees, check, read_cases

FILE = Path(__file__).with_name("conformance_cases.json")
CASES = read_cases(FILE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_the_library_gives_what_the_reference_gives(case):
    assert check(case)[0] is None


def accuracy_case(**changes):
    given = {"metric": "accuracy", "targets": [1, 0], "predictions": [1, 1]}
    case = {
        "id": "metric-1",
        "kind": "metric",
        "task": "t",
        "input": given,
        "expected": {"accuracy": 50.0},
    }
    return {**case, **changes}


@pytest.fixture
def run(tmp_path, capsys):
    """Returns the exit code and the lines printed for the content of a file."""

    def run(content, name="cases.json"):
        file = tmp_path / name
        if content is not None:
            file.write_text(
                content if isinstance(content, str) else json.dumps(content), encoding="utf-8"
            )
        try:
            main(["conformance", str(file)])
        except SystemExit as end:
            return end.code, capsys.readouterr().out.splitlines()
        return 0, capsys.readouterr().out.splitlines()

    return run


def test_cases_that_agree_are_counted_and_nothing_else_is_said(run):
    code, lines = run({"cases": [accuracy_case(), accuracy_case(id="metric-2")]})
    assert code == 0
    assert len(lines) == 1
    assert lines[0].endswith("2 of 2 cases agree.")


def test_a_case_that_differs_is_shown_with_both_values_and_the_exit_code_is_1(run):
    code, lines = run(
        {"cases": [accuracy_case(expected={"accuracy": 51.0}), accuracy_case(id="metric-2")]}
    )
    assert code == 1
    assert lines[0] == 'metric-1 (t): expected {"accuracy": 51.0}, got {"accuracy": 50.0}'
    assert lines[1].endswith("1 of 2 cases agree.")


def broken(**changes):
    return accuracy_case(id="broken", **changes)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            broken(input={"metric": "acuracy"}),
            "no function for metric 'acuracy'. Did you mean 'accuracy'",
        ),
        (broken(kind="metrics"), "there is no kind 'metrics'. Did you mean 'metric'"),
        (broken(kind=["metric"]), "TypeError"),
        (
            broken(kind="preprocess", task="sentiment", input={}),
            "no function for preprocess 'sentiment'",
        ),
        (
            broken(task="squad", input={"metric": "spam_squad"}),
            "no function for metric 'spam_squad'",
        ),
        (
            broken(kind="postprocess", task="qa", input={"txt": "x"}),
            "no text; expected one of string, prediction",
        ),
        (broken(input={"metric": "accuracy", "targets": [1]}), "KeyError: 'predictions'"),
        (broken(input={"metric": "accuracy", "targets": [1], "predictions": []}), "ValueError"),
        (broken(kind="preprocess", task="super_glue/cb", input={"label": 7}), "A row has label 7"),
        (
            broken(input=[1, 2]),
            "no case; expected a mapping with kind, task, input (a mapping) and expected",
        ),
        ({"id": "broken", "kind": "metric"}, "no case"),
    ],
)
def test_a_case_that_cannot_be_run_is_one_line_and_the_others_are_run(run, case, message):
    code, lines = run({"cases": [case, accuracy_case()]})
    assert code == 1
    assert len(lines) == 2
    assert lines[0].startswith("broken")
    assert message in lines[0]
    assert lines[1].endswith("1 of 2 cases agree.")


@pytest.mark.parametrize(
    ("task", "given", "message"),
    [
        (
            "",
            {"fn": "random_spans_helper", "inputs_length": 10**9},
            "inputs_length is 1000000000; expected an integer of",
        ),
        (
            "",
            {"fn": "random_spans_helper", "inputs_length": 512, "noise_density": 0.999999},
            "at this noise_density is",
        ),
        (
            "",
            {"fn": "random_spans_helper", "inputs_length": 512, "noise_density": 1.0},
            "noise_density is 1.0; expected",
        ),
        (
            "",
            {"fn": "random_spans_helper", "inputs_length": 1},
            "inputs_length is 1; expected an integer from 2",
        ),
        ("", {"fn": "random_spans_noise_mask", "length": 10**9}, "length is 1000000000; expected"),
        (
            "",
            {"fn": "sentinel vocabulary", "base_pieces": 10**9, "extra_ids": 1},
            "base_pieces is 1000000000",
        ),
        (
            "",
            {"fn": "sentinel fine-tuning variant", "num_sentinels": 10**12},
            "num_sentinels is 1000000000000",
        ),
        (
            "",
            {"fn": "EncDecFeatureConverter", "task_feature_lengths": {"inputs": 10**10}},
            "max_length is 10000000000",
        ),
    ],
)
def test_a_case_that_would_take_for_ever_is_one_line_with_the_reason(run, task, given, message):
    code, lines = run(
        [{"id": "huge", "kind": "preprocess", "task": "", "input": given, "expected": []}]
    )
    assert code == 1
    assert lines[0].startswith("huge (): ConfigError: ")
    assert message in lines[0]


@pytest.mark.parametrize(
    "metric", ["mean_multiclass_f1(num_classes=1000000000)", "accuracy " * 100_000, "(" * 50_000]
)
def test_the_name_of_a_metric_that_would_take_for_ever_is_one_line(run, metric):
    code, lines = run(
        [broken(input={"metric": metric, "targets": [1], "predictions": [1]}), accuracy_case()]
    )
    assert len(lines) <= 2
    assert lines[-1].endswith("cases agree.")
    assert code in (0, 1)


def test_numbers_of_any_size_are_compared():
    assert not agrees(10**400, 5.0)
    assert agrees(10**400, 10**400)
    assert not agrees(float("inf"), 5)
    assert agrees(float("inf"), float("inf"))


def test_what_is_no_mapping_is_called_by_its_number(run):
    assert run([accuracy_case(), "metric-2"])[1][0].startswith("case 1: no case")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory. Give a JSON file of cases."),
        ("{", "is not JSON (EOF while parsing"),
        ("[" * 10**5, "is not JSON (recursion limit exceeded"),
        ("9" * 5_000, "is not JSON (number out of range"),
        ('["\\ud800"]', "half a character"),
        ("3", "has no cases"),
        ({"cases": []}, "has no cases"),
        ({"case": [1]}, "has no cases"),
    ],
)
def test_a_file_without_cases_is_one_line_and_exit_code_1(run, content, message):
    code, lines = run(content)
    assert code == 1
    assert len(lines) == 1
    assert message in lines[0]


def test_a_file_that_is_no_text_is_one_line(run, tmp_path):
    (tmp_path / "image.json").write_bytes(b"\xff\xfe\x00")
    code, lines = run(None, "image.json")
    assert (code, len(lines)) == (1, 1)
    assert "is not UTF-8: byte 0xff at offset 0" in lines[0]


def test_a_byte_order_mark_in_front_of_the_cases_does_not_matter(run):
    assert run("\ufeff" + json.dumps([accuracy_case()]))[0] == 0


def test_deduplicated_values_without_a_named_metric_are_scored_as_squads():
    targets = [{"group": [0, 3], "value": ["Ada"]}, {"group": [0, 3], "value": ["Ada"]}]
    given = {
        "metric": "deduplicate_metric",
        "targets": targets,
        "predictions": [{"value": "ada"}, {"value": "no"}],
    }
    case = {"kind": "metric", "task": "t", "input": given, "expected": {"em": 100.0, "f1": 100.0}}
    assert check(case)[0] is None


def test_a_missing_file_does_not_keep_others_from_being_run(tmp_path, capsys):
    with pytest.raises(SystemExit, match="1"):
        main(["conformance", str(tmp_path / "none.json"), str(FILE)])
    lines = capsys.readouterr().out.splitlines()
    assert "cannot be read" in lines[0]
    assert lines[-1].endswith(f"{len(CASES)} of {len(CASES)} cases agree.")


def test_where_the_library_departs_from_t5_on_purpose_the_command_says_so():
    (case,) = (case for case in CASES if case["input"].get("length") == 350)
    assert (
        "agrees with T5, not with this library: half a token is rounded to even here (52 masked)"
        in check(case)[1]
    )


@pytest.mark.parametrize(
    ("length", "counts"), [(1, (0, 0)), (2, (1, 1)), (10, (2, 1)), (190, (29, 10)), (512, (77, 26))]
)
def test_masks_of_other_lengths_have_t5s_counts(length, counts):
    # By hand: 0.15 x length, kept within 1 and length - 1, and a third of it, at least 1; 28.5 is
    # 29 in T5's float32.
    expected = {"noise_tokens": counts[0], "noise_spans": counts[1], "first_is_noise": False}
    given = {"fn": "random_spans_noise_mask invariants", "length": length}
    case = {"kind": "preprocess", "task": "span_corruption", "input": given}
    assert check({**case, "expected": {**expected, "last_is_noise": length > 1}})[0] is None
    assert check({**case, "expected": {**expected, "last_is_noise": length == 1}})[0] is not None


@pytest.mark.parametrize(
    ("inputs_length", "density", "mean", "tokens", "targets"),
    # The first two are T5's own test; 512 and 1,024 its settings; at one half T5 takes a token from
    # inputs and targets.
    [
        (64, 0.2, 2.0, 70, 22),
        (64, 0.2, 1.0, 63, 27),
        (512, 0.15, 3.0, 568, 114),
        (1024, 0.15, 3.0, 1137, 229),
        (5, 0.15, 3.0, 5, 2),
        (11, 0.5, 3.0, 14, 11),
        (8, 0.5, 1.0, 6, 8),
    ],
)
def test_lengths_of_other_settings_are_those_that_t5_plans(
    inputs_length, density, mean, tokens, targets
):
    given = {
        "inputs_length": inputs_length,
        "noise_density": density,
        "mean_noise_span_length": mean,
    }
    case = {
        "kind": "preprocess",
        "task": "span_corruption",
        "input": {"fn": "random_spans_helper", **given},
    }
    assert (
        check({**case, "expected": {"tokens_length": tokens, "targets_length": targets}})[0] is None
    )


def test_segments_are_shifted_each_on_its_own():
    # The example in the documentation of seqio's make_autoregressive_inputs.
    given = {
        "targets": [3, 8, 1, 9, 1, 5, 4, 1, 0, 0],
        "segment_ids": [1, 1, 1, 2, 2, 3, 3, 3, 0, 0],
    }
    case = {
        "kind": "preprocess",
        "task": "shift_right",
        "input": given,
        "expected": [0, 3, 8, 0, 9, 0, 5, 4, 0, 0],
    }
    assert check(case)[0] is None


def test_two_examples_share_a_packed_row():
    # The example in the documentation of seqio's trim_and_pack_dataset.
    examples = [
        {"inputs": [8, 7, 1], "targets": [4, 1]},
        {"inputs": [2, 3, 4, 1], "targets": [5, 6, 1]},
    ]
    given = {"fn": "EncDecFeatureConverter(pack=True)", "examples": examples}
    given["task_feature_lengths"] = {"inputs": 10, "targets": 7}
    row = {
        "encoder_input_tokens": [8, 7, 1, 2, 3, 4, 1, 0, 0, 0],
        "encoder_segment_ids": [1, 1, 1, 2, 2, 2, 2, 0, 0, 0],
        "encoder_positions": [0, 1, 2, 0, 1, 2, 3, 0, 0, 0],
        "decoder_target_tokens": [4, 1, 5, 6, 1, 0, 0],
        "decoder_input_tokens": [0, 4, 0, 5, 6, 0, 0],
        "decoder_loss_weights": [1, 1, 1, 1, 1, 0, 0],
        "decoder_segment_ids": [1, 1, 2, 2, 2, 0, 0],
        "decoder_positions": [0, 1, 0, 1, 2, 0, 0],
    }
    assert (
        check({"kind": "preprocess", "task": "packing", "input": given, "expected": [row]})[0]
        is None
    )


@pytest.mark.parametrize(
    ("max_length", "expected"), [(3, [5, 6, 1]), (1, [1]), (None, [5, 6, 7, 8, 1])]
)
def test_the_end_token_survives_whatever_is_cut(max_length, expected):
    given = {"tokens": [5, 6, 7, 8], "max_length": max_length, "eos_id": 1}
    case = {
        "kind": "preprocess",
        "task": "append_eos_after_trim",
        "input": given,
        "expected": expected,
    }
    assert check(case)[0] is None


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        (
            "spearman_corrcoef",
            {"targets": [0, 2, 1], "predictions": [0, 1, 2]},
            {"spearman_corrcoef": 50.0},
        ),
        (
            "matthews_corrcoef x100",
            {"targets": [0, 1], "predictions": [0, 1]},
            {"matthews_corrcoef": 100.0},
        ),
        (
            "mean_multiclass_f1",
            {"targets": [0, 1, 1, 2], "predictions": [0, 0, 2, 2], "num_classes": 3},
            400 / 9,
        ),
        (
            "mean_multiclass_f1(num_classes=3)",
            {"targets": [0, 1, 1, 2], "predictions": [0, 0, 2, 2]},
            400 / 9,
        ),
        (
            "Spearman_corrcoef x100 of two lists",
            {"targets": [1, 2], "predictions": [1, 2]},
            {"spearman_corrcoef": 100},
        ),
        ("rouge_mean(rouge1)", {"targets": ["a b"], "predictions": ["a b"]}, {"rouge1": 100.0}),
    ],
)
def test_metrics_go_by_the_names_of_the_source(name, given, expected):
    expected = expected if isinstance(expected, dict) else {"mean_3class_f1": expected}
    case = {"kind": "metric", "task": "t", "input": {"metric": name, **given}, "expected": expected}
    assert check(case)[0] is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mean_group_metric(all_match)", {"exact_match": 50.0}),
        ("mean_group_metric", {"exact_match": 50.0}),
        ("mean_group_metric(metrics.all_match) of questions", {"exact_match": 50.0}),
        ("mean_group_metric(accuracy)", {"accuracy": 75.0}),
        ("deduplicate_metric(accuracy)", {"accuracy": 100.0}),
        ("multirc_exact_match", {"exact_match": 50.0}),
    ],
)
def test_metrics_of_groups_go_with_any_metric_inside(name, expected):
    targets = [{"group": 3, "value": 1}, {"group": 3, "value": 0}, {"group": 5, "value": 1}]
    given = {
        "metric": name,
        "targets": targets,
        "predictions": [{"value": value} for value in (1, 1, 1)],
    }
    assert check({"kind": "metric", "task": "t", "input": given, "expected": expected})[0] is None


ROW = {
    "text": "Ada said that she won",
    "span1_text": "Ada",
    "span1_index": 0,
    "span2_text": "she",
    "span2_index": 3,
}
ROW |= {"label": 0, "idx": 7}


@pytest.mark.parametrize(
    ("kind", "task", "given", "expected"),
    [
        ("preprocess", "super_glue/wsc.fixed", {"example": ROW, "correct_referent_only": True}, []),
        (
            "preprocess",
            "super_glue/wsc.fixed (marker form)",
            ROW,
            [{"inputs": "wsc text: * Ada * said that # she # won", "targets": "False", "idx": 7}],
        ),
        (
            "preprocess",
            "rank_classification formatter",
            {
                "example": {"q": {"a": "x"}, "key": 1},
                "inputs_formats": "Q",
                "targets_formats": ["", "{q/a}"],
            }
            | {"mode": "train", "label_key": "key"},
            [{"idx": [0, 1], "inputs": "Q", "targets": "x", "is_correct": True}],
        ),
        (
            "postprocess",
            "super_glue/multirc",
            {
                "string": "True",
                "is_target": True,
                "example": {"idx/paragraph": 2, "idx/question": 11},
            },
            {"value": 1, "group": 11},
        ),
        (
            "postprocess",
            "super_glue/record",
            {"string": "Ann", "is_target": False},
            {"value": "Ann"},
        ),
        ("postprocess", "super_glue/wsc.fixed", {"is_target": True, "example": {"label": 1}}, 1),
        ("postprocess", "generic", {"fn": "lower_text", "value": "AB"}, "ab"),
        (
            "postprocess",
            "closed-book",
            {"fn": "qa", "answer": "x", "example": {"answers": ["y"]}},
            "x",
        ),
        (
            "postprocess",
            "closed-book",
            {"fn": "qa", "answer": "x", "is_target": True, "answers": ["y"]},
            ["y"],
        ),
        (
            "postprocess",
            "generic",
            {"fn": "remove_sentinel", "values": ["<extra_id_0> a", "b"]},
            ["a", "b"],
        ),
        (
            "preprocess",
            "mixture_rate",
            {"num_examples": 1000, "maximum": None, "temperature": 1.0, "scale": 1.0},
            1000,
        ),
    ],
)
def test_a_case_is_found_by_its_task_or_function_and_its_options_are_passed_on(
    kind, task, given, expected
):
    case = {"kind": kind, "task": task, "input": given, "expected": expected}
    assert check(case)[0] is None
    assert check({**case, "expected": ["something else"]})[0] is not None


def test_values_agree_by_kind_and_floats_to_a_millionth():
    assert agrees([1.0, {"a": "x"}], (1.0000005, {"a": "x"}))
    assert agrees(float("nan"), float("nan"))
    assert not agrees(1.0, 1.000002)
    assert not agrees("1", 1)
    assert not agrees({"a": 1}, {"a": 1, "b": 2})
    assert agrees({"a": 1}, {"a": 1, "b": 2}, subset=True)
    assert not agrees([1], [1, 2])
    assert not agrees(None, 0)
