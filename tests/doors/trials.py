"""What comes of a door: its listed cases, and those that hypothesis draws."""

from pathlib import Path

from tests.doors.cases import cases_of
from tests.doors.driver import Outcome, try_case


def outcomes_of(door: str, workspace: Path) -> list[Outcome]:
    """Returns the outcomes of all cases of a door."""
    return [try_case(case, workspace) for case in cases_of(door, workspace)]
