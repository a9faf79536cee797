"""Fine-tuning on a mixture with dev scores: the best model beside the last, several seeds, kills at
bad moments.

Oracles: the run that was never stopped; the saved models, evaluated again by themselves; statistics
by hand.
"""

import json
import shutil
import statistics

import pytest
import yaml

import stmoe
import stmoe_eval.answers.predict
from moe import CheckpointError, ConfigError, DataError
from moe.checkpoint.best_model import best_and_last, score_model
from moe.commands import finetune as finetune_command
from moe.commands import pretrain
from moe.data.mixture import build_source, choose_examples
from stmoe_eval.answers.data_ranks import SINGLE_PROCESS
from stmoe_eval.dev_scores import read_tasks
from tests.training.test_finetune_command import losses
from tests.training.tiny_run import TRAINING, pretrain_arguments, write_inputs
from tests.training.tiny_tasks import DEV, SIZES, registered

RECIPE = {
    "seeds": [3, 5],
    "mixture": {"tasks": ["first", "last", "rare"], "maximum": 53, "dev_examples": None},
    "data": {"inputs_length": 48, "targets_length": 24, "pack": True},
    "optim": {"schedule": "constant", "lr": 0.1, "warmup_steps": 2},
    "training": {**TRAINING, "steps": 6, "evaluate_every": 4, "checkpoint_every": 2},
}
STEPS = [4, 6]


@pytest.fixture(autouse=True, scope="module")
def tiny_tasks():
    with registered():
        yield


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model and a recipe that holds everything but the folder of the run."""
    folder = tmp_path_factory.mktemp("inputs")
    paths = write_inputs(folder)
    steps = ("--training.steps", 2, "--optim.cooldown_steps", 0)
    pretrain.main(pretrain_arguments(paths, folder / "pretrain", *steps))
    paths["model"], paths["recipe"] = folder / "pretrain" / "model", folder / "recipe.yaml"
    paths["recipe"].write_text(yaml.safe_dump({"pretrained": str(paths["model"]), **RECIPE}))
    return paths


def tune(inputs, out, *more):
    stmoe.main(["finetune", *map(str, ("--config", inputs["recipe"], "--out", out, *more))])
    return out


@pytest.fixture(scope="module")
def straight(inputs, tmp_path_factory):
    """Both seeds, never stopped."""
    return tune(inputs, tmp_path_factory.mktemp("straight") / "run")


def eval_lines(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "eval/mean" in line]


def files_of(run):
    """Returns what a run leaves that another one should leave too, byte for byte."""
    names = [
        f"{model}/{file}"
        for model in ("model", "best/model")
        for file in ("model.safetensors", "config.json")
    ]
    return {name: (run / name).read_bytes() for name in (*names, "best/scores.json")}


def test_every_evaluation_writes_scores_by_task_and_their_mean(straight, inputs):
    lines = eval_lines(straight / "seed-3")
    assert [line["step"] for line in lines] == STEPS
    # The task `rare` has no dev split.
    names = {"eval/first/accuracy", "eval/first/near", "eval/last/accuracy", "eval/mean"}
    for line in lines:
        assert line.keys() == {"step", *names}
        headlines = (line["eval/first/near"] + line["eval/last/accuracy"]) / 2
        assert line["eval/mean"] == pytest.approx(headlines)

    weights = "model/model.safetensors"
    before = (inputs["model"] / "model.safetensors").read_bytes()
    assert before != (straight / "seed-3" / weights).read_bytes(), "the model learns"


def test_the_best_and_the_last_model_are_kept_and_score_what_is_said(straight, tmp_path):
    run = straight / "seed-3"
    best, last = best_and_last(run)
    means = {line["step"]: line["eval/mean"] for line in eval_lines(run)}
    assert (best["mean"], last["step"]) == (max(means.values()), STEPS[-1])
    assert best["step"] == min(step for step in STEPS if means[step] == best["mean"])
    assert json.loads((run / "best" / "scores.json").read_text()) == best
    scores = read_tasks(["first", "last"]).scores(None, SINGLE_PROCESS)
    assert scores is not None
    for folder, said in (("best/model", best), ("model", last)):
        again = scores(run / folder, tmp_path / folder)
        assert {"step": said["step"], **again} == pytest.approx(said)
    assert not (run / "dev" / "model").exists()


def test_the_summary_has_mean_and_spread_over_seeds_and_says_what_a_peak_is(straight):
    summary = json.loads((straight / "summary.json").read_text())
    text = (straight / "summary.md").read_text()
    assert [run["seed"] for run in summary["runs"]] == [3, 5]
    for which in ("best", "last"):
        values = [run[which]["mean"] for run in summary["runs"]]
        mean, stdev = statistics.mean(values), statistics.stdev(values)
        assert summary[which]["mean"] == {"mean": pytest.approx(mean), "stdev": stdev}
        assert f"{mean:.2f} ± {stdev:.2f}" in text
    assert "The paper reports the peak" in text and "optimistic" in text
    for run in summary["runs"]:
        assert run["models"]["best"].endswith("best/model") and run["models"]["last"] in text
    assert losses(straight / "seed-3") != losses(straight / "seed-5")


class Killed(BaseException):
    """Nothing catches it, as nothing catches a kill."""


@pytest.mark.slow
def test_a_run_killed_while_it_evaluates_goes_on_as_if_it_had_not_been(
    inputs, straight, tmp_path, monkeypatch
):
    made, original = [], stmoe_eval.answers.predict._generate
    num_before_the_kill = 3  # the second evaluation of the first run has begun

    def generate(system, task, *more):
        if len(made) == num_before_the_kill:
            raise Killed
        made.append((system.fingerprint, task.name))
        return original(system, task, *more)

    monkeypatch.setattr(stmoe_eval.answers.predict, "_generate", generate)
    with pytest.raises(Killed):
        tune(inputs, tmp_path / "run")
    num_before_the_kill = None
    tune(inputs, tmp_path / "run", "--resume")
    assert len(made) == len(set(made)) == 2 * 2 * len(STEPS), "no answer was generated twice"
    for folder in ("seed-3", "seed-5"):
        assert losses(tmp_path / "run" / folder) == losses(straight / folder)
        assert eval_lines(tmp_path / "run" / folder) == eval_lines(straight / folder)
        assert files_of(tmp_path / "run" / folder) == files_of(straight / folder)
    theirs = (straight / "summary.json").read_text().replace(str(straight), str(tmp_path / "run"))
    assert (tmp_path / "run" / "summary.json").read_text() == theirs


# ---- which model is the best, without training ----


def export_of(step):
    def export(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(str(step))

    return export


def best_model(folder):
    return (folder / "best" / "model" / "config.json").read_text()


def test_the_first_model_of_the_highest_mean_is_the_best(tmp_path):
    nan = float("nan")
    means = [(nan, 0), (5.0, 1), (7.0, 2), (7.0, 2), (3.0, 2), (nan, 2), (8.0, 6)]
    for step, (mean, best) in enumerate(means):
        found = score_model(tmp_path, step, export_of(step), lambda *_, mean=mean: {"mean": mean})
        assert found == pytest.approx({"mean": mean}, nan_ok=True)
        assert best_model(tmp_path) == str(best)
        assert not (tmp_path / "dev" / "model").exists()


def test_missing_and_damaged_scores_are_one_message_and_scored_again_when_removed(tmp_path):
    with pytest.raises(DataError, match=r"dev holds no scores\.json"):
        best_and_last(tmp_path)
    score_model(tmp_path, 1, export_of(1), lambda *_: {"mean": 1.0})
    score_model(tmp_path, 2, export_of(2), lambda *_: {"mean": 2.0})
    file = tmp_path / "dev" / "step_00000002" / "scores.json"
    for content in ("", '{"mean": 1.0}', '{"step": 2, "mean": "high"}'):
        file.write_text(content)
        with pytest.raises(DataError, match=r"_00000002/scores\.json.* Remove the file: --resume"):
            score_model(tmp_path, 2, export_of(2), lambda *_: {"mean": 2.0})
    file.unlink()
    assert score_model(tmp_path, 2, export_of(2), lambda *_: {"mean": 2.0}) == {"mean": 2.0}


def test_what_a_kill_left_of_a_candidate_is_not_mixed_with_the_next(tmp_path):
    (tmp_path / "dev" / "model").mkdir(parents=True)
    (tmp_path / "dev" / "model" / "generation_config.json").write_text("old")
    score_model(tmp_path, 1, export_of(1), lambda *_: {"mean": 1.0})
    assert best_model(tmp_path) == "1"
    assert sorted(path.name for path in (tmp_path / "dev").iterdir()) == ["step_00000001"]


def test_a_kill_between_scores_and_keeping_the_model_loses_nothing(tmp_path, monkeypatch):
    import moe.checkpoint.best_model as peak

    def killed(*_):
        raise Killed

    score_model(tmp_path, 1, export_of(1), lambda *_: {"mean": 1.0})
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(peak, "_promote", killed)
        score_model(tmp_path, 2, export_of(2), lambda *_: {"mean": 2.0})
    assert best_model(tmp_path) == "1"
    assert score_model(tmp_path, 1, killed, killed) == {"mean": 1.0}  # the same steps again
    assert score_model(tmp_path, 2, export_of(2), killed) == {"mean": 2.0}
    assert best_model(tmp_path) == "2"


# ---- the door ----


REFUSED = {
    ("--task", "frist"): (ConfigError, r"no task called 'frist'\. Did you mean 'first'"),
    ("--seeds", "3", "3"): (ConfigError, r"seeds is \[3, 3\]; expected one or more different"),
    ("--seeds", "-1"): (ConfigError, "seed is -1"),
    ("--task", "first", "--train", "pairs.jsonl"): (ConfigError, "first and train pairs.jsonl given"),
    ("--mixture.tasks", "[]"): (ConfigError, "nothing given to train on; expected one of --task"),
    ("--task", "rare"): (ConfigError, "dev_examples is None, and no task has a dev split"),
    ("--mixture.folder", "nowhere"): (DataError, "is nowhere, which is not a folder"),
    ("--pretrained", "none"): (CheckpointError, "none holds no model"),
}  # fmt: skip


def test_what_cannot_be_run_is_one_message_before_anything_is_written(inputs, tmp_path):
    for more, (error, message) in REFUSED.items():
        with pytest.raises(error, match=message) as raised:
            tune(inputs, tmp_path / "run", *more)
        assert "\n" not in str(raised.value)
        assert not (tmp_path / "run").exists()


def test_a_task_without_training_rows_is_refused(inputs, tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "rare", 0)
    with pytest.raises(DataError, match="Task 'rare' has no training examples"):
        tune(inputs, tmp_path / "run")


def test_a_folder_that_holds_one_of_the_runs_is_refused_before_any_of_them_starts(
    inputs, straight, tmp_path
):
    shutil.copytree(straight / "seed-5", tmp_path / "run" / "seed-5")
    with pytest.raises(DataError, match="seed-5 already holds a run"):
        tune(inputs, tmp_path / "run")
    assert not (tmp_path / "run" / "seed-3").exists()


def test_a_resumed_run_with_another_mixture_is_refused(inputs, straight):
    for name in ("maximum", "dev_examples", "train_examples", "temperature"):
        with pytest.raises(CheckpointError, match=rf"mixture\.{name} was .* and is 7"):
            tune(inputs, straight, f"--mixture.{name}", "7", "--resume")


@pytest.fixture
def built_runs(monkeypatch):
    """Runs that commands build, and do not train."""
    runs = []
    monkeypatch.setattr(finetune_command, "train", lambda run, **_: runs.append(run))
    monkeypatch.setattr(finetune_command, "write_summary", lambda *_: "")
    monkeypatch.setattr(finetune_command, "best_sentence", lambda *_: "")
    return runs


def test_the_command_line_wins_over_the_recipe(inputs, tmp_path, built_runs):
    (tmp_path / "pairs.jsonl").write_text('{"inputs": "ba", "targets": "ko"}\n')
    tune(inputs, tmp_path / "a", "--task", "last", "--seeds", "7", "--mixture.dev_examples", "5")
    tune(inputs, tmp_path / "b", "--train", tmp_path / "pairs.jsonl", "--seeds", "7")
    task, pairs = built_runs
    assert (task.folder.parent.name, pairs.folder.parent.name) == ("a", "b")
    assert (task.recipe.mixture.tasks, pairs.recipe.mixture.tasks) == (["last"], [])
    assert (task.recipe.mixture.dev_examples, pairs.recipe.mixture.dev_examples) == (5, 500)
    assert (task.source.num_examples, pairs.source.num_examples) == (SIZES["last"], 1)
    assert task.dev is not None and pairs.dev is None and DEV > 5


@pytest.mark.usefixtures("built_runs")
def test_each_seed_trains_on_its_own_subset_of_each_tasks_labels(
    inputs, tmp_path, monkeypatch, capsys
):
    made = []

    def build(tasks, *arguments, **settings):
        made.append(tasks)
        return build_source(tasks, *arguments, **settings)

    monkeypatch.setattr(finetune_command, "build_source", build)
    whole = read_tasks(["first", "rare"]).train
    tune(inputs, tmp_path, "--mixture.tasks", "[first, rare]", "--mixture.train_examples", "11")
    printed = capsys.readouterr().out
    for seed, tasks in zip((3, 5), made, strict=True):
        assert tasks == {**whole, "first": choose_examples(whole["first"], 11, seed)}
        assert f"first: 11 of 101 training examples (seed {seed})." in printed
    assert "rare: all 5 training examples (11 were asked for)." in printed
