"""From a row of a question-answering dataset to `inputs` and `targets`.

Open-book questions come with a text to read, closed-book ones are answered from memory alone.

Sources: T5 `t5/data/preprocessors.py` (google-research/text-to-text-transfer-transformer at
e081111) for the open book, `t5_closed_book_qa/t5_cbqa/preprocessors.py`
(google-research/google-research) for the closed one.
"""

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from eval.task import Features, Row
from eval.text.preprocess import HIDDEN_TARGET

_PUNCTUATION = re.compile(f"([{re.escape(string.punctuation)}])")
_SPACES = re.compile(r"[\t\n\f\r ]+")  # RE2's \s
_ASCII_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


# ---------------------------------------------------------------------------
# Open book


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


def trivia_qa(row: Row) -> list[Features]:
    """Maps a question to an alias, for each context and each alias that occurs in it.

    Source:
        T5 `trivia_qa`. Differs: an alias is looked for to the letter, where T5 takes it for a
        regular expression; normalised aliases have no punctuation.
    """
    contexts = [
        *row.get("entity_pages", {}).get("wiki_context", ()),
        *row.get("search_results", {}).get("search_context", ()),
    ]
    aliases = list(map(pad_punctuation, row["answer"]["normalized_aliases"]))
    question = pad_punctuation(row["question"])

    examples: list[Features] = []
    for context in map(pad_punctuation, contexts):
        inputs = _SPACES.sub(" ", f"question: {question} context: {context}")
        lower_context = context.translate(_ASCII_LOWER)
        for alias in aliases:
            if alias.translate(_ASCII_LOWER) in lower_context:
                examples.append({"inputs": inputs, "targets": alias})
    return examples


# ---------------------------------------------------------------------------
# Closed book


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


# ---------------------------------------------------------------------------
# Natural Questions with the answers of each annotator


def natural_questions_nocontext(
    row: Row,
    *,
    drop_yes_no: bool = False,
    max_tokens: int | None = None,
    max_answers: int | None = None,
) -> list[Features]:
    """Maps a question to all its answers, `answer: A1 answer: A2`; without any gives no example.

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

    # Labels are 1 for yes, 0 for no, and -1 where an annotator gave neither.
    yes_no_labels: list[int] = list(annotations["yes_no_answer"])
    if drop_yes_no:
        yes_no_labels = [-1] * len(yes_no_labels)
    answers: list[str] = []
    for label in yes_no_labels:
        if label > -1:
            answers.append("yes" if label == 1 else "no")

    # The short answers of all annotators in one list, and where those of each begin.
    short_answers: list[str] = []
    row_starts: list[int] = []
    for annotation in _by_annotator(annotations["short_answers"]):
        row_starts.append(len(short_answers))
        short_answers += _short_answers(annotation, max_tokens)

    answers += short_answers
    if not answers:
        return []
    return [
        {
            "inputs": f"nq question: {row['question']['text']}",
            "targets": " ".join(f"answer: {answer}" for answer in answers[:max_answers]),
            "short_answers/values": short_answers,
            "short_answers/row_starts": row_starts,
            "yes_no_answers": yes_no_labels,
        }
    ]


def _by_annotator(short_answers: Any) -> list[Mapping[str, Any]]:
    """Returns the short answers of each annotator, from a list of mappings or a mapping of lists."""
    if not isinstance(short_answers, dict):
        return list(short_answers)

    annotations: list[Mapping[str, Any]] = []
    for values in zip(*short_answers.values(), strict=True):
        annotations.append(dict(zip(short_answers, values, strict=True)))
    return annotations


def _short_answers(annotation: Mapping[str, Any], max_tokens: int | None) -> list[str]:
    """Returns the texts of one annotator's short answers that are no longer than `max_tokens`."""
    texts = list(annotation["text"])
    if not max_tokens:
        return texts

    starts = annotation["start_token"]
    ends = annotation["end_token"]
    short: list[str] = []
    for text, start, end in zip(texts, starts, ends, strict=True):
        if end - start <= max_tokens:
            short.append(text)
    return short
