"""What all studies show, a line for each claim: a page in Markdown, made of their files study.json.

Comes after `report`, which writes those files.
"""

from pathlib import Path

from eval.reports.formatting import markdown_table
from eval.studies.analysis import StudyResult
from eval.studies.report import STUDY_JSON, interval_text, read_result, study_body
from moe.errors import DataError

_HEADER = (
    "study",
    "claim",
    "verdict",
    "better by",
    "95 % interval",
    "seeds",
    "million tokens a run",
    "CPU hours",
)
_INTRODUCTION = """\
# What we measured

Every number is copied from a file study.json, which the command below its table wrote; this page is made of those files
by `python -m scripts.measured`. No seed is left out. *Better by* is the difference of the primary comparison, which
was declared with the study, in the unit of its measure; positive speaks for the first arm. *Holds* means that it is
significant (p < 0.05) and of the claimed sign, *does not hold at this scale* that it is significant the other way or
shown to be smaller than the declared margin, *not resolved* neither.
"""


def read_results(folder: Path) -> dict[str, StudyResult]:
    """Returns the results in the folders of a folder, by the name of the study.

    Raises:
        DataError: When there is none, or a file is damaged.
    """
    paths = sorted(folder.glob(f"*/{STUDY_JSON}"))
    if not paths:
        raise DataError(f"There is no {STUDY_JSON} below {folder}. Give the folder of studies.")
    return {path.parent.name: read_result(path) for path in paths}


def measured_page(results: dict[str, StudyResult]) -> str:
    """Returns the page: a table of all claims, then each study."""
    rows = []
    for name, result in results.items():
        rows.append(_claim_row(name, result))
    lines = [_INTRODUCTION, *markdown_table(_HEADER, rows)]
    for name, result in results.items():
        lines += ["", *_section(name, result)]
    return "\n".join(lines) + "\n"


def _claim_row(name: str, result: StudyResult) -> list[str]:
    """Returns the line of one study."""
    study = result.study
    title = f"[{study.title}](#{name.replace('_', '-')})"

    # What it cost.
    hours = sum(run.cpu_seconds for run in result.outcomes) / 3600
    tokens = max((run.tokens or 0 for run in result.outcomes), default=0)
    millions = f"{tokens / 1e6:.1f}" if tokens else ""

    # What it says: the primary comparison comes first.
    if not result.contrasts:
        return [title, study.claim, "not run yet", "", "", "", millions, f"{hours:.1f}"]
    item = result.contrasts[0]
    effect = f"{item.difference:+.3g}"
    seeds = str(item.num_seeds)
    interval = interval_text(item)
    return [title, study.claim, item.verdict, effect, interval, seeds, millions, f"{hours:.1f}"]


def _section(name: str, result: StudyResult) -> list[str]:
    """Returns the section of one study."""
    return [f"({name.replace('_', '-')})=", f"## {result.study.title}", "", *study_body(result)]
