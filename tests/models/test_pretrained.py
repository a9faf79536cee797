"""Model folders that are damaged, or saved into twice: one message that names what is wrong, or
what was saved last.
"""

import json
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from moe import (
    CheckpointError,
    ConfigError,
    MeshConfig,
    MoEError,
    STMoEForConditionalGeneration,
    build_mesh,
    load_complete,
    load_model_on_mesh,
)
from moe.models.weight_files import forget_weight_sums
from tests.models.tiny import tiny_model


class RunsCode:
    """A pickle that makes a folder when it is read without care."""

    def __reduce__(self):
        return os.mkdir, ("code-ran",)


def config(**changes):
    def damage(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def binary(content):
    def damage(folder):
        (folder / "model.safetensors").unlink()
        torch.save(content, folder / "pytorch_model.bin")

    return damage


def index(content):
    def damage(folder):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(content)

    return damage


def weights(change):
    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return damage


DAMAGES = {
    "config cut": (text("config.json", '{"d_model": 2'), "config.json: .* is not JSON"),
    "config a list": (text("config.json", "[]"), r"config.json: its content is \[\]"),
    "config of another model": (config(model_type="bert"), "of a model of type 'bert'"),
    "router a list": (config(router=["switch"]), r"router is \['switch'\]"),
    "dtype": (config(dtype="float7"), "dtype is 'float7'"),
    "layers": (config(num_layers=100_000), "num_layers is 100000"),
    "width": (config(d_model=2**20, d_ff=2**24, num_layers=512), "parameters; expected at most"),
    "width of other weights": (config(d_model=2**16), "shape|cannot be loaded"),
    "labels": (config(num_labels=10**12), "num_labels is 1000000000000"),
    "a method": (config(num_parameters=5), "num_parameters"),
    "generation torn": (text("generation_config.json", '{"num_beams'), "generation_config.json"),
    "adapter a list": (text("adapter_config.json", "[]"), "adapter_config.json"),
    "bin of code": (binary(RunsCode()), "code|torn"),
    "bin cut": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "cannot be loaded|cannot be read",
    ),
    "index torn": (index('{"weight_map"'), "cannot be loaded"),
    "index to nothing": (
        index('{"metadata": {}, "weight_map": {"a": "x.safetensors"}}'),
        "x.safetensors",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "no numbers": (
        weights(lambda tensors: tensors["lm_head.weight"][5].fill_(float("nan"))),
        "lm_head.weight in .* holds numbers that are not finite: from nan to nan",
    ),
    "infinity": (
        weights(lambda tensors: tensors["lm_head.weight"][5].fill_(float("-inf"))),
        "lm_head.weight in .* holds numbers that are not finite: from -inf to",
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model folder that is not to be changed, without checksums as other tools write it."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    tiny_model().save_pretrained(folder)
    forget_weight_sums(folder)
    return folder


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield build_mesh(MeshConfig(), "cpu")
    dist.destroy_process_group()


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_model_folder_is_refused_with_what_is_wrong(
    whole, tmp_path, monkeypatch, damage, message
):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(whole, tmp_path / "model")
    damage(folder)
    for load in (STMoEForConditionalGeneration.from_pretrained, load_whole):
        with pytest.raises((MoEError, OSError), match=message):
            load(folder)
    assert not (tmp_path / "code-ran").exists()


def load_whole(folder):
    return load_complete(STMoEForConditionalGeneration, folder)


def test_a_mesh_refuses_numbers_that_are_none(whole, tmp_path, mesh):
    ones = torch.ones(131, 29, dtype=torch.int8)
    integers = weights(lambda tensors: tensors.update({"lm_head.weight": ones}))
    damages = {"integers": (integers, "numbers of type torch.int8"), **DAMAGES}
    for name in ("integers", "no numbers"):
        damage, message = damages[name]
        folder = shutil.copytree(whole, tmp_path / name)
        damage(folder)
        with pytest.raises(CheckpointError, match=message):
            load_model_on_mesh(folder, mesh)


@pytest.mark.parametrize("first", ["5KB", "5GB"])
def test_a_second_save_takes_the_place_of_the_first(tmp_path, mesh, first):
    sizes = {"5KB": "5GB", "5GB": "5KB"}
    tiny_model(seed=1).save_pretrained(tmp_path, max_shard_size=first)
    last = tiny_model(seed=2)
    last.save_pretrained(tmp_path, max_shard_size=sizes[first])
    for loaded in (load_whole(tmp_path), load_model_on_mesh(tmp_path, mesh)[0]):
        assert torch.equal(loaded.lm_head.weight, last.lm_head.weight)
    assert (tmp_path / "model.safetensors").exists() == (first == "5KB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (first == "5GB")


def test_saves_under_another_name_stay(tmp_path):
    tiny_model(seed=1).save_pretrained(tmp_path)
    tiny_model(seed=2).save_pretrained(tmp_path, variant="best", max_shard_size="5KB")
    tiny_model(seed=3).save_pretrained(tmp_path, variant="best")
    kept = STMoEForConditionalGeneration.from_pretrained(tmp_path)
    best = STMoEForConditionalGeneration.from_pretrained(tmp_path, variant="best")
    assert torch.equal(kept.lm_head.weight, tiny_model(seed=1).lm_head.weight)
    assert torch.equal(best.lm_head.weight, tiny_model(seed=3).lm_head.weight)


def test_a_config_that_could_not_be_loaded_again_is_not_saved(tmp_path):
    model = tiny_model()
    model.config.lock = object()
    with pytest.raises(TypeError, match="JSON"):
        model.save_pretrained(tmp_path)
    del model.config.lock
    model.config.d_ff = 0
    with pytest.raises(ConfigError, match="d_ff is 0"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
