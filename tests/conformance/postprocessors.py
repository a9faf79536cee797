"""Postprocessors by T5's names: from a text to the value that metrics compare.

The input of a case is `{text, is_target, example}`, with the text under one of several names, or
`{values: [text, ...]}` for a list of values.
"""

from collections.abc import Callable
from typing import Any

from stmoe_eval.task import Features, Postprocess
from stmoe_eval.text import postprocess
from stmoe_eval.text.preprocess import LABELS
from tests.conformance import t5_functions
from tests.conformance.case import CaseFunction, CaseFunctions, CaseInput

_TEXT_NAMES = ("string", "prediction", "answer", "text", "output", "string_label", "value", "score")

# ---------------------------------------------------------------------------
# From a case to a call


def _on_text(build: Callable[[CaseInput], Postprocess]) -> CaseFunction:
    """Returns a function that calls the postprocessor that `build` makes for a case."""

    def call(given: CaseInput) -> Any:
        function = build(given)
        fields = given.get("example") or given
        is_target = bool(given.get("is_target", False))
        if "values" in given:
            return [function(value, fields, is_target) for value in given["values"]]

        # A target may need no text: its value is in the fields.
        texts = [given[name] for name in _TEXT_NAMES if name in given]
        return function(texts[0] if texts else "", fields, is_target)

    return call


def _plain(function: Postprocess) -> CaseFunction:
    """Returns a function that calls a postprocessor without options."""

    def build(given: CaseInput) -> Postprocess:
        return function

    return _on_text(build)


# ---------------------------------------------------------------------------
# Postprocessors with options, or with T5's own form


def _build_label_index(given: CaseInput) -> Postprocess:
    return postprocess.label_index(given["label_classes"], given.get("default", -1))


def _build_string_to_float(given: CaseInput) -> Postprocess:
    return postprocess.string_to_float(given.get("default", -1.0))


def _build_without_sentinels(given: CaseInput) -> Postprocess:
    num_sentinels = given.get("num_sentinels", 1)
    return t5_functions.without_sentinels(postprocess.unchanged, num_sentinels)


def _build_wsc_simple(given: CaseInput) -> Postprocess:
    """Returns the postprocessor of WSC; the referent is in the input, or in T5's field."""
    example = given.get("example") or {}
    in_example = example.get("targets_pretokenized", example.get("targets", ""))
    referent = given.get("referent", in_example)
    fields = {"label": given.get("label"), **example, "targets": referent}

    def wsc_simple(text: str, _: Features, is_target: bool) -> int:
        return postprocess.wsc_simple(text, fields, is_target)

    return wsc_simple


def _multirc(text: str, fields: Features, is_target: bool) -> dict[str, Any]:
    """Returns MultiRC's value as T5 has it, with the question's number alone as the group."""
    value = postprocess.multirc(text, fields, is_target)
    if is_target:
        value["group"] = fields["idx/question"]
    return value


_label_index = _on_text(_build_label_index)
_string_to_float = _on_text(_build_string_to_float)
_without_sentinels = _on_text(_build_without_sentinels)
_wsc_simple = _on_text(_build_wsc_simple)
_qa = _plain(postprocess.qa)


# ---------------------------------------------------------------------------
# The table

POSTPROCESSORS: CaseFunctions = {
    **dict.fromkeys(LABELS, _label_index),
    "string_label_to_class_id": _label_index,
    "multirc": _plain(_multirc),
    "record": _plain(postprocess.record),
    "wsc": _wsc_simple,
    "wsc.fixed": _wsc_simple,
    "wsc_simple": _wsc_simple,
    "string_to_float": _string_to_float,
    "stsb": _string_to_float,
    "lower_text": _plain(postprocess.lower_text),
    "qa": _qa,
    "squad": _qa,
    "trivia_qa": _qa,
    "nq_open": _qa,
    "web_questions": _qa,
    "trivia_qa_open": _qa,
    "span_qa": _plain(t5_functions.span_qa),
    "natural_questions": _plain(t5_functions.natural_questions),
    "rank_classification": _plain(t5_functions.rank_classification_target),
    "remove_sentinel": _without_sentinels,
    "sentinel": _without_sentinels,
    "without_sentinels": _without_sentinels,
    "add_task_with_sentinels": _without_sentinels,
    "_postprocess_fn_remove_sentinel": _without_sentinels,
}
