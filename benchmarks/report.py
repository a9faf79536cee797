"""Reports: groups of runs that are measured one after the other, saved after every round.

All benchmarks of `scripts.benchmark` run through `measure_groups`: Ctrl-C keeps and prints what has been
measured, and the same command then continues after the last complete group.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from moe.errors import ConfigError
from moe.files import write_text
from moe.inspection.tables import format_table
from moe.parsing import read_json

Row = dict[str, Any]
"""A row of a saved table."""

Columns = Sequence[tuple[str, str | Callable[[Any], Any], str]]
"""The columns of a table: header, field of a row or function of it, and format of its values."""

Tables = Mapping[str, Columns | Callable[[Sequence[Row]], Columns]]
"""The columns of each table of a report by its name, or a function that gives them for its rows."""

IN_PROGRESS = "in_progress"
"""Field of an incomplete report: table and keys of the group whose rounds are not all there."""


class Group(NamedTuple):
    """Runs that are measured in turn.

    Attributes:
        keys: Fields that its rows have, and no rows of other groups.
        measure: Yields its rows after every round.
        table: Name of the table of its rows.
    """

    keys: Row
    measure: Callable[[], Iterator[list[Row]]]
    table: str = "rows"


def rows_by_round(
    rounds: Iterable[dict[str, float]], describe: Callable[[list[dict[str, float]]], list[Row]]
) -> Iterator[list[Row]]:
    """Yields the rows of a group after every round, with the number of rounds so far."""
    times: list[dict[str, float]] = []
    for round_ in rounds:
        times.append(round_)
        yield [{**row, "rounds": len(times)} for row in describe(times)]


def measure_groups(
    settings: Row, groups: Sequence[Group], tables: Tables, path: Path | None
) -> None:
    """Measures the groups that are not in the file yet, and prints the tables.

    Args:
        settings: Start of the report: `describe_machine`, `rounds`, and what else makes times
            comparable.
        groups: The groups, the most valuable first.
        tables: The tables.
        path: File that is saved after every round; None for none.

    Raises:
        ConfigError: When the file holds an incomplete report of other settings.
        KeyboardInterrupt: After the tables were printed, with a note on what is kept.
    """
    report = {**settings, **{name: [] for name in tables}}
    if path is not None and path.exists():
        report = _continued(report, path)
    groups = [group for group in groups if not _rows_of(group.keys, report[group.table])]

    rounds = settings["rounds"]
    bar = tqdm(total=rounds * len(groups), unit="round", smoothing=0)
    try:
        for index, group in enumerate(groups):
            bar.set_postfix_str(" ".join(map(str, group.keys.values())))
            report[IN_PROGRESS] = [group.table, group.keys]
            save_report(report, path)

            complete = report[group.table]
            for rows in group.measure():
                report[group.table] = complete + [{**group.keys, **row} for row in rows]
                save_report(report, path)
                bar.update()
            bar.update(rounds * (index + 1) - bar.n)  # a group may have fewer
        del report[IN_PROGRESS]
        save_report(report, path)
    except KeyboardInterrupt as interrupt:
        place = "--json FILE would save them"
        if path is not None:
            place = f"they are in {path}, and the same command continues"
        interrupt.add_note(f"{bar.n} of {bar.total} rounds were measured; {place}.")
        raise
    finally:
        bar.close()
        print(format_report(report, tables))
    if path is not None:
        print(f"The table is in {path}.")


def _rows_of(keys: Row, rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of a group."""
    return [row for row in rows if keys.items() <= row.items()]


def save_report(report: Row, path: Path | None) -> None:
    """Writes a report, whole or not at all; None for no file."""
    if path is not None:
        write_text(path, json.dumps(report, indent=1) + "\n")


def _continued(start: Row, path: Path) -> Row:
    """Returns the incomplete report in a file without the group in progress; a new one otherwise."""
    saved = read_json(path)
    if IN_PROGRESS not in saved:
        return start

    for name, value in start.items():
        if name != "date" and not isinstance(value, list) and saved.get(name) != value:
            raise ConfigError(
                f"{path} is incomplete and has {name} {saved.get(name)}, but this run has {value}. Delete it, or "
                "choose another --json."
            )
    table, keys = saved.pop(IN_PROGRESS)
    torn = _rows_of(keys, saved[table])
    saved[table] = [row for row in saved[table] if row not in torn]
    return saved


def format_report(report: Row, tables: Tables) -> str:
    """Returns a report as text: where and how often it was measured, and the tables that have rows."""
    machine = f"{report['device']}, threads: {report['threads']}, torch {report['torch']}"
    parts = [f"{machine}, {report['rounds']} rounds"]
    for name, columns in tables.items():
        rows = report[name]
        if rows:
            parts.append(report_table(columns(rows) if callable(columns) else columns, rows))
    return "\n\n".join(parts)


def report_table(columns: Columns, rows: Sequence[Row]) -> str:
    """Returns the table of rows; a cell is empty where its row has no such field, or None."""
    cells: list[list[str]] = []
    for row in rows:
        line: list[str] = []
        for _, field, form in columns:
            value = row.get(field) if isinstance(field, str) else field(row)
            line.append("" if value is None else format(value, form))
        cells.append(line)
    return format_table([header for header, _, _ in columns], cells)
