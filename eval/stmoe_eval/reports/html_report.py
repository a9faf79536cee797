"""report.html: an evaluation next to published results, on one page.

templates/evaluation.html arranges the texts of report_text.py and the figures of charts.py.
"""

from pathlib import Path

from moe.inspection.formatting import format_score, format_versions
from moe.inspection.html_page import render_page
from stmoe_eval.reports import charts, report_text
from stmoe_eval.reports.formatting import format_marked_interval, shorten
from stmoe_eval.reports.records import Report
from stmoe_eval.reports.scoreboard import Scoreboard

_TEMPLATES = Path(__file__).parent / "templates"


def html_report(report: Report, board: Scoreboard) -> str:
    """Returns the page."""
    return render_page(
        "evaluation.html",
        _TEMPLATES,
        title="Evaluation",
        report=report,
        board=board,
        versions=format_versions(report.versions),
        text=report_text,
        charts=charts,
        format_score=format_score,
        format_marked_interval=format_marked_interval,
        shorten=shorten,
    )
