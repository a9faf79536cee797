"""Files of predictions in the format of the GLUE and SuperGLUE sites.

A task names its `SubmissionFile`; `write_submission` writes it. Both sites score it against labels
that are not public.

Source:
    jiant v1 (github.com/nyu-mll/jiant), the toolkit of the authors of both benchmarks, in
    `jiant/evaluate.py`. Differs: answers that are not labels, which a classifier cannot give, are
    replaced by a label.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moe.files import write_text

Key = tuple[int, ...]
"""The numbers by which a site knows an example."""

Labels = Sequence[tuple[Key, Any]]
"""The labels of all examples, in the order of their keys."""


@dataclass(frozen=True)
class SubmissionFile:
    """The format of a task's file.

    Attributes:
        site: `GLUE` or `SuperGLUE`.
        name: Name of the file.
        to_label: From a post-processed answer to the site's label; None for an invalid answer.
        fallback: Label used for such an answer.
        to_text: From all labels to the content of the file.
        keys: Fields of an example that make its key.
    """

    site: str
    name: str
    to_label: Callable[[Any], Any]
    fallback: Any
    to_text: Callable[[Labels], str]
    keys: tuple[str, ...] = ("idx",)


class Submission(NamedTuple):
    """A file that was written.

    Attributes:
        file: Its path in the folder of the run.
        fallback: Label used for invalid answers.
        num_replaced: Number of such answers.
    """

    file: str
    fallback: str
    num_replaced: int


def superglue_file(name: str, labels: Sequence[Any]) -> SubmissionFile:
    """Returns the file format of a SuperGLUE classification.

    Args:
        name: Name of the file.
        labels: The site's labels in the order of their numbers.
    """
    return SubmissionFile("SuperGLUE", name, _one_of(labels), labels[0], _to_json_lines)


def glue_file(name: str, labels: Sequence[Any]) -> SubmissionFile:
    """Returns the file format of a GLUE classification; the arguments are those of `superglue_file`."""
    return SubmissionFile("GLUE", name, _one_of(labels), labels[0], _to_table)


def write_submission(
    form: SubmissionFile,
    folder: Path,
    system: str,
    examples: Sequence[Mapping[str, Any]],
    answers: Sequence[Any],
) -> Submission | None:
    """Writes a system's answers to a whole split, atomically.

    Args:
        form: The file format.
        folder: Folder of the run.
        system: Name of the system, and its mode.
        examples: Features of N examples.
        answers: N post-processed answers.

    Returns:
        The written file; None if two examples share a key, which the site's examples never do.
    """
    labels: list[tuple[Key, Any]] = []
    num_replaced = 0
    for features, answer in zip(examples, answers, strict=True):
        label = form.to_label(answer)
        if label is None:
            label = form.fallback
            num_replaced += 1
        labels.append((tuple(features[key] for key in form.keys), label))

    # The sites identify an example by its key.
    occurrences = Counter(key for key, _ in labels)
    if len(occurrences) < len(labels):
        return None

    labels.sort(key=_key)
    path = Path("submission") / f"{form.site}.{system}" / form.name
    write_text(folder / path, form.to_text(labels))
    return Submission(str(path), str(form.fallback), num_replaced)


def _key(item: tuple[Key, Any]) -> Key:
    return item[0]


def _one_of(labels: Sequence[Any]) -> Callable[[Any], Any]:
    def to_label(answer: int) -> Any:
        return labels[answer] if 0 <= answer < len(labels) else None

    return to_label


def _to_similarity(answer: float) -> str | None:
    """Returns a similarity in 0..5 with three decimals; as the site requires."""
    if math.isnan(answer) or answer == -1:
        return None
    return f"{min(max(0.0, answer), 5.0):.3f}"


def _unchanged(answer: str) -> str:
    return answer


def _to_json_lines(labels: Labels) -> str:
    """Returns `{"idx": 0, "label": "true"}` in a line for each example."""
    lines: list[str] = []
    for (*_, number), label in labels:
        lines.append(json.dumps({"idx": number, "label": label}, ensure_ascii=False) + "\n")
    return "".join(lines)


def _to_table(labels: Labels) -> str:
    """Returns the header `index prediction`, and a line for each example, with tabs."""
    lines = ["index\tprediction\n"]
    for (number,), label in labels:
        lines.append(f"{number}\t{label}\n")
    return "".join(lines)


def _to_paragraphs(labels: Labels) -> str:
    """Returns a line for each paragraph of MultiRC, with the labels of its questions' answers."""
    paragraphs: dict[int, dict[int, list[dict[str, int]]]] = {}
    for (paragraph, question, answer), label in labels:
        questions = paragraphs.setdefault(paragraph, {})
        questions.setdefault(question, []).append({"idx": answer, "label": label})

    lines: list[str] = []
    for paragraph, questions in paragraphs.items():
        listed = [{"idx": number, "answers": answers} for number, answers in questions.items()]
        line = {"idx": paragraph, "passage": {"questions": listed}}
        lines.append(json.dumps(line) + "\n")
    return "".join(lines)


# Files with several numbers for each example, or texts.
MULTIRC_FILE = SubmissionFile(
    site="SuperGLUE",
    name="MultiRC.jsonl",
    to_label=_one_of((0, 1)),
    fallback=0,
    to_text=_to_paragraphs,
    keys=("idx/paragraph", "idx/question", "idx/answer"),
)

RECORD_FILE = SubmissionFile(
    site="SuperGLUE",
    name="ReCoRD.jsonl",
    to_label=_unchanged,
    fallback="",
    to_text=_to_json_lines,
    keys=("idx/passage", "idx/query"),
)

STSB_FILE = SubmissionFile(
    site="GLUE", name="STS-B.tsv", to_label=_to_similarity, fallback="0.000", to_text=_to_table
)
