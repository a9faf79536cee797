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
from stmoe_eval.studies.command import main
from stmoe_eval.studies.processes import StudyError
from stmoe_eval.studies.results import ContrastResult, contrast_results
from stmoe_eval.studies.study import Contrast, Study, read_study, study_runs
from tests.processes import TIMEOUT, Command
from tests.training.tiny_run import write_inputs

STUDIES = sorted((Path(__file__).parents[3] / "recipes/studies").glob("*.yaml"))
PRIMARY = {"arm": "with", "against": "without"}
STUDY = {
    "title": "Balance",
    "claim": "It matters.",
    "paper": "It does.",
    "expected": "It will.",
    "command": "pretrain",
    "settings": {
        "config": "pretrain.yaml",
        "corpus": "{studies}/corpus",
        "tokenizer": "{studies}/tokenizer",
        "optim.cooldown_steps": 2,
        "training.steps": 6,
        "training.evaluate_every": 3,
        "training.checkpoint_every": 2,
    },
    "arms": {"with": {}, "without": {"model.load_balance_loss_weight": 0.0}},
    "seeds": [3, 5],
    "measure": {"metric": "heldout/loss"},
    "primary": PRIMARY,
}


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
        ({"settings": {"seed": 3}}, "seed cannot be set"),
        ({"arms": {"with": {"model.num_expert": 3}, "without": {}}}, "Arm 'with': .*num_expert"),
    ],
)
def test_a_study_that_makes_no_sense_is_refused_before_any_run_begins(tmp_path, changes, noun):
    with pytest.raises(ConfigError, match=noun):
        study_runs(read(tmp_path, **changes), tmp_path / "out")


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


def results(numbers: dict[str, list[float]], *contrasts: Contrast) -> list[ContrastResult]:
    content = {**STUDY, "arms": {"a": {}, "b": {}, "c": {}}}
    study = to_record(Study, content, where="here")
    study = study._replace(primary=contrasts[0], contrasts=list(contrasts[1:]))
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
        ({"a": [2.0], "b": [2.5]}, Contrast("a", "b"), "not resolved"),
    ],
)
def test_a_claim_holds_is_refuted_or_stays_open(numbers, primary, verdict):
    (result,) = results(numbers, primary)
    assert result.verdict == verdict


def test_the_primary_comparison_is_the_paired_t_test_and_holm_corrects_the_others():
    contrasts = [Contrast("a", "b"), Contrast("a", "c"), Contrast("b", "c")]
    primary, first, second = results(FAR, *contrasts)
    expected = stats.ttest_rel(FAR["b"], FAR["a"])
    interval = expected.confidence_interval(0.95)
    found = primary.difference
    assert (found.mean, found.p) == pytest.approx((0.5, expected.pvalue))
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))

    # Holm: the smaller one times two, the larger one at least as large as that.
    low, high = sorted(stats.ttest_rel(FAR["c"], FAR[arm]).pvalue for arm in ("a", "b"))
    corrected = sorted([first.difference.p, second.difference.p])
    assert corrected == pytest.approx([2 * low, max(2 * low, high)])

    # Without a seed that both arms have there is no comparison.
    assert results({"a": [2.0]}, contrasts[0]) == []


# ---- a study that really trains ----


@pytest.mark.slow
def test_a_study_that_was_killed_goes_on_until_all_runs_are_complete(tmp_path, capsys):
    write_inputs(tmp_path)
    file, out = tmp_path / "study.yaml", tmp_path / "killed"
    content = {**STUDY, "seeds": [3]}
    file.write_text(yaml.safe_dump(content))

    def run(*options: str) -> str:
        main([str(file), "--out", str(out), *options])
        return (out / "study.md").read_text()

    # Killed while a run writes its metrics; its run ends with it.
    folder = out / "runs/with/seed-3"
    metrics = folder / "metrics.jsonl"
    command = Command("scripts.study", [file, "--out", out, "--jobs", "2"])
    command.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
    command.send_signal(signal.SIGKILL)
    command.finish()
    end = time.monotonic() + TIMEOUT
    while is_locked(folder):
        assert time.monotonic() < end
        time.sleep(0.1)

    # What is there is reported, the rest is run.
    assert "Missing runs" in run("--report")
    report = run("--jobs", "2")
    assert "| with vs. without (primary) | better | 0.01 | 1 |" in report
    assert "Missing runs" not in report
    capsys.readouterr()
    assert run("--report") == report

    # Other settings are refused in the same folder, and the message says which.
    settings = {**STUDY["settings"], "training.steps": 7}
    file.write_text(yaml.safe_dump({**content, "settings": settings}))
    with pytest.raises(StudyError, match=r"seed 3 failed with exit code 2.*steps"):
        run()
    assert "2 runs; 2 are complete" in capsys.readouterr().out


def is_locked(folder: Path) -> bool:
    try:
        with locked_folder(folder, "locked"):
            return False
    except ValueError:
        return True
