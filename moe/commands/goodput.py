"""stmoe goodput: shows where the time of a run went.

    stmoe goodput runs/pretrain [runs/replica-1 ...]

It reads timeline.jsonl in the folder of the run, also while it trains.
"""

from moe.cli import Parser, path
from moe.inspection.tables import format_table
from moe.planning.goodput import show_duration
from moe.training.timeline import STATES, Goodput, measure_goodput, read_timeline


def main(argv: list[str]) -> None:
    """Prints the goodput of each given run."""
    parser = Parser(prog="stmoe goodput", description="Shows how the seconds of a run were spent.")
    parser.add_argument("runs", type=path, nargs="+", help="folders of runs")
    options = parser.parse_args(argv)
    tables = [show_goodput(measure_goodput(read_timeline(run)), str(run)) for run in options.runs]
    print("\n\n".join(tables))


def show_goodput(goodput: Goodput, title: str) -> str:
    """Returns a table of where the time of a run went."""
    table: list[list[str]] = []
    for state, name in STATES.items():
        table.append([name, show_duration(goodput.seconds[state]), f"{goodput.share(state):.1%}"])
    times = "once" if goodput.starts == 1 else f"{goodput.starts} times"
    total = show_duration(goodput.total)
    lines = [
        f"{title}: {goodput.steps:,} steps in {total}, started {times}",
        format_table(["", "time", "share"], table),
        f"goodput {goodput.share('useful'):.1%}",
        f"A step waited for its batch in {goodput.data_wait_share:.1%} of its time.",
    ]
    return "\n".join(lines)
