"""Examples of any task: from Python where its rows come with it, else from the fixtures."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from stmoe_eval.answers.predictions_file import Prediction, read_predictions_file
from stmoe_eval.source import BuiltIn, HubData
from stmoe_eval.task import TASKS, Example, Task

FIXTURES = Path(__file__).parent / "fixtures"
OFFLINE = [name for name in TASKS.names() if isinstance(TASKS.get(name).source, BuiltIn)]
ON_THE_HUB = [name for name in TASKS.names() if isinstance(TASKS.get(name).source, HubData)]


def folder_of(task: Task) -> Path | None:
    """Returns the argument `folder` with which a task finds its rows."""
    if task.name in OFFLINE:
        return None
    home = FIXTURES / (task.variant_of or task.name)
    missing = [
        f"{split}.jsonl" for split in task.source.splits if not (home / f"{split}.jsonl").is_file()
    ]
    assert not missing, (
        f"The task {task.name} has no fixture {home}/{missing[0]}. Write three to five rows of your own for it in the "
        "schema of the dataset: eval/stmoe_eval/tasks/__init__.py says how."
    )
    return FIXTURES


def examples_of(task: Task, split: str) -> list[Example]:
    """Returns the examples of a split."""
    return task.examples(split, folder_of(task))


def fixture_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a fixture as they are written."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows as Parquet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def predictions_by_id(path: Path) -> dict[str, Prediction]:
    """Returns the predictions of the closed batches in a file."""
    return {
        prediction.id: prediction
        for batch in read_predictions_file(path)[1]
        for prediction in batch.predictions
    }
