"""Predictions for networks next to published numbers, as one table.

    python -m benchmarks.network [--only laws goodput] [--json benchmarks/network.json]

A row passes if our number is within the tolerance. Rows with a star are only reported: they are uncertain, fitted, or
complement another row. The command fails if a row does not pass. All reports take minutes on one core.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import sys
from collections.abc import Sequence
from dataclasses import asdict

import benchmarks.network_all_reduce
import benchmarks.network_all_to_all
import benchmarks.network_goodput  # noqa: F401  they register their reports
from benchmarks.machine import save_report
from benchmarks.network_rows import REPORTS, Row, published, rows_of
from moe.cli import Parser, run_main
from moe.files import output_path
from moe.inspection.tables import format_table

_HEADER = ("id", "what", "predicted", "published", "unit", "tolerance", "confidence", "pass")
_VERDICTS = {True: "yes", False: "NO", None: "-"}


def main(argv: list[str]) -> None:
    """Reads the options and prints the reports."""
    parser = Parser(prog="python -m benchmarks.network", description="Predicted beside published.")
    names = REPORTS.names()
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="reports (all)")
    parser.add_argument("--json", help="file to save the table to")
    options = parser.parse_args(argv)
    path = options.json and output_path(options.json, suffix=".json", option="--json")

    # Print first: a full disk must not lose the table.
    rows = rows_of(options.only)
    print(format_rows(rows))
    report = {"sources": published("sources"), "rows": [asdict(row) for row in rows]}
    save_report(report, path or None)

    # A row that does not pass fails the command.
    failed = [row for row in rows if row.passes is False]
    if failed:
        print(f"{len(failed)} of {len(rows)} rows do not pass.")
        sys.exit(1)


def format_rows(rows: Sequence[Row]) -> str:
    """Returns the table."""
    cells = []
    for row in rows:
        # Bounds have no published number.
        theirs = "" if row.published is None else f"{row.published:.5g}"
        ours = f"{row.predicted:.5g}"
        verdict = _VERDICTS[row.passes]
        cells.append(
            (row.id, row.what, ours, theirs, row.unit, row.tolerance, row.confidence, verdict)
        )
    return format_table(_HEADER, cells)


if __name__ == "__main__":
    run_main(main)
