"""What a model card takes of an evaluation: the hub's `model-index` header, and a table of results."""

from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from eval.answers.predict import MODES
from eval.reports.markdown import interval, number, table


def card(report: dict[str, Any]) -> str:
    """Returns card.md: the header and the section on results for the README of the report's first
    model.
    """
    name = next(iter(report["models"]))
    rows = [
        (task, row) for task in report["tasks"] for row in task["systems"] if row["name"] == name
    ]
    rows = [(task, row) for task, row in rows if row["mode"] in MODES]
    results = [
        _result(task, row, score)
        for task, row in rows
        for score in row["scores"]
        if score["value"] is not None
    ]
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
    lines += [
        "",
        f"Made by `{report['command']}`; intervals are 95 % bootstrap intervals over groups of examples.",
        "",
    ]
    lines += [f"- {task['task']}: {note}" for task in report["tasks"] for note in task["notes"]]
    return "\n".join(lines).rstrip() + "\n"


def _result(task: dict[str, Any], row: dict[str, Any], score: dict[str, Any]) -> EvalResult:
    """Returns a score as the hub's header has it; rows of a folder are not passed off as those of
    the hub.

    The header puts results of one repository, config and split under the name of the first of them.
    Tasks therefore differ in one of these, but for a task and its variants, which are told apart by
    the prompt.
    """
    data, limit = task["data"], task["limit"]
    hub = data["folder"] is None and data["repository"] is not None
    name = task["variant_of"] or task["task"]
    prompt = f" with the prompt of {task['prompt_source']}" if task["variant_of"] else ""
    arguments = {"task": task["task"], "mode": row["mode"], "version": task["version"]}
    return EvalResult(
        task_type="text2text-generation",
        dataset_type=data["repository"] if hub else "local",
        dataset_name=f"{name} (rows of a local folder)" if data["folder"] is not None else name,
        dataset_config=data["config"] if hub else name,
        dataset_split=data["split"] if hub else task["split"],
        dataset_args={"limit": limit} if limit is not None else None,
        metric_type=score["metric"],
        metric_name=f"{score['metric']} by {row['mode']}{prompt}",
        metric_value=round(score["value"], 2),
        metric_args=arguments,
    )
