"""report.md: an evaluation as Markdown."""

from moe.inspection.formatting import format_score, format_versions
from stmoe_eval.reports import report_text as text
from stmoe_eval.reports.formatting import (
    format_marked_interval,
    markdown_cell,
    markdown_list,
    markdown_table,
)
from stmoe_eval.reports.records import Report, TaskResult
from stmoe_eval.reports.scoreboard import Scoreboard


def markdown_report(report: Report, board: Scoreboard) -> str:
    """Returns the report as Markdown."""
    lines = ["# Evaluation", "", f"Made by `{report.command}`", ""]

    # The models, tasks and settings of the run.
    for name, model in report.models.items():
        lines.append(f"- `{name}`: {text.model_sentence(model)}")
    lines += [f"- {format_versions(report.versions)}", f"- device: {report.device}", ""]

    if report.earlier:
        lines += [text.earlier_report_sentence(report.earlier), ""]
    for failure in report.failed:
        lines += [f"**{failure.task} failed**: {' '.join(failure.message.split())}", ""]

    lines += _score_section(board)
    for task in report.tasks:
        lines += _task_section(report, task)
    return "\n".join(lines) + "\n"


def _score_section(board: Scoreboard) -> list[str]:
    """Returns the lines of the table of all scores next to published ones."""
    if not board.lines:
        return []

    header = ["task", "metric", "split", *board.headers]
    rows = []
    for line in board.lines:
        row = [line.task + line.marks, line.metric, line.split]
        for score in line.ours:
            cell = ""
            if score is not None:
                cell = f"{format_score(score.value)} ({format_marked_interval(score)})"
            row.append(cell)
        for result in line.published:
            cell = ""
            if result is not None:
                cell = format_score(result.value) + line.published_mark(result)
            row.append(cell)
        rows.append(row)

    return [
        "## Scores",
        "",
        "Scores in percent; in brackets, 95 % intervals over groups of examples.",
        "",
        *markdown_table(header, rows),
        "",
        *markdown_list(board.legend),
        "",
    ]


def _task_section(report: Report, task: TaskResult) -> list[str]:
    """Returns the lines about one task."""
    lines = [f"## {task.task} (version {task.version})", "", task.description, ""]
    lines += [text.data_sentence(task), "", *markdown_list(task.notes), ""]
    lines += [*markdown_table(text.SCORE_HEADER, text.score_rows(task)), ""]
    lines += [*markdown_list(text.remarks(task)), ""]

    if task.contamination:
        sentence = text.contamination_sentence(task.contamination)
        lines += ["### Overlap with a corpus", "", sentence, ""]
        lines += [*markdown_table(text.CLEAN_HEADER, text.clean_rows(task)), ""]

    costs = text.cost_rows(report, task)
    if costs:
        lines += ["### Cost", "", text.FLOPS_FORMULA, ""]
        lines += [*markdown_table(text.COST_HEADER, costs), ""]

    calibrations = text.calibration_rows(task)
    if calibrations:
        lines += ["### Calibration of ranked choices", "", text.CALIBRATION_SENTENCE, ""]
        lines += [*markdown_table(text.CALIBRATION_HEADER, calibrations), ""]

    routers = text.router_rows(task)
    if routers:
        lines += ["### Routers", "", *markdown_table(text.ROUTER_HEADER, routers), ""]

    lines += ["### Lengths of inputs", "", text.lengths_sentence(task), ""]
    first = text.first_system(task)
    if task.by_class:
        lines += [f"### By class ({first})", ""]
        lines += [*markdown_table(text.CLASS_HEADER, text.class_rows(task)), ""]

    if task.worst:
        rows = []
        for answer in task.worst:
            texts = (answer.id, answer.inputs, answer.target, answer.output)
            rows.append([*map(markdown_cell, texts), format_score(answer.score)])
        lines += [f"### Worst answers ({first})", ""]
        lines += [*markdown_table(text.WORST_HEADER, rows), ""]
    return lines
