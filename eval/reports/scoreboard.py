"""All scores of a report in one table, beside the published ones."""

from typing import Any, NamedTuple

from eval.answers.predict import MODES
from eval.reports.published import SUPERGLUE, SYSTEMS, Published, published

DIFFERS, OWN_PROMPT, PARTIAL = "†", "‡", "§"


class Line(NamedTuple):
    """One metric of one task.

    Attributes:
        task: Its name.
        metric: Its name.
        split: On which it was taken.
        marks: Signs of the legend that hold for all our scores.
        ours: A score of report.json for each system of the board; None where there is none.
        published: A published result for each published system of the board; None where there is
            none.
        baselines: Scores of what needs no model, by name.
        headline: Whether it is what the chart shows of the task.
    """

    task: str
    metric: str
    split: str
    marks: str
    ours: list[dict[str, Any] | None]
    published: list[Published | None]
    baselines: dict[str, dict[str, Any]]
    headline: bool


class Scoreboard(NamedTuple):
    """The table.

    Attributes:
        systems: (name, mode) of ours.
        published: Names of the published systems that have a result for one of the lines.
        lines: One for each metric; the averages come first.
        legend: What the signs mean that occur.
    """

    systems: list[tuple[str, str]]
    published: list[str]
    lines: list[Line]
    legend: list[str]


def scoreboard(report: dict[str, Any]) -> Scoreboard:
    """Returns all scores of a report in one table."""
    systems = list(
        dict.fromkeys(
            (row["name"], row["mode"])
            for task in report["tasks"]
            for row in task["systems"]
            if row["mode"] in MODES
        )
    )
    wanted = [(task, metric) for task in report["tasks"] for metric in _metrics(task)]
    found = {(task["task"], metric): published_of(task, metric) for task, metric in wanted}
    average = published("superglue", "average") if report["averages"] else []
    names = [
        name
        for name in SYSTEMS
        if any(one.system == name for ones in [*found.values(), average] for one in ones)
    ]
    lines = [_average_line(report, systems, average, names)] if report["averages"] else []
    for task, metric in wanted:
        scores = {
            (row["name"], row["mode"]): score
            for row in task["systems"]
            for score in row["scores"]
            if score["metric"] == metric
        }
        results = {one.system: one for one in found[task["task"], metric]}
        with_results = [name for name in _metrics(task) if found[task["task"], name]] or _metrics(
            task
        )
        lines.append(
            Line(
                task["task"],
                metric,
                task["split"],
                _marks(task),
                [scores.get(system) for system in systems],
                [results.get(name) for name in names],
                {name: score for (name, mode), score in scores.items() if mode not in MODES},
                metric == with_results[0],
            )
        )
    return Scoreboard(systems, names, lines, _legend(lines))


def _average_line(
    report: dict[str, Any],
    systems: list[tuple[str, str]],
    average: list[Published],
    names: list[str],
) -> Line:
    """Returns the line of the SuperGLUE average."""
    results = {one.system: one for one in average}
    scores = {(one["name"], one["mode"]): one for one in report["averages"]}
    own = [task for task in report["tasks"] if task["task"] in SUPERGLUE]
    splits = list(dict.fromkeys(task["split"] for task in own))
    marks = "".join(dict.fromkeys("".join(_marks(task) for task in own)))
    ours = [scores.get(system) for system in systems]
    return Line(
        "superglue",
        "average",
        "/".join(splits),
        marks,
        ours,
        [results.get(name) for name in names],
        {},
        True,
    )


def _metrics(task: dict[str, Any]) -> list[str]:
    """Returns the names of a task's metrics."""
    return [score["metric"] for score in task["systems"][0]["scores"]] if task["systems"] else []


def published_of(task: dict[str, Any], metric: str) -> list[Published]:
    """Returns what was published of a metric of a task, or of the task that it varies."""
    return published(task["task"], metric) or published(task["variant_of"] or "", metric)


def _marks(task: dict[str, Any]) -> str:
    """Returns the signs of what keeps our scores of a task from being compared."""
    expected = task["num_expected"]
    partial = (
        task["data"]["folder"]
        or task["limit"] is not None
        or expected not in (None, task["num_rows"])
    )
    own = task["prompt_source"] != "T5" and any(
        published_of(task, metric) for metric in _metrics(task)
    )
    return (PARTIAL if partial else "") + (OWN_PROMPT if own else "")


def _legend(lines: list[Line]) -> list[str]:
    """Returns a sentence for each sign that occurs, and the sources of what is published."""
    marks = "".join(line.marks for line in lines)
    sentences = []
    if PARTIAL in marks:
        sentences.append(
            f"{PARTIAL} ours are of rows of a folder, or of part of a split: not comparable with published scores."
        )
    if OWN_PROMPT in marks:
        sentences.append(
            f"{OWN_PROMPT} the prompt is not T5's; published results may stand on another one."
        )
    if any(one and one.split != line.split for line in lines for one in line.published):
        sentences.append(
            f"{DIFFERS} published on another split than ours: the test split, or validation for a test."
        )
    if any((line.task, line.split) == ("natural_questions", "validation") for line in lines):
        sentences.append(
            "The validation split of natural_questions is what others call its test set."
        )
    results = [(line, one) for line in lines for one in line.published if one]
    sources = sorted({one.source for _, one in results})
    if sources:
        sentences.append(
            f"Published: {'; '.join(sources)}. They are of models that were fine-tuned on the task."
        )
    others = sorted(
        {
            (line.task, one.metric, line.metric)
            for line, one in results
            if _differ(one.metric, line.metric)
        }
    )
    if others:
        named = "; ".join(f"{printed} of {task} is our {own}" for task, printed, own in others)
        sentences.append(f"Metrics under other names in the papers: {named}.")
    return sentences


def _differ(printed: str, own: str) -> bool:
    """Returns whether a metric as a paper prints it is not known by our name for it."""
    usual = {"acc": "accuracy", "avg": "average", "R-2": "rouge2"}
    return usual.get(printed, printed.lower()) != own
