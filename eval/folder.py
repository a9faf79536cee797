"""What a run leaves in its folder, and how it is read back: report.json, the examples, and what models answered."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eval.answers.journal import read_predictions
from eval.task import Example, Task
from moe import DataError, whole_file

REPORT = "report.json"


class Answers(NamedTuple):
    """One system's answers to a task, beside the examples.

    Attributes:
        task: The entry of report.json.
        examples: In the order of the run.
        outputs: One for each.
    """

    task: dict[str, Any]
    examples: list[Example]
    outputs: list[str]


def examples_path(folder: Path, task: str) -> Path:
    """Returns where the examples of a task are."""
    return folder / "examples" / f"{task}.jsonl"


def predictions_path(folder: Path, task: str, name: str, mode: str) -> Path:
    """Returns where a system's answers to a task are."""
    return folder / "predictions" / f"{task}.{name}.{mode}.jsonl"


def write_examples(folder: Path, task: Task, examples: Sequence[Example]) -> str:
    """Writes the examples of a task, whole or not at all, and returns a digest that tells them from others."""
    lines = []
    for example in examples:
        rest = {name: value for name, value in example.fields.items() if name not in ("inputs", "targets")}
        lines.append(json.dumps({**example._asdict(), "fields": rest}, ensure_ascii=False, default=_plain))
    write_whole(examples_path(folder, task.name), "".join(line + "\n" for line in lines))
    told = [[example.id, example.group, example.inputs, example.targets] for example in examples]
    return hashlib.sha256(json.dumps([task.name, task.version, told]).encode()).hexdigest()[:16]


def read_report(folder: Path) -> dict[str, Any]:
    """Returns the content of report.json in the folder of a run, or of the file itself.

    Raises:
        DataError: When there is none, or it is of another kind.
    """
    path = folder / REPORT if folder.is_dir() else folder
    if not path.is_file():
        raise DataError(f"There is no {REPORT} in {folder}. Expected the --out folder of `python -m eval run`.")
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}. Make it again with `python -m eval run`.") from error
    if not isinstance(report, dict) or not {"models", "tasks"} <= report.keys():
        raise DataError(f"{path} is no report of `python -m eval run`: it has no models and tasks.")
    return report


def read_answers(folder: Path, task: dict[str, Any], name: str, mode: str) -> Answers:
    """Returns a system's answers to a task of a report.

    Raises:
        DataError: When examples or answers are missing.
    """
    examples = []
    for text in _existing(examples_path(folder, task["task"])).read_text(encoding="utf-8").split("\n")[:-1]:
        line = json.loads(text)
        fields = {"inputs": line["inputs"], "targets": line["targets"], **line["fields"]}
        examples.append(Example(**{**line, "choices": tuple(line["choices"]), "fields": fields}))
    if len(examples) != task["num_examples"]:
        raise DataError(
            f"{examples_path(folder, task['task'])} holds {len(examples):,} of the {task['num_examples']:,} examples "
            "that the report is about. Run the same `python -m eval run` again: answers that are there are kept."
        )
    path = _existing(predictions_path(folder, task["task"], name, mode))
    made = {id: prediction.output for id, prediction in read_predictions(path).items()}
    if missing := [example.id for example in examples if example.id not in made]:
        raise DataError(
            f"{path} answers {len(examples) - len(missing):,} of {len(examples):,} examples; the first without an "
            f"answer is {missing[0]!r}. Run the same `python -m eval run` again: it goes on where it stopped."
        )
    return Answers(task, examples, [made[example.id] for example in examples])


def write_whole(path: Path, text: str) -> None:
    """Writes `text` to `path`, whole or not at all."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _existing(path: Path) -> Path:
    """Returns the path of a file that is there."""
    if not path.is_file():
        raise DataError(f"There is no {path}. Run `python -m eval run` again: what is there is kept.")
    return path


def _plain(value: Any) -> Any:
    """Returns what JSON can hold of a value that it does not know."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
