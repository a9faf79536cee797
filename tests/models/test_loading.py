"""Folders that were damaged on purpose, at every door that needs a whole model."""

import json
import os
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

from eval.answers.seq2seq import load_seq2seq
from moe import CheckpointError, DataError, STMoEForConditionalGeneration, load_complete
from moe.checksums import read_sums
from moe.commands import inspect_router
from moe.training.build import BuiltModel
from moe.training.finetuning import finetuning_config, load_for_finetuning
from moe.training.recipe import FinetuneRecipe
from tests.models.tiny import tiny_model


def inspect(folder: Path) -> None:
    inspect_router.main(
        ["report", "--model", str(folder), "--corpus", "nowhere", "--out", "report.html"]
    )


def finetune(folder: Path, recipe: FinetuneRecipe) -> BuiltModel:
    return load_for_finetuning(folder, recipe, finetuning_config(folder, recipe), "cpu")


DOORS = {
    "eval": load_seq2seq,
    "finetune": lambda folder: finetune(folder, FinetuneRecipe()),
    "inspect_router": inspect,
    "library": lambda folder: load_complete(STMoEForConditionalGeneration, folder),
}
every_door = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def change_weights(folder: Path, change) -> None:
    """Rewrites the weights on purpose, as another tool would."""
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    change(weights)
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "SHA256SUMS").unlink(missing_ok=True)


@pytest.fixture
def folder(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    return tmp_path


@every_door
def test_missing_weights_are_refused_by_name(folder, door):
    change_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(
        CheckpointError, match=r"Weights 1 missing: lm_head\.weight\. Copy the whole folder again"
    ):
        door(folder)


def test_a_weight_of_another_shape_is_refused_with_both_shapes(folder):
    change_weights(folder, lambda weights: weights.update({"lm_head.weight": torch.zeros(3, 5)}))
    with pytest.raises(
        CheckpointError,
        match=r"1 of another shape: lm_head\.weight \(3, 5\) instead of \(131, 29\)\.",
    ):
        load_complete(AutoModelForSeq2SeqLM, folder)


def test_a_weight_that_the_model_does_not_know_is_refused(folder):
    change_weights(folder, lambda weights: weights.update({"adapter.weight": torch.zeros(3, 5)}))
    with pytest.raises(CheckpointError, match=r"Weights 1 unexpected: adapter\.weight\."):
        load_complete(AutoModelForSeq2SeqLM, folder)


def test_many_weights_are_counted_and_the_first_named(folder):
    lost = [name for name in tiny_model().state_dict() if ".decoder." in name]
    change_weights(folder, lambda weights: [weights.pop(name) for name in lost])
    expected = rf"Weights {len(lost)} missing: (model\.decoder[\w.]+, ){{4}}[\w.]+ and {len(lost) - 5} more\."
    with pytest.raises(CheckpointError, match=expected):
        load_complete(STMoEForConditionalGeneration, folder)


@every_door
def test_torn_weights_are_one_message(folder, door):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(
        CheckpointError,
        match=r"The model in .* is damaged: model\.safetensors has another SHA-256 ",
    ):
        door(folder)
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be loaded: .*header"):
        door(folder)


@every_door
def test_one_flipped_bit_of_a_weight_is_refused_by_the_name_of_its_file(folder, door):
    flip_a_bit(folder / "model.safetensors")
    advice = r"Copy the whole folder again from where it was saved; if another tool rewrote .* remove .*SHA256SUMS"
    with pytest.raises(
        CheckpointError, match=rf"is damaged: model\.safetensors has another SHA-256 .*\. {advice}"
    ):
        door(folder)


def test_from_pretrained_refuses_a_flipped_bit_in_any_file_of_the_weights(tmp_path):
    tiny_model().save_pretrained(tmp_path, max_shard_size="40KB")
    files = sorted(path.name for path in tmp_path.glob("model*.safetensors*"))
    assert len(files) > 3
    assert sorted(read_sums(tmp_path)) == files  # the rest is for users to edit

    STMoEForConditionalGeneration.from_pretrained(tmp_path)
    for name in (files[0], files[-1]):
        whole = (tmp_path / name).read_bytes()
        flip_a_bit(tmp_path / name)
        for load in (
            STMoEForConditionalGeneration.from_pretrained,
            AutoModelForSeq2SeqLM.from_pretrained,
        ):
            with pytest.raises(CheckpointError, match=rf"{re.escape(name)} has another SHA-256"):
                load(tmp_path)
        (tmp_path / name).write_bytes(whole)
    (tmp_path / files[1]).unlink()
    with pytest.raises(CheckpointError, match=rf"{re.escape(files[1])} is missing"):
        STMoEForConditionalGeneration.from_pretrained(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b"\xff\x00\n\n", b"0  model.safetensors\n", b"\0" * 40])
def test_damaged_checksums_are_no_reason_to_trust_the_weights(folder, content):
    (folder / "SHA256SUMS").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"The model in .* is damaged: "):
        load_complete(STMoEForConditionalGeneration, folder)


@pytest.mark.parametrize(("first", "then"), [("50GB", "40KB"), ("40KB", "50GB")])
def test_a_model_saved_over_another_in_other_files_is_the_one_that_loads(tmp_path, first, then):
    tiny_model(seed=1).save_pretrained(tmp_path, max_shard_size=first)
    model = tiny_model(seed=2)
    model.save_pretrained(tmp_path, max_shard_size=then)
    loaded = load_complete(STMoEForConditionalGeneration, tmp_path)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True)
    )


def test_settings_and_card_may_be_edited(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dropout_rate": 0.3}))
    (folder / "README.md").write_text("mine")
    assert load_complete(STMoEForConditionalGeneration, folder).config.dropout_rate == 0.3


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
    load_complete(STMoEForConditionalGeneration, folder)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "generation_config.json", "SHA256SUMS"]
)
def test_a_model_is_never_saved_through_a_link(tmp_path, name):
    (tmp_path / "mine").write_text("years of work")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).symlink_to(tmp_path / "mine")
    with pytest.raises(DataError, match=rf"{name} is a link, and the file behind it"):
        tiny_model().save_pretrained(tmp_path / "model")
    assert (tmp_path / "mine").read_text() == "years of work"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "SHA256SUMS"])
@every_door
def test_a_pipe_among_the_files_of_a_model_is_refused(folder, door, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises((CheckpointError, DataError), match=name):
        door(folder)


@every_door
def test_a_folder_without_a_model_is_refused(tmp_path, door):
    with pytest.raises(
        CheckpointError, match=r"holds no model: it has no config\.json\. Give a folder made by"
    ):
        door(tmp_path)


def test_starting_from_scratch_needs_no_weights(folder):
    (folder / "model.safetensors").unlink()
    assert finetune(folder, FinetuneRecipe(init="scratch")).model.num_parameters() > 0


@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_model_loads_as_it_was_saved(tmp_path, tied):
    model = tiny_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    loaded = load_complete(AutoModelForSeq2SeqLM, tmp_path)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True)
    )


def test_another_librarys_model_with_a_tied_head_is_whole(tmp_path):
    config = T5Config(
        vocab_size=131,
        d_model=29,
        d_kv=5,
        d_ff=31,
        num_layers=2,
        num_heads=3,
        decoder_start_token_id=0,
    )
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    assert load_complete(AutoModelForSeq2SeqLM, tmp_path).config.d_model == 29
    change_weights(tmp_path, lambda weights: weights.pop("encoder.final_layer_norm.weight"))
    with pytest.raises(CheckpointError, match=r"1 missing: encoder\.final_layer_norm\.weight"):
        load_complete(AutoModelForSeq2SeqLM, tmp_path)


def test_a_config_with_other_sizes_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_decoder_layers": 1, "d_ff": 37}))
    # Of another shape are two matrices of each feed-forward left: encoder dense, dense and sparse,
    # decoder dense.
    with pytest.raises(
        CheckpointError, match=r"unexpected: model\.decoder\.blocks\.1.*; 8 of another shape: model"
    ):
        load_complete(STMoEForConditionalGeneration, folder)
