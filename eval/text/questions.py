"""From a row of a question-answering dataset to `inputs` and `targets`, with a text to read or from
memory alone.

Sources: T5 `t5/data/preprocessors.py` (google-research/text-to-text-transfer-transformer at
e081111) for the open book, `t5_closed_book_qa/t5_cbqa/preprocessors.py`
(google-research/google-research) for the closed one.
"""

import re
import string
from collections.abc import Sequence
from typing import Any

from eval.task import Row
from eval.text.preprocess import HIDDEN

_PUNCTUATION = re.compile(f"([{re.escape(string.punctuation)}])")
_SPACES = re.compile(r"[\t\n\f\r ]+")  # RE2's \s
_ASCII_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


def pad_punctuation(text: str) -> str:
    """Returns the text with spaces around each ASCII punctuation mark, and no two spaces in a row.

    Source:
        T5 `_pad_punctuation`. Differs: no.
    """
    return _SPACES.sub(" ", _PUNCTUATION.sub(r" \1 ", text))


def squad(row: Row, *, include_context: bool = True) -> list[dict[str, Any]]:
    """Returns a question, with its context or without, to its first answer; punctuation is padded
    everywhere.

    Source:
        T5 `squad`. Differs: a question without answers, on which T5 fails, has a hidden target.
    """
    answers = [pad_punctuation(answer) for answer in row["answers"]["text"]]
    question, context = pad_punctuation(row["question"]), pad_punctuation(row["context"])
    parts = (
        ["question:", question, "context:", context]
        if include_context
        else ["squad trivia question:", question]
    )
    return [
        {
            "inputs": _SPACES.sub(" ", " ".join(parts)),
            "targets": answers[0] if answers else HIDDEN,
            "id": row["id"],
            "context": context,
            "question": question,
            "answers": answers,
        }
    ]


def trivia_qa(row: Row) -> list[dict[str, Any]]:
    """Returns an example for each context and each alias that occurs in it.

    Source:
        T5 `trivia_qa`. Differs: an alias is looked for to the letter, where T5 takes it for a
        regular expression; normalised aliases have no punctuation.
    """
    contexts = [
        *row.get("entity_pages", {}).get("wiki_context", ()),
        *row.get("search_results", {}).get("search_context", ()),
    ]
    aliases = [pad_punctuation(alias) for alias in row["answer"]["normalized_aliases"]]
    question, examples = pad_punctuation(row["question"]), []
    for context in map(pad_punctuation, contexts):
        inputs = _SPACES.sub(" ", f"question: {question} context: {context}")
        lower = context.translate(_ASCII_LOWER)
        found = [alias for alias in aliases if alias.translate(_ASCII_LOWER) in lower]
        examples += [{"inputs": inputs, "targets": alias} for alias in found]
    return examples


def natural_questions_open(row: Row) -> list[dict[str, Any]]:
    """Returns a question to the first of its answers.

    Source:
        t5_cbqa `natural_questions_open`. Differs: no.
    """
    return _closed_book("nq question: ", row, row["answer"])


def web_questions(row: Row) -> list[dict[str, Any]]:
    """Returns a question to the first of its answers.

    Source:
        t5_cbqa `web_questions_open`. Differs: no.
    """
    return _closed_book("wq question: ", row, row["answers"])


def trivia_qa_open(row: Row) -> list[dict[str, Any]]:
    """Returns a question to its answer; all aliases count as right.

    Source:
        t5_cbqa `trivia_qa_open`. Differs: no.
    """
    answer = row["answer"]
    return _closed_book("trivia_qa question: ", row, answer["aliases"], answer["value"])


def natural_questions_nocontext(
    row: Row,
    *,
    drop_yes_no: bool = False,
    max_tokens: int | None = None,
    max_answers: int | None = None,
) -> list[dict[str, Any]]:
    """Returns a question to all its answers, `answer: A1 answer: A2`; nothing when there is none.

    Args:
        row: A row of Natural Questions; `annotations` has a yes_no_answer and short_answers for
            each annotator.
        drop_yes_no: Leaves out answers that are yes or no.
        max_tokens: Leaves out longer short answers; None for none.
        max_answers: Most answers in the target; None for all.

    Source:
        t5_cbqa `natural_questions_nocontext`. Differs: no.
    """
    annotations = row["annotations"]
    yes_no = [-1 if drop_yes_no else label for label in annotations["yes_no_answer"]]
    groups = [
        _short_answers(group, max_tokens) for group in _by_annotator(annotations["short_answers"])
    ]
    values = [text for group in groups for text in group]
    answers = [("no", "yes")[label == 1] for label in yes_no if label > -1] + values
    if not answers:
        return []
    return [
        {
            "inputs": f"nq question: {row['question']['text']}",
            "targets": " ".join(f"answer: {answer}" for answer in answers[:max_answers]),
            "short_answers/values": values,
            "short_answers/row_starts": [
                sum(map(len, groups[:number])) for number in range(len(groups))
            ],
            "yes_no_answers": yes_no,
        }
    ]


def _closed_book(
    prompt: str, row: Row, answers: Sequence[str], target: str | None = None
) -> list[dict[str, Any]]:
    """Returns a question without context; the target is the first answer unless given."""
    if target is None:
        target = answers[0] if answers else HIDDEN
    return [{"inputs": prompt + row["question"], "targets": target, "answers": list(answers)}]


def _by_annotator(short_answers: Any) -> list[dict[str, Any]]:
    """Returns the short answers of each annotator, from a list of mappings or a mapping of lists."""
    if not isinstance(short_answers, dict):
        return list(short_answers)
    names = list(short_answers)
    return [
        dict(zip(names, values, strict=True))
        for values in zip(*short_answers.values(), strict=True)
    ]


def _short_answers(group: dict[str, Any], max_tokens: int | None) -> list[str]:
    """Returns the texts of one annotator's short answers that are no longer than `max_tokens`."""
    if not max_tokens:
        return list(group["text"])
    spans = zip(group["text"], group["start_token"], group["end_token"], strict=True)
    return [text for text, start, end in spans if end - start <= max_tokens]
