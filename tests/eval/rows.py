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


def examples_of(task: Task, split: str) -> list[Example]:
    """Returns the examples of a split."""
    return task.examples(split, None if task.name in OFFLINE else FIXTURES)


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
