"""ARC: science questions of American schools for grades 3 to 9, three to five choices each.

Neither T5 nor the paper has a prompt for them. The tasks' own prompt labels the choices with
letters and asks for the letter; the variant uses the prompt of UnifiedQA, whose ARC scores the
paper compares with, and asks for the choice's text.
"""

from collections.abc import Mapping
from dataclasses import replace

from stmoe_eval.scores.metrics import ACCURACY
from stmoe_eval.source import HubData
from stmoe_eval.task import Features, Preprocess, Row, Task, register_task
from stmoe_eval.text.postprocess import label_index, lower_text

LETTERS = "ABCDE"


def ask_letter(name: str) -> Preprocess:
    """Returns the preprocessor that maps a question with its choices to a letter.

    Args:
        name: Start of the prompt.
    """

    def preprocess(row: Row) -> list[Features]:
        texts = row["choices"]["text"]
        right = right_choice(row)
        return [
            {
                "id": row["id"],
                "inputs": f"{name} question: {row['question']} choices: {_with_letters(texts)}",
                "targets": LETTERS[right],
                "choices": tuple(LETTERS[: len(texts)]),
            }
        ]

    return preprocess


def unifiedqa(row: Row) -> list[Features]:
    """Maps a question with its choices to the text of the right one, all in lower case.

    Source:
        UnifiedQA (github.com/allenai/unifiedqa) encode_datasets.py and tasks.py; the parts are
        separated by a backslash and an n. Differs: choices keep the order of the row but get new
        letters, since some have digits.
    """
    right = right_choice(row)
    texts = list(map(str.lower, row["choices"]["text"]))
    return [
        {
            "id": row["id"],
            "inputs": f"{row['question']} \\n {_with_letters(texts)}".lower(),
            "targets": texts[right],
            "choices": tuple(dict.fromkeys(texts)),
        }
    ]


def right_choice(row: Row) -> int:
    """Returns the number of the right choice; keys are letters or digits, as the labels are."""
    return row["choices"]["label"].index(row["answerKey"])


def choices_of_row(features: Features) -> tuple[str, ...]:
    """Returns the choices of an example; their number differs."""
    return features["choices"]


def _with_letters(texts: list[str]) -> str:
    return " ".join(f"({letter}) {text}" for letter, text in zip(LETTERS, texts, strict=False))


def _register_level(name: str, config: str, counts: Mapping[str, int]) -> None:
    """Registers ARC-Easy or ARC-Challenge, and its variant."""
    question = "A science question for school grades 3 to 9 with three to five choices"

    # Our own prompt: T5's rule for GLUE, with lettered choices.
    task = register_task(
        Task(
            name=name,
            version=1,
            description=f"{question}, to the letter of one.",
            licence="CC BY-SA 4.0",
            source=HubData(
                "allenai/ai2_arc",
                config,
                counts=counts,
                columns={
                    "id": str,
                    "question": str,
                    "choices": {"text": [str], "label": [str]},
                    "answerKey": str,
                },
            ),
            preprocess=ask_letter(name),
            postprocess=label_index(LETTERS),
            metrics=(ACCURACY,),
            choices=choices_of_row,
            ids=("id",),
            split="test",
            prompt_source="this library",
            family="ARC",
        )
    )

    # UnifiedQA's prompt for the same rows.
    register_task(
        replace(
            task,
            name=f"{name}.unifiedqa",
            description=f"{question}, to the text of one.",
            preprocess=unifiedqa,
            postprocess=lower_text,
            prompt_source="UnifiedQA",
            variant_of=name,
        )
    )


_register_level("arc_easy", "ARC-Easy", {"train": 2251, "validation": 570, "test": 2376})
_register_level("arc_challenge", "ARC-Challenge", {"train": 1119, "validation": 299, "test": 1172})
