"""An evaluation from end to end: models and tasks in, report files out."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from eval.baselines import baseline_outputs
from eval.intervals import accuracy, accuracy_by_class
from eval.journal import Prediction
from eval.predict import MODES, Request, load_seq2seq, predict
from eval.ranks import ALONE, arrange
from eval.report import write_reports
from eval.task import TASKS, Example, Task
from moe import ConfigError, World

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
    world: World = ALONE.world,
    ep: int = 1,
    tp: int = 1,
) -> dict[str, Any] | None:
    """Evaluates every model on every task in every mode, writes the reports and returns their content.

    Every rank must call it with the same arguments but `world`. All of them predict; rank 0 alone scores, writes and
    has something to return. Nothing depends on the number of ranks.

    Args:
        models: Checkpoint folders by name; the first is the one that the report is about.
        tasks: Names of tasks.
        modes: `generate`, `rank`.
        split: Of the tasks.
        limit: Most examples; every n-th is taken so that all classes stay. None for all.
        out: Receives predictions/, report.json and report.md.
        command: How it was called, for the report.
        world: The ranks.
        ep: Ranks that the experts of a layer are spread over.
        tp: Ranks that heads and hidden units are spread over.

    Raises:
        ConfigError: When a task, mode or limit is impossible, or the ranks cannot be divided so.
    """
    chosen = [TASKS.get(name) for name in tasks]
    for mode in modes:
        if mode not in MODES:
            raise ConfigError(f"There is no mode {mode!r}. Choose from {', '.join(MODES)}.")
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit is {limit}; expected at least 1.")
    ranks = arrange(world, ep, tp, models.values())
    systems = {name: load_seq2seq(folder, ranks) for name, folder in models.items()}
    examples = {task.name: _thin_out(task.examples(split), limit) for task in chosen}
    predictions = {}
    for task, name, mode in product(chosen, systems, modes):
        requests = [Request(example.id, example.inputs, example.choices) for example in examples[task.name]]
        path = out / "predictions" / f"{task.name}.{name}.{mode}.jsonl"
        predictions[task.name, name, mode] = predict(systems[name], task, requests, mode, path).predictions
    if world.rank > 0:
        return None

    results = []
    for task in chosen:
        made = {key[1:]: values for key, values in predictions.items() if key[0] == task.name}
        references = examples[task.name]
        rows = [score_row(task, references, [p.output for p in made[key]], *key) for key in made]
        for name, outputs in baseline_outputs(task.examples("train"), references).items():
            rows.append(score_row(task, references, outputs, name, "baseline"))
        results.append(_describe(task, split, references, rows, next(iter(made.values()), [])))
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
        "num_unparsable": sum(o not in e.choices for o, e in zip(outputs, examples, strict=True)),
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
