"""Model folders that are damaged, or saved into twice: one message that names what is wrong, or
what was saved last.
"""

import os
import shutil

import pytest
import torch
import torch.distributed as dist

from moe import (
    CheckpointError,
    ConfigError,
    MeshConfig,
    MoEError,
    STMoEForConditionalGeneration,
    build_mesh,
)
from moe.checkpoint import load_model, load_model_on_mesh
from moe.models.weight_files import forget_weight_sums
from tests.models.folders import change_weights
from tests.models.tiny import tiny_model


class RunsCode:
    """A pickle that makes a folder when it is read without care."""

    def __reduce__(self):
        return os.mkdir, ("code-ran",)


def put_code_into_a_bin(folder):
    (folder / "model.safetensors").unlink()
    torch.save(RunsCode(), folder / "pytorch_model.bin")


def put_nan_into_the_head(folder):
    change_weights(folder, lambda weights: weights["lm_head.weight"][5].fill_(torch.nan))


DAMAGES = {
    "code": (put_code_into_a_bin, "code|torn"),
    "adapter": (
        lambda folder: (folder / "adapter_config.json").write_text("[]"),
        "adapter_config.json",
    ),
    "not finite": (put_nan_into_the_head, "lm_head.weight in .* not finite: from nan to nan"),
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
    return load_model(folder)


def test_a_mesh_refuses_numbers_that_are_none(whole, tmp_path, mesh):
    folder = shutil.copytree(whole, tmp_path / "model")
    put_nan_into_the_head(folder)
    with pytest.raises(CheckpointError, match="not finite: from nan to nan"):
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
