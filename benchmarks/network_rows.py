"""Rows of the report on the network: a predicted number next to a published one.

A report is a function that returns rows. It registers itself in `REPORTS` under its name for
`python -m benchmarks.network --only`.
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


@dataclass(frozen=True)
class Row:
    """A predicted number next to a published one.

    Attributes:
        id: Name of the claim; a star after it marks rows that are reported and not asserted.
        what: Quantity.
        predicted: Our number.
        published: Published number; None if the claim is only a bound.
        unit: Unit of both.
        tolerance: Tolerance in words.
        confidence: Source of the published number.
        passes: Whether our number is within the tolerance; None if it is only reported.
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
    """A published claim, before it is compared with our number; see `Row` for the fields."""

    id: str
    what: str
    unit: str
    confidence: str

    def close(self, predicted: float, published: float, relative: float) -> Row:
        """Returns the row that passes if the relative error is at most `relative`."""
        error = abs(predicted / published - 1)
        tolerance = f"±{relative:.0%}" if relative >= 0.01 else "exact"
        return self._row(predicted, published, tolerance, error <= relative)

    def between(self, predicted: float, least: float, most: float) -> Row:
        """Returns the row that passes if our number is between `least` and `most`."""
        tolerance = f"{least:.4g} to {most:.4g}"
        return self._row(predicted, None, tolerance, least <= predicted <= most)

    def reported(self, predicted: float, published: float | None, expectation: str) -> Row:
        """Returns the row of a claim that is too uncertain to be asserted, or was fitted."""
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
    path = Path(__file__).with_name("network_published.json")
    return json.loads(path.read_text(encoding="utf-8"))[section]


def rows_of(names: Sequence[str]) -> list[Row]:
    """Returns the rows of some reports, in their order."""
    rows = []
    for name in names:
        rows += REPORTS.get(name)()
    return rows
