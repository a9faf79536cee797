"""stmoe upcycle from end to end: a dense model becomes sparse, and pre-training continues from it."""

import json
import shutil

import pytest
import yaml

from moe import STMoEConfig, STMoEForConditionalGeneration
from moe.commands import pretrain, upcycle
from moe.errors import ConfigError, DataError
from tests.training.tiny_run import MODEL, pretrain_arguments, write_inputs

DENSE = {
    "num_experts": 0,
    "num_sparse_encoder_layers": 0,
    "num_sparse_decoder_layers": 0,
    "sparse_dense_stacking": False,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    paths = write_inputs(tmp_path_factory.mktemp("inputs"))
    recipe = yaml.safe_load(paths["pretrain.yaml"].read_text())
    recipe["model"] = {**MODEL, **DENSE}
    recipe["training"] |= {"steps": 12, "evaluate_every": 12}
    paths["pretrain.yaml"].write_text(yaml.safe_dump(recipe))
    paths["dense"] = paths["texts"].parent / "dense"
    pretrain.main(pretrain_arguments(paths, paths["dense"]))
    return paths


def upcycle_to(inputs, folder, *more, source=None):
    source = source or inputs["dense"] / "model"
    arguments = ["--from", source, "--to", folder, "--experts", "3", *more]
    upcycle.main([str(argument) for argument in arguments])


def test_an_upcycled_model_answers_as_before_and_is_trained_further(inputs, tmp_path, capsys):
    text = ["--corpus", inputs["corpus"], "--inputs-length", "16", "--examples", "23"]
    upcycle_to(inputs, tmp_path / "sparse", *text)
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "sparse/surgery.json").read_text())
    effects = report["effects"]
    before, after = effects["loss"]
    assert after == pytest.approx(before, abs=1e-6)
    assert abs(effects["loss_change"]["value"]) < 1e-6
    changed, number = effects["changed_answers"]
    assert (changed, number) == (0, 23)
    assert "0 of 23" in printed

    # Sizes are those of the models, and the card says what was done.
    config = STMoEConfig.from_pretrained(tmp_path / "sparse")
    assert report["sizes"][0][1:] == [
        STMoEConfig.from_pretrained(inputs["dense"] / "model").num_parameters(),
        config.num_parameters(),
    ]
    assert "stmoe upcycle --from" in (tmp_path / "sparse/README.md").read_text()

    # A recipe without settings of a model keeps those of the model.
    recipe = yaml.safe_load(inputs["pretrain.yaml"].read_text())
    del recipe["model"]
    recipe["optim"]["schedule_options"] = {"first_step": 12}
    (tmp_path / "continue.yaml").write_text(yaml.safe_dump(recipe))
    paths = {**inputs, "pretrain.yaml": tmp_path / "continue.yaml"}
    more = ["--pretrained", tmp_path / "sparse", "--training.steps", "3"]
    pretrain.main(pretrain_arguments(paths, tmp_path / "run", *more, "--optim.cooldown_steps", "0"))
    trained = STMoEForConditionalGeneration.from_pretrained(tmp_path / "run/model")
    assert trained.config.num_experts == 3
    saved = yaml.safe_load((tmp_path / "run/recipe.yaml").read_text())
    assert saved["model"]["num_experts"] == 3
    assert saved["model"]["capacity_factor"] is None


def test_options_that_do_not_fit_are_refused(inputs, tmp_path):
    with pytest.raises(ConfigError, match="no option --dropless"):
        upcycle_to(inputs, tmp_path / "a", "--corpus", inputs["corpus"], "--dropless")
    with pytest.raises(ConfigError, match="num_selected_experts is 4"):
        upcycle_to(inputs, tmp_path / "a", "--selected", "4")
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        upcycle_to(inputs, tmp_path / "there")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]


def test_a_source_that_cannot_be_measured_is_named(inputs, tmp_path):
    source = tmp_path / "bare"
    shutil.copytree(inputs["dense"] / "model", source)
    (source / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=f"{source} has no tokenizer.json"):
        upcycle_to(inputs, tmp_path / "a", "--corpus", inputs["corpus"], source=source)
    (tmp_path / "t5x").mkdir()
    (tmp_path / "t5x/checkpoint").touch()
    with pytest.raises(ConfigError, match="Convert it first"):
        upcycle_to(inputs, tmp_path / "a", source=tmp_path / "t5x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "t5x"]


def test_experts_of_a_sparse_model_get_twins_and_parts(inputs, tmp_path, capsys):
    upcycle_to(inputs, tmp_path / "sparse")
    text = ["--corpus", inputs["corpus"], "--inputs-length", "16", "--examples", "5"]
    more = ["--experts", "6", "--granularity", "2", *text]
    upcycle_to(inputs, tmp_path / "larger", *more, source=tmp_path / "sparse")
    assert "logsumexp of 4 equal rows" in capsys.readouterr().out
    report = json.loads((tmp_path / "larger/surgery.json").read_text())
    assert report["effects"]["changed_answers"] == [0, 5]
    assert report["effects"]["loss"][0] == pytest.approx(report["effects"]["loss"][1], abs=1e-6)
    for layer in report["effects"]["routing"]:
        assert layer["first_expert_changed"] == 0
        assert (len(layer["load_before"]), len(layer["load_after"])) == (3, 12)
    with pytest.raises(ConfigError, match=r"--selected .* no effect on .*, which has 3 experts"):
        upcycle_to(inputs, tmp_path / "a", "--selected", "4", source=tmp_path / "sparse")
