"""An evaluation from end to end: models and tasks in, report files out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.baselines import baseline_outputs
from eval.metrics import accuracy, accuracy_by_class
from eval.predict import MODES, Prediction, Request, load_seq2seq, predict
from eval.report import write_reports
from eval.task import TASKS, Example, Task
from moe import ConfigError

_SHOWN_MISTAKES = 10


def evaluate(
    models: dict[str, Path],
    tasks: Sequence[str],
    *,
    modes: Sequence[str] = MODES,
    split: str = "test",
    limit: int | None = None,
    out: Path,
    command: str,
) -> dict[str, Any]:
    """Evaluates every model on every task in every mode, writes the reports and returns their content.

    Args:
        models: Checkpoint folders by name; the first is the one that the report is about.
        tasks: Names of tasks.
        modes: `generate`, `rank`.
        split: Of the tasks.
        limit: Most examples; every n-th is taken so that all classes stay. None for all.
        out: Receives predictions/, report.json and report.md.
        command: How it was called, for the report.

    Raises:
        ConfigError: When a task, mode or limit is impossible.
    """
    chosen = [TASKS.get(name) for name in tasks]
    for mode in modes:
        if mode not in MODES:
            raise ConfigError(f"There is no mode {mode!r}. Choose from {', '.join(MODES)}.")
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit is {limit}; expected at least 1.")
    systems = {name: load_seq2seq(folder) for name, folder in models.items()}
    results = []
    for task in chosen:
        examples = _thin_out(task.examples(split), limit)
        requests = [Request(example.id, example.inputs) for example in examples]
        rows, first = [], None
        for name, system in systems.items():
            for mode in modes:
                path = out / "predictions" / f"{task.name}.{name}.{mode}.jsonl"
                predictions = predict(system, task, requests, mode, path)
                rows.append(score_row(task, examples, [p.output for p in predictions], name, mode))
                first = first or predictions
        for name, outputs in baseline_outputs(task.examples("train"), examples).items():
            rows.append(score_row(task, examples, outputs, name, "baseline"))
        results.append(_describe(task, split, examples, rows, first or []))
    report = {"command": command, "models": {name: str(path) for name, path in models.items()}, "tasks": results}
    write_reports(report, out)
    return report


def score_row(task: Task, examples: Sequence[Example], outputs: Sequence[str], name: str, mode: str) -> dict[str, Any]:
    """Returns one line of the report: a system's accuracy in 0..1 with its interval."""
    targets, groups = [example.targets for example in examples], [example.group for example in examples]
    score = accuracy(outputs, targets, groups)
    return {
        "name": name,
        "mode": mode,
        "accuracy": score.mean,
        "low": score.low,
        "high": score.high,
        "num_examples": len(examples),
        "num_unparsable": sum(output not in task.choices for output in outputs),
    }


def _describe(
    task: Task, split: str, examples: list[Example], rows: list[dict[str, Any]], first: list[Prediction]
) -> dict[str, Any]:
    """Returns what the report says of one task; classes and mistakes are those of the first model and mode."""
    outputs, targets = [p.output for p in first], [example.targets for example in examples]
    by_class = accuracy_by_class(outputs, targets) if first else {}
    wrong = [(e, p) for e, p in zip(examples, first, strict=True) if e.targets != p.output]
    return {
        "task": task.name,
        "version": task.version,
        "description": task.description,
        "licence": task.licence,
        "split": split,
        "num_examples": len(examples),
        "num_groups": len({example.group for example in examples}),
        "num_train": len(task.examples("train")),
        "systems": rows,
        "per_class": [{"target": t, "right": right, "total": total} for t, (right, total) in by_class.items()],
        "mistakes": [
            {"id": e.id, "inputs": e.inputs, "target": e.targets, "output": p.output}
            for e, p in wrong[:: max(1, len(wrong) // _SHOWN_MISTAKES)][:_SHOWN_MISTAKES]
        ],
    }


def _thin_out(examples: list[Example], limit: int | None) -> list[Example]:
    """Returns at most `limit` examples, evenly taken."""
    if limit is None or limit >= len(examples):
        return examples
    return [examples[i * len(examples) // limit] for i in range(limit)]
