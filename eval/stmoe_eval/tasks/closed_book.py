"""Questions that a model answers from memory: WebQuestions, Natural Questions, TriviaQA.

Prompts, targets and scoring are those of T5's closed-book experiments (arXiv:2002.08910). The
headline is exact match, which the paper prints. Natural Questions are those of nq_open: it has no
annotators' sets, so the recall of all answers cannot be taken on it.
"""

from stmoe_eval.scores.metrics import SQUAD_EM, SQUAD_F1, TRIVIA_EM, TRIVIA_F1
from stmoe_eval.source import HubData
from stmoe_eval.task import Task, register_task
from stmoe_eval.text.postprocess import qa
from stmoe_eval.text.questions import natural_questions_open, trivia_qa_open, web_questions

FAMILY = "Closed-book questions"

register_task(
    Task(
        name="web_questions",
        version=1,
        description=(
            "A question that people asked a search engine, without a text, to an answer from Freebase."
        ),
        licence="unknown",
        source=HubData(
            "stanfordnlp/web_questions",
            "default",
            counts={"train": 3778, "test": 2032},
            columns={"question": str, "answers": [str]},
        ),
        preprocess=web_questions,
        postprocess=qa,
        metrics=(SQUAD_EM, SQUAD_F1),
        split="test",
        family=FAMILY,
    )
)

register_task(
    Task(
        name="natural_questions",
        version=1,
        description=(
            "A question that people asked Google, without a text, to a short answer from Wikipedia. "
            "The validation split is what others call the test set."
        ),
        licence="CC BY-SA 3.0",
        source=HubData(
            "google-research-datasets/nq_open",
            "nq_open",
            counts={"train": 87925, "validation": 3610},
            columns={"question": str, "answer": [str]},
        ),
        preprocess=natural_questions_open,
        postprocess=qa,
        metrics=(SQUAD_EM, SQUAD_F1),
        family=FAMILY,
    )
)

register_task(
    Task(
        name="trivia_qa",
        version=1,
        description=(
            "A question of a quiz, without a text, to an answer; every alias counts as right. The "
            "test split's answers are hidden."
        ),
        licence="unknown",
        source=HubData(
            "mandarjoshi/trivia_qa",
            "unfiltered.nocontext",
            counts={"train": 87622, "validation": 11313, "test": 10832},
            columns={"question": str, "answer": {"value": str, "aliases": [str]}},
            hidden=("test",),
        ),
        preprocess=trivia_qa_open,
        postprocess=qa,
        metrics=(TRIVIA_EM, TRIVIA_F1),
        family=FAMILY,
    )
)
