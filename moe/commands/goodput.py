"""stmoe goodput: shows where the time of a run went.

    stmoe goodput runs/pretrain [runs/replica-1 ...]

It reads timeline.jsonl in the folder of the run, also while it trains.
"""

from moe.cli import Parser, path
from moe.inspection.tables import format_table
from moe.planning.goodput import show_duration
from moe.training.timeline import Goodput, measure_goodput, read_timeline


def main(argv: list[str]) -> None:
    """Prints the goodput of each given run."""
    parser = Parser(prog="stmoe goodput", description="Shows how the seconds of a run were spent.")
    parser.add_argument("runs", type=path, nargs="+", help="folders of runs")
    options = parser.parse_args(argv)
    tables = [show_goodput(measure_goodput(read_timeline(run)), str(run)) for run in options.runs]
    print("\n\n".join(tables))


def show_goodput(goodput: Goodput, title: str) -> str:
    """Returns a table of where the time of a run went."""
    rows = {
        "useful steps": goodput.useful,
        "steps that were taken again": goodput.redone,
        "nobody there, until a start": goodput.down,
        "importing, loading data and model": goodput.loading,
        "waiting for batches": goodput.data_wait,
        "meeting other replica groups": goodput.meeting,
        "healing from another group": goodput.healing,
        "steps lost with a group": goodput.lost,
        "evaluating": goodput.evaluation,
        "checkpoints, final model, exit": goodput.other,
    }
    table: list[list[str]] = []
    for name, seconds in rows.items():
        share = seconds / goodput.total if goodput.total else 0.0
        table.append([name, show_duration(seconds), f"{share:.1%}"])
    times = "once" if goodput.starts == 1 else f"{goodput.starts} times"
    total = show_duration(goodput.total)
    line = f"{title}: {goodput.steps:,} steps in {total}, started {times}"
    waits = f"A step waited for its batch in {goodput.data_wait_share:.1%} of its time."
    return "\n".join(
        [line, format_table(["", "time", "share"], table), f"goodput {goodput.share:.1%}", waits]
    )
