"""Runs that were made by another study, or on another machine, are taken over."""

import re
from pathlib import Path

import pytest
import yaml

from eval.studies.report import read_result
from eval.studies.runs import study_runs
from eval.studies.scheduler import read_state
from eval.studies.study import read_study
from moe.errors import ConfigError
from tests.eval.studies.conftest import copy_run
from tests.eval.studies.tiny_study import STUDY, run_study

pytestmark = pytest.mark.slow


def test_two_halves_of_a_study_come_to_the_whole(
    studies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (3, 5):
        copy_run(studies, "first", f"with/seed-{seed}")
    run_study(studies, studies / "first", "--report")
    first = read_result(studies / "first/study.json")
    assert [(run.arm, run.seed) for run in first.outcomes] == [("with", 3), ("with", 5)]
    assert first.missing == ["without, seed 3", "without, seed 5"]

    # One of the other runs is there already; only the named one is run.
    out = studies / "second"
    copy_run(studies, "second", "without/seed-3")
    take = ["--jobs", "2", "--take", str(studies / "first/study.json")]
    capsys.readouterr()
    run_study(studies, out, *take, "--only", "without:5")
    printed = capsys.readouterr().out
    assert "2 of 4 runs are taken from" in printed and "3 are complete" in printed
    assert "2 runs are from `python -m scripts.study" in printed

    # The numbers are those of one study; a run that was taken has no curve file to go on with.
    whole = read_result(studies / "whole/study.json")
    halves = read_result(out / "study.json")
    assert halves.numbers == whole.numbers and halves.contrasts == whole.contrasts
    assert halves.sizes == whole.sizes and halves.missing == []
    assert [run.curve for run in halves.outcomes] == [run.curve for run in whole.outcomes]
    assert [bool(run.taken_from) for run in halves.outcomes] == [True, False, True, False]

    # A budget of hours is judged by what the runs took where they were made.
    for run in study_runs(read_study(studies / "study.yaml"), out):
        state = read_state(run)
        assert state is not None and state.is_complete and state.seconds > 0

    # What is there already is not taken a second time, and cannot be compared with itself.
    run_study(studies, out, *take)
    assert "0 of 4 runs are taken from" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="was taken from another study"):
        run_study(studies, out, "--repeat", "with:5")


def test_an_arm_of_another_name_is_the_same_and_one_of_other_settings_is_not(
    tmp_path: Path,
) -> None:
    def digests(**changes: object) -> list[str]:
        settings = {**STUDY["settings"], "config": "tiny.yaml"}
        content = {**STUDY, "settings": settings, **changes}
        (tmp_path / "tiny.yaml").write_text("optim: {warmup_steps: 2}\n")
        (tmp_path / "study.yaml").write_text(yaml.safe_dump(content))
        runs = study_runs(read_study(tmp_path / "study.yaml"), tmp_path / "out")
        return [run.digest for run in runs]

    original = digests()
    arms = {"as-it-is": {}, "longer": {"training.steps": 7}}
    changes = {"arms": arms, "primary": {"arm": "as-it-is", "against": "longer"}}
    assert [digest in original for digest in digests(**changes)] == [True, False, True, False]

    # Another measure of the same runs is another number.
    changes["measure"] = {"metric": "heldout/text_loss"}
    assert not set(digests(**changes)) & set(original)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wth", "--only is 'wth'; there is no such arm. Did you mean 'with'?"),
        ("with:4", "--only is 'with:4'; expected ARM or ARM:SEED with a seed of 3, 5."),
        ("with:", "--only is 'with:'; expected ARM or ARM:SEED with a seed of 3, 5."),
    ],
)
def test_an_arm_or_seed_that_is_not_there_is_named(
    studies: Path, tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_study(studies, tmp_path / "out", "--only", text)
