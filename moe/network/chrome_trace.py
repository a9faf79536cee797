"""A simulation as a Chrome trace: a line for every rank, a bar for every transfer.

Opens in Perfetto (ui.perfetto.dev) and in chrome://tracing. A trace of millions of bars opens
nowhere: of a long simulation it has the transfers of the critical path, and those of as many ranks
as fit; its first line says so.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe.checks import check_integer
from moe.network.schedule import IntArray
from moe.network.simulate import Simulation

MAX_EVENTS = 100_000
"""Bars of a trace, unless asked for more: about 20 MB of JSON."""

_MICROSECOND = 1e-6
_RANKS = 0
_PATH = 1


@dataclass(frozen=True)
class _Choice:
    """The transfers that a trace shows.

    Attributes:
        rows: <int64>[N] rows of the table.
        text: What they are, for the reader of the trace.
    """

    rows: IntArray
    text: str


def chrome_trace(simulation: Simulation, *, max_events: int = MAX_EVENTS) -> dict[str, Any]:
    """Returns a trace that `json.dump` writes.

    A bar stands on the line of the rank that sends, from the first byte sent to the last one
    received. The critical path stands once more on a line of its own, above all others.

    Args:
        simulation: What to show.
        max_events: Bars at most, those of the critical path not counted.

    Raises:
        ConfigError: When no bar is allowed.
    """
    check_integer("max_events", max_events, least=1)

    # What is shown, and what of it sets the time.
    choice = _choose_rows(simulation, max_events)
    is_critical = np.zeros(len(simulation.start), np.bool_)
    is_critical[simulation.critical_path] = True

    # The path first: viewers show processes in this order.
    events = list(_names(simulation, choice))
    events += _bars(simulation, simulation.critical_path, is_critical, process=_PATH)
    events += _bars(simulation, choice.rows, is_critical, process=_RANKS)
    return {
        "displayTimeUnit": "ns",
        "otherData": {
            "network": simulation.topology.name,
            "payload_bytes": simulation.payload_bytes,
            "seconds": simulation.seconds,
            "shown": choice.text,
        },
        "traceEvents": events,
    }


def _choose_rows(simulation: Simulation, max_events: int) -> _Choice:
    """Returns all transfers, or those of the first ranks and what fits of the next one."""
    num_rows = len(simulation.start)
    if num_rows <= max_events:
        return _Choice(np.arange(num_rows), f"all {num_rows:,} transfers")

    # Whole ranks, as a line with holes would look idle; of one rank that is too long its start.
    source = simulation.schedule.transfers.source
    counts = np.bincount(source, minlength=simulation.schedule.num_ranks)
    num_fitting = int(np.searchsorted(np.cumsum(counts), max_events, side="right"))
    last = max(num_fitting - 1, int(np.flatnonzero(counts)[0]))
    rows = np.flatnonzero(source <= last)[:max_events]
    text = f"{len(rows):,} of {num_rows:,} transfers: those that ranks 0 to {last} send"
    if int(counts[: last + 1].sum()) > max_events:
        text += ", the first of them"
    return _Choice(rows, text)


def _names(simulation: Simulation, choice: _Choice) -> Iterator[dict[str, Any]]:
    """Yields the names of all lines."""
    yield _name("process_name", _RANKS, 0, f"{simulation.topology.name}: {choice.text}")
    yield _name("process_name", _PATH, 0, "critical path")
    yield {"name": "process_sort_index", "ph": "M", "pid": _PATH, "args": {"sort_index": -1}}

    # A line for every rank that sends.
    senders = np.unique(simulation.schedule.transfers.source[choice.rows])
    for rank in senders.tolist():
        yield _name("thread_name", _RANKS, rank, f"rank {rank}")


def _name(kind: str, process: int, thread: int, text: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": text}}


def _bars(
    simulation: Simulation, rows: IntArray, is_critical: NDArray[np.bool_], *, process: int
) -> Iterator[dict[str, Any]]:
    """Yields a bar for each of some rows of the table."""
    table = simulation.schedule.transfers
    unit_bytes = simulation.payload_bytes / max(simulation.schedule.num_units, 1)
    for row in rows.tolist():
        # Who sends what to whom, and when.
        source = int(table.source[row])
        destination = int(table.destination[row])
        start = float(simulation.start[row])
        finish = float(simulation.finish[row])
        num_units = int(table.high[row] - table.low[row])

        # The name says what happens, the arguments to which units.
        verb = "add" if table.adds[row] else "copy"
        yield {
            "name": f"{verb} {source} > {destination}",
            "cat": "critical" if is_critical[row] else "transfer",
            "ph": "X",
            "pid": process,
            "tid": source if process == _RANKS else 0,
            "ts": start / _MICROSECOND,
            "dur": (finish - start) / _MICROSECOND,
            "args": {
                "step": int(table.step[row]),
                "units": [int(table.low[row]), int(table.high[row])],
                "bytes": num_units * unit_bytes,
            },
        }
