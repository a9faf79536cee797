"""Studies: what a file may say, the runs that it stands for, what is concluded, and the runs themselves."""

import signal
import time
from pathlib import Path

import pytest
import yaml
from scipy import stats

from moe.errors import ConfigError
from moe.files import locked_folder
from moe.parsing import to_record
from stmoe_eval.studies.processes import StudyError
from stmoe_eval.studies.results import ContrastResult, contrast_results
from stmoe_eval.studies.study import Contrast, Study, read_study, study_runs
from tests.eval.studies.tiny_study import STUDY, run_study, write_studies
from tests.processes import TIMEOUT, Command

STUDIES = sorted((Path(__file__).parents[3] / "recipes/studies").glob("*.yaml"))
PRIMARY = {"arm": "with", "against": "without"}


def read(folder: Path, **changes: object) -> Study:
    (folder / "pretrain.yaml").write_text("training: {steps: 7}\noptim: {warmup_steps: 2}\n")
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({**STUDY, **changes}))
    return read_study(path)


# ---- definitions ----


def test_a_study_is_a_run_for_each_arm_and_seed_and_arms_win(tmp_path):
    arms = {"with": {"training.steps": 11}, "without": {}}
    runs = study_runs(read(tmp_path, arms=arms), tmp_path / "studies/mine")
    names = [(run.arm, run.seed) for run in runs]
    assert names == [("with", 3), ("without", 3), ("with", 5), ("without", 5)]
    assert len({run.folder for run in runs}) == 4

    argv = runs[0].argv
    assert argv[argv.index("--corpus") + 1] == str(tmp_path / "studies/corpus")
    assert argv[argv.index("--training.steps") + 1] == "11"
    assert runs[1].argv[runs[1].argv.index("--training.steps") + 1] == "6"


@pytest.mark.parametrize(
    ("changes", "noun"),
    [
        ({"seeds": []}, "seeds"),
        ({"arms": {"../x": {}}}, "arms"),
        ({"primary": {**PRIMARY, "arm": "wiht"}}, "Did you mean 'with'"),
        ({"primary": {**PRIMARY, "margin": 0}}, "margin"),
        ({"settings": {"seed": 3}}, "seed cannot be set"),
        ({"arms": {"with": {"print_config": ""}, "without": {}}}, "print_config"),
        ({"command": "eval"}, "command"),
    ],
)
def test_a_study_that_makes_no_sense_is_refused(tmp_path, changes, noun):
    with pytest.raises(ConfigError, match=rf"study\.yaml.*{noun}"):
        read(tmp_path, **changes)


def test_an_unknown_setting_is_refused_before_any_run_begins(tmp_path):
    study = read(tmp_path, arms={"with": {"model.num_expert": 3}, "without": {}})
    with pytest.raises(ConfigError, match=r"Arm 'with': .*num_expert"):
        study_runs(study, tmp_path / "out")


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_of_the_repository_has_runs_that_its_command_takes(path):
    study = read_study(path)
    assert len(study.seeds) >= 3
    runs = study_runs(study._replace(seeds=study.seeds[:1]), Path("runs/studies") / path.stem)
    assert [run.arm for run in runs] == list(study.arms)


# ---- conclusions, on numbers of which they are known ----

FAR = {"a": [2.0, 2.1, 2.2], "b": [2.5, 2.7, 2.6], "c": [3.0, 3.3, 3.5]}
NEAR = {"a": [2.0, 2.1, 2.2], "b": [2.0006, 2.1007, 2.2008]}
NOISY = {"a": [2.0, 2.9, 2.2], "b": [2.5, 2.1, 2.6]}


def study_of(primary: Contrast, *contrasts: Contrast) -> Study:
    content = {**STUDY, "arms": {"a": {}, "b": {}, "c": {}}}
    study = to_record(Study, content, where="here")
    return study._replace(primary=primary, contrasts=list(contrasts))


def results(study: Study, numbers: dict[str, list[float]]) -> list[ContrastResult]:
    by_seed = {arm: dict(enumerate(numbers.get(arm, ()))) for arm in study.arms}
    return contrast_results(study, by_seed)


@pytest.mark.parametrize(
    ("numbers", "primary", "verdict"),
    [
        (FAR, Contrast("a", "b"), "holds"),
        (FAR, Contrast("b", "a"), "does not hold at this scale"),
        (FAR, Contrast("b", "a", expect="worse"), "holds"),
        (FAR, Contrast("a", "b", expect="equal"), "does not hold at this scale"),
        (NEAR, Contrast("a", "b", expect="equal", margin=0.01), "holds"),
        (NEAR, Contrast("b", "a", margin=0.01), "does not hold at this scale"),
        (NOISY, Contrast("a", "b"), "not resolved"),
        (NOISY, Contrast("a", "b", expect="equal"), "not resolved"),
        ({"a": [2.0], "b": [2.5]}, Contrast("a", "b"), "not resolved"),
        ({"a": [2.0] * 3, "b": [2.5] * 3}, Contrast("a", "b"), "not resolved"),
    ],
)
def test_a_claim_holds_is_refuted_or_stays_open(numbers, primary, verdict):
    (result,) = results(study_of(primary), numbers)
    assert result.verdict == verdict


def test_the_primary_comparison_is_the_paired_t_test_and_holm_corrects_the_others():
    primary, first, second = results(
        study_of(Contrast("a", "b"), Contrast("a", "c"), Contrast("b", "c")), FAR
    )
    expected = stats.ttest_rel(FAR["b"], FAR["a"])
    interval = expected.confidence_interval(0.95)
    found = primary.difference
    assert (found.mean, found.p) == pytest.approx((0.5, expected.pvalue))
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))

    # Holm: the smaller one times two, the larger one at least as large as that.
    low, high = sorted(stats.ttest_rel(FAR["c"], FAR[arm]).pvalue for arm in ("a", "b"))
    corrected = sorted([first.difference.p, second.difference.p])
    assert corrected == pytest.approx([2 * low, max(2 * low, high)])


def test_without_a_seed_that_both_arms_have_there_is_no_comparison():
    assert results(study_of(Contrast("a", "b")), {"a": [2.0]}) == []


# ---- studies that really train ----


@pytest.mark.slow
def test_a_study_that_was_killed_goes_on_and_comes_to_the_same_numbers(tmp_path, capsys):
    studies = write_studies(tmp_path, seeds=[3])
    whole = studies / "whole"
    run_study(studies, whole, "--jobs", "2")
    report = (whole / "study.md").read_text()
    assert "| with vs. without (primary) | better | 0.01 | 1 |" in report
    assert "Missing runs" not in report

    # Killed while a run writes its metrics; its run ends with it.
    killed = studies / "killed"
    folder = killed / "runs/with/seed-3"
    metrics = folder / "metrics.jsonl"
    command = Command("scripts.study", [studies / "study.yaml", "--out", killed, "--jobs", "2"])
    command.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
    command.send_signal(signal.SIGKILL)
    command.finish()
    end = time.monotonic() + TIMEOUT
    while is_locked(folder):
        assert time.monotonic() < end
        time.sleep(0.1)

    # What is there is reported, the rest is run, and a third call runs nothing.
    run_study(studies, killed, "--report")
    assert "Missing runs" in (killed / "study.md").read_text()
    for _ in range(2):
        run_study(studies, killed, "--jobs", "2")
        assert (killed / "study.md").read_text() == report.replace(str(whole), str(killed))
    assert "2 runs; 2 are complete" in capsys.readouterr().out

    # Other settings are refused in the same folder, and the message says which.
    (studies / "study.yaml").write_text(
        yaml.safe_dump(
            {**STUDY, "seeds": [3], "settings": {**STUDY["settings"], "training.steps": 7}}
        )
    )
    with pytest.raises(StudyError, match=r"seed 3 failed with exit code 2.*steps"):
        run_study(studies, killed)


def is_locked(folder: Path) -> bool:
    try:
        with locked_folder(folder, "locked"):
            return False
    except ValueError:
        return True
