"""From a row of a question-answering dataset to `inputs` and `targets`.

Open-book questions come with a text to read, closed-book ones are answered from memory alone.

Sources: T5 `t5/data/preprocessors.py` (google-research/text-to-text-transfer-transformer at
e081111) for the open book, `t5_closed_book_qa/t5_cbqa/preprocessors.py`
(google-research/google-research) for the closed one.
"""

import re
import string
from collections.abc import Sequence

from stmoe_eval.task import Features, Row
from stmoe_eval.text.preprocess import HIDDEN_TARGET

_PUNCTUATION = re.compile(f"([{re.escape(string.punctuation)}])")
_SPACES = re.compile(r"[\t\n\f\r ]+")  # RE2's \s


def pad_punctuation(text: str) -> str:
    """Returns the text with spaces around each ASCII punctuation mark, and no two spaces in a row.

    Source:
        T5 `_pad_punctuation`. Differs: no.
    """
    return _SPACES.sub(" ", _PUNCTUATION.sub(r" \1 ", text))


def squad(row: Row, *, include_context: bool = True) -> list[Features]:
    """Maps a question to its first answer; punctuation is padded everywhere.

    Args:
        row: A row of SQuAD.
        include_context: Whether the inputs hold the text that has the answer.

    Source:
        T5 `squad`. Differs: a question without answers, on which T5 fails, has a hidden target.
    """
    answers = list(map(pad_punctuation, row["answers"]["text"]))
    question = pad_punctuation(row["question"])
    context = pad_punctuation(row["context"])

    inputs = f"question: {question} context: {context}"
    if not include_context:
        inputs = f"squad trivia question: {question}"
    return [
        {
            "inputs": _SPACES.sub(" ", inputs),
            "targets": answers[0] if answers else HIDDEN_TARGET,
            "id": row["id"],
            "context": context,
            "question": question,
            "answers": answers,
        }
    ]


def natural_questions_open(row: Row) -> list[Features]:
    """Maps a question to the first of its answers.

    Source:
        t5_cbqa `natural_questions_open`. Differs: no.
    """
    return _closed_book("nq question: ", row, row["answer"])


def web_questions(row: Row) -> list[Features]:
    """Maps a question to the first of its answers.

    Source:
        t5_cbqa `web_questions_open`. Differs: no.
    """
    return _closed_book("wq question: ", row, row["answers"])


def trivia_qa_open(row: Row) -> list[Features]:
    """Maps a question to its answer; all aliases count as right.

    Source:
        t5_cbqa `trivia_qa_open`. Differs: no.
    """
    answer = row["answer"]
    return _closed_book("trivia_qa question: ", row, answer["aliases"], answer["value"])


def _closed_book(
    prompt: str, row: Row, answers: Sequence[str], target: str | None = None
) -> list[Features]:
    """Maps a question without context to an answer; the target is the first answer unless given."""
    if target is None:
        target = answers[0] if answers else HIDDEN_TARGET
    return [{"inputs": prompt + row["question"], "targets": target, "answers": list(answers)}]
