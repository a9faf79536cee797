"""What a run leaves in its folder, and how it is read back: report.json, the examples, and what
models answered.

Nothing that is read back is trusted: each file has a checksum, and must be about the same model,
task and examples.
"""

import hashlib
import itertools
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from eval.answers.predictions_file import Header, ScoringFields, read_predictions_file
from eval.sealed_json import is_whole
from eval.task import Decoding, Example, Task
from moe import DataError, whole_file
from moe.checks import shown
from moe.checksums import sha256_of
from moe.parsing import parse_json, read_json_lines, read_text, to_record

REPORT = "report.json"
VIEWS = ("report.md", "report.html", "card.md")
"""Files that show what report.json holds."""

_AGAIN = "Restore it, or run the same `python -m eval run` again: answers that are there are kept."

T = TypeVar("T")


class Row(NamedTuple):
    """What is read back of one system's line in report.json."""

    name: str
    mode: str


class Entry(NamedTuple):
    """What is read back of a task in report.json.

    Attributes:
        task: Its name.
        version: Of the task.
        split: Of its examples.
        limit: Most examples that were asked for; None for all.
        num_examples: That there are.
        decoding: How answers were generated.
        digest: Tells the examples from others, whichever version of this library wrote them.
        examples_sha256: Of their file.
        systems: A `Row` for each that answered.
    """

    task: str
    version: int
    split: Literal["train", "validation", "test"]
    limit: int | None
    num_examples: int
    decoding: Decoding
    digest: str
    examples_sha256: str
    systems: list[Any]


class Report(NamedTuple):
    """What is read back of report.json.

    Attributes:
        folder: Of the run.
        fingerprints: Of the models' files, by name.
        scoring: What decided between choices.
        tasks: By name.
    """

    folder: Path
    fingerprints: dict[str, str]
    scoring: ScoringFields
    tasks: dict[str, Entry]


class Answers(NamedTuple):
    """One system's answers to a task, beside the examples.

    Attributes:
        examples: In the order of the run.
        outputs: One for each.
    """

    examples: list[Example]
    outputs: list[str]


Result = tuple[str, int, str, str, str]
"""Task, its version, the digest of its examples, the fingerprint of a model or the name of a baseline, and the mode."""


class _Model(NamedTuple):
    fingerprint: str


class _Settings(NamedTuple):
    scoring: ScoringFields


class _Content(NamedTuple):
    """What of the whole of report.json is read back; its parts are read after it."""

    models: dict[str, dict[str, Any]]
    settings: dict[str, Any]
    tasks: list[dict[str, Any]]
    sha256: str


class _ExampleLine(NamedTuple):
    """A line of a file of examples."""

    id: str
    group: str
    inputs: str
    targets: str
    choices: list[str]
    fields: dict[str, Any]


def examples_path(folder: Path, task: str) -> Path:
    """Returns where the examples of a task are."""
    return folder / "examples" / f"{task}.jsonl"


def predictions_path(folder: Path, task: str, name: str, mode: str) -> Path:
    """Returns where a system's answers to a task are."""
    return folder / "predictions" / f"{task}.{name}.{mode}.jsonl"


def write_examples(folder: Path, task: Task, examples: Sequence[Example]) -> dict[str, str]:
    """Writes the examples of a task, whole or not at all, and returns `digest` and
    `examples_sha256` of `Entry`.
    """
    lines = []
    for example in examples:
        rest = {
            name: value
            for name, value in example.fields.items()
            if name not in ("inputs", "targets")
        }
        lines.append(
            json.dumps({**example._asdict(), "fields": rest}, ensure_ascii=False, default=_plain)
        )
    path = examples_path(folder, task.name)
    write_whole(path, "".join(line + "\n" for line in lines))
    return {
        "digest": digest_of(task.name, task.version, examples),
        "examples_sha256": sha256_of(path),
    }


def digest_of(task: str, version: int, examples: Sequence[Example]) -> str:
    """Returns 16 hexadecimal digits that tell the examples of a task from others."""
    told = [[example.id, example.group, example.inputs, example.targets] for example in examples]
    return hashlib.sha256(json.dumps([task, version, told]).encode()).hexdigest()[:16]


def read_report(folder: Path) -> Report:
    """Returns what report.json says, in the folder of a run or as the file itself.

    Raises:
        DataError: When there is none, it is of another kind, or was changed after it was written.
    """
    path = folder / REPORT if folder.is_dir() else folder
    if not path.is_file():
        raise DataError(
            f"There is no {REPORT} in {folder}. Expected the --out folder of `python -m eval run`."
        )
    text = read_text(path, advice=_AGAIN)
    value = parse_json(text, where=str(path), advice=_AGAIN)
    content = _part(_Content, value, str(path))
    fingerprints = {}
    for name, model in content.models.items():
        fingerprints[name] = _part(_Model, model, f"{path}, model {shown(name)}").fingerprint
    tasks = {}
    for number, task in enumerate(content.tasks, start=1):
        where = f"{path}, task {number}"
        entry = entry_of(task, where)
        if entry.task in tasks:
            raise DataError(f"{where}: {shown(entry.task)} is there twice. {_AGAIN}")
        tasks[entry.task] = entry
    scoring = _part(_Settings, content.settings, f"{path}, settings").scoring

    if not is_whole(text, value):
        raise DataError(f"{path} is not what was written: its sha256 differs. {_AGAIN}")
    if not fingerprints:
        raise DataError(f"{path} is about no model. {_AGAIN}")
    return Report(path.parent, fingerprints, scoring, tasks)


def entry_of(task: dict[str, Any], where: str) -> Entry:
    """Returns what is read back of a task's entry in report.json."""
    entry = _part(Entry, task, where)
    return entry._replace(systems=[_part(Row, row, where) for row in entry.systems])


def results_of(fingerprints: Mapping[str, str], tasks: Iterable[Entry]) -> Set[Result]:
    """Returns what a report has scores of.

    Args:
        fingerprints: Of its models, by name.
        tasks: Its entries.
    """
    results = set()
    for entry in tasks:
        for row in entry.systems:
            model = fingerprints.get(row.name, row.name)
            results.add((entry.task, entry.version, entry.digest, model, row.mode))
    return results


def read_answers(report: Report, task: str, name: str, mode: str) -> Answers:
    """Returns a system's answers to a task of a report.

    Raises:
        DataError: When examples or answers are missing, or are not those that the report is about.
    """
    examples = _read_examples(report, report.tasks[task])
    path = predictions_path(report.folder, task, name, mode)

    def check_header(header: Header) -> None:
        _check_header(path, header, report, report.tasks[task], name, mode)

    written = read_predictions_file(_existing(path), check_header)
    if not written.has_checksums:
        raise DataError(
            f"{path} has no checksums: an earlier version of this library wrote it. {_AGAIN}"
        )

    known = {example.id for example in examples}
    for id, number in written.line_numbers.items():
        if id not in known:
            raise DataError(
                f"{path}, line {number}: {shown(id)} is none of the examples of the report. {_AGAIN}"
            )
    outputs = {made.id: made.output for batch in written.batches for made in batch.predictions}
    missing = [example.id for example in examples if example.id not in outputs]
    if missing:
        raise DataError(
            f"{path} answers {len(examples) - len(missing):,} of {len(examples):,} examples; the first without an "
            f"answer is {missing[0]!r}. Run the same `python -m eval run` again: it goes on where it stopped."
        )
    return Answers(examples, [outputs[example.id] for example in examples])


def set_aside(folder: Path, results: Set[Result]) -> Path | None:
    """Copies the report of an earlier run that has results which a new one lacks, and returns where
    it is.

    It is done before the new report takes its place, so that a run that fails or is stopped loses
    nothing.

    Args:
        folder: Of both runs.
        results: Those of the new report.

    Returns:
        The copy of report.json, called report.1.json or with the next number that is free; None
        when there is no earlier report, or the new one has all of its results.
    """
    if not (folder / REPORT).exists() or covers(folder / REPORT, results):
        return None

    number = next(
        number for number in itertools.count(1) if not (folder / f"report.{number}.json").exists()
    )
    for name in (*VIEWS, REPORT):
        if (folder / name).is_file():
            with whole_file(_numbered(folder / name, number)) as partial:
                shutil.copyfile(folder / name, partial)
    return _numbered(folder / REPORT, number)


def drop_aside(copy: Path) -> None:
    """Removes what `set_aside` has copied."""
    number = int(copy.suffixes[-2].removeprefix("."))
    for name in (*VIEWS, REPORT):
        _numbered(copy.with_name(name), number).unlink(missing_ok=True)


def _numbered(path: Path, number: int) -> Path:
    """Returns `report.1.html` for `report.html`."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def covers(path: Path, results: Set[Result]) -> bool:
    """Returns whether all results of a report.json are among others; False when it cannot be read."""
    try:
        report = read_report(path)
    except DataError:
        return False
    return results_of(report.fingerprints, report.tasks.values()) <= results


def write_whole(path: Path, text: str) -> None:
    """Writes `text` to `path`, whole or not at all."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _read_examples(report: Report, entry: Entry) -> list[Example]:
    """Returns the examples of a task.

    Raises:
        DataError: When they are not those that the report is about.
    """
    path = _existing(examples_path(report.folder, entry.task))
    examples: dict[str, Example] = {}
    for number, value in read_json_lines(path, advice=_AGAIN, torn_end=True, nan=True):
        where = f"{path}, line {number}"
        line = to_record(_ExampleLine, value, where=where, advice=_AGAIN)
        if line.id in examples:
            raise DataError(f"{where}: the example {shown(line.id)} is there twice. {_AGAIN}")
        fields = {"inputs": line.inputs, "targets": line.targets, **line.fields}
        examples[line.id] = Example(
            **{**line._asdict(), "choices": tuple(line.choices), "fields": fields}
        )

    if len(examples) != entry.num_examples:
        raise DataError(
            f"{path} holds {len(examples):,} of the {entry.num_examples:,} examples that the report is about. {_AGAIN}"
        )
    digest = digest_of(entry.task, entry.version, list(examples.values()))
    if digest != entry.digest or sha256_of(path) != entry.examples_sha256:
        raise DataError(
            f"{path} does not hold the examples that the report is about: its SHA-256 differs. {_AGAIN}"
        )
    return list(examples.values())


def _check_header(
    path: Path, header: Header, report: Report, entry: Entry, name: str, mode: str
) -> None:
    """Raises a DataError when a file of predictions is not about what the report is about."""
    expected = {
        "model": report.fingerprints[name],
        "task": entry.task,
        "version": entry.version,
        "mode": mode,
    }
    if mode == "generate":
        expected["decoding"] = entry.decoding
    else:
        expected["scoring"] = report.scoring
    for field, value in expected.items():
        found = getattr(header, field)
        if found != value:
            raise DataError(
                f"{path}, line 1: {field} is {_plainly(found)}, and the report is about {_plainly(value)}. {_AGAIN}"
            )


def _plainly(value: Any) -> str:
    """Returns a value as it stands in the files."""
    return shown(value._asdict() if hasattr(value, "_asdict") else value)


def _part(kind: type[T], value: Any, where: str) -> T:
    """Returns a record of those fields of a JSON object that it has.

    Raises:
        DataError: When one is missing or of another type, or `value` is no object.
    """
    if isinstance(value, dict):
        value = {name: value[name] for name in kind._fields if name in value}  # type: ignore[attr-defined]
    return to_record(kind, value, where=where, advice=_AGAIN)


def _existing(path: Path) -> Path:
    """Returns the path of a file that is there."""
    if not path.is_file():
        raise DataError(
            f"There is no {path}. Run `python -m eval run` again: what is there is kept."
        )
    return path


def _plain(value: Any) -> Any:
    """Returns what JSON can hold of a value that it does not know."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
