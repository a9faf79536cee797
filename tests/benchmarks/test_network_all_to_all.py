"""All-to-alls reach what is published of them, within the tolerances."""

import pytest

from benchmarks.network_all_to_all import cube_rows, hot_expert_rows, law_rows, speed_up_rows
from benchmarks.network_rows import REPORTS, Row


def failing(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.passes is False]


def test_rings_take_the_time_of_their_closed_forms() -> None:
    rows = law_rows()

    assert not failing(rows)
    assert {row.id for row in rows} == {"A1", "A2"}


@pytest.mark.slow
def test_tori_are_as_much_faster_as_published() -> None:
    rows = speed_up_rows()

    assert not failing(rows)
    assert sum(row.passes is True for row in rows) == 5

    # Rows with a star are reported, and nothing is asserted of them.
    assert all((row.passes is None) == row.id.endswith("*") for row in rows)


@pytest.mark.slow
def test_a_cube_of_chips_reaches_its_measured_bandwidth() -> None:
    rows = cube_rows()

    assert not failing(rows)

    # Routers send what is as far both ways one way: three quarters of what a chip has, on a link.
    by_load = rows[1].predicted
    assert by_load == pytest.approx(56 / 0.75)


@pytest.mark.slow
def test_hot_experts_cost_as_much_as_published() -> None:
    rows = hot_expert_rows()

    assert not failing(rows)
    lowest, highest = (row.predicted for row in rows[1:])
    assert lowest < rows[0].predicted < highest <= 100


def test_the_reports_can_be_asked_for() -> None:
    for name in ("laws", "speed_ups", "tpu_v4", "hot_experts"):
        assert REPORTS.get(f"all_to_all_{name}")
