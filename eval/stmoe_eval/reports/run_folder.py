"""The folder of a run: report.json, the examples, and the predictions of each model.

What is read back must be about the same model, task and examples.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe.checks import shown
from moe.errors import DataError
from moe.files import write_text
from moe.parsing import read_json_lines, read_record, to_record
from stmoe_eval.answers.inference import AS_SAVED
from stmoe_eval.answers.predictions_file import Header, read_predictions_file
from stmoe_eval.reports.records import Report, TaskResult
from stmoe_eval.task import Example, Task

REPORT = "report.json"

_ADVICE = "Restore it, or run the same `stmoe eval run` again: answers that are there are kept."


class _ExampleLine(NamedTuple):
    """A line of a file of examples, which has no other fields."""

    id: str
    group: str
    inputs: str
    targets: str
    choices: list[str]
    fields: dict[str, Any]


def examples_path(folder: Path, task: str) -> Path:
    """Returns the path of a task's examples."""
    return folder / "examples" / f"{task}.jsonl"


def predictions_path(folder: Path, task: str, name: str, mode: str) -> Path:
    """Returns the path of a system's answers to a task."""
    return folder / "predictions" / f"{task}.{name}.{mode}.jsonl"


def write_examples(folder: Path, task: Task, examples: Sequence[Example]) -> str:
    """Writes the examples of a task, whole or not at all, and returns their digest."""
    lines = []
    for example in examples:
        # Inputs and targets are stored once, with the other fields.
        fields = dict(example.fields)
        fields.pop("inputs", None)
        fields.pop("targets", None)
        content = example._replace(fields=fields)._asdict()
        lines.append(json.dumps(content, ensure_ascii=False, default=_plain) + "\n")

    write_text(examples_path(folder, task.name), "".join(lines))
    return digest_of(task.name, task.version, examples)


def digest_of(task: str, version: int, examples: Sequence[Example]) -> str:
    """Returns 16 hexadecimal digits that identify the examples of a task."""
    contents = []
    for example in examples:
        contents.append([example.id, example.group, example.inputs, example.targets])
    return hashlib.sha256(json.dumps([task, version, contents]).encode()).hexdigest()[:16]


def read_report(folder: Path) -> Report:
    """Returns the report in the folder of a run, given the folder or report.json itself.

    Raises:
        DataError: When there is none, or it is of another kind.
    """
    path = folder / REPORT if folder.is_dir() else folder
    if not path.is_file():
        raise DataError(
            f"There is no {REPORT} in {folder}. Expected the --out folder of `stmoe eval run`."
        )
    report = read_record(path, Report, advice=_ADVICE)
    if not report.models:
        raise DataError(f"{path} lists no model. {_ADVICE}")
    return report


def read_examples(folder: Path, task: TaskResult) -> list[Example]:
    """Returns the examples of a task of a report.

    Raises:
        DataError: When they are not those that the report is about.
    """
    path = _existing(examples_path(folder, task.task))
    examples = []
    for number, value in read_json_lines(path, advice=_ADVICE):
        line = to_record(_ExampleLine, value, where=f"{path}, line {number}", advice=_ADVICE)
        fields = {"inputs": line.inputs, "targets": line.targets, **line.fields}
        examples.append(
            Example(**{**line._asdict(), "choices": tuple(line.choices), "fields": fields})
        )
    if digest_of(task.task, task.version, examples) != task.digest:
        raise DataError(f"{path} does not contain the examples of the report. {_ADVICE}")
    return examples


def read_answers(
    folder: Path, report: Report, task: TaskResult, name: str, mode: str
) -> tuple[list[Example], list[str]]:
    """Returns the examples of a task of a report, and a system's answers to them.

    Raises:
        DataError: When examples or answers are missing, or are not those that the report is about.
    """
    examples = read_examples(folder, task)
    path = _existing(predictions_path(folder, task.task, name, mode))

    header, batches = read_predictions_file(path)
    if header is not None:
        _check_header(path, header, report, task, name, mode)

    # Answers by id, since batches are sorted by length.
    outputs: dict[str, str] = {}
    for batch in batches:
        for prediction in batch.predictions:
            outputs[prediction.id] = prediction.output
    missing = [example.id for example in examples if example.id not in outputs]
    if missing:
        raise DataError(
            f"{path} answers {len(examples) - len(missing):,} of {len(examples):,} examples; the first without an "
            f"answer is {missing[0]!r}. Run the same `stmoe eval run` again: it resumes where it stopped."
        )
    return examples, [outputs[example.id] for example in examples]


def _check_header(
    path: Path, header: Header, report: Report, task: TaskResult, name: str, mode: str
) -> None:
    """Raises a DataError when a file of predictions is not about what the report is about."""
    model = report.models[name]
    expected: dict[str, Any] = {
        "model": model.fingerprint,
        "task": task.task,
        "version": task.version,
        "mode": mode,
        "inference": model.inference or AS_SAVED,
    }

    # Only settings that affect this kind of answer.
    if mode == "generate":
        expected["decoding"] = task.decoding
    else:
        expected["scoring"] = report.settings.scoring

    for field, value in expected.items():
        written = getattr(header, field)
        if written != value:
            raise DataError(
                f"{path}, line 1: {field} is {shown(written)}, but the report has {shown(value)}. {_ADVICE}"
            )


def _existing(path: Path) -> Path:
    """Returns the path of an existing file."""
    if not path.is_file():
        raise DataError(
            f"There is no {path}. Run `stmoe eval run` again: existing results are kept."
        )
    return path


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
