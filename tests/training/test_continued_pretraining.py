"""Pre-training that goes on from a model, as a user would do it."""

import json
import shutil

import pytest

from moe import CheckpointError, ConfigError, STMoEForConditionalGeneration
from moe.checkpoint.loading import load_model_on_mesh
from moe.commands import pretrain, train_tokenizer
from moe.distributed.mesh import MeshConfig, build_mesh
from moe.training.build import build_model
from moe.training.finetuning import finetuning_config
from moe.training.recipe import FinetuneRecipe, PretrainRecipe
from tests.distributed.ranks import run_ranks
from tests.training.tiny_run import MODEL, pretrain_arguments, write_inputs

pytestmark = pytest.mark.slow  # all read a run that was made


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    paths = write_inputs(tmp_path_factory.mktemp("inputs"))
    paths["run"] = paths["corpus"].parent / "run"
    steps = ("--training.steps", "4", "--optim.cooldown_steps", "0")
    pretrain.main(pretrain_arguments(paths, paths["run"], *steps))
    return paths


def go_on(inputs, out, *more):
    pretrain.main(pretrain_arguments(inputs, out, "--pretrained", inputs["run"] / "model", *more))


def held_out_losses(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {line["step"]: line["heldout/loss"] for line in records if "heldout/loss" in line}


def test_it_begins_where_the_model_ends_gets_better_and_resumes_from_its_own_checkpoint(
    inputs, tmp_path
):
    out = tmp_path / "run"
    options = ("--training.steps", "14", "--model.capacity_factor", "2.0")
    go_on(inputs, out, *options)
    before = held_out_losses(inputs["run"])
    after = held_out_losses(out)
    assert after[0] == pytest.approx(before[4], abs=1e-5)
    assert after[14] < after[0]
    assert json.loads((out / "model/config.json").read_text())["capacity_factor"] == 2.0

    # As if it had been killed between its last two checkpoints.
    weights = (out / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(out / "model")
    *_, newest = sorted((out / "checkpoints").glob("step_*"))
    shutil.rmtree(newest)
    go_on(inputs, out, *options, "--resume")
    assert held_out_losses(out) == after
    assert (out / "model" / "model.safetensors").read_bytes() == weights


def test_a_model_keeps_the_noise_of_its_pre_training_unless_it_starts_from_scratch(
    inputs, tmp_path
):
    noise = ["--data.noise_density", "0.4", "--data.mean_noise_span_length", "2.0"]
    go_on(inputs, tmp_path / "run", "--training.steps", "2", "--optim.cooldown_steps", "0", *noise)
    folder = tmp_path / "run" / "model"
    config = STMoEForConditionalGeneration.from_pretrained(folder).config
    assert (config.noise_density, config.mean_noise_span_length) == (0.4, 2.0)
    earlier = STMoEForConditionalGeneration.from_pretrained(inputs["run"] / "model").config
    assert (earlier.noise_density, earlier.mean_noise_span_length) == (0.15, 3.0)

    assert finetuning_config(folder, FinetuneRecipe()).noise_density == 0.4
    assert finetuning_config(folder, FinetuneRecipe(init="scratch")).noise_density is None


def test_another_architecture_is_named(inputs, tmp_path):
    with pytest.raises(ConfigError, match=r"model\.num_heads is 2, the model has 4"):
        go_on(inputs, tmp_path / "run", "--model.num_heads", "2")
    assert not (tmp_path / "run").exists()


def test_another_tokenizer_and_no_model_are_named(inputs, tmp_path):
    other = tmp_path / "tokenizer"
    options = ["--corpus", inputs["corpus"], "--out", other, "--vocab-size", "200"]
    train_tokenizer.main([str(option) for option in options])
    with pytest.raises(ConfigError, match="tokenizer does not belong to the model"):
        go_on(inputs, tmp_path / "run", "--tokenizer", str(other))
    with pytest.raises(CheckpointError, match="holds no model"):
        pretrain.main(pretrain_arguments(inputs, tmp_path / "run", "--pretrained", inputs["run"]))
    with pytest.raises(ConfigError, match="--out"):
        go_on(inputs, inputs["run"] / "model")


def test_another_router_takes_the_weights_and_counts_from_zero(inputs, tmp_path):
    few = ("--training.steps", "2", "--optim.cooldown_steps", "0")
    go_on(inputs, tmp_path / "run", *few, "--model.router", "bias_balanced")
    before = held_out_losses(inputs["run"])
    after = held_out_losses(tmp_path / "run")
    assert after[0] == pytest.approx(before[4], abs=0.05)  # of two experts the second may be other

    # And back again: what the router had counted is left out.
    folder = tmp_path / "run" / "model"
    counts = STMoEForConditionalGeneration.from_pretrained(folder).state_dict()
    assert any(value.any() for name, value in counts.items() if name.endswith("load_steps"))
    recipe = PretrainRecipe(model=MODEL)
    built = build_model(recipe, recipe.build_config(), "cpu", folder)
    assert not any(name.endswith("load_steps") for name in built.model.state_dict())


def load_on_two_ranks(rank, num_ranks, model_folder):
    config = PretrainRecipe(model={**MODEL, "router": "bias_balanced"}).build_config()
    recipe = PretrainRecipe(model={**MODEL, "router": "bias_balanced"}, mesh=MeshConfig(ep=2))
    model = build_model(recipe, config, "cpu", model_folder).model
    counts = [name for name in model.state_dict() if name.endswith("load_steps")]
    assert len(counts) == 2
    assert not any(model.state_dict()[name].any() for name in counts)

    # Of the same kind it must be there.
    recipe = PretrainRecipe(model=MODEL, mesh=MeshConfig(ep=2))
    with pytest.raises(CheckpointError, match="load_steps"):
        load_model_on_mesh(model_folder, build_mesh(recipe.mesh, "cpu"), config=config)
    return rank


def test_on_a_mesh_another_router_counts_from_zero_too(inputs, tmp_path):
    assert run_ranks(load_on_two_ranks, 2, tmp_path, inputs["run"] / "model") == [0, 1]
