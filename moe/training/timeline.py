"""How the seconds of a run were spent: timeline.jsonl, and the goodput that follows from it.

Each process of a run appends a line when it starts, at every log interval, and when it ends; nothing is removed, so
that work lost in a crash is counted. The time of a command counts from its first line of Python, before torch is
imported, to the exit of the process.
"""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from moe.errors import DataError
from moe.json_lines import JsonLines
from moe.parsing import read_json_lines, to_record

TIMELINE_FILE = "timeline.jsonl"

_Seconds = Annotated[float, Field(ge=0)]
_Count = Annotated[int, Field(ge=0)]

_DIGITS = 6


class TimelineEvent(NamedTuple):
    """A line of timeline.jsonl.

    Attributes:
        event: `start` of a process, `steps` since its last line, an `evaluation`, or the `end` of
            the run and of its process.
        time: Seconds since 1970.
        step: Updates so far.
        num_steps: Updates since the last line of steps.
        seconds: Seconds of these steps, including waiting; of the evaluation; or from the start of
            the process until its model and data are loaded.
        data_wait: Part of `seconds` spent waiting for batches.
        meeting: Part of `seconds` spent waiting for other replica groups.
        healing: Part of `seconds` spent taking over the state of another group.
        lost: Further seconds, in steps that were lost with a group and repeated.
        healed: Number of states taken over.
    """

    event: Literal["start", "steps", "evaluation", "end"]
    time: _Seconds
    step: _Count
    num_steps: _Count = 0
    seconds: _Seconds = 0.0
    data_wait: _Seconds = 0.0
    meeting: _Seconds = 0.0
    healing: _Seconds = 0.0
    lost: _Seconds = 0.0
    healed: _Count = 0


class Timeline:
    """Appends to timeline.jsonl; nothing is written without a path.

    Args:
        path: The file; None on ranks that do not write.
        step: Updates so far.
        started: Seconds since 1970 when the process started, if it serves only this run; None to
            start now.
    """

    def __init__(self, path: Path | None, step: int, *, started: float | None = None) -> None:
        self._lines = None if path is None else JsonLines(path)
        self._events: list[TimelineEvent] = []
        now = time.time()
        started = now if started is None else started
        loading = max(0.0, now - started)
        self.append(TimelineEvent("start", started, step, seconds=loading))

    def append(self, event: TimelineEvent) -> None:
        """Adds a line."""
        self._events.append(event)
        if self._lines is None:
            return
        values = {}
        for name, value in event._asdict().items():
            values[name] = round(value, _DIGITS) if isinstance(value, float) else value
        self._lines.append(values)

    def end(self) -> None:
        """Writes that the run, or its process, ends now."""
        # A complete run must not fail because of a full disk or a removed folder.
        with contextlib.suppress(OSError):
            self.append(TimelineEvent("end", time.time(), self._events[-1].step))

    def summary(self) -> str:
        """Returns a line on how the seconds of this process were spent."""
        now = TimelineEvent("end", time.time(), self._events[-1].step)
        goodput = measure_goodput([*self._events, now])
        num_steps = sum(event.num_steps for event in self._events)
        return (
            f"{num_steps:,} {'step' if num_steps == 1 else 'steps'} in {goodput.total:,.1f} s: "
            f"a step waited for its batch in {goodput.data_wait_share:.1%} of its time; "
            f"evaluations took {goodput.share('evaluation'):.1%} of all."
        )


# ---------------------------------------------------------------------------
# Goodput

STATES = {
    "useful": "useful steps",
    "redone": "steps that were taken again",
    "down": "nobody there, until a start",
    "loading": "importing, loading data and model",
    "data_wait": "waiting for batches",
    "meeting": "meeting other replica groups",
    "healing": "healing from another group",
    "lost": "steps lost with a group",
    "evaluation": "evaluating",
    "other": "checkpoints, final model, exit",
}
"""States of a run, and what happens in them."""


class Goodput(NamedTuple):
    """How the seconds of a run were spent.

    Attributes:
        steps: Updates so far.
        starts: Number of starts.
        total: Seconds from the first start to the last line, which a process writes as it exits.
        seconds: Seconds in each of the `STATES`; `down` is from the last line of a process to the
            start of the next.
    """

    steps: int
    starts: int
    total: float
    seconds: dict[str, float]

    def share(self, state: str) -> float:
        """Returns the share of the seconds in a state; that of `useful` is the goodput."""
        return self.seconds[state] / self.total if self.total else 0.0

    @property
    def data_wait_share(self) -> float:
        """Share of the seconds of steps spent waiting for batches."""
        of_steps = ("useful", "redone", "data_wait", "meeting", "healing")
        seconds = sum(self.seconds[state] for state in of_steps)
        return self.seconds["data_wait"] / seconds if seconds else 0.0


def read_timeline(folder: Path) -> list[TimelineEvent]:
    """Returns the timeline of a run.

    Raises:
        DataError: When there is none, or a line is damaged; names it.
    """
    path = folder / TIMELINE_FILE
    advice = "Give the folder of a run that this version has trained."
    events: list[TimelineEvent] = []
    for number, line in read_json_lines(path, advice=advice, torn_end=True):
        where = f"{path}, line {number}"
        events.append(to_record(TimelineEvent, line, where=where, advice="Remove it."))
    if not events:
        raise DataError(f"{path} is empty: the run has not begun. Wait for its first steps.")
    return events


def measure_goodput(events: Sequence[TimelineEvent]) -> Goodput:
    """Returns a breakdown of the seconds of a run."""
    seconds = dict.fromkeys(STATES, 0.0)
    starts = 0
    ended = events[0].time  # of the process before
    for event in events:
        if event.event == "start":
            starts += 1
            seconds["down"] += max(0.0, event.time - ended)
        ended = event.time

    # From the end, since a later process tells which steps were taken again.
    first_redone = events[-1].step
    healed_at: int | None = None  # updates before the first steps of a process that was healed
    for event in reversed(events):
        if event.event == "start":
            seconds["loading"] += event.seconds
            resumed_at = event.step if healed_at is None else healed_at
            first_redone = min(first_redone, resumed_at)
            healed_at = None
        elif event.event == "evaluation":
            seconds["evaluation"] += event.seconds
        elif event.event == "steps":
            for state in ("data_wait", "meeting", "healing", "lost"):
                seconds[state] += getattr(event, state)
            work = max(0.0, event.seconds - event.data_wait - event.meeting - event.healing)
            num_redone = min(event.num_steps, max(0, event.step - first_redone))
            redone = work * num_redone / max(1, event.num_steps)
            seconds["redone"] += redone
            seconds["useful"] += work - redone
            healed_at = event.step - event.num_steps if event.healed else None

    total = events[-1].time - events[0].time
    seconds["other"] = max(0.0, total - sum(seconds.values()))
    return Goodput(events[-1].step, starts, total, seconds)
