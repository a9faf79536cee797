"""Scores, intervals and versions as text: the same in reports on routers and on evaluations."""

from collections.abc import Mapping


def format_score(value: float | None, *, sign: bool = False) -> str:
    """Returns a score with one decimal; `-` where there is none."""
    if value is None:
        return "-"
    return f"{value:+.1f}" if sign else f"{value:.1f}"


def format_interval(low: float | None, high: float | None) -> str:
    """Returns e.g. `76.3 to 84.3`; `-` where there is none."""
    if low is None or high is None:
        return "-"
    return f"{low:.1f} to {high:.1f}"


def format_versions(versions: Mapping[str, str]) -> str:
    """Returns names and versions of libraries."""
    return ", ".join(f"{name} {number}" for name, number in versions.items())
