"""python -m tests.doors [DOOR ...]: tries all cases and prints the table, and after it what went
wrong.
"""

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.doors.cases import door_names
from tests.doors.driver import BAD, GOOD, Outcome
from tests.doors.trials import outcomes_of
from tests.doors.workspace import build_workspace

COLUMNS = (*GOOD, *BAD)


def main(wanted: list[str]) -> None:
    """Prints a line for each door."""
    doors = [
        name for name in door_names() if not wanted or any(name.startswith(each) for each in wanted)
    ]
    sys.stdout.reconfigure(errors="backslashreplace")  # halves of characters
    totals: Counter[str] = Counter()
    outcomes: list[Outcome] = []
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        workspace = build_workspace(Path(folder) / "workspace")
        print(
            f"| door | cases | {' | '.join(COLUMNS)} | seconds |\n|---|{'---:|' * (len(COLUMNS) + 2)}"
        )
        for door in doors:
            begin = time.process_time()
            found = outcomes_of(door, workspace)
            counts = Counter(outcome.kind for outcome in found)
            totals += counts
            outcomes += found
            print(_row(door, counts, time.process_time() - begin), flush=True)
    print(_row("all", totals, time.process_time() - start))
    for outcome in outcomes:
        if outcome.kind in BAD:
            print(f"\n{outcome}")
    for outcome in sorted(outcomes, key=lambda outcome: -outcome.seconds)[:10]:
        print(f"{outcome.seconds:6.2f} s  {outcome.case.door}: {outcome.case.name}")


def _row(name: str, counts: Counter[str], seconds: float) -> str:
    """Returns a line of the table."""
    cells = [name, str(counts.total()), *(str(counts[kind]) for kind in COLUMNS), f"{seconds:.1f}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main(sys.argv[1:])
