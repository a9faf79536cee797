"""Table 14 over the seeds of a study: the numbers are those of the traces of its models."""

import json
from pathlib import Path

import pytest

from eval.studies.report import read_result, write_report
from eval.studies.results_page import read_results
from moe.errors import ConfigError, DataError
from scripts.sentinels import main
from tests.eval.studies.results import build, result_of, run


@pytest.mark.slow
def test_the_entropies_of_every_seed_are_compared_in_pairs(studies: Path) -> None:
    out = studies / "sentinels"
    argv = [str(studies / "whole"), "--arm", "with", "--corpus", str(studies / "corpus")]
    main([*argv, "--examples", "40", "--out", str(out)])

    # Two arms in two layers with two seeds, each number from the trace of its model.
    result = read_results(studies)["sentinels"]
    assert len(result.outcomes) == 2 * 2 * 2
    for outcome in result.outcomes:
        tables = json.loads((out / f"seed-{outcome.seed}/tables.json").read_text())
        (layer,) = [row for row in tables["sentinels"] if row["layer"] == outcome.value]
        assert outcome.number == layer[outcome.arm.replace("-", "_")]["value"]

    # The encoder is the declared comparison; fewer experts are a positive difference.
    numbers = {(run.arm, run.value, run.seed): run.number for run in result.outcomes}
    gaps = []
    for seed in (3, 5):
        sentinels = numbers["sentinels", "encoder 1", seed]
        gaps.append(numbers["all-tokens", "encoder 1", seed] - sentinels)
    assert result.contrasts[0].contrast.at == "encoder 1"
    assert result.contrasts[0].difference == pytest.approx(sum(gaps) / 2)
    expected = {
        item.contrast.expect for item in result.contrasts if item.contrast.at == "decoder 1"
    }
    assert expected == {"better", "equal"}

    # The page has no curves; a second call writes the same numbers.
    assert "Curves" not in (out / "study.html").read_text()
    main([*argv, "--examples", "40", "--out", str(out)])
    again = read_result(out / "study.json")
    assert again.contrasts == result.contrasts


@pytest.mark.parametrize(
    ("arm", "message"),
    [("d", "--arm is 'd'; there is no such arm"), ("c", "No run of arm 'c' is complete")],
)
def test_an_arm_without_a_model_is_refused(tmp_path: Path, arm: str, message: str) -> None:
    (tmp_path / "study").mkdir()
    outcomes = [run("a", 0, 1.0), run("c", 0, 5.0, has_diverged=True)]
    write_report(result_of(build(), outcomes), tmp_path / "study")
    error = ConfigError if arm == "d" else DataError
    options = ["--arm", arm, "--corpus", str(tmp_path / "corpus"), "--out", str(tmp_path / "out")]
    with pytest.raises(error, match=message):
        main([str(tmp_path / "study"), *options])
