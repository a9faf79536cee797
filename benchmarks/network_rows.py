"""What a report on the network is made of: rows of a predicted and a published number.

A report is a function that returns rows. It registers itself in `REPORTS` under the name by which
`python -m benchmarks.network --only` asks for it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe.registry import Registry

PRIMARY = "primary artefact"
VENDOR = "vendor page or abstract"
THIRD_PARTY = "third party's account"
PROTOTYPE = "measured in a prototype"
CLOSED_FORM = "closed form"
RECOLLECTION = "recollection of the paper"


@dataclass(frozen=True)
class Row:
    """A number of ours beside a published one.

    Attributes:
        id: Of the claim; a star after it marks what is reported, and not asserted.
        what: What the numbers are of.
        predicted: Ours.
        published: Theirs; None where the claim is a bound alone.
        unit: Of both.
        tolerance: What is asked of ours, in words.
        confidence: Where theirs comes from.
        passes: Whether ours is within the tolerance; None where it is only reported.
    """

    id: str
    what: str
    predicted: float
    published: float | None
    unit: str
    tolerance: str
    confidence: str
    passes: bool | None


Report = Callable[[], list[Row]]

REPORTS: Registry[Report] = Registry("report on the network")
"""Functions that return rows, by the name of what they report on."""


@dataclass(frozen=True)
class Claim:
    """What is claimed, before it is held against a number of ours.

    Attributes:
        id: As of `Row`.
        what: As of `Row`.
        unit: As of `Row`.
        confidence: As of `Row`.
    """

    id: str
    what: str
    unit: str
    confidence: str

    def close(self, predicted: float, published: float, relative: float) -> Row:
        """Returns the row that passes when both numbers differ by so much at most."""
        # Relative to theirs.
        error = abs(predicted / published - 1)
        tolerance = f"±{relative:.0%}" if relative >= 0.01 else "exact"
        return self._row(predicted, published, tolerance, error <= relative)

    def between(self, predicted: float, least: float, most: float) -> Row:
        """Returns the row that passes for a number from `least` to `most`."""
        tolerance = f"{least:.4g} to {most:.4g}"
        return self._row(predicted, None, tolerance, least <= predicted <= most)

    def reported(self, predicted: float, published: float | None, expectation: str) -> Row:
        """Returns the row of a claim that is too uncertain to be asserted, or has been fitted."""
        return self._row(predicted, published, expectation, None)

    def _row(
        self, predicted: float, published: float | None, tolerance: str, passes: bool | None
    ) -> Row:
        return Row(
            id=self.id,
            what=self.what,
            predicted=float(predicted),
            published=published,
            unit=self.unit,
            tolerance=tolerance,
            confidence=self.confidence,
            passes=None if passes is None else bool(passes),
        )


def published(section: str) -> Any:
    """Returns a section of the published numbers."""
    # The file names its sources.
    path = Path(__file__).with_name("network_published.json")
    return json.loads(path.read_text(encoding="utf-8"))[section]


def rows_of(names: Sequence[str]) -> list[Row]:
    """Returns the rows of some reports, in their order."""
    rows = []
    for name in names:
        rows += REPORTS.get(name)()
    return rows
