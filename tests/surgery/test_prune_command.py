"""stmoe prune from end to end: the folder, the table and what is refused."""

import json
import shutil

import pytest
import torch

from moe import STMoEConfig, STMoEForConditionalGeneration
from moe.commands import prune
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
    with torch.no_grad():  # a second of four experts is always the worst
        for layer in sparse_layers(model).values():
            layer.experts.down_proj[1] = 0
    model.save_pretrained(paths["model"])
    for file in paths["tokenizer"].glob("tokenizer*.json"):
        shutil.copy(file, paths["model"])
    return paths


def run(inputs, folder, *more):
    text = ["--corpus", inputs["corpus"], "--inputs-length", "16", "--examples", "23"]
    prune.main([str(word) for word in ("--from", inputs["model"], "--to", folder, *text, *more)])


def test_the_worst_experts_are_gone_and_reported(inputs, tmp_path, capsys):
    run(inputs, tmp_path / "pruned", "--keep", 3)
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "pruned/surgery.json").read_text())
    (table,) = report["tables"]
    assert table["rows"] == [["encoder 1", "3 of 4", "2 (0)"], ["decoder 1", "3 of 4", "2 (0)"]]
    assert "2 (0)" in printed and "stmoe prune" in (tmp_path / "pruned/README.md").read_text()

    # The other experts are those of the model, and rows of the router moved with them.
    model = STMoEForConditionalGeneration.from_pretrained(inputs["model"])
    pruned = STMoEForConditionalGeneration.from_pretrained(tmp_path / "pruned")
    for key, layer in sparse_layers(pruned).items():
        before = sparse_layers(model)[key]
        assert torch.equal(layer.router.gate, before.router.gate[[0, 2, 3]])
        assert torch.equal(layer.experts.down_proj, before.experts.down_proj[[0, 2, 3]])
    sizes = {name: (before, after) for name, before, after in report["sizes"]}
    assert sizes["parameters"] == (model.num_parameters(), pruned.num_parameters())
    assert [len(layer["load_after"]) for layer in report["effects"]["routing"]] == [3, 3]


def test_a_budget_leaves_layers_of_different_sizes(inputs, tmp_path):
    run(inputs, tmp_path / "p", "--budget", 7, "--floor", 2, "--score", "frequency")
    config = STMoEConfig.from_pretrained(tmp_path / "p")
    numbers = config.layer_experts(decoder=False) + config.layer_experts(decoder=True)
    assert sorted(numbers) == [3, 4]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "--keep --budget is required"),
        (["--keep", 1], "would keep 1 of 4 experts, and each token chooses 2"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(inputs, tmp_path, more, message):
    with pytest.raises(ConfigError, match=message):
        run(inputs, tmp_path / "pruned", *more)
    assert not (tmp_path / "pruned").exists()
