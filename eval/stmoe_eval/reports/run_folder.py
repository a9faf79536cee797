"""The folder of a run: report.json, the examples, and the predictions of each model.

Files that are read back are not trusted: each file has a checksum, and must be about the same
model, task and examples.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from moe.checks import shown
from moe.checksums import sha256_of
from moe.errors import DataError
from moe.files import whole_file, write_text
from moe.parsing import parse_json, read_json_lines, read_text, to_record
from stmoe_eval.answers.inference import AS_SAVED, Inference, identity
from stmoe_eval.answers.predictions_file import Header, ScoringFields, read_predictions_file
from stmoe_eval.answers.sealed_json import is_whole
from stmoe_eval.reports.records import Report, SystemResult
from stmoe_eval.task import Decoding, Example, Task

REPORT = "report.json"
VIEWS = ("report.md", "report.html", "card.md")
"""Files that show what report.json holds."""

_ADVICE = "Restore it, or run the same `stmoe eval run` again: answers that are there are kept."

Result = tuple[str, int, str, str, str]
"""What tells one system's scores from others: task, its version, the digest of its examples, the
fingerprint of a model and how it computed, or the name of a baseline with what it has seen, and the
mode."""


# ---------------------------------------------------------------------------
# What is read back. Other fields of the files, which no reader of them needs, are not looked at.


class SavedSystem(BaseModel, frozen=True):
    """A system that answered a task, as report.json names it."""

    name: str
    mode: str
    fitted_to: str | None = None


class SavedTask(BaseModel, frozen=True):
    """A task read back from report.json; the fields are those of `TaskResult`."""

    task: str
    version: int
    split: Literal["train", "validation", "test"]
    limit: int | None
    num_examples: int
    decoding: Decoding
    digest: str
    examples_sha256: str
    systems: list[SavedSystem]
    num_hidden: int = 0


class SavedReport(NamedTuple):
    """A report read back from report.json.

    Attributes:
        folder: Folder of the run.
        fingerprints: Fingerprints of the models' files, by name.
        scoring: How choices were scored.
        tasks: Tasks by name.
        inference: Settings that override the checkpoint's own, by name.
    """

    folder: Path
    fingerprints: dict[str, str]
    scoring: ScoringFields
    tasks: dict[str, SavedTask]
    inference: Mapping[str, Inference] = MappingProxyType({})

    def inference_of(self, model: str) -> Inference:
        """Returns the settings that replaced a checkpoint's own."""
        return self.inference.get(model, AS_SAVED)


class SavedAnswers(NamedTuple):
    """One system's answers to a task, with the examples.

    Attributes:
        examples: N examples in the order of the run.
        outputs: N answers.
    """

    examples: list[Example]
    outputs: list[str]


class _Model(BaseModel, frozen=True):
    fingerprint: str
    inference: Inference = AS_SAVED


class _Settings(BaseModel, frozen=True):
    scoring: ScoringFields


class _Content(BaseModel, frozen=True):
    """The whole of report.json."""

    models: dict[str, _Model]
    settings: _Settings
    tasks: list[SavedTask]
    sha256: str


class _ExampleLine(NamedTuple):
    """A line of a file of examples, which has no other fields."""

    id: str
    group: str
    inputs: str
    targets: str
    choices: list[str]
    fields: dict[str, Any]


# ---------------------------------------------------------------------------
# Examples


class ExamplesDigest(NamedTuple):
    """Identity of the examples of a task.

    Attributes:
        digest: Digest of their content, for any version of this library.
        examples_sha256: Checksum of their file.
    """

    digest: str
    examples_sha256: str


def examples_path(folder: Path, task: str) -> Path:
    """Returns the path of a task's examples."""
    return folder / "examples" / f"{task}.jsonl"


def predictions_path(folder: Path, task: str, name: str, mode: str) -> Path:
    """Returns the path of a system's answers to a task."""
    return folder / "predictions" / f"{task}.{name}.{mode}.jsonl"


def write_examples(folder: Path, task: Task, examples: Sequence[Example]) -> ExamplesDigest:
    """Writes the examples of a task, whole or not at all."""
    lines = []
    for example in examples:
        # Inputs and targets are stored once, with the other fields.
        fields = dict(example.fields)
        fields.pop("inputs", None)
        fields.pop("targets", None)
        content = example._replace(fields=fields)._asdict()
        lines.append(json.dumps(content, ensure_ascii=False, default=_plain) + "\n")

    path = examples_path(folder, task.name)
    write_text(path, "".join(lines))
    return ExamplesDigest(digest_of(task.name, task.version, examples), sha256_of(path))


def digest_of(task: str, version: int, examples: Sequence[Example]) -> str:
    """Returns 16 hexadecimal digits that identify the examples of a task."""
    contents = []
    for example in examples:
        contents.append([example.id, example.group, example.inputs, example.targets])
    return hashlib.sha256(json.dumps([task, version, contents]).encode()).hexdigest()[:16]


def _read_examples(report: SavedReport, task: SavedTask) -> list[Example]:
    """Returns the examples of a task.

    Raises:
        DataError: When they are not those that the report is about.
    """
    path = _existing(examples_path(report.folder, task.task))
    examples: dict[str, Example] = {}
    for number, value in read_json_lines(path, advice=_ADVICE, torn_end=True, nan=True):
        where = f"{path}, line {number}"
        line = to_record(_ExampleLine, value, where=where, advice=_ADVICE)
        if line.id in examples:
            raise DataError(f"{where}: the example {shown(line.id)} occurs twice. {_ADVICE}")
        examples[line.id] = Example(
            id=line.id,
            group=line.group,
            inputs=line.inputs,
            targets=line.targets,
            choices=tuple(line.choices),
            fields={"inputs": line.inputs, "targets": line.targets, **line.fields},
        )

    if len(examples) != task.num_examples:
        raise DataError(
            f"{path} holds {len(examples):,} of the {task.num_examples:,} examples in the report. {_ADVICE}"
        )

    # The digest detects different examples, the checksum any changed byte.
    digest = digest_of(task.task, task.version, list(examples.values()))
    if digest != task.digest or sha256_of(path) != task.examples_sha256:
        raise DataError(
            f"{path} does not contain the examples of the report: its SHA-256 differs. {_ADVICE}"
        )
    return list(examples.values())


# ---------------------------------------------------------------------------
# report.json


def read_report(folder: Path) -> SavedReport:
    """Returns the content of report.json, given the folder of a run or the file itself.

    Raises:
        DataError: When there is none, it is of another kind, or was changed after it was written.
    """
    path = folder / REPORT if folder.is_dir() else folder
    if not path.is_file():
        raise DataError(
            f"There is no {REPORT} in {folder}. Expected the --out folder of `stmoe eval run`."
        )
    text = read_text(path, advice=_ADVICE)
    value = parse_json(text, where=str(path), advice=_ADVICE)
    if not isinstance(value, dict):
        raise DataError(
            f"{path}: its content is {shown(value)}; expected an object with fields. {_ADVICE}"
        )
    content = to_record(_Content, value, where=str(path), advice=_ADVICE)

    tasks: dict[str, SavedTask] = {}
    for task in content.tasks:
        if task.task in tasks:
            raise DataError(f"{path}: the task {shown(task.task)} occurs twice. {_ADVICE}")
        tasks[task.task] = task

    # The checksum comes last: the errors above are more specific.
    if not is_whole(text, value):
        raise DataError(f"{path} has changed since it was written: its SHA-256 differs. {_ADVICE}")
    if not content.models:
        raise DataError(f"{path} lists no model. {_ADVICE}")
    return SavedReport(
        folder=path.parent,
        fingerprints={name: model.fingerprint for name, model in content.models.items()},
        scoring=content.settings.scoring,
        tasks=tasks,
        inference={name: model.inference for name, model in content.models.items()},
    )


def results_of_report(report: Report) -> Set[Result]:
    """Returns the keys of a report's scores."""
    results = set()
    for task in report.tasks:
        for system in task.systems:
            model = report.models.get(system.name)
            source = _baseline_source(system) if model is None else model.identity
            results.add((task.task, task.version, task.digest, source, system.mode))
    return results


def results_of_saved(report: SavedReport) -> Set[Result]:
    """Returns the keys of the scores in a report that was read back."""
    results = set()
    for task in report.tasks.values():
        for system in task.systems:
            source = _baseline_source(system)
            if system.name in report.fingerprints:
                fingerprint = report.fingerprints[system.name]
                source = identity(fingerprint, report.inference_of(system.name))
            results.add((task.task, task.version, task.digest, source, system.mode))
    return results


def _baseline_source(system: SystemResult | SavedSystem) -> str:
    return f"{system.name}: {system.fitted_to}"


# ---------------------------------------------------------------------------
# Copies of an earlier report


def keep_earlier_report(folder: Path, results: Set[Result]) -> Path | None:
    """Copies the report of an earlier run if it has results that a new one lacks.

    It is done before the new report takes its place, so that a failed or stopped run loses nothing.

    Args:
        folder: Folder of both runs.
        results: Results of the new report.

    Returns:
        The copy of report.json, called report.1.json or with the next number that is free; None
        when there is no earlier report, or the new one has all of its results.
    """
    if not (folder / REPORT).exists() or is_superseded(folder / REPORT, results):
        return None

    number = 1
    while (folder / f"report.{number}.json").exists():
        number += 1
    for name in (*VIEWS, REPORT):
        if (folder / name).is_file():
            with whole_file(_numbered(folder / name, number)) as partial:
                shutil.copyfile(folder / name, partial)
    return _numbered(folder / REPORT, number)


def remove_earlier_report(copy: Path) -> None:
    """Removes what `keep_earlier_report` has copied."""
    number = int(copy.suffixes[-2].removeprefix("."))
    for name in (*VIEWS, REPORT):
        _numbered(copy.with_name(name), number).unlink(missing_ok=True)


def is_superseded(path: Path, results: Set[Result]) -> bool:
    """Returns whether `results` has all results of a report.json; False when it cannot be read."""
    try:
        report = read_report(path)
    except DataError:
        return False
    return results_of_saved(report) <= results


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


# ---------------------------------------------------------------------------
# Answers


def read_answers(report: SavedReport, task: str, name: str, mode: str) -> SavedAnswers:
    """Returns a system's answers to a task of a report.

    Raises:
        DataError: When examples or answers are missing, or are not those that the report is about.
    """
    examples = _read_examples(report, report.tasks[task])
    path = predictions_path(report.folder, task, name, mode)

    def check_header(header: Header) -> None:
        _check_header(path, header, report, report.tasks[task], name, mode)

    written = read_predictions_file(_existing(path), check_header)
    # Answers to examples that are not in the report.
    known = {example.id for example in examples}
    for id, number in written.line_numbers.items():
        if id not in known:
            raise DataError(
                f"{path}, line {number}: {shown(id)} is not an example of the report. {_ADVICE}"
            )

    # Answers by id, since batches are sorted by length.
    outputs: dict[str, str] = {}
    for batch in written.batches:
        for prediction in batch.predictions:
            outputs[prediction.id] = prediction.output
    missing = [example.id for example in examples if example.id not in outputs]
    if missing:
        raise DataError(
            f"{path} answers {len(examples) - len(missing):,} of {len(examples):,} examples; the first without an "
            f"answer is {missing[0]!r}. Run the same `stmoe eval run` again: it resumes where it stopped."
        )
    return SavedAnswers(examples, [outputs[example.id] for example in examples])


def _check_header(
    path: Path, header: Header, report: SavedReport, task: SavedTask, name: str, mode: str
) -> None:
    """Raises a DataError when a file of predictions is not about what the report is about."""
    expected: dict[str, Any] = {
        "model": report.fingerprints[name],
        "task": task.task,
        "version": task.version,
        "mode": mode,
        "inference": report.inference_of(name),
    }

    # Only settings that affect this kind of answer.
    if mode == "generate":
        expected["decoding"] = task.decoding
    else:
        expected["scoring"] = report.scoring

    for field, value in expected.items():
        written = getattr(header, field)
        if written != value:
            raise DataError(
                f"{path}, line 1: {field} is {_show(written)}, but the report has {_show(value)}. {_ADVICE}"
            )


def _show(value: Any) -> str:
    return shown(value._asdict() if hasattr(value, "_asdict") else value)


def _existing(path: Path) -> Path:
    """Returns the path of an existing file."""
    if not path.is_file():
        raise DataError(
            f"There is no {path}. Run `stmoe eval run` again: existing results are kept."
        )
    return path


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
