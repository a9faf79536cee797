"""Preprocessors by T5's names: from a row to a list of examples.

The input of a case is the row itself, or `{"example": row, **options}`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from stmoe_eval.task import Features
from stmoe_eval.text import preprocess, questions, wsc
from tests.conformance import t5_functions
from tests.conformance.case import CaseFunction, CaseFunctions, CaseInput
from tests.conformance.training_data import TRAINING_DATA

# ---------------------------------------------------------------------------
# From a case to a call


def _on_row(function: Callable[..., list[Features]], **renamed: str) -> CaseFunction:
    """Returns a function that calls a preprocessor with the row and options of a case.

    Args:
        function: The preprocessor.
        renamed: Our names of options that T5 calls otherwise.
    """

    def call(given: CaseInput) -> list[Features]:
        if "example" not in given:
            return function(given)

        options: dict[str, Any] = {}
        for name, value in given.items():
            if name not in ("example", "fn"):
                options[renamed.get(name, name)] = value
        return function(given["example"], **options)

    return call


def _translate(given: CaseInput) -> list[Features]:
    """Returns the translation of `example` from `source` to `target`."""
    source = given["source"] if "source" in given else given["source_language"]
    target = given["target"] if "target" in given else given["target_language"]
    return preprocess.translate(source, target)(given["example"])


_rank_classification = _on_row(
    t5_functions.rank_classification_formatter, label_key="label_field", weight_key="weight_field"
)


# ---------------------------------------------------------------------------
# The table

PREPROCESSORS: CaseFunctions = {
    **{name: _on_row(preprocess.glue_task(name)) for name in preprocess.LABELS},
    "stsb": _on_row(preprocess.stsb),
    "record": _on_row(preprocess.record),
    "wsc": _on_row(wsc.wsc_simple),
    "wsc.fixed": _on_row(wsc.wsc_simple),
    "wsc.fixed_marker_form": _on_row(t5_functions.wsc),
    "definite_pronoun_resolution": _on_row(wsc.definite_pronoun_resolution_simple),
    "dpr": _on_row(wsc.definite_pronoun_resolution_simple),
    "cnn_dailymail": _on_row(preprocess.summarize("article", "highlights")),
    "xsum": _on_row(preprocess.summarize("document", "summary")),
    "squad": _on_row(questions.squad),
    "squad_context_free": _on_row(partial(questions.squad, include_context=False)),
    "trivia_qa": _on_row(t5_functions.trivia_qa),
    "trivia_qa_open": _on_row(questions.trivia_qa_open),
    "natural_questions": _on_row(questions.natural_questions_open),
    "nq_open": _on_row(questions.natural_questions_open),
    "natural_questions_nocontext": _on_row(t5_functions.natural_questions_nocontext),
    "web_questions": _on_row(questions.web_questions),
    "translation": _translate,
    "rank_classification": _rank_classification,
    "rank_classification_formatter": _rank_classification,
    **TRAINING_DATA,
}
