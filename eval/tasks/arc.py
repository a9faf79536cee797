"""ARC: science questions of American schools for grades 3 to 9, three to five choices each.

Neither T5 nor the paper has a prompt for them. The tasks' own names the choices by letters and asks
for the letter; the variant is that of UnifiedQA, the model whose ARC scores the paper compares
with, which asks for the choice's text.
"""

from dataclasses import replace
from typing import Any

from eval.scores.metrics import ACCURACY
from eval.source import HubData
from eval.task import TASKS, Row, Task
from eval.text.postprocess import label_index, lower_text
from moe import DataError

LETTERS = "ABCDE"
_COUNTS = {"easy": (2251, 570, 2376), "challenge": (1119, 299, 1172)}


def right_choice(row: Row) -> int:
    """Returns the number of the right choice; keys are letters or digits, as the labels of the
    choices are.

    Raises:
        DataError: When the key is no label of a choice, or there are more choices than LETTERS.
    """
    labels = row["choices"]["label"]
    if (
        row["answerKey"] not in labels
        or len(labels) != len(row["choices"]["text"])
        or len(labels) > len(LETTERS)
    ):
        raise DataError(
            f"The ARC question {row['id']!r} has answerKey {row['answerKey']!r} and {len(row['choices']['text'])} "
            f"choices labelled {', '.join(labels) or 'nothing'}; expected one of the labels, and at most "
            f"{len(LETTERS)} choices with a label each. Correct the row, or leave it out."
        )
    return labels.index(row["answerKey"])


def by_letter(name: str, row: Row) -> list[dict[str, Any]]:
    """Returns the example whose target is the letter of the right choice."""
    right, texts = right_choice(row), row["choices"]["text"]
    inputs = f"{name} question: {row['question']} choices: {_lettered(texts)}"
    return [
        {
            "id": row["id"],
            "inputs": inputs,
            "targets": LETTERS[right],
            "choices": tuple(LETTERS[: len(texts)]),
        }
    ]


def unifiedqa(row: Row) -> list[dict[str, Any]]:
    """Returns the example whose target is the text of the right choice, all in lower case.

    Source:
        UnifiedQA (github.com/allenai/unifiedqa) encode_datasets.py and tasks.py; between the parts
        stand a backslash and an n. Differs: choices keep the order of the row but are lettered
        anew, since some have digits.
    """
    right, texts = right_choice(row), [text.lower() for text in row["choices"]["text"]]
    inputs = f"{row['question']} \\n {_lettered(texts)}".lower()
    return [
        {
            "id": row["id"],
            "inputs": inputs,
            "targets": texts[right],
            "choices": tuple(dict.fromkeys(texts)),
        }
    ]


def _lettered(texts: list[str]) -> str:
    """Returns `(A) first (B) second`."""
    return " ".join(f"({letter}) {text}" for letter, text in zip(LETTERS, texts, strict=False))


def _task(level: str) -> Task:
    """Returns ARC-Easy or ARC-Challenge."""
    name = f"arc_{level}"
    return Task(
        name=name,
        version=1,
        description="A science question for school grades 3 to 9 with three to five choices, to the letter of one.",
        licence="CC BY-SA 4.0",
        source=HubData(
            "allenai/ai2_arc",
            f"ARC-{level.capitalize()}",
            counts=dict(zip(("train", "validation", "test"), _COUNTS[level], strict=True)),
            columns={
                "id": str,
                "question": str,
                "choices": {"text": [str], "label": [str]},
                "answerKey": str,
            },
        ),
        preprocess=lambda row: by_letter(name, row),
        postprocess=label_index(LETTERS),
        metrics=(ACCURACY,),
        choices=lambda fields: fields["choices"],
        ids=("id",),
        split="test",
        prompt_source="this library",
        family="ARC",
    )


for _level in _COUNTS:
    _own = TASKS.add(f"arc_{_level}", _task(_level))
    TASKS.add(
        f"{_own.name}.unifiedqa",
        replace(
            _own,
            name=f"{_own.name}.unifiedqa",
            description="A science question for school grades 3 to 9 with three to five choices, to the text of one.",
            preprocess=unifiedqa,
            postprocess=lower_text,
            prompt_source="UnifiedQA",
            variant_of=_own.name,
        ),
    )
