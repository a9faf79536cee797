"""The page of all studies and the README say what the committed results say."""

import json
import re
from pathlib import Path

import pytest

from eval.studies.analysis import StudyResult, arm_numbers, contrast_results
from eval.studies.outcomes import Point
from eval.studies.report import write_report
from eval.studies.results_page import measured_page, read_results
from eval.studies.study import Measure, Study, read_study
from moe.errors import DataError
from scripts.measured import main
from tests.eval.studies.results import build, result_of, run, runs_of

ROOT = Path(__file__).parents[3]
COMMITTED = ROOT / "benchmarks/studies"
RECIPES = ROOT / "recipes/studies"


def write_result(folder: Path, **changes: object) -> StudyResult:
    """Writes the result of a study of three seeds, in which `a` is better by 0.5."""
    study = build(measure=Measure("heldout/loss", unit="nats"), **changes)
    outcomes = runs_of({"a": [2.0, 2.1, 2.2], "b": [2.5, 2.7, 2.6]})
    result = result_of(study, outcomes)
    folder.mkdir(parents=True)
    write_report(result, folder)
    return result


# ---- what is committed ----


def test_the_committed_page_is_made_of_the_committed_results() -> None:
    results = read_results(COMMITTED)
    page = measured_page(results)
    assert (ROOT / "docs/measured.md").read_text(encoding="utf-8") == page, "run `make measured`"


def test_every_interval_in_the_readme_is_one_of_the_committed_results() -> None:
    intervals = []
    for result in read_results(COMMITTED).values():
        intervals += [(item.low, item.high) for item in result.contrasts]

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"\((-?[\d.]+) to (-?[\d.]+)\)", readme.partition("## What was measured")[2])
    assert len(shown) >= 4
    for low, high in shown:
        decimals = len(low.partition(".")[2])
        rounded = [(round(known[0], decimals), round(known[1], decimals)) for known in intervals]
        assert (float(low), float(high)) in rounded


def test_a_committed_result_is_of_the_study_as_its_recipe_declares_it() -> None:
    results = read_results(COMMITTED)
    declared = [name for name in results if (RECIPES / f"{name}.yaml").exists()]
    assert len(declared) >= 10  # no grid of runs made the others
    for name in declared:
        recipe = read_study(RECIPES / f"{name}.yaml")
        assert comparable(results[name].study) == comparable(recipe), name


def comparable(study: Study) -> dict[str, object]:
    """Returns what of a study decides its numbers and verdicts."""
    texts = ("title", "paper", "expected", "cost", "order")
    content = {name: value for name, value in study._asdict().items() if name not in texts}
    for settings in (content["settings"], *content["arms"].values()):
        if "config" in settings:
            settings["config"] = Path(settings["config"]).name
    content["measure"] = study.measure._replace(unit="")
    return json.loads(json.dumps(content))


# ---- the commands ----


def test_results_are_added_and_shown_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = write_result(tmp_path / "runs/gating", paper="They say 3.")
    studies = tmp_path / "committed"
    page = tmp_path / "page.md"
    main([str(studies), "--add", str(tmp_path / "runs/gating"), "--out", str(page)])
    assert read_results(studies) == {"gating": result}
    assert "1 studies are in" in capsys.readouterr().out

    # Each number as the result has it; the paper's beside it.
    (row,) = re.findall(r"^\| \[Title\]\(#gating\).*$", page.read_text(), re.MULTILINE)
    assert "| holds | +0.5 nats | " in row
    assert "\n**The paper.** They say 3.\n" in page.read_text()


def test_curves_lie_beside_the_page_that_shows_them(tmp_path: Path) -> None:
    curve = [Point(0, 9.0), Point(10, 2.0)]
    (tmp_path / "gating").mkdir()
    outcomes = [run(arm, 0, 2.0, curve=curve) for arm in ("a", "b")]
    write_report(result_of(build(), outcomes), tmp_path / "gating")
    main([str(tmp_path), "--out", str(tmp_path / "page.md")])
    page = (tmp_path / "page.md").read_text()
    assert "](page/gating.svg)" in page
    assert (tmp_path / "page/gating.svg").read_text().startswith("<svg")
    assert list(read_results(tmp_path)) == ["gating"]


def test_every_committed_curve_is_shown_and_every_shown_one_is_committed() -> None:
    page = (ROOT / "docs/measured.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"\(measured/([^)]+\.svg)\)", page))
    assert shown == {path.name for path in (ROOT / "docs/measured").glob("*.svg")}


def test_studies_stand_in_their_order_and_a_missing_run_is_named(tmp_path: Path) -> None:
    write_result(tmp_path / "aaa", title="Last", order=7)
    write_result(tmp_path / "zzz", title="First", order=3)
    results = read_results(tmp_path)
    assert list(results) == ["zzz", "aaa"]

    results["aaa"] = results["aaa"]._replace(missing=["a, seed 3"], overrides={"optim.lr": 0.1})
    page = measured_page(results, {})
    assert "optim.lr" in page
    assert "a, seed 3" in page


def test_without_a_pair_of_runs_or_any_result_it_is_said() -> None:
    study, outcomes = build(), runs_of({"a": [2.0]})
    assert contrast_results(study, arm_numbers(study, outcomes)) == []
    assert "not run yet" in measured_page({"x": result_of(study, outcomes)}, {})
    assert "No study is complete yet." in measured_page({}, {})


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no study\.json below .*Give the folder of studies"):
        main([str(tmp_path), "--out", str(tmp_path / "page.md")])
    with pytest.raises(DataError, match=r"study\.json cannot be read"):
        main([str(tmp_path), "--add", str(tmp_path), "--out", str(tmp_path / "page.md")])
