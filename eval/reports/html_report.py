"""report.html: an evaluation beside what was published, as one page.

Here its texts and figures are chosen; templates/evaluation.html arranges them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.answers.cost import FLOPS_FORMULA
from eval.reports.charts import bar_chart, length_histogram, load_chart
from eval.reports.formatting import format_marked_interval, shorten
from eval.reports.records import FailedTask, Report, TaskResult
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
from eval.reports.scoreboard import DIFFERENT_SPLIT, Scoreboard, ScoreboardLine
from moe.inspection.formatting import format_score, format_versions
from moe.inspection.html_page import render_page

_TEMPLATES = Path(__file__).parent / "templates"
_SHOWN_CHARACTERS = 600


@dataclass(frozen=True)
class ScoreCell:
    """A score with what stands below it and what appears when one points at it."""

    value: str
    below: str = ""
    tooltip: str = ""


@dataclass(frozen=True)
class BoardRow:
    """A metric of a task in the table of all scores.

    Attributes:
        task: Name of the task; None when it is that of the row above.
        marks: Signs of the legend.
        split: The evaluated split.
        metric: Name of the metric.
        ours: Our scores; None where there is none.
        published: Published scores; None where there is none.
    """

    task: str | None
    marks: str
    split: str
    metric: str
    ours: Sequence[ScoreCell | None]
    published: Sequence[ScoreCell | None]


@dataclass(frozen=True)
class BoardView:
    """The table of all scores, and its chart; `tasks` are links to the sections below."""

    header: Sequence[str]
    rows: Sequence[BoardRow]
    legend: Sequence[str]
    chart: str
    tasks: Sequence[str]
    has_published: bool


@dataclass(frozen=True)
class RouterView:
    """What routers did; `charts` are the loads of the first system that has routers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    system: str
    charts: Sequence[str]


@dataclass(frozen=True)
class TaskView:
    """The section of one task.

    Attributes:
        name: Name of the task, which is also the anchor of its section.
        title: Heading of the section.
        description: One sentence about the task.
        data: Where the examples come from.
        notes: What keeps the scores from being compared with published ones.
        score_header: Header of the table of scores.
        score_rows: A row for each system and metric.
        remarks: Settings of metrics, notes on single scores, and how models compare.
        contamination: What the examples share with a corpus; None when none is given.
        clean_header: Header of the table of scores without those examples.
        clean_rows: A row for each model and metric.
        cost_header: Header of the table of costs.
        cost_rows: A row for each model.
        cost_formula: How operations are counted.
        calibration_header: Header of the table of calibration.
        calibration_rows: A row for each system that ranked its choices; empty for none.
        calibration: What its numbers are.
        routers: What routers did; None for dense models.
        lengths: How long the inputs are.
        length_chart: SVG of the same.
        first_system: The system of the classes and the worst answers.
        class_header: Header of the table of classes.
        class_rows: A row for each class; empty for no classification.
        worst_header: Header of the table of worst answers.
        worst_rows: A row for each of them.
    """

    name: str
    title: str
    description: str
    data: str
    notes: Sequence[str]
    score_header: Sequence[str]
    score_rows: Sequence[Sequence[str]]
    remarks: Sequence[str]
    contamination: str | None
    clean_header: Sequence[str]
    clean_rows: Sequence[Sequence[str]]
    cost_header: Sequence[str]
    cost_rows: Sequence[Sequence[str]]
    cost_formula: str
    calibration_header: Sequence[str]
    calibration_rows: Sequence[Sequence[str]]
    calibration: str
    routers: RouterView | None
    lengths: str
    length_chart: str
    first_system: str
    class_header: Sequence[str]
    class_rows: Sequence[Sequence[str]]
    worst_header: Sequence[str]
    worst_rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class EvaluationView:
    """The whole page.

    Attributes:
        failed: Tasks that could not be evaluated; they stand first.
        command: The command line.
        models: Name and description of each model.
        versions: Versions of libraries, and the device.
        earlier: Where the copy of an earlier report is; None for none.
        board: All scores; None when there are none.
        tasks: A section for each task.
    """

    failed: Sequence[FailedTask]
    command: str
    models: Sequence[tuple[str, str]]
    versions: str
    earlier: str | None
    board: BoardView | None
    tasks: Sequence[TaskView]


def html_report(report: Report, board: Scoreboard) -> str:
    """Returns the page."""
    view = EvaluationView(
        failed=report.failed,
        command=report.command,
        models=[(name, model_sentence(model)) for name, model in report.models.items()],
        versions=f"{format_versions(report.versions)}; {report.device}",
        earlier=earlier_report_sentence(report.earlier) if report.earlier else None,
        board=_board(board) if board.lines else None,
        tasks=[_task(report, task) for task in report.tasks],
    )
    return render_page("evaluation.html", _TEMPLATES, title="Evaluation", view=view)


# ---------------------------------------------------------------------------
# All scores


def _board(board: Scoreboard) -> BoardView:
    """Returns the table of all scores, its chart, and the way to each task."""
    rows = []
    tasks: dict[str, None] = {}
    previous = None
    for line in board.lines:
        rows.append(_board_row(line, previous))
        previous = line.task
        if line.metric != "average":
            tasks[line.task] = None
    return BoardView(
        header=["task", "metric", *board.headers],
        rows=rows,
        legend=board.legend,
        chart=bar_chart(board),
        tasks=list(tasks),
        has_published=bool(board.published),
    )


def _board_row(line: ScoreboardLine, previous: str | None) -> BoardRow:
    """Returns a row of the table; `previous` is the task of the row above."""
    ours: list[ScoreCell | None] = []
    for score in line.ours:
        cell = None
        if score is not None:
            interval = format_marked_interval(score)
            cell = ScoreCell(format_score(score.value), below=interval, tooltip=score.note)
        ours.append(cell)

    published: list[ScoreCell | None] = []
    for result in line.published:
        cell = None
        if result is not None:
            mark = "" if result.split == line.split else DIFFERENT_SPLIT
            tooltip = f"{result.metric}, {result.split} split; {result.source}"
            cell = ScoreCell(format_score(result.value) + mark, tooltip=tooltip)
        published.append(cell)
    return BoardRow(
        task=None if line.task == previous else line.task,
        marks=line.marks,
        split=line.split,
        metric=line.metric,
        ours=ours,
        published=published,
    )


# ---------------------------------------------------------------------------
# One task


def _task(report: Report, task: TaskResult) -> TaskView:
    """Returns the section of one task."""
    worst_rows = []
    for answer in task.worst:
        texts = [answer.inputs, answer.target, answer.output]
        shown = [shorten(text, _SHOWN_CHARACTERS) for text in texts]
        worst_rows.append([answer.id, *shown, format_score(answer.score)])

    contamination = None
    if task.contamination:
        contamination = contamination_sentence(task.contamination)
    return TaskView(
        name=task.task,
        title=f"{task.task} (version {task.version})",
        description=task.description,
        data=data_sentence(task),
        notes=task.notes,
        score_header=SCORE_HEADER,
        score_rows=score_rows(task),
        remarks=[
            *signature_sentences(task),
            *score_notes(task),
            *model_comparisons(task.systems),
            *baseline_notes(task.systems),
        ],
        contamination=contamination,
        clean_header=CLEAN_HEADER,
        clean_rows=clean_rows(task),
        cost_header=COST_HEADER,
        cost_rows=cost_rows(report, task),
        cost_formula=FLOPS_FORMULA,
        calibration_header=CALIBRATION_HEADER,
        calibration_rows=calibration_rows(task),
        calibration=CALIBRATION_SENTENCE,
        routers=_routers(task),
        lengths=lengths_sentence(task),
        length_chart=length_histogram(task.inputs),
        first_system=first_system(task),
        class_header=CLASS_HEADER,
        class_rows=class_rows(task),
        worst_header=WORST_HEADER,
        worst_rows=worst_rows,
    )


def _routers(task: TaskResult) -> RouterView | None:
    """Returns what the routers did, with the load of experts of the first system that has some."""
    for system in task.systems:
        if system.router:
            charts = []
            for stack, summary in system.router.items():
                charts.append(load_chart(stack, summary.expert_load))
            name = f"{system.name} by {system.mode}"
            return RouterView(ROUTER_HEADER, router_rows(task), name, charts)
    return None
