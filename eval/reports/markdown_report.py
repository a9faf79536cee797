"""report.md: an evaluation as Markdown."""

from eval.answers.cost import FLOPS_FORMULA
from eval.reports.formatting import (
    format_marked_interval,
    markdown_cell,
    markdown_list,
    markdown_table,
)
from eval.reports.records import Report, TaskResult
from eval.reports.report_text import (
    CALIBRATION_HEADER,
    CALIBRATION_SENTENCE,
    CLASS_HEADER,
    CLEAN_HEADER,
    COST_HEADER,
    ROUTER_HEADER,
    SCORE_HEADER,
    WORST_HEADER,
    baseline_notes,
    calibration_rows,
    class_rows,
    clean_rows,
    contamination_sentence,
    cost_rows,
    data_sentence,
    earlier_report_sentence,
    first_system,
    lengths_sentence,
    model_comparisons,
    model_sentence,
    router_rows,
    score_notes,
    score_rows,
    signature_sentences,
)
from eval.reports.scoreboard import DIFFERENT_SPLIT, Scoreboard
from moe.inspection.formatting import format_score, format_versions


def markdown_report(report: Report, board: Scoreboard) -> str:
    """Returns the report as Markdown."""
    lines = ["# Evaluation", "", f"Made by `{report.command}`", ""]

    # What was run on what.
    for name, model in report.models.items():
        lines.append(f"- `{name}`: {model_sentence(model)}")
    lines += [f"- {format_versions(report.versions)}", f"- device: {report.device}", ""]

    if report.earlier:
        lines += [earlier_report_sentence(report.earlier), ""]
    for failure in report.failed:
        lines += [f"**{failure.task} failed**: {' '.join(failure.message.split())}", ""]

    lines += _score_section(board)
    for task in report.tasks:
        lines += _task_section(report, task)
    return "\n".join(lines) + "\n"


def _score_section(board: Scoreboard) -> list[str]:
    """Returns the lines of the table of all scores beside the published ones."""
    if not board.lines:
        return []

    header = ["task", "metric", "split", *board.headers]
    rows = []
    for line in board.lines:
        row = [line.task + line.marks, line.metric, line.split]
        for score in line.ours:
            text = ""
            if score is not None:
                text = f"{format_score(score.value)} ({format_marked_interval(score)})"
            row.append(text)
        for result in line.published:
            text = ""
            if result is not None:
                mark = "" if result.split == line.split else DIFFERENT_SPLIT
                text = format_score(result.value) + mark
            row.append(text)
        rows.append(row)

    return [
        "## Scores",
        "",
        "In brackets 95 % intervals over groups of examples.",
        "",
        *markdown_table(header, rows),
        "",
        *markdown_list(board.legend),
        "",
    ]


def _task_section(report: Report, task: TaskResult) -> list[str]:
    """Returns the lines about one task."""
    lines = [f"## {task.task} (version {task.version})", "", task.description, ""]
    lines += [data_sentence(task), "", *markdown_list(task.notes), ""]

    lines += [*markdown_table(SCORE_HEADER, score_rows(task)), ""]
    remarks = [
        *signature_sentences(task),
        *score_notes(task),
        *model_comparisons(task.systems),
        *baseline_notes(task.systems),
    ]
    lines += [*markdown_list(remarks), ""]

    if task.contamination:
        lines += ["### Overlap with a corpus", "", contamination_sentence(task.contamination), ""]
        lines += [*markdown_table(CLEAN_HEADER, clean_rows(task)), ""]

    costs = cost_rows(report, task)
    if costs:
        lines += ["### Cost", "", FLOPS_FORMULA, "", *markdown_table(COST_HEADER, costs), ""]

    calibrations = calibration_rows(task)
    if calibrations:
        lines += ["### Calibration of ranked choices", "", CALIBRATION_SENTENCE, ""]
        lines += [*markdown_table(CALIBRATION_HEADER, calibrations), ""]

    routers = router_rows(task)
    if routers:
        lines += ["### Routers", "", *markdown_table(ROUTER_HEADER, routers), ""]

    lines += ["### Lengths of inputs", "", lengths_sentence(task), ""]

    if task.by_class:
        lines += [f"### By class ({first_system(task)})", ""]
        lines += [*markdown_table(CLASS_HEADER, class_rows(task)), ""]

    if task.worst:
        rows = []
        for answer in task.worst:
            texts = (answer.id, answer.inputs, answer.target, answer.output)
            rows.append([*map(markdown_cell, texts), format_score(answer.score)])
        lines += [f"### Worst answers ({first_system(task)})", ""]
        lines += [*markdown_table(WORST_HEADER, rows), ""]
    return lines
