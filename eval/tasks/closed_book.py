"""Questions that a model answers from memory: WebQuestions, Natural Questions, TriviaQA.

Prompts, targets and scoring are those of T5's closed-book experiments (arXiv:2002.08910). The
headline is exact match, which the paper prints. Natural Questions are those of nq_open: it has no
annotators' sets, so the recall of all answers cannot be taken on it.
"""

from typing import Any

from eval.scores.metrics import SQUAD_EM, SQUAD_F1, TRIVIA_EM, TRIVIA_F1, Metric
from eval.source import HubData
from eval.task import TASKS, Task
from eval.text.postprocess import qa
from eval.text.preprocess import Preprocess
from eval.text.questions import natural_questions_open, trivia_qa_open, web_questions


def _add(
    name: str,
    description: str,
    licence: str,
    source: HubData,
    preprocess: Preprocess,
    metrics: tuple[Metric, ...] = (SQUAD_EM, SQUAD_F1),
    **fields: Any,
) -> None:
    """Adds a task."""
    TASKS.add(
        name,
        Task(
            name=name,
            version=1,
            description=description,
            licence=licence,
            source=source,
            preprocess=preprocess,
            postprocess=qa,
            metrics=metrics,
            family="Closed-book questions",
            **fields,
        ),
    )


_add(
    "web_questions",
    "A question that people asked a search engine, without a text, to an answer from Freebase.",
    "unknown",
    HubData(
        "stanfordnlp/web_questions",
        "default",
        counts={"train": 3778, "test": 2032},
        columns={"question": str, "answers": [str]},
    ),
    web_questions,
    split="test",
)
_add(
    "natural_questions",
    "A question that people asked Google, without a text, to a short answer from Wikipedia. The validation split is "
    "what others call the test set.",
    "CC BY-SA 3.0",
    HubData(
        "google-research-datasets/nq_open",
        "nq_open",
        counts={"train": 87925, "validation": 3610},
        columns={"question": str, "answer": [str]},
    ),
    natural_questions_open,
)
_add(
    "trivia_qa",
    "A question of a quiz, without a text, to an answer; every alias counts as right. The test split's answers are "
    "hidden.",
    "unknown",
    HubData(
        "mandarjoshi/trivia_qa",
        "unfiltered.nocontext",
        counts={"train": 87622, "validation": 11313, "test": 10832},
        columns={"question": str, "answer": {"value": str, "aliases": [str]}},
        hidden=("test",),
    ),
    trivia_qa_open,
    (TRIVIA_EM, TRIVIA_F1),
)
