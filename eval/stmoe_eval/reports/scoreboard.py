"""One table of all scores of a report and the published ones."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stmoe_eval.answers.predict import MODES
from stmoe_eval.reports.formatting import NOTED
from stmoe_eval.reports.published import SYSTEMS, published_scores
from stmoe_eval.reports.records import AverageScore, MetricScore, PublishedScore, Report, TaskResult
from stmoe_eval.scores.superglue import SUPERGLUE

DIFFERENT_SPLIT = "†"
OWN_PROMPT = "‡"
PARTIAL_DATA = "§"
NOT_SCORED = "not scored"

_PRINTED_NAMES = {"acc": "accuracy", "avg": "average", "R-2": "rouge2"}
"""Our names for metrics that papers print in other words."""


class ScoreboardLine(NamedTuple):
    """One metric of one task.

    Attributes:
        task: Name of the task.
        metric: Name of the metric.
        split: The evaluated split.
        marks: Marks of the legend that apply to all our scores.
        ours: Score of each of our systems; None where there is none.
        published: Result of each published system; None where there is none.
        baselines: Scores of systems that need no model, by name.
        in_chart: Whether the chart shows it: one metric of each task.
    """

    task: str
    metric: str
    split: str
    marks: str
    ours: Sequence[MetricScore | AverageScore | None]
    published: Sequence[PublishedScore | None]
    baselines: Mapping[str, MetricScore]
    in_chart: bool

    def published_mark(self, result: PublishedScore) -> str:
        """Returns the mark of a published result on a different split."""
        return "" if result.split == self.split else DIFFERENT_SPLIT


class Scoreboard(NamedTuple):
    """The table.

    Attributes:
        systems: Name and mode of each of our systems.
        published: Names of the published systems that have a result for one of the lines.
        lines: One for each metric; the averages come first.
        legend: Meaning of the marks in use.
    """

    systems: Sequence[tuple[str, str]]
    published: Sequence[str]
    lines: Sequence[ScoreboardLine]
    legend: Sequence[str]

    @property
    def headers(self) -> list[str]:
        """Headers of our systems, then of the published ones."""
        ours = [f"{name}, {mode}" for name, mode in self.systems]
        return [*ours, *self.published]


def build_scoreboard(report: Report) -> Scoreboard:
    """Returns all scores of a report in one table."""
    systems = _own_systems(report)
    average = published_scores("superglue", "average") if report.averages else []

    # Published systems that have a result for anything in this report.
    with_results = {result.system for result in average}
    for task in report.tasks:
        with_results.update(result.system for result in task.published)
    published = [system for system in SYSTEMS if system in with_results]

    lines = []
    if report.averages:
        lines.append(_average_line(report, systems, published, average))
    for task in report.tasks:
        lines += _task_lines(task, systems, published)
    return Scoreboard(systems, published, lines, _legend(lines))


def _own_systems(report: Report) -> list[tuple[str, str]]:
    """Returns name and mode of each model that answered, without baselines."""
    systems: dict[tuple[str, str], None] = {}
    for task in report.tasks:
        for system in task.systems:
            if system.mode in MODES:
                systems[system.name, system.mode] = None
    return list(systems)


def _average_line(
    report: Report,
    systems: Sequence[tuple[str, str]],
    published: Sequence[str],
    average: Sequence[PublishedScore],
) -> ScoreboardLine:
    """Returns the line of the SuperGLUE average."""
    # If a system has two published averages, the last is shown.
    results = {result.system: result for result in average}
    scores = {(score.name, score.mode): score for score in report.averages}

    # Splits and marks of any of the tasks apply to the average.
    splits: dict[str, None] = {}
    marks: dict[str, None] = {}
    for task in report.tasks:
        if task.task in SUPERGLUE:
            splits[task.split] = None
            marks.update(dict.fromkeys(_marks(task)))

    return ScoreboardLine(
        task="superglue",
        metric="average",
        split="/".join(splits),
        marks="".join(marks),
        ours=[scores.get(system) for system in systems],
        published=[results.get(name) for name in published],
        baselines={},
        in_chart=True,
    )


def _task_lines(
    task: TaskResult, systems: Sequence[tuple[str, str]], published: Sequence[str]
) -> list[ScoreboardLine]:
    """Returns a line for each metric of a task."""
    if task.num_hidden:
        line = ScoreboardLine(
            task=task.task,
            metric=NOT_SCORED,
            split=task.split,
            marks="",
            ours=[None] * len(systems),
            published=[None] * len(published),
            baselines={},
            in_chart=False,
        )
        return [line]
    metrics = [score.metric for score in task.systems[0].scores] if task.systems else []

    # The chart shows the first metric that has published results, or else the first.
    with_results = {result.own_metric for result in task.published}
    candidates = [metric for metric in metrics if metric in with_results] or metrics

    lines = []
    for metric in metrics:
        # Scores of models by name and mode, and of baselines by name.
        scores: dict[tuple[str, str], MetricScore] = {}
        baselines: dict[str, MetricScore] = {}
        for system in task.systems:
            for score in system.scores:
                if score.metric != metric:
                    continue
                if system.mode in MODES:
                    scores[system.name, system.mode] = score
                else:
                    baselines[system.name] = score

        results: dict[str, PublishedScore] = {}
        for result in task.published:
            if result.own_metric == metric:
                results[result.system] = result

        lines.append(
            ScoreboardLine(
                task=task.task,
                metric=metric,
                split=task.split,
                marks=_marks(task),
                ours=[scores.get(system) for system in systems],
                published=[results.get(name) for name in published],
                baselines=baselines,
                in_chart=metric == candidates[0],
            )
        )
    return lines


def _marks(task: TaskResult) -> str:
    """Returns the marks for the reasons why our scores of a task are not comparable."""
    other_rows = task.num_expected not in (None, task.num_rows)
    marks = ""
    if task.data.folder or task.limit is not None or other_rows:
        marks += PARTIAL_DATA
    if task.prompt_source != "T5" and task.published:
        marks += OWN_PROMPT
    return marks


def _legend(lines: Sequence[ScoreboardLine]) -> list[str]:
    """Returns a sentence for each mark in use, and the sources of published results."""
    # Marks that occur in the table.
    marks = "".join(line.marks for line in lines)
    sources: set[str] = set()
    other_names: set[tuple[str, str, str]] = set()
    different_split = False
    has_notes = False
    for line in lines:
        has_notes |= any(score is not None and score.note for score in line.ours)
        for result in line.published:
            if result is None:
                continue
            sources.add(result.source)
            different_split |= result.split != line.split
            if _PRINTED_NAMES.get(result.metric, result.metric.lower()) != line.metric:
                other_names.add((line.task, result.metric, line.metric))

    sentences = []

    # Meaning of the marks.
    if any(line.metric == NOT_SCORED for line in lines):
        sentences.append(
            f"{NOT_SCORED}: the labels of the split are hidden; see where its predictions are below."
        )
    if has_notes:
        sentences.append(
            f"{NOTED} the interval has a note, below the scores of the task; in the chart it is dashed."
        )
    if PARTIAL_DATA in marks:
        sentences.append(
            f"{PARTIAL_DATA} ours are of rows of a folder, or of part of a split: not comparable with published "
            "scores."
        )
    if OWN_PROMPT in marks:
        sentences.append(
            f"{OWN_PROMPT} the prompt is not T5's; published results may stand on another one."
        )
    if different_split:
        sentences.append(
            f"{DIFFERENT_SPLIT} published on another split than ours: the test split, or validation for a test."
        )
    if any((line.task, line.split) == ("natural_questions", "validation") for line in lines):
        sentences.append(
            "The validation split of natural_questions is what others call its test set."
        )

    # Sources of published results, and their names there.
    if sources:
        sentences.append(
            f"Published: {'; '.join(sorted(sources))}. They are of models that were fine-tuned on the task."
        )
    if other_names:
        names = [f"{printed} of {task} is our {own}" for task, printed, own in sorted(other_names)]
        sentences.append(f"Metrics under other names in the papers: {'; '.join(names)}.")
    return sentences
