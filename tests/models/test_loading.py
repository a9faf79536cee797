"""Folders that were damaged on purpose, at every door that needs a whole model."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

import stmoe
from moe import (
    CheckpointError,
    DataError,
    STMoEEncoderModel,
    STMoEForConditionalGeneration,
    STMoEModel,
)
from moe.checkpoint import load_model
from moe.checksums import read_sums
from moe.training.build import BuiltModel, build_model
from moe.training.finetuning import finetuning_config
from moe.training.recipe import FinetuneRecipe
from stmoe_eval.answers.seq2seq import load_seq2seq
from tests.models.folders import change_config, change_weights
from tests.models.tiny import tiny_model


def inspect(folder: Path) -> None:
    arguments = ["--model", str(folder), "--corpus", "nowhere", "--out", "report.html"]
    stmoe.main(["inspect", "report", *arguments])


def finetune(folder: Path, recipe: FinetuneRecipe) -> BuiltModel:
    config = finetuning_config(folder, recipe)
    return build_model(recipe, config, "cpu", None if recipe.init == "scratch" else folder)


DOORS = {
    "eval": load_seq2seq,
    "finetune": lambda folder: finetune(folder, FinetuneRecipe()),
    "inspect report": inspect,
    "library": lambda folder: load_model(folder),
}


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.fixture
def folder(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    return tmp_path


def tiny_t5() -> T5ForConditionalGeneration:
    sizes = {"vocab_size": 131, "d_model": 29, "d_kv": 5, "d_ff": 31, "num_layers": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, num_heads=3, decoder_start_token_id=0))


CLASSES = (STMoEForConditionalGeneration, STMoEModel, STMoEEncoderModel, AutoModelForSeq2SeqLM)
LOADERS = (
    *(each.from_pretrained for each in CLASSES),
    lambda folder: load_model(folder, mmap=True),
    *DOORS.values(),
)


def tear(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def tear_without_sums(folder: Path) -> None:
    tear(folder)
    (folder / "SHA256SUMS").unlink()


DAMAGE = [
    (
        lambda folder: change_weights(folder, lambda weights: weights.pop("lm_head.weight")),
        r"1 missing: lm_head\.weight\. Copy the whole",
    ),
    (tear, r"damaged: model\.safetensors has another SHA"),
    (tear_without_sums, r"cannot be read: .*header"),
    (lambda folder: (folder / "config.json").unlink(), r"it has no config\.json"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_folder_is_refused_at_every_door(folder, damage, message):
    damage(folder)
    for load in DOORS.values():
        with pytest.raises(CheckpointError, match=message):
            load(folder)


def test_a_shard_that_is_a_pipe_or_outside_of_the_folder_is_refused(tmp_path):
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder, max_shard_size="40KB")
    (folder / "SHA256SUMS").unlink()
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name, file = next(iter(content["weight_map"].items()))
    (folder / file).rename(tmp_path / file)
    os.mkfifo(folder / file)
    for load in LOADERS:
        with pytest.raises(CheckpointError, match=rf"{file} is missing, or no file"):
            load(folder)
    for outside in (f"../{file}", str(tmp_path / file)):
        content["weight_map"][name] = outside
        index.write_text(json.dumps(content))
        for load in LOADERS:
            with pytest.raises(CheckpointError, match=rf"{file} is not in .*model"):
                load(folder)


def test_a_quantizer_that_is_not_installed_is_named(folder):
    change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(CheckpointError, match=r"cannot be loaded: .*pip install optimum"):
        STMoEForConditionalGeneration.from_pretrained(folder)


def test_weights_that_do_not_fit_are_refused_by_name(folder):
    other = {"lm_head.weight": torch.zeros(3, 5), "adapter.weight": torch.zeros(3, 5)}
    change_weights(folder, lambda weights: weights.update(other))
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, model_class=AutoModelForSeq2SeqLM)
    assert "1 unexpected: adapter.weight" in str(caught.value)
    assert "lm_head.weight (3, 5) instead of (131, 29)" in str(caught.value)


def test_a_flipped_bit_in_any_file_of_the_weights_is_refused_at_every_door(tmp_path):
    tiny_model().save_pretrained(tmp_path, max_shard_size="40KB")
    files = sorted(path.name for path in tmp_path.glob("model*.safetensors*"))
    assert len(files) > 3
    assert sorted(read_sums(tmp_path)) == files  # the rest is for users to edit

    from_pretrained = STMoEForConditionalGeneration.from_pretrained
    from_pretrained(tmp_path)
    for name in (files[0], files[-1]):
        whole = (tmp_path / name).read_bytes()
        flip_a_bit(tmp_path / name)
        for load in (from_pretrained, AutoModelForSeq2SeqLM.from_pretrained, *DOORS.values()):
            with pytest.raises(CheckpointError, match=rf"{re.escape(name)} has another SHA-256"):
                load(tmp_path)
        (tmp_path / name).write_bytes(whole)
    (tmp_path / files[1]).unlink()
    with pytest.raises(CheckpointError, match=rf"{re.escape(files[1])} is missing"):
        from_pretrained(tmp_path)


def test_damaged_checksums_are_no_reason_to_trust_the_weights(folder):
    for content in (b"", b"\xff\x00\n\n", b"0  model.safetensors\n", b"\0" * 40):
        (folder / "SHA256SUMS").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"The model in .* is damaged: "):
            load_model(folder)


def test_settings_and_card_may_be_edited(folder):
    change_config(folder, dropout_rate=0.3)
    (folder / "README.md").write_text("mine")
    assert load_model(folder).config.dropout_rate == 0.3


def test_a_kill_while_a_model_is_saved_over_another_leaves_no_checksums_that_do_not_fit(
    folder, monkeypatch
):
    class KilledError(Exception):
        pass

    def killed(*_, **__):
        raise KilledError

    monkeypatch.setattr("moe.models.pretrained.write_weight_sums", killed)
    with pytest.raises(KilledError):
        tiny_model(seed=3).save_pretrained(folder)
    assert not (folder / "SHA256SUMS").exists()
    load_model(folder)


def test_a_model_is_never_saved_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("years of work")
    for name in ("model.safetensors", "config.json", "generation_config.json", "SHA256SUMS"):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        (folder / name).symlink_to(tmp_path / "mine")
        with pytest.raises(DataError, match=rf"{name} is a link, and the file behind it"):
            tiny_model().save_pretrained(folder)
    assert (tmp_path / "mine").read_text() == "years of work"


def test_another_librarys_model_with_a_tied_head_is_whole(tmp_path):
    tiny_t5().save_pretrained(tmp_path)
    assert load_model(tmp_path, model_class=AutoModelForSeq2SeqLM).config.d_model == 29
    change_weights(tmp_path, lambda weights: weights.pop("encoder.final_layer_norm.weight"))
    with pytest.raises(CheckpointError, match=r"1 missing: encoder\.final_layer_norm\.weight"):
        load_model(tmp_path, model_class=AutoModelForSeq2SeqLM)


def test_a_config_with_other_sizes_is_refused(folder):
    change_config(folder, num_decoder_layers=1, d_ff=37)

    # Four feed-forwards are left, of two matrices each: three of the encoder, one of the decoder.
    unexpected = r"unexpected: model\.decoder\.blocks\.1.*; 8 of another shape: model"
    with pytest.raises(CheckpointError, match=unexpected):
        load_model(folder)
