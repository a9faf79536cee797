"""report.html: one page, with nothing outside it, that shows an evaluation beside what was
published.
"""

import re
from collections.abc import Iterable, Sequence
from html import escape

from eval.records import AverageScore, FailedTask, MetricScore, Report, TaskResult
from eval.reports.charts import bar_chart, histogram, load_bars
from eval.reports.formatting import format_interval, format_score, shorten
from eval.reports.report_text import (
    ROUTER_HEADER,
    data_sentence,
    earlier_report_sentence,
    first_system,
    lengths_sentence,
    model_comparisons,
    model_sentence,
    router_rows,
    score_notes,
)
from eval.reports.scoreboard import DIFFERENT_SPLIT, Scoreboard, ScoreboardLine

_SHOWN_CHARACTERS = 600

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fdfdfc; --line: #d8d8d4; --soft: #5b5b57; --ours: #0072b2;
        --ours2: #56b4e9; --theirs: #b9b9b2; --warn: #9a3b00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e4; --paper: #1a1a1c; --line: #3a3a3d; --soft: #a5a5a0;
        --ours: #4ba3dc; --ours2: #1f6fa3; --theirs: #5d5d60; --warn: #ff9b5c; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 72rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { line-height: 1.2; } h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line); } h3 { margin-bottom: .2rem; }
p.read, .soft { color: var(--soft); } p.failed, .warn { color: var(--warn); } .scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .8rem 0; overflow-wrap: normal; } th, td { text-align: left;
       padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.text { min-width: 10rem; overflow-wrap: anywhere; white-space: pre-wrap; } code { font-size: .92em; }
table.board { font-size: .86rem; } table.board td, table.board th { padding-right: .6rem; }
table.board th.number { white-space: normal; } td:first-child, th:first-child { position: sticky; left: 0;
       background: var(--paper); } td small { color: var(--soft); display: block; } tbody th { font-weight: 600; }
figure { margin: .8rem 0; } figure svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } svg .soft { fill: var(--soft); }
svg .ours { fill: var(--ours); } svg .ours2 { fill: var(--ours2); } svg .theirs { fill: var(--theirs); }
svg .grid { stroke: var(--line); } svg .whisker { stroke: var(--ink); stroke-width: 1.5; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; } a { color: var(--ours); }
summary { cursor: pointer; }
"""


def html_report(report: Report, board: Scoreboard) -> str:
    """Returns the page."""
    title = "Evaluation"
    body = [
        f"<h1>{title}</h1>",
        _failures(report.failed),
        _setting(report),
        _scores(board),
        *(_task(task) for task in report.tasks),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _failures(failed: Sequence[FailedTask]) -> str:
    """Returns what failed, first of all."""
    return "".join(
        f'<p class="failed"><b>{escape(one.task)} failed.</b> {escape(one.message)}</p>'
        for one in failed
    )


def _setting(report: Report) -> str:
    """Returns what was run on what."""
    models = "".join(
        f"<li><b>{escape(name)}</b>: {escape(model_sentence(model))}</li>"
        for name, model in report.models.items()
    )
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    earlier = (
        f'<p class="warn">{_inline(earlier_report_sentence(report.earlier))}</p>'
        if report.earlier
        else ""
    )
    return (
        f"<p>Made by <code>{escape(report['command'])}</code></p><ul>{models}</ul>"
        f'<p class="read">{escape(versions)}; {escape(report.device)}.</p>{earlier}'
    )


def _scores(board: Scoreboard) -> str:
    """Returns the table of all scores, the chart, and the way to each task."""
    if not board.lines:
        return _section("Scores", "<p>There are no scores.</p>")
    header = [
        "task",
        "metric",
        *(f"{name}, {mode}" for name, mode in board.systems),
        *board.published,
    ]
    before = ["", *(line.task for line in board.lines)]
    rows = [
        _line(line, again=line.task == last)
        for line, last in zip(board.lines, before, strict=False)
    ]
    legend = "".join(f"<li>{escape(sentence)}</li>" for sentence in board.legend)
    tasks = [line.task for line in board.lines if line.metric != "average"]
    hint = " Point at a published score to see its source." if board.published else ""
    links = "".join(
        f'<a href="#{escape(task)}">{escape(task)}</a>' for task in dict.fromkeys(tasks)
    )
    return _section(
        "Scores",
        _read(
            "In small letters the split, and 95 % bootstrap intervals over groups of examples."
            + hint
        )
        + _table(header, rows, numbers=range(2, len(header)), kind="board")
        + f'<ul class="soft">{legend}</ul><figure>{bar_chart(board)}</figure>'
        + (f"<nav>{links}</nav>" if len(set(tasks)) > 1 else ""),
    )


def _line(line: ScoreboardLine, *, again: bool) -> list[str]:
    """Returns the cells of one metric; `again` when it is not the first of its task."""
    task = (
        ""
        if again
        else f"<b>{escape(line.task)}</b>{line.marks}<small>{escape(line.split)}</small>"
    )
    cells = [task, escape(line.metric)]
    for score in line.ours:
        cells.append(_score(score) if score else "")
    for one in line.published:
        if one is None:
            cells.append("")
            continue
        tip = f"{one.metric}, {one.split} split; {one.source}"
        mark = "" if one.split == line.split else DIFFERENT_SPLIT
        cells.append(f'<span title="{escape(tip)}">{format_score(one.value)}{mark}</span>')
    return cells


def _score(score: MetricScore | AverageScore) -> str:
    """Returns a score over its interval."""
    spread = format_interval(score.low, score.high)
    return f'{format_score(score.value)}<small title="{escape(score.note)}">{spread}</small>'


def _task(task: TaskResult) -> str:
    """Returns the section of one task."""
    rows = [
        [
            escape(row.name),
            escape(row.mode),
            escape(score.metric),
            format_score(score.value),
            format_interval(score.low, score.high),
            "-" if score.stderr is None else f"{score.stderr:.2f}",
            "-" if row.num_unparsable is None else f"{row.num_unparsable:,}",
            f"{row.num_empty:,}",
        ]
        for row in task.systems
        for score in row.scores
    ]
    header = [
        "system",
        "mode",
        "metric",
        "score",
        "95 % interval",
        "standard error",
        "unparsable",
        "empty",
    ]
    parts = [
        f"<p>{_inline(task['description'])}</p>",
        _read(data_sentence(task)),
        _list(task.notes, "warn"),
        _table(header, rows, numbers=range(3, 8)),
        _list([*score_notes(task), *model_comparisons(task.systems)], "soft"),
        _routers(task),
        _lengths(task),
        _classes(task),
        _worst(task),
    ]
    return _section(f"{task.task} (version {task.version})", "".join(parts), task.task)


def _routers(task: TaskResult) -> str:
    """Returns what the routers did, and the load of the experts for the first model and mode."""
    rows = router_rows(task)
    if not rows:
        return ""
    first = next(row for row in task.systems if row.router)
    loads = "".join(
        f"<figure>{load_bars(stack, found['expert_load'])}</figure>"
        for stack, found in first.router.items()
    )
    return (
        "<h3>Routers</h3>"
        + _read(
            "A dropped token reached no expert. Load CV is the standard deviation of the load over its mean."
        )
        + _table(
            ROUTER_HEADER, [[escape(text) for text in row] for row in rows], numbers=range(3, 7)
        )
        + f"<details><summary>Load of experts: {escape(first['name'])} by {first.mode}</summary>{loads}</details>"
    )


def _lengths(task: TaskResult) -> str:
    """Returns how long the inputs are."""
    lengths = task.inputs
    return (
        "<h3>Lengths of inputs</h3>"
        + _read(lengths_sentence(task))
        + f"<figure>{histogram(lengths['histogram'], lengths['limit'])}</figure>"
    )


def _classes(task: TaskResult) -> str:
    """Returns the table of classes."""
    if not task.by_class:
        return ""
    cells = []
    for row in task.by_class:
        cells.append([escape(row.target), f"{row.right:,}", f"{row.total:,}", f"{row.answered:,}"])
    table = _table(["target", "right", "examples", "answered"], cells, numbers=range(1, 4))
    return f"<h3>By class ({escape(first_system(task))})</h3>{table}"


def _worst(task: TaskResult) -> str:
    """Returns the table of the worst answers, folded."""
    rows = task.worst
    if not rows:
        return ""
    cells = [
        [escape(row.id)]
        + [
            escape(shorten(text, _SHOWN_CHARACTERS))
            for text in (row.inputs, row.target, row.output)
        ]
        + [format_score(row.score)]
        for row in rows
    ]
    body = _table(
        ["id", "inputs", "target", "output", "score"], cells, numbers=[4], texts=[1, 2, 3]
    )
    summary = f"{len(rows)} example{'s' if len(rows) > 1 else ''}"
    title = f"Worst answers ({escape(first_system(task))})"
    return f"<h3>{title}</h3><details><summary>{summary}</summary>{body}</details>"


def _section(title: str, body: str, anchor: str = "") -> str:
    """Returns a section with its heading."""
    place = f' id="{escape(anchor)}"' if anchor else ""
    return f"<section{place}><h2>{escape(title)}</h2>{body}</section>"


def _read(text: str) -> str:
    """Returns a sentence on how to read what follows."""
    return f'<p class="read">{_inline(text)}</p>'


def _inline(text: str) -> str:
    """Returns a sentence whose `names` are set as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _list(sentences: Iterable[str], kind: str) -> str:
    """Returns sentences as a list."""
    items = "".join(f"<li>{_inline(sentence)}</li>" for sentence in sentences)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def _table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Iterable[int] = (),
    texts: Iterable[int] = (),
    kind: str = "",
) -> str:
    """Returns a table; the cells are HTML, those of the columns `numbers` stand on the right."""
    kinds = {**dict.fromkeys(texts, ' class="text"'), **dict.fromkeys(numbers, ' class="number"')}
    head = "".join(f"<th{kinds.get(i, '')}>{escape(text)}</th>" for i, text in enumerate(header))
    body = "".join(
        "<tr>"
        + "".join(f"<td{kinds.get(i, '')}>{text}</td>" for i, text in enumerate(row))
        + "</tr>"
        for row in rows
    )
    table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table class="{kind}">{table}</table></div>'
