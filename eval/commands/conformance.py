"""python -m eval conformance FILE.json: the library's functions on cases with expected values, one
by one.

A case has an `id`, a `kind` (preprocess, postprocess, metric), a `task`, an `input` and an
`expected` value. What is called for it stands in three tables; data_conformance.py has those of the
training data.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from eval.commands.data_conformance import DATA, MOST_TOKENS, REASON, Deviation
from eval.scores import metrics
from eval.scores.metrics import Metric
from eval.scores.superglue import superglue_average
from eval.task import Row
from eval.text import postprocess, preprocess, questions, wsc
from moe import DataError, did_you_mean
from moe.checks import check_integer, is_kind
from moe.cli import path
from moe.parsing import read_json

_TOLERANCE = 1e-6
_MOST_WORDS = 20  # of the name of a function
_SIZES = (
    "length",
    "inputs_length",
    "max_length",
    "num_sentinels",
    "extra_ids",
    "base_pieces",
    "num_classes",
)

Input = dict[str, Any]
Function = Callable[[Input], Any]


def add_conformance_command(commands: Any) -> None:
    """Adds the sub-command to a parser's sub-commands."""
    command = commands.add_parser(
        "conformance", help="runs the library's functions on cases with expected values"
    )
    command.add_argument("files", nargs="+", type=path, metavar="FILE.json", help="cases to run")


def run_conformance(arguments: argparse.Namespace) -> None:
    """Runs the cases, prints what differs and a count, and exits with 1 when anything differs."""
    differing = 0
    for file in arguments.files:
        try:
            cases = read_cases(file)
        except DataError as error:
            print(error)
            differing += 1
            continue
        wrong, deviations = [], []
        for number, case in enumerate(cases):
            difference, deviation = check(case, number)
            wrong += [difference] * (difference is not None)
            deviations += [deviation] * (deviation is not None)
        print(
            "\n".join(
                [
                    *wrong,
                    *deviations,
                    f"{file}: {len(cases) - len(wrong)} of {len(cases)} cases agree.",
                ]
            )
        )
        differing += len(wrong)
    if differing:
        sys.exit(1)


def read_cases(file: Path) -> list[Any]:
    """Returns the cases of a file, a list or a mapping with a list `cases`.

    Raises:
        DataError: When it cannot be read, or holds no cases.
    """
    content = read_json(file, advice="Give a JSON file of cases.", nan=True)
    cases = content.get("cases") if isinstance(content, dict) else content
    if not isinstance(cases, list) or not cases:
        raise DataError(f'{file} has no cases; expected {{"cases": [...]}} with at least one case.')
    return cases


def check(case: Any, number: int = 0) -> tuple[str | None, str | None]:
    """Returns one line on how a case differs, None when it agrees; and one on a documented
    deviation, None for none.
    """
    name = str(case.get("id", f"case {number}")) if isinstance(case, dict) else f"case {number}"
    lacking = [
        key
        for key in ("kind", "task", "input", "expected")
        if not isinstance(case, dict) or key not in case
    ]
    if lacking or not isinstance(case["input"], dict):
        return (
            f"{name}: no case; expected a mapping with kind, task, input (a mapping) and expected.",
            None,
        )
    try:
        _check_sizes(case["input"])
        got = function_of(case["kind"], case["task"], case["input"])(case["input"])
    except Exception as error:  # whatever it is, the other cases are run
        reason = str(error).replace("\n", " ")
        return f"{name} ({case['task']}): {type(error).__name__}: {reason}", None
    note = None
    if isinstance(got, Deviation):
        note, got = f"{name}: agrees with T5, not with this library: {got.reason}", got.theirs
    if agrees(case["expected"], got, subset=case["kind"] == "metric"):
        return None, note
    return f"{name} ({case['task']}): expected {_show(case['expected'])}, got {_show(got)}", None


def _check_sizes(given: Input) -> None:
    """Raises when an input asks for more than can be computed while one waits.

    Raises:
        ConfigError: With the number and its bound.
    """
    for name, value in {**given, **_mapping(given.get("task_feature_lengths"))}.items():
        if name in _SIZES:
            check_integer(name, value, most=MOST_TOKENS, reason=REASON, optional="null")


def _mapping(value: Any) -> Input:
    """Returns the lengths of a case under names that tell them from others; nothing when it has
    none.
    """
    return {"max_length": max(value.values())} if isinstance(value, dict) and value else {}


def function_of(kind: Any, task: Any, given: Input) -> Function:
    """Returns what a case is about: the function that its input names, else the one of its task.

    Raises:
        DataError: When none is known.
    """
    if kind not in TABLES:
        raise DataError(
            f"there is no kind {kind!r}.{did_you_mean(kind, TABLES)} Choose from {', '.join(TABLES)}."
        )
    table = {name.lower(): function for name, function in TABLES[kind].items()}
    wanted = str(given.get("fn") or given.get("metric") or task)
    for spelling in _spellings(wanted):
        if spelling in table:
            return table[spelling]
    raise DataError(f"no function for {kind} {wanted!r}.{did_you_mean(wanted, TABLES[kind])}")


def _spellings(name: str) -> list[str]:
    """Returns a name, and the first words of it and of what follows its slash, the most words
    first.
    """
    name, spellings = name.lower(), [name.lower()]
    for part in (name, name.partition("/")[2]):
        words = re.findall(r"[\w./]+", part)[:_MOST_WORDS]
        spellings += ["_".join(words[:number]) for number in range(len(words), 0, -1)]
    return spellings


def agrees(expected: Any, got: Any, *, subset: bool = False) -> bool:
    """Returns whether two values are equal, floats to 1e-6; with `subset`, `got` may have further
    keys.
    """
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        keys = set(expected) <= set(got) if subset else set(expected) == set(got)
        return keys and all(agrees(value, got[key]) for key, value in expected.items())
    if isinstance(expected, list) and isinstance(got, list | tuple):
        return len(expected) == len(got) and all(map(agrees, expected, got))
    if isinstance(expected, int | float) and isinstance(got, int | float):
        both_nan = expected != expected and got != got
        if expected == got or both_nan:
            return True
        are_finite = is_kind(expected, float) and is_kind(got, float)
        return are_finite and abs(expected - got) <= _TOLERANCE
    return type(expected) is type(got) and expected == got


def _show(value: Any) -> str:
    """Returns a value on one line."""
    return json.dumps(value, ensure_ascii=False, default=str)


# --- preprocessors: of a row, or of {"example": row, **options}, to a list of examples ---


def _on_row(function: Callable[..., list[Input]], **renamed: str) -> Function:
    """Returns what calls `function` with the row of an input and its options, some under another
    name.
    """

    def call(given: Input) -> list[Input]:
        if "example" not in given:
            return function(given)
        options = {
            renamed.get(key, key): value
            for key, value in given.items()
            if key not in ("example", "fn")
        }
        return function(given["example"], **options)

    return call


def _translate(given: Input) -> list[Input]:
    """Returns the translation of `example` from `source` to `target`."""
    source, target = (
        given[key] if key in given else given[f"{key}_language"] for key in ("source", "target")
    )
    return preprocess.translate(source, target)(given["example"])


_ranked = _on_row(
    preprocess.rank_classification_formatter, label_key="label_field", weight_key="weight_field"
)

PREPROCESSORS: dict[str, Function] = {
    **{name: _on_row(preprocess.glue_task(name)) for name in preprocess.LABELS},
    "stsb": _on_row(preprocess.stsb),
    "record": _on_row(preprocess.record),
    "wsc": _on_row(wsc.wsc_simple),
    "wsc.fixed": _on_row(wsc.wsc_simple),
    "wsc.fixed_marker_form": _on_row(wsc.wsc),
    "definite_pronoun_resolution": _on_row(wsc.definite_pronoun_resolution_simple),
    "dpr": _on_row(wsc.definite_pronoun_resolution_simple),
    "cnn_dailymail": _on_row(preprocess.summarize("article", "highlights")),
    "xsum": _on_row(preprocess.summarize("document", "summary")),
    "squad": _on_row(questions.squad),
    "squad_context_free": _on_row(partial(questions.squad, include_context=False)),
    "trivia_qa": _on_row(questions.trivia_qa),
    "trivia_qa_open": _on_row(questions.trivia_qa_open),
    "natural_questions": _on_row(questions.natural_questions_open),
    "nq_open": _on_row(questions.natural_questions_open),
    "natural_questions_nocontext": _on_row(questions.natural_questions_nocontext),
    "web_questions": _on_row(questions.web_questions),
    "translation": _translate,
    "rank_classification": _ranked,
    "rank_classification_formatter": _ranked,
    **DATA,
}


# --- postprocessors: of {text, is_target, example}, to a value; of {values: [text, ...]}, to a list
# of values ---

_TEXT_KEYS = ("string", "prediction", "answer", "text", "output", "string_label", "value", "score")


def _on_text(make: Callable[[Input], postprocess.Postprocess]) -> Function:
    """Returns what calls the postprocessor that `make` returns for an input."""

    def call(given: Input) -> Any:
        function, fields = make(given), given.get("example") or given
        is_target = bool(given.get("is_target", False))
        if "values" in given:
            return [function(value, fields, is_target) for value in given["values"]]
        texts = [given[key] for key in _TEXT_KEYS if key in given]
        if not texts and not is_target:
            raise DataError(f"no text; expected one of {', '.join(_TEXT_KEYS)} in the input.")
        return function(texts[0] if texts else "", fields, is_target)

    return call


def _label_index(given: Input) -> postprocess.Postprocess:
    """Returns the postprocessor of the labels in an input."""
    return postprocess.label_index(given["label_classes"], given.get("default", -1))


def _multirc(text: str, fields: Row, is_target: bool) -> Input:
    """Returns MultiRC's value as T5 has it: the group is the question's number alone, without its
    paragraph's.
    """
    value = postprocess.multirc(text, fields, is_target)
    return value | {"group": fields["idx/question"]} if is_target else value


def _wsc_simple(given: Input) -> postprocess.Postprocess:
    """Returns the postprocessor of WSC; the referent is in the input, or in T5's field."""
    fields = given.get("example") or {}
    referent = given.get("referent", fields.get("targets_pretokenized", fields.get("targets", "")))
    fields = {"label": given.get("label"), **fields, "targets": referent}
    return lambda text, unused, is_target: postprocess.wsc_simple(text, fields, is_target)


def _sentinels(given: Input) -> postprocess.Postprocess:
    """Returns the postprocessor that only takes sentinels away."""
    return postprocess.without_sentinels(postprocess.unchanged, given.get("num_sentinels", 1))


POSTPROCESSORS: dict[str, Function] = {
    **dict.fromkeys(preprocess.LABELS, _on_text(_label_index)),
    "string_label_to_class_id": _on_text(_label_index),
    "multirc": _on_text(lambda given: _multirc),
    "record": _on_text(lambda given: postprocess.record),
    "wsc": _on_text(_wsc_simple),
    "wsc.fixed": _on_text(_wsc_simple),
    "wsc_simple": _on_text(_wsc_simple),
    "string_to_float": _on_text(
        lambda given: postprocess.string_to_float(given.get("default", -1.0))
    ),
    "stsb": _on_text(lambda given: postprocess.string_to_float(given.get("default", -1.0))),
    "lower_text": _on_text(lambda given: postprocess.lower_text),
    **dict.fromkeys(("qa", "squad", "trivia_qa"), _on_text(lambda given: postprocess.qa)),
    **dict.fromkeys(
        ("nq_open", "web_questions", "trivia_qa_open"), _on_text(lambda given: postprocess.qa)
    ),
    "span_qa": _on_text(lambda given: postprocess.span_qa),
    "natural_questions": _on_text(lambda given: postprocess.natural_questions),
    "rank_classification": _on_text(lambda given: postprocess.rank_classification),
    **dict.fromkeys(("remove_sentinel", "sentinel", "without_sentinels"), _on_text(_sentinels)),
    **dict.fromkeys(
        ("add_task_with_sentinels", "_postprocess_fn_remove_sentinel"), _on_text(_sentinels)
    ),
}


# --- metrics: of {targets, predictions, **options}, to numbers by name ---


def _scores(*chosen: Metric) -> Function:
    """Returns what gives the scores of metrics by name."""
    return lambda given: {m.name: m.score(given["targets"], given["predictions"]) for m in chosen}


def _mean_group_metric(given: Input) -> dict[str, float]:
    """Returns the means over groups of the scores of each group, by the metric in brackets."""
    scores = [_inner(given, numbers) for numbers in _members(given)]
    return {name: sum(score[name] for score in scores) / len(scores) for name in scores[0]}


def _deduplicate_metric(given: Input) -> dict[str, float]:
    """Returns the scores of the first of each group, by the metric in brackets."""
    return _inner(given, [numbers[0] for numbers in _members(given)])


def _members(given: Input) -> list[list[int]]:
    """Returns the numbers of the examples of each group."""
    groups: dict[str, list[int]] = {}
    for number, target in enumerate(given["targets"]):
        groups.setdefault(json.dumps(target["group"]), []).append(number)
    return list(groups.values())


def _inner(given: Input, numbers: Sequence[int]) -> dict[str, float]:
    """Returns the scores of some examples by the metric in brackets, as in
    `mean_group_metric(squad)`.

    Without brackets it is the metric that T5 has there: SQuAD's of ReCoRD, else whether all of a
    question is right.
    """
    named = re.search(r"\((?:\w+\.)*([^()]*)\)", given["metric"])
    name = (
        named[1] if named else "squad" if given["metric"].startswith("deduplicate") else "all_match"
    )
    values = {
        key: [given[key][number]["value"] for number in numbers]
        for key in ("targets", "predictions")
    }
    return function_of("metric", "", {"metric": name})({"metric": name, **values})


def _multirc_exact_match(given: Input) -> dict[str, float]:
    """Returns the share of questions, or of lists without groups, that are all right."""
    targets, answers = given["targets"], given["predictions"]
    if targets and not isinstance(targets[0], Mapping):
        targets = [{"group": 0, "value": value} for value in targets]
        answers = [{"value": value} for value in answers]
    score = metrics.MULTIRC_EM.score(targets, answers)
    return {"exact_match": score, "em": score}


def _mean_multiclass_f1(given: Input) -> dict[str, float]:
    """Returns the mean F1 of as many classes as the input says, by `num_classes` or in brackets."""
    named = re.search(r"(\d+)\)?$", given["metric"])
    number = given.get("num_classes") or int(named[1] if named else 3)
    check_integer("num_classes", number, least=1, most=MOST_TOKENS, reason=REASON)
    return _scores(metrics.mean_multiclass_f1(number))(given)


def _natural_questions(given: Input) -> dict[str, float]:
    """Returns the recall of whole sets of answers, and of how many questions."""
    threshold, normalize = given.get("non_null_threshold", 2), given.get("normalize_answers", True)
    metric = metrics.natural_questions_recall(threshold, normalize)
    counted = [sum(map(bool, groups)) >= threshold for groups in given["targets"]]
    return {**_scores(metric)(given), "golden_answers": sum(counted)}


def _rank_classification(given: Input) -> dict[str, float]:
    """Returns the metrics of ranked choices."""
    return metrics.rank_classification(
        given["targets"],
        given.get("scores", given.get("predictions", ())),
        given.get("num_classes") or None,
        given.get("normalize_by_target_length", False),
    )


def _gender_parity(given: Input) -> dict[str, float]:
    """Returns the share of equal pairs; targets do not matter."""
    answers: Sequence[Any] = given["predictions"]
    return {"gender_parity": metrics.GENDER_PARITY.score(given.get("targets", answers), answers)}


_rouge = _scores(metrics.ROUGE1, metrics.ROUGE2, metrics.ROUGELSUM)
_f1 = _scores(metrics.F1_WITH_INVALID)
_exact = dict.fromkeys(
    ("exact_match", "multirc_exact_match", "multirc_em", "all_match"), _multirc_exact_match
)

METRICS: dict[str, Function] = {
    "accuracy": _scores(metrics.ACCURACY),
    "sequence_accuracy": _scores(metrics.SEQUENCE_ACCURACY),
    "mean_multiclass_f1": _mean_multiclass_f1,
    "f1_score_with_invalid": _f1,
    **dict.fromkeys(("multirc_f1_over_all_answers", "multirc_f1a"), _scores(metrics.MULTIRC_F1A)),
    **_exact,
    "mean_group_metric": _mean_group_metric,
    **{f"mean_group_metric({name})": function for name, function in _exact.items()},
    "squad": _scores(metrics.SQUAD_EM, metrics.SQUAD_F1),
    "trivia_qa": _scores(metrics.TRIVIA_EM, metrics.TRIVIA_F1),
    "deduplicate_metric": _deduplicate_metric,
    **dict.fromkeys(
        ("deduplicate_metric(squad)", "record"), _scores(metrics.RECORD_EM, metrics.RECORD_F1)
    ),
    "normalize_squad": lambda given: metrics.normalize_squad(given["text"]),
    "normalize_trivia_qa": lambda given: metrics.normalize_trivia_qa(given["text"]),
    **dict.fromkeys(
        ("natural_questions", "natural_questions_recall", "nq_recall"), _natural_questions
    ),
    **dict.fromkeys(("rouge", "rouge_mean"), _rouge),
    **{
        metric.name: _scores(metric)
        for metric in (metrics.ROUGE1, metrics.ROUGE2, metrics.ROUGELSUM)
    },
    **dict.fromkeys(("pearson_corrcoef", "pearson"), _scores(metrics.PEARSON)),
    **dict.fromkeys(("spearman_corrcoef", "spearman"), _scores(metrics.SPEARMAN)),
    **dict.fromkeys(("matthews_corrcoef", "sklearn_metrics_wrapper"), _scores(metrics.MATTHEWS)),
    "gender_parity": _gender_parity,
    **dict.fromkeys(
        ("superglue_average", "super_glue_average"),
        lambda given: {"average": float(superglue_average(given["scores"]))},
    ),
    **dict.fromkeys(
        ("auc", "score_auc"), lambda given: metrics.auc(given["targets"], given["predictions"])
    ),
    "rank_classification": _rank_classification,
}

TABLES: dict[str, dict[str, Function]] = {
    "preprocess": PREPROCESSORS,
    "postprocess": POSTPROCESSORS,
    "metric": METRICS,
}
"""What is called, by the kind of a case and the name of its function or task."""
