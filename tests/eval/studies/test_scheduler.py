"""Studies that really train: killed half-way they go on, and come to the same numbers."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest

from moe.errors import ConfigError
from stmoe_eval.studies.report import read_result
from stmoe_eval.studies.runs import study_runs
from stmoe_eval.studies.scheduler import StudyError, steps_done
from stmoe_eval.studies.study import read_study
from tests.eval.studies.conftest import copy_run
from tests.eval.studies.tiny_study import run_study
from tests.processes import Command

pytestmark = pytest.mark.slow


def curves(study: Path) -> list[object]:
    return [(run.arm, run.seed, run.number, run.curve) for run in read_result(study).outcomes]


def test_a_study_that_was_killed_goes_on_and_comes_to_the_same_curves(
    studies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = curves(studies / "whole/study.json")
    assert [(arm, seed) for arm, seed, *_ in whole] == [
        *(("with", 3), ("without", 3), ("with", 5), ("without", 5))
    ]

    # Killed while a run writes its metrics.
    killed = studies / "killed"
    metrics = killed / "runs/with/seed-3/metrics.jsonl"
    options = ["--only", "with:3", "--jobs", "2"]  # so many threads: the last bits hang on them
    command = Command("scripts.study", [studies / "study.yaml", "--out", killed, *options])
    command.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
    command.send_signal(signal.SIGKILL)
    command.finish()
    assert not (killed / "study.json").exists()

    run_study(studies, killed, *options)
    assert curves(killed / "study.json") == whole[:1]

    # A third call runs nothing, and writes the same numbers.
    capsys.readouterr()
    run_study(studies, killed, *options)
    assert "4 runs, 24 steps, 2 at a time; 1 are complete" in capsys.readouterr().out
    assert curves(killed / "study.json") == whole[:1]


def test_a_study_that_was_moved_goes_on_and_reports_its_numbers(
    studies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = studies / "whole"  # a copy, of which the original may be elsewhere
    numbers = curves(out / "study.json")
    run_study(studies, out, "--report")
    assert curves(out / "study.json") == numbers

    shutil.rmtree(out / "runs/without/seed-5")
    capsys.readouterr()
    run_study(studies, out, "--jobs", "2")
    assert "3 are complete" in capsys.readouterr().out
    assert curves(out / "study.json")[:3] == numbers[:3]
    assert len(curves(out / "study.json")) == 4

    # Other settings are refused there too.
    with pytest.raises(StudyError, match="holds a run with other settings"):
        run_study(studies, out, "--set", "training.steps=7")


def test_runs_of_two_machines_come_to_the_whole_in_one_folder(
    studies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in ("with/seed-3", "with/seed-5", "without/seed-3"):
        copy_run(studies, "parts", run)
    run_study(studies, studies / "parts", "--report")
    parts = read_result(studies / "parts/study.json")
    assert [(run.arm, run.seed) for run in parts.outcomes] == [
        *(("with", 3), ("without", 3), ("with", 5))
    ]
    assert parts.missing == ["without, seed 5"]

    copy_run(studies, "parts", "without/seed-5")
    run_study(studies, studies / "parts", "--only", "without:5")
    assert "4 are complete" in capsys.readouterr().out
    whole = read_result(studies / "whole/study.json")
    parts = read_result(studies / "parts/study.json")
    assert (parts.outcomes, parts.contrasts) == (whole.outcomes, whole.contrasts)


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


def test_progress_is_read_from_the_end_of_the_metrics(studies: Path) -> None:
    run = study_runs(read_study(studies / "study.yaml"), studies / "out")[0]
    assert steps_done(run) == 0

    # The last line is torn, and the file is longer than what is read of it.
    run.folder.mkdir(parents=True)
    lines = [json.dumps({"step": step, "train/loss": 1.5}) + "\n" for step in range(800)]
    (run.folder / "metrics.jsonl").write_text("".join(lines) + '{"ste')
    assert steps_done(run) == 799


def test_runs_of_another_command_are_refused(studies: Path) -> None:
    out = studies / "settings"
    state = out / "runs/with/seed-3/study_run.json"
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps({"commands": [["-m", "stmoe", "pretrain"]]}))
    with pytest.raises(StudyError, match="holds a run with other settings"):
        run_study(studies, out)


def test_a_budget_that_is_too_small_names_what_is_left_out(
    studies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = studies / "budget"
    run_study(studies, out, "--hours", "1e-12")
    result = read_result(out / "study.json")
    assert result.outcomes == []
    assert "without, seed 5" in result.missing
    assert "left out, the budget would not suffice: with, seed 3" in capsys.readouterr().out


def test_a_run_that_diverges_is_counted_with_its_initial_loss(studies: Path) -> None:
    out = studies / "diverged"
    # Every step makes the weights 1e8 times as large.
    settings = ["--only", "with:3"]
    for setting in ("optim.optimizer=adamw", "optim.lr=1000000", "optim.weight_decay=100"):
        settings += ["--set", setting]
    run_study(studies, out, *settings)

    (diverged,) = read_result(out / "study.json").outcomes
    assert diverged.has_diverged
    assert (diverged.curve[0].step, diverged.curve[0].value) == (0, diverged.number)


def test_a_run_that_fails_ends_the_study_with_its_last_words(studies: Path) -> None:
    missing = f"corpus={studies / 'absent'}"
    with pytest.raises(StudyError, match=r"with, seed 3 failed with exit code 2:\n(.|\n)*absent"):
        run_study(studies, studies / "failed", "--set", missing)
