"""SQuAD 1.1 and 2.0: questions about a paragraph of Wikipedia.

Questions of 2.0 may be unanswerable from the passage. Prompts and answers are T5's: punctuation is
padded with spaces on both sides, and normalisation takes it away again. T5 has no task for SQuAD
2.0. Its prompt is kept; a question without an answer has the target `unanswerable`, the word of
FLAN's prompts, since with an empty target a model that says nothing at all, for whatever reason,
would look right on half of the questions. Scoring is that of the official script: `unanswerable` is
the empty answer, and so is what normalisation leaves nothing of; of a question without answers the
empty answer is right (exact match and F1 of 100) and any other is wrong (0).
"""

import numpy as np
from numpy.typing import NDArray

from stmoe_eval.scores.metrics import SQUAD_EM, SQUAD_F1, Values, mean_of, normalize_squad
from stmoe_eval.source import HubData
from stmoe_eval.task import Features, Row, Task, register_task
from stmoe_eval.text.postprocess import qa
from stmoe_eval.text.questions import squad

UNANSWERABLE = "unanswerable"
_COLUMNS = {"id": str, "context": str, "question": str, "answers": {"text": [str]}}


def squad_v2(row: Row) -> list[Features]:
    """Maps a question to its first answer, as T5 does, or to UNANSWERABLE."""
    examples = squad(row)
    for features in examples:
        if not features["answers"]:
            features["targets"] = UNANSWERABLE
    return examples


def answer_or_none(text: str, fields: Features, is_target: bool) -> str | list[str]:
    """Returns the text, empty for UNANSWERABLE; of a target all answers that are not empty.

    Without any, it is the empty answer.
    """
    if is_target:
        return [answer for answer in fields["answers"] if normalize_squad(answer)] or [""]
    return "" if text == UNANSWERABLE else text


def _f1(targets: Values, answers: Values) -> NDArray[np.float64]:
    """Returns <float64>[N] SQuAD's F1, which is 100 if no answer is expected and none is given."""
    is_rightly_empty: list[bool] = []
    for target, answer in zip(targets, answers, strict=True):
        is_rightly_empty.append(target == [""] and not normalize_squad(answer))

    assert SQUAD_F1.score_examples is not None, "SQuAD's F1 is a mean"
    return np.where(is_rightly_empty, 100.0, SQUAD_F1.score_examples(targets, answers))


SQUAD_V2_F1 = mean_of("f1", _f1)
"""Source: evaluate-v2.0.py of SQuAD. Differs: no."""


register_task(
    Task(
        name="squad",
        version=1,
        description="A question about a paragraph of Wikipedia, to a span of it (SQuAD 1.1).",
        licence="CC BY-SA 4.0",
        source=HubData(
            "rajpurkar/squad",
            "plain_text",
            counts={"train": 87599, "validation": 10570},
            columns=_COLUMNS,
        ),
        preprocess=squad,
        postprocess=qa,
        metrics=(SQUAD_F1, SQUAD_EM),
        ids=("id",),
        targets_length=97,
        prompt_source="T5",
        family="SQuAD",
    )
)

register_task(
    Task(
        name="squad_v2",
        version=1,
        description=(
            "A question about a paragraph of Wikipedia, to a span of it or to "
            f"`{UNANSWERABLE}` (SQuAD 2.0)."
        ),
        licence="CC BY-SA 4.0",
        source=HubData(
            "rajpurkar/squad_v2",
            "squad_v2",
            counts={"train": 130319, "validation": 11873},
            columns=_COLUMNS,
        ),
        preprocess=squad_v2,
        postprocess=answer_or_none,
        metrics=(SQUAD_V2_F1, SQUAD_EM),
        ids=("id",),
        targets_length=97,
        prompt_source="T5 and this library",
        family="SQuAD",
    )
)
