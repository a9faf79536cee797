"""card.md: the hub's `model-index` header and a table of results, for the README of a model."""

from huggingface_hub import EvalResult, ModelCardData

from moe.inspection.formatting import format_score
from moe.parsing import printable
from stmoe_eval.answers.predict import MODES
from stmoe_eval.reports.formatting import NOTED, format_marked_interval, markdown_table
from stmoe_eval.reports.records import MetricScore, Report, SystemResult, TaskResult


def model_card(report: Report) -> str:
    """Returns the header and the section on results of the report's first model."""
    name = next(iter(report.models))
    results = []
    rows = []
    for task in report.tasks:
        for system in task.systems:
            if system.name != name or system.mode not in MODES:
                continue
            for score in system.scores:
                if score.value is not None:
                    results.append(_hub_result(task, system, score, score.value))
                value = [format_score(score.value), format_marked_interval(score)]
                row = [task.task, task.split, score.metric, *value, system.mode]
                rows.append([*row, f"{system.num_examples:,}"])
    for average in report.averages:
        if average.name == name:
            value = [format_score(average.value), format_marked_interval(average)]
            rows.append(["SuperGLUE", "", "average", *value, average.mode, ""])

    lines = []
    if results:
        header = ModelCardData(model_name=printable(name), eval_results=results).to_yaml()
        lines += ["---", header, "---", ""]
    header = ["task", "split", "metric", "score", "95 % interval", "mode", "examples"]
    lines += ["## Results", "", *markdown_table(header, rows), ""]
    lines += [f"Made by `{report.command}`; 95 % intervals over groups of examples.", ""]
    if any(NOTED in row[4] for row in rows):
        lines += [f"{NOTED} The report has a note on this interval.", ""]
    for task in report.tasks:
        lines += [f"- {task.task}: {note}" for note in task.notes]
    return "\n".join(lines).rstrip() + "\n"


def _hub_result(
    task: TaskResult, system: SystemResult, score: MetricScore, value: float
) -> EvalResult:
    """Returns a score in the format of the hub's header.

    Local rows are not presented as rows from the hub. The header puts results of one repository,
    config and split under the name of the first of them: so tasks must differ in one of these,
    except a task and its variants, which differ in the prompt.
    """
    data = task.data
    name = task.variant_of or task.task
    prompt = f" with the prompt of {task.prompt_source}" if task.variant_of else ""
    dataset = ("local", name, task.split)
    if data.folder is None and data.repository is not None:
        dataset = (data.repository, data.config, data.split)
    return EvalResult(
        task_type="text2text-generation",
        dataset_type=dataset[0],
        dataset_name=name if data.folder is None else f"{name} (rows of a local folder)",
        dataset_config=dataset[1],
        dataset_split=dataset[2],
        dataset_args=None if task.limit is None else {"limit": task.limit},
        metric_type=score.metric,
        metric_name=f"{score.metric} by {system.mode}{prompt}",
        metric_value=round(value, 2),
        metric_args={"task": task.task, "mode": system.mode, "version": task.version},
    )
