"""Studies as values: what a file may say, and which runs it stands for."""

from pathlib import Path

import pytest
import yaml

from moe import STMoEConfig
from moe.errors import ConfigError
from moe.training.recipe import PretrainRecipe
from stmoe_eval.studies.command import read_overrides
from stmoe_eval.studies.outcomes import ArmSize, arm_size
from stmoe_eval.studies.runs import study_runs
from stmoe_eval.studies.study import Study, read_study
from tests.models.tiny import tiny_model

ROOT = Path(__file__).parents[3]
STUDIES = sorted((ROOT / "recipes/studies").glob("*.yaml"))

PRIMARY = {"arm": "with", "against": "without"}
CONTENT = {
    "title": "Balance",
    "claim": "It matters.",
    "paper": "It does.",
    "expected": "It will.",
    "command": "pretrain",
    "settings": {"config": "tiny.yaml", "corpus": "{studies}/corpus", "tokenizer": "{out}/t"},
    "arms": {"with": {}, "without": {"model.load_balance_loss_weight": 0.0}},
    "seeds": [3, 5],
    "measure": {"metric": "heldout/loss"},
    "primary": PRIMARY,
}


def write(folder: Path, **changes: object) -> Path:
    (folder / "tiny.yaml").write_text("training: {steps: 7}\noptim: {warmup_steps: 2}\n")
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({**CONTENT, **changes}))
    return path


def study(folder: Path, **changes: object) -> Study:
    return read_study(write(folder, **changes))


def test_a_study_is_a_run_for_each_arm_and_seed_and_paths_name_the_folders(tmp_path: Path) -> None:
    runs = study_runs(study(tmp_path), Path("runs/studies/{seed}"))

    # Whole seeds come first.
    names = [(run.arm, run.seed) for run in runs]
    assert names == [("with", 3), ("without", 3), ("with", 5), ("without", 5)]
    assert len({run.folder for run in runs}) == 4

    # Braces in the name of a folder are not replaced in turn.
    command = runs[0].commands[0]
    assert command[command.index("--corpus") + 1] == "runs/studies/corpus"
    assert command[command.index("--tokenizer") + 1] == "runs/studies/{seed}/t"


def test_an_arm_that_continues_a_model_has_the_size_of_that_model(tmp_path: Path) -> None:
    arms = {"with": {"pretrained": "{studies}/trunk"}, "without": {"model.num_layers": 1}}
    with_trunk, without = study_runs(study(tmp_path, arms=arms, seeds=[3]), tmp_path / "out")
    model = tiny_model()
    model.save_pretrained(with_trunk.folder / "model")
    size = arm_size(with_trunk)
    assert size is not None
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert arm_size(without) == ArmSize(*[STMoEConfig(num_layers=1).num_parameters()] * 2)


def test_the_arm_and_the_command_line_win_in_that_order(tmp_path: Path) -> None:
    arms = {"with": {"training.steps": 11}, "without": {}}
    content = study(tmp_path, seeds=[3], arms=arms)

    first, second = study_runs(content, tmp_path / "out")
    assert (first.recipe.training.steps, second.recipe.training.steps) == (11, 7)
    first, _ = study_runs(content, tmp_path / "out", {"training.steps": 13})
    assert first.recipe.training.steps == 13


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": []}, "seeds is \\[\\]; expected one or more different numbers"),
        ({"seeds": [1, 1]}, "seeds is \\[1, 1\\]"),
        ({"arms": {}}, "arms is {}; expected at least one arm"),
        ({"arms": {"../x": {}}}, "expected names of lower-case letters"),
        ({"primary": {**PRIMARY, "arm": "wiht"}}, "no arm 'wiht'.*Did you mean 'with'"),
        ({"primary": {**PRIMARY, "margin": 0}}, "margin is 0.0; .* above 0"),
        ({"primary": {**PRIMARY, "against": "with"}}, "'with' is compared with itself"),
        ({"settings": {"seed": 3}}, "seed is set by the study itself"),
        ({"arms": {"with": {"print_config": ""}, "without": {}}}, "print_config is not a setting"),
        ({"command": "eval"}, "command is 'eval'"),
    ],
)
def test_a_study_that_makes_no_sense_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        study(tmp_path, **changes)
    assert "study.yaml" in str(error.value)


def test_the_settings_of_a_run_do_not_depend_on_where_the_study_lies(tmp_path: Path) -> None:
    settings = {"pretrained": "{studies}/model", "mixture.folder": "{out}/rows"}
    arms = {"with": {}, "without": {"training.steps": 11}}
    content = study(tmp_path, command="finetune", settings=settings, arms=arms, seeds=[3])
    here, other = study_runs(content, tmp_path / "here")
    there, _ = study_runs(content, tmp_path / "there/deeper")
    assert here.settings == there.settings
    assert here.settings != other.settings


def test_an_unknown_setting_is_refused_before_any_run_begins(tmp_path: Path) -> None:
    content = study(tmp_path, arms={"with": {"model.num_expert": 3}, "without": {}})
    with pytest.raises(ConfigError, match=r"Arm 'with': .*num_expert"):
        study_runs(content, tmp_path / "out")


@pytest.mark.parametrize("text", ["{corpora}", "{out[0]}", "{seed:>3000000000}", "{"])
def test_braces_may_hold_one_of_three_names_and_no_format(tmp_path: Path, text: str) -> None:
    settings = {"config": "tiny.yaml", "corpus": text}
    with pytest.raises(ConfigError, match=r"corpus is '.*'; .* \{seed\}, \{out\}, \{studies\}"):
        study_runs(study(tmp_path, settings=settings), tmp_path / "out")


def test_overrides_are_yaml_values() -> None:
    assert read_overrides(["a.b=3", "c=null", "d=x=y"]) == {"a.b": 3, "c": None, "d": "x=y"}
    assert read_overrides(["a=2024-99-99", "b=[1, x]"]) == {"a": "2024-99-99", "b": [1, "x"]}
    for text in ("a", "=3"):
        with pytest.raises(ConfigError, match="expected NAME=VALUE"):
            read_overrides([text])
    with pytest.raises(ConfigError, match="out is set by the study itself"):
        read_overrides(["out=elsewhere"])


@pytest.mark.parametrize(
    "value", ["{", "!!bool x", "9" * 5000, "[" * 20_000, "{a: 2}"], ids=lambda value: value[:16]
)
def test_an_override_that_is_no_plain_yaml_value_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"--set a\.b is .*Give a number") as error:
        read_overrides([f"a.b={value}"])
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_of_the_repository_has_runs_that_its_command_takes(path: Path) -> None:
    """All arms with the first seed: other seeds change a number."""
    content = read_study(path)
    assert len(content.seeds) >= 3

    first = content._replace(seeds=content.seeds[:1])
    runs = study_runs(first, Path("runs/studies") / path.stem)
    assert [run.arm for run in runs] == list(content.arms)
    for run in runs:
        if isinstance(run.recipe, PretrainRecipe):
            run.recipe.build_config()


@pytest.mark.parametrize("value", [True, None])
def test_arms_are_drawn_over_a_number_that_each_of_them_has(tmp_path: Path, value: object) -> None:
    arms = {"with": {"training.batch_size": 4}, "without": {"training.batch_size": value}}
    with pytest.raises(ConfigError, match=r"training\.batch_size is .* number in arm without"):
        study(tmp_path, arms=arms, plot_over="training.batch_size")
