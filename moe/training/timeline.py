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

from moe.distributed.replica_groups import ReplicaSeconds
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
        self._step = step
        now = time.time()
        self._started = now if started is None else started
        self._goodput = Goodput(steps=0, starts=1, total=0.0)
        self._num_steps = 0
        self._seconds = 0.0
        self._data_wait = 0.0
        self._lines = None if path is None else JsonLines(path)
        loading = max(0.0, now - self._started)
        self._append(TimelineEvent("start", self._started, step, seconds=loading))

    def count_step(self, seconds: float, data_wait: float) -> None:
        """Counts an update."""
        self._num_steps += 1
        self._seconds += seconds
        self._data_wait += data_wait

    def write(self, step: int, replicas: ReplicaSeconds) -> None:
        """Writes the updates since the last line.

        Args:
            step: Updates so far.
            replicas: Cost of lost replica groups in the meantime.
        """
        event = TimelineEvent(
            event="steps",
            time=time.time(),
            step=step,
            num_steps=self._num_steps,
            seconds=self._seconds,
            data_wait=self._data_wait,
            meeting=replicas.meeting,
            healing=replicas.healing,
            lost=replicas.lost,
            healed=replicas.healed,
        )
        self._append(event)
        self._num_steps = 0
        self._seconds = 0.0
        self._data_wait = 0.0

    def write_evaluation(self, step: int, seconds: float) -> None:
        """Records the end of an evaluation after `step` updates, and its seconds."""
        self._append(TimelineEvent("evaluation", time.time(), step, seconds=seconds))

    def end(self) -> None:
        """Writes that the run, or its process, ends now."""
        # A complete run must not fail because of a full disk or a removed folder.
        with contextlib.suppress(OSError):
            self._append(TimelineEvent("end", time.time(), self._step))

    def goodput(self) -> "Goodput":
        """Returns a breakdown of this process's seconds; `steps` are its own."""
        return self._goodput._replace(total=time.time() - self._started)

    def _append(self, event: TimelineEvent) -> None:
        self._step = event.step
        num_steps = self._goodput.steps + event.num_steps
        self._goodput = _add_event(self._goodput, event)._replace(steps=num_steps)
        if self._lines is None:
            return
        values = {}
        for name, value in event._asdict().items():
            values[name] = round(value, _DIGITS) if isinstance(value, float) else value
        self._lines.append(values)


# ---------------------------------------------------------------------------
# Goodput


class Goodput(NamedTuple):
    """How the seconds of a run were spent.

    Attributes:
        steps: Updates so far.
        starts: Number of starts.
        total: Seconds from the first start to the last line, which a process writes as it exits.
        useful: Seconds in steps that count.
        redone: Seconds in steps that were repeated after a crash.
        down: Seconds from the last line of a process to the start of the next.
        loading: Seconds from the start of a process until its model and data are loaded.
        data_wait: Seconds of waiting for batches.
        meeting: Seconds of waiting for other replica groups before a step.
        healing: Seconds of taking over the state of another group.
        lost: Seconds in steps that were lost with a group.
        evaluation: Seconds in held-out losses and dev scores.
    """

    steps: int
    starts: int
    total: float
    useful: float = 0.0
    redone: float = 0.0
    down: float = 0.0
    loading: float = 0.0
    data_wait: float = 0.0
    meeting: float = 0.0
    healing: float = 0.0
    lost: float = 0.0
    evaluation: float = 0.0

    @property
    def other(self) -> float:
        """Seconds in checkpoints, the final model, and exit."""
        parts = self[self._fields.index("useful") :]
        return max(0.0, self.total - sum(parts))

    @property
    def share(self) -> float:
        """Share of the seconds that were useful."""
        return self.useful / self.total if self.total else 0.0

    @property
    def evaluation_share(self) -> float:
        """Share of the seconds that evaluations took."""
        return self.evaluation / self.total if self.total else 0.0

    @property
    def data_wait_share(self) -> float:
        """Share of the seconds of steps spent waiting for batches."""
        steps = self.useful + self.redone + self.data_wait + self.meeting + self.healing
        return self.data_wait / steps if steps else 0.0


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
    starts = sum(event.event == "start" for event in events)
    total = events[-1].time - events[0].time
    goodput = Goodput(events[-1].step, starts, total)
    for index, event in enumerate(events):
        if event.event == "start":
            # No process was running since the last line.
            before = events[index - 1].time if index else event.time
            down = max(0.0, event.time - before)
            goodput = goodput._replace(down=goodput.down + down)
        goodput = _add_event(goodput, event, _kept_share(events, index))
    return goodput


def _add_event(goodput: Goodput, event: TimelineEvent, kept: float = 1.0) -> Goodput:
    """Returns the goodput with an event's seconds added; the share `kept` of its steps counts."""
    if event.event == "start":
        return goodput._replace(loading=goodput.loading + event.seconds)
    if event.event == "evaluation":
        return goodput._replace(evaluation=goodput.evaluation + event.seconds)

    waits = event.data_wait + event.meeting + event.healing
    work = max(0.0, event.seconds - waits)
    return goodput._replace(
        useful=goodput.useful + kept * work,
        redone=goodput.redone + (1 - kept) * work,
        data_wait=goodput.data_wait + event.data_wait,
        meeting=goodput.meeting + event.meeting,
        healing=goodput.healing + event.healing,
        lost=goodput.lost + event.lost,
    )


def _kept_share(events: Sequence[TimelineEvent], index: int) -> float:
    """Returns the share of an event's steps that no later process repeated."""
    event = events[index]
    first_again = event.step
    for later in range(index + 1, len(events)):
        if events[later].event == "start":
            first_again = min(first_again, _goes_on_at(events, later))
    redone = min(event.num_steps, event.step - first_again)
    return 1 - redone / event.num_steps if event.num_steps else 1.0


def _goes_on_at(events: Sequence[TimelineEvent], start: int) -> int:
    """Returns the number of updates before the first step of a process."""
    for following in events[start + 1 :]:
        if following.event == "start":
            break
        if following.event == "steps":
            return following.step - following.num_steps if following.healed else events[start].step
    return events[start].step
