"""stmoe merge from end to end: the folder, the tables and what is refused."""

import json
import shutil

import pytest
import torch

from moe import STMoEConfig, STMoEForConditionalGeneration
from moe.commands import merge
from moe.errors import ConfigError
from moe.sparse.editing import sparse_layers
from tests.training.tiny_run import MODEL, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    paths = write_inputs(tmp_path_factory.mktemp("inputs"))
    paths["model"] = paths["texts"].parent / "model"
    torch.manual_seed(0)
    fields = {**MODEL, "eval_capacity_factor": None, "router_initializer_std": 1.0}
    model = STMoEForConditionalGeneration(STMoEConfig(**fields))
    with torch.no_grad():  # the first and the third of four experts are one
        for layer in sparse_layers(model).values():
            for weight in layer.experts.parameters():
                weight[2] = weight[0]
    model.save_pretrained(paths["model"])
    for file in paths["tokenizer"].glob("tokenizer*.json"):
        shutil.copy(file, paths["model"])
    return paths


def run(inputs, folder, *more):
    text = ["--corpus", inputs["corpus"], "--inputs-length", "16", "--examples", "23"]
    merge.main([str(word) for word in ("--from", inputs["model"], "--to", folder, *text, *more)])


def test_equal_experts_are_merged_and_nothing_changes(inputs, tmp_path, capsys):
    run(inputs, tmp_path / "merged", "--keep", 3, "--method", "output_clusters")
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "merged/surgery.json").read_text())
    (table,) = report["tables"]
    for name, number, groups in table["rows"]:
        assert name in ("encoder 1", "decoder 1") and number == "3 of 4"
        assert groups.startswith("1 (") and " + 3 (" in groups and groups in printed
    assert "stmoe merge" in (tmp_path / "merged/README.md").read_text()

    # The routers keep their rows, and no loss, answer or first expert changes.
    effects = report["effects"]
    assert effects["loss"][1] == pytest.approx(effects["loss"][0], abs=1e-6)
    assert effects["changed_answers"][0] == 0
    for layer in effects["routing"]:
        assert layer["first_expert_changed"] == 0 and len(layer["load_after"]) == 4
    sizes = {name: after for name, _, after in report["sizes"]}
    merged = STMoEForConditionalGeneration.from_pretrained(tmp_path / "merged")
    assert sizes["parameters"] == merged.num_parameters()


def test_a_budget_is_shared_among_layers(inputs, tmp_path):
    run(inputs, tmp_path / "m", "--budget", 7)
    config = STMoEConfig.from_pretrained(tmp_path / "m")
    assert sum(layer.num_stored_experts for layer in config.all_sparse_configs()) == 7


@pytest.mark.parametrize(
    ("more", "message"),
    [([], "keep is None and budget None"), (["--keep", 1], "keep is 1; .* from 2 to 3")],
)
def test_numbers_that_do_not_fit_are_refused(inputs, tmp_path, more, message):
    with pytest.raises(ConfigError, match=message):
        run(inputs, tmp_path / "merged", *more)
    assert not (tmp_path / "merged").exists()
