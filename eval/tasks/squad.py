"""SQuAD 1.1 and 2.0: questions about a paragraph of Wikipedia; those of 2.0 may have no answer in
it.

Prompts and answers are T5's: punctuation is padded with spaces on both sides, and normalisation
takes it away again. T5 has no task for SQuAD 2.0. Its prompt is kept; a question without an answer
has the target `unanswerable`, the word of FLAN's prompts, since with an empty target a model that
says nothing at all, for whatever reason, would look right on half of the questions. Scoring is that
of the official script: `unanswerable` is the empty answer, and so is what normalisation leaves
nothing of; of a question without answers the empty answer is right (exact match and F1 of 100) and
any other is wrong (0).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.scores.metrics import SQUAD_EM, SQUAD_F1, Metric, Values, mean_of, normalize_squad
from eval.source import HubData
from eval.task import TASKS, Row, Task
from eval.text.postprocess import Postprocess, qa
from eval.text.preprocess import Preprocess
from eval.text.questions import squad

UNANSWERABLE = "unanswerable"
_COLUMNS = {"id": str, "context": str, "question": str, "answers": {"text": [str]}}


def squad_v2(row: Row) -> list[dict[str, Any]]:
    """Returns T5's example, to its first answer or to UNANSWERABLE."""
    return [
        fields if fields["answers"] else fields | {"targets": UNANSWERABLE} for fields in squad(row)
    ]


def answer_or_none(text: str, fields: Row, is_target: bool) -> str | list[str]:
    """Returns the text, empty for UNANSWERABLE; of a target all answers that are not empty, or the
    empty one.
    """
    if is_target:
        return [answer for answer in fields["answers"] if normalize_squad(answer)] or [""]
    return "" if text == UNANSWERABLE else text


def _f1(targets: Values, answers: Values) -> NDArray[np.float64]:
    """Returns <float64>[N] SQuAD's F1, which is 100 where no answer is wanted and none is given."""
    none = [
        wanted == [""] and not normalize_squad(given)
        for wanted, given in zip(targets, answers, strict=True)
    ]
    assert SQUAD_F1.score_examples is not None  # it is a mean
    return np.where(none, 100.0, SQUAD_F1.score_examples(targets, answers))


SQUAD_V2_F1 = mean_of("f1", _f1)
"""Source: evaluate-v2.0.py of SQuAD. Differs: no."""


def _add(
    name: str,
    description: str,
    source: HubData,
    preprocess: Preprocess,
    postprocess: Postprocess,
    f1: Metric,
    prompt_source: str,
) -> None:
    """Adds a task."""
    TASKS.add(
        name,
        Task(
            name=name,
            version=1,
            description=description,
            licence="CC BY-SA 4.0",
            source=source,
            preprocess=preprocess,
            postprocess=postprocess,
            metrics=(f1, SQUAD_EM),
            ids=("id",),
            targets_length=97,
            prompt_source=prompt_source,
            family="SQuAD",
        ),
    )


_add(
    "squad",
    "A question about a paragraph of Wikipedia, to a span of it (SQuAD 1.1).",
    HubData(
        "rajpurkar/squad",
        "plain_text",
        counts={"train": 87599, "validation": 10570},
        columns=_COLUMNS,
    ),
    squad,
    qa,
    SQUAD_F1,
    "T5",
)
_add(
    "squad_v2",
    f"A question about a paragraph of Wikipedia, to a span of it or to `{UNANSWERABLE}` (SQuAD 2.0).",
    HubData(
        "rajpurkar/squad_v2",
        "squad_v2",
        counts={"train": 130319, "validation": 11873},
        columns=_COLUMNS,
    ),
    squad_v2,
    answer_or_none,
    SQUAD_V2_F1,
    "T5 and this library",
)
