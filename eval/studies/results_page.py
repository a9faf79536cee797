"""The page of all studies in Markdown, made from study.json files.

Comes after `report`, which writes those files.
"""

from collections.abc import Mapping
from pathlib import Path

from eval.reports.formatting import markdown_table
from eval.studies.analysis import StudyResult
from eval.studies.charts import curves_chart, setting_chart
from eval.studies.report import STUDY_JSON, interval_text, read_result, study_details

_HEADER = ("study", "verdict", "better by", "95 % interval", "seeds", "CPU hours")
_INTRODUCTION = """\
# What we measured

Each study declared one claim and one primary comparison before its first run. All planned seeds are shown. The numbers
come from the files `benchmarks/studies/NAME/study.json`; `make measured` makes this page from them.

*Better by* is the difference of the primary comparison, with a 95 % interval; positive means that the first arm is
better. Verdicts:

- *holds*: significant (p < 0.05) in the claimed direction.
- *does not hold at this scale*: significant in the other direction, or shown to be smaller than the declared margin.
- *not resolved*: neither.

A claim of equality holds if the difference is shown to be smaller than the margin. A difference can be both significant
and smaller than the margin; the verdict then says so.
"""
_NOTHING = "No study is complete yet."
_FOLLOW_PAGE = "<style>@media (prefers-color-scheme: dark) { svg { filter: invert(0.92) hue-rotate(180deg); } }</style>"


def read_results(folder: Path) -> dict[str, StudyResult]:
    """Returns the results in the folders of a folder, by the name of the study, in their order.

    Raises:
        DataError: When a file is damaged.
    """
    results = {}
    for path in sorted(folder.glob(f"*/{STUDY_JSON}")):
        results[path.parent.name] = read_result(path)
    names = sorted(results, key=lambda name: results[name].study.order)
    return {name: results[name] for name in names}


def curve_figures(results: Mapping[str, StudyResult]) -> dict[str, str]:
    """Returns the figure of each study that has one, as SVG, by the name of the study.

    They are shown in an <img>, and dark if the surrounding page is.
    """
    figures = {}
    for name, result in results.items():
        if _has_curves(result):
            chart = setting_chart if result.study.plot_over else curves_chart
            opening, end, content = chart(result).partition(">")
            figures[name] = f"{opening}{end}{_FOLLOW_PAGE}{content}"
    return figures


def measured_page(results: Mapping[str, StudyResult], figures: str = "measured") -> str:
    """Returns the page: a table of all claims, and each study.

    Args:
        results: Results by the name of the study.
        figures: Folder with the curves, next to the page, NAME.svg.
    """
    rows = []
    for name, result in results.items():
        rows.append(_claim_row(name, result))
    lines = [_INTRODUCTION, *(markdown_table(_HEADER, rows) if rows else [_NOTHING])]
    for name, result in results.items():
        lines += ["", *_section(name, result, figures)]
    return "\n".join(lines) + "\n"


def _claim_row(name: str, result: StudyResult) -> list[str]:
    """Returns the line of one study."""
    title = f"[{result.study.title}](#{_label(name)})"
    cpu_hours = f"{sum(run.cpu_seconds for run in result.outcomes) / 3600:.1f}"
    if not result.contrasts:
        return [title, "not run yet", "", "", "", cpu_hours]

    # The primary comparison comes first.
    item = result.contrasts[0]
    effect = f"{item.difference:+.2g} {result.study.measure.unit}".strip()
    return [title, item.verdict_text, effect, interval_text(item), str(item.num_seeds), cpu_hours]


def _section(name: str, result: StudyResult, figures: str) -> list[str]:
    """Returns the section of one study; everything below its figure opens with a click."""
    study = result.study
    lines = [f"({_label(name)})=", f"## {study.title}", "", f"**Claim.** {study.claim}", ""]
    if _has_curves(result):
        title = f"Curves of {study.title}: thin lines are seeds"
        if study.plot_over:
            title = f"{study.title}, over {study.plot_over}: dots are seeds"
        lines += [f"![{title}]({figures}/{name}.svg)", ""]
    lines += ["<details><summary>Paper, expectation, comparisons, arms and routers</summary>", ""]
    return [*lines, *study_details(result), "", "</details>"]


def _has_curves(result: StudyResult) -> bool:
    return any(run.curve for run in result.outcomes)


def _label(name: str) -> str:
    return name.replace("_", "-")
