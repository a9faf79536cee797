"""What a model card takes of an evaluation: the hub's `model-index` header, and a table of results."""

from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from eval.answers.predict import MODES
from eval.reports.markdown import interval, number, table


def card(report: dict[str, Any]) -> str:
    """Returns card.md: the header and the section on results for the README of the report's first model."""
    name = next(iter(report["models"]))
    rows = [(task, row) for task in report["tasks"] for row in task["systems"] if row["name"] == name]
    rows = [(task, row) for task, row in rows if row["mode"] in MODES]
    results = [_result(task, row, score) for task, row in rows for score in row["scores"] if score["value"] is not None]
    header = ModelCardData(model_name=name, eval_results=results).to_yaml() if results else ""
    lines = [*(["---", header, "---", ""] if header else []), "## Results", ""]
    cells = [
        [
            task["task"],
            task["split"],
            score["metric"],
            number(score["value"]),
            interval(score["low"], score["high"]),
            row["mode"],
            f"{row['num_examples']:,}",
        ]
        for task, row in rows
        for score in row["scores"]
    ]
    for average in report["averages"]:
        if average["name"] == name:
            value, spread = number(average["value"]), interval(average["low"], average["high"])
            cells.append(["SuperGLUE", "", "average", value, spread, average["mode"], ""])
    lines += table(["task", "split", "metric", "score", "95 % interval", "mode", "examples"], cells)
    lines += ["", f"Made by `{report['command']}`; intervals are 95 % bootstrap intervals over groups of examples.", ""]
    lines += [f"- {task['task']}: {note}" for task in report["tasks"] for note in task["notes"]]
    return "\n".join(lines).rstrip() + "\n"


def _result(task: dict[str, Any], row: dict[str, Any], score: dict[str, Any]) -> EvalResult:
    """Returns a score as the hub's header has it; rows of a folder are not passed off as those of the hub."""
    data, limit = task["data"], task["limit"]
    local = data["folder"] is not None
    arguments = {"mode": row["mode"], "version": task["version"]}
    return EvalResult(
        task_type="text2text-generation",
        dataset_type="local" if local or not data["repository"] else data["repository"],
        dataset_name=f"{task['task']} (rows of a local folder)" if local else task["task"],
        dataset_config=None if local else data["config"],
        dataset_split=task["split"],
        dataset_args={"limit": limit} if limit is not None else None,
        metric_type=score["metric"],
        metric_name=f"{score['metric']} by {row['mode']}",
        metric_value=round(score["value"], 2),
        metric_args=arguments,
    )
