"""The report on the network: its rows, and the saved table that the documentation quotes."""

import json
from pathlib import Path

import numpy as np
import pytest

import benchmarks.network_goodput  # noqa: F401  it registers its report
from benchmarks.network import format_rows, main
from benchmarks.network_all_reduce import chips, fitted_steps, hole_ratios
from benchmarks.network_rows import CLOSED_FORM, REPORTS, Claim, published, rows_of

SAVED = Path("benchmarks/network.json")
QUICK = ("goodput", "levels", "scaling")


def test_quick_reports_pass_and_are_those_saved() -> None:
    rows = rows_of(QUICK)

    assert {row.id for row in rows} == {"G1", "G2", "R1*", "R2*", "R9"}
    assert [row.what for row in rows if row.passes is False] == []

    saved = json.loads(SAVED.read_text(encoding="utf-8"))["rows"]
    by_claim = {(row["id"], row["what"]): row["predicted"] for row in saved}
    for row in rows:
        assert by_claim[row.id, row.what] == pytest.approx(row.predicted)


@pytest.mark.slow
def test_all_laws_pass() -> None:
    rows = rows_of(["laws"])

    assert {row.id for row in rows} == {"R5", "R6"}
    assert [row.what for row in rows if row.passes is False] == []


def test_a_fit_of_two_constants_is_not_asserted_since_it_holds_with_any_all_reduce() -> None:
    rows = rows_of(["scaling"])
    assert all(row.passes is None and row.tolerance == "fit of 2 constants" for row in rows)

    # Both ends are met whatever the network takes; those between within 12 % even for nothing.
    runs = published("resnet_v0.6")
    images = np.array([run["batch"] / run["chips"] / 2 for run in runs])
    logged = np.array([run["block"] / run["steps"] for run in runs])
    for seconds in (0.0, 1e-3):
        steps = fitted_steps(images, logged, np.full(len(runs), seconds))
        assert steps[[0, -1]] == pytest.approx(logged[[0, -1]])
        assert np.abs(steps / logged - 1).max() < 0.12


@pytest.mark.slow
def test_the_cost_of_a_hole_depends_on_where_it_is_unless_all_places_are_alike() -> None:
    mesh = chips((4, 4), wraps=False, latency=1.5e-6)
    ratios = hole_ratios(mesh, (2, 2)).reshape(3, 3)
    assert ratios.max() > 1.5 * ratios.min()

    # A mesh looks the same from each of its corners.
    assert ratios[[0, 0, 2, 2], [0, 2, 0, 2]] == pytest.approx(ratios[0, 0])

    # A hole of a torus may reach over its ends.
    torus = chips((2, 3), wraps=True, latency=1.5e-6)
    assert hole_ratios(torus, (1, 1)).shape == (6,)


def test_the_saved_table_has_every_claim_and_passes() -> None:
    rows = json.loads(SAVED.read_text(encoding="utf-8"))["rows"]

    claims = {"R1*", "R2*", "R5", "R6", "R7", "R9", "F1", "F1*", "G1", "G2"}
    assert claims <= {row["id"] for row in rows}
    assert [row["what"] for row in rows if row["passes"] is False] == []

    # What has a star is only reported, and all else asserted.
    starred = {"R1*", "R2*", "F1*"}
    assert {row["id"] for row in rows if row["passes"] is None} == starred


def test_a_row_fails_outside_its_tolerance() -> None:
    claim = Claim("X1", "something", "s", CLOSED_FORM)

    assert claim.close(1.12, 1.0, 0.12 + 1e-9).passes
    assert not claim.close(0.87, 1.0, 0.12).passes
    assert claim.between(1.0, 1.0, 1.75).passes
    assert not claim.between(1.76, 1.0, 1.75).passes
    assert claim.reported(2.0, 1.0, "below").passes is None


def test_the_table_says_what_does_not_pass() -> None:
    claim = Claim("X1", "something", "s", CLOSED_FORM)

    table = format_rows([claim.close(2.0, 1.0, 0.12), claim.reported(2.0, 1.0, "below")])

    _, failed, reported = table.splitlines()
    assert failed.split() == ["X1", "something", "2", "1", "s", "±12%", "closed", "form", "NO"]
    assert reported.endswith("-")


def test_the_command_prints_and_saves_the_reports_that_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "network.json"

    main(["--only", "goodput", "--json", str(path)])

    report = json.loads(path.read_text(encoding="utf-8"))
    assert [row["id"] for row in report["rows"]] == ["G1", "G1", "G2", "G2", "G2"]
    assert report["sources"] == published("sources")
    assert "effective time" in capsys.readouterr().out


def test_the_command_fails_when_a_row_does_not_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Claim("X1", "something", "s", CLOSED_FORM).close(2.0, 1.0, 0.12)
    monkeypatch.setattr(REPORTS, "_entries", {"wrong": lambda: [wrong]})

    with pytest.raises(SystemExit, match="1"):
        main([])
    assert "1 of 1 rows do not pass" in capsys.readouterr().out


def test_published_runs_have_what_they_are_compared_by() -> None:
    runs = published("resnet_v0.6")

    assert [run["chips"] for run in runs] == [16, 64, 128, 256, 512, 1024]
    for run in runs:
        # Four epochs of ImageNet's 1,281,167 images, to within a step.
        assert abs(run["steps"] * run["batch"] - 4 * 1_281_167) <= run["batch"]
