"""The command: there and back bit for bit, folders that transformers' own classes load, one error
with every reason.
"""

import json
import shutil

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config

from moe import CheckpointError, ConfigError, STMoEForConditionalGeneration
from moe.commands.convert import main
from moe.convert import conversion_report
from moe.data.tokenizer import load_tokenizer, prompt_ids, train_tokenizer
from moe.errors import DataError
from tests.models.hf_models import (
    SIZES,
    SPARSE,
    assert_equal_to_rounding,
    needs_a_right_switch,
    their_inputs,
    their_model,
)
from tests.models.tiny import DENSE, tiny_batch, tiny_model

SWITCH = {  # what a model of ours must be to be a Switch
    "feed_forward_proj": "relu",
    "router": "switch",
    "router_options": None,
    "num_selected_experts": 1,
    "sparse_dense_stacking": False,
    "expert_capacity": 3,
    "convention": "switch",
    "sparse_position": "second",
}


def convert(source, target, *arguments):
    """Runs the command."""
    main(["--from", str(source), "--to", str(target), *arguments])


def weights_of(folder):
    """Returns every tensor of a folder by name."""
    weights = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    return weights


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(tensor, b[name]) for name, tensor in a.items())


@pytest.mark.parametrize("kind", ["T5 1.0", "T5 1.1", "Switch, untied"])
def test_there_and_back_is_bit_exact_and_loads_in_transformers(tmp_path, kind):
    theirs, inputs = their_model(kind), their_inputs()
    theirs.save_pretrained(tmp_path / "theirs")
    for name in ("spiece.model", "tokenizer.json"):
        (tmp_path / "theirs" / name).write_bytes(b'{"pieces": []}')
    form = "t5" if kind.startswith("T5") else "switch"
    convert(tmp_path / "theirs", tmp_path / "ours", "--max-shard-size", "50KB")
    convert(tmp_path / "ours", tmp_path / "back", "--format", form)
    assert_same(weights_of(tmp_path / "back"), weights_of(tmp_path / "theirs"))
    assert (tmp_path / "back" / "spiece.model").read_bytes() == b'{"pieces": []}'

    # The weights of the copy may lie at other addresses.
    back = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "back", attn_implementation="eager")
    assert type(back) is type(theirs)
    assert_equal_to_rounding(back(**inputs).logits, theirs(**inputs).logits)

    ours = STMoEForConditionalGeneration.from_pretrained(tmp_path / "ours")
    direct = STMoEForConditionalGeneration.from_pretrained(tmp_path / "theirs")
    assert_same(dict(ours.named_parameters()), dict(direct.named_parameters()))
    other = {"architectures": 0, "_name_or_path": 0}
    assert ours.config.to_dict() | other == direct.config.to_dict() | other
    assert ours.generation_config.to_dict() == direct.generation_config.to_dict()


def test_a_folder_with_only_a_spiece_model_has_a_tokenizer_that_every_door_reads(tmp_path):
    # Four letters and the sentinels of T5; sentencepiece reads the same file.
    their_model("T5 1.1").save_pretrained(tmp_path / "theirs")
    train_tokenizer(["ab cd", "abcd", "dc ba"], 109, tmp_path / "vocabulary")
    shutil.copy(tmp_path / "vocabulary" / "spiece.model", tmp_path / "theirs")
    pieces = str(tmp_path / "theirs" / "spiece.model")
    expected = [*sentencepiece.SentencePieceProcessor(model_file=pieces).encode("ab</s>"), 1]

    convert(tmp_path / "theirs", tmp_path / "ours")
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        for tokenizer in (load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)):
            assert prompt_ids(tokenizer, ["ab</s>"]) == [expected]
            assert tokenizer.convert_tokens_to_ids("<extra_id_0>") == 108


def test_a_damaged_spiece_model_is_named(tmp_path):
    their_model("T5 1.1").save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "spiece.model").write_bytes(b"pieces")
    with pytest.raises(DataError, match=r"spiece[.]model cannot be read"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("form", "fields"),
    [
        pytest.param("switch", SWITCH, marks=needs_a_right_switch),
        pytest.param(
            "switch",
            {**SWITCH, "tie_word_embeddings": True, "router_options": {"policy": "argmax"}},
            marks=needs_a_right_switch,
        ),
        ("t5", {**DENSE, "feed_forward_proj": "gated-gelu"}),
        ("t5", {**DENSE, "feed_forward_proj": "relu", "tie_word_embeddings": True}),
    ],
)
def test_a_model_of_ours_computes_the_same_in_transformers(tmp_path, form, fields):
    ours, inputs = tiny_model(**fields), their_inputs()
    ours.save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "--format", form)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "theirs", attn_implementation="eager")
    assert_equal_to_rounding(theirs(**inputs).logits, ours(**inputs).logits)
    raw = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert raw["tie_word_embeddings"] is fields.get("tie_word_embeddings", False)
    convert(tmp_path / "theirs", tmp_path / "back")
    assert_same(weights_of(tmp_path / "back"), weights_of(tmp_path / "ours"))


def test_every_reason_against_the_format_is_in_one_error(tmp_path):
    tiny_model(expert_bias="additive", num_layers=3).save_pretrained(tmp_path / "ours")
    with pytest.raises(ConfigError) as caught:
        convert(tmp_path / "ours", tmp_path / "out", "--format", "switch")
    for reason in (
        "feed_forward_proj is 'gated-gelu', not 'relu'",
        "num_selected_experts is 2, not 1",
        "the router is token_choice, not switch",
        "sparse_dense_stacking is True, not False",
        "expert_bias is 'additive'",
        "expert_capacity is None",
        "convention is 'ours', not 'switch'",
        "sparse_position is 'last', not 'second'",
    ):
        assert reason in str(caught.value)
    with pytest.raises(ConfigError, match="it has 7 experts"):
        convert(tmp_path / "ours", tmp_path / "out", "--format", "t5")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]  # no half of a folder either


def test_a_setting_and_a_dtype_can_be_given_on_the_way(tmp_path):
    source = tmp_path / "theirs"
    their_model().save_pretrained(source)
    settings = ("--set", "expert_capacity=5", "convention=ours")
    convert(source, tmp_path / "ours", "--dtype", "bfloat16", *settings)
    ours = STMoEForConditionalGeneration.from_pretrained(tmp_path / "ours")
    assert ours.dtype == torch.bfloat16
    assert (ours.config.expert_capacity, ours.config.convention) == (5, "ours")
    whole = STMoEForConditionalGeneration.from_pretrained(source, dtype=torch.bfloat16)
    assert_same(dict(ours.named_parameters()), dict(whole.named_parameters()))
    with pytest.raises(ConfigError, match=r"'expert_capasity'.*'expert_capacity'"):
        convert(source, tmp_path / "other", "--set", "expert_capasity=5")
    with pytest.raises(ConfigError, match=r"--set is 'expert_capacity'"):
        convert(source, tmp_path / "other", "--set", "expert_capacity")


def test_our_own_format_is_cut_into_shards_anew_as_save_pretrained_cuts_it(tmp_path):
    model = tiny_model(router="bias_balanced", router_options=None)
    model.save_pretrained(tmp_path / "whole")
    convert(tmp_path / "whole", tmp_path / "cut", "--max-shard-size", "60KB")
    assert_same(weights_of(tmp_path / "cut"), weights_of(tmp_path / "whole"))
    cut, batch = STMoEForConditionalGeneration.from_pretrained(tmp_path / "cut"), tiny_batch()
    assert torch.equal(cut(**batch).logits, model(**batch).logits)


def test_the_folder_is_new_and_whole_or_absent(tmp_path):
    their_model().save_pretrained(tmp_path / "theirs")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match=r"--to .*out exists already"):
        convert(tmp_path / "theirs", tmp_path / "out")
    weights = tmp_path / "theirs" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError):
        convert(tmp_path / "theirs", tmp_path / "new")
    with pytest.raises(CheckpointError, match=r"There is no folder .*nowhere"):
        convert(tmp_path / "nowhere", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "theirs"]


def test_the_command_says_what_became_of_every_tensor(tmp_path, capsys):
    AutoModelForSeq2SeqLM.from_config(T5Config(**SIZES)).save_pretrained(tmp_path)
    main(["--from", str(tmp_path)])
    shown = capsys.readouterr().out
    assert shown.strip() == str(conversion_report(tmp_path))
    assert "115 tensors mapped to 115" in shown
    assert (
        "ignored, belongs to the head of a classifier: classifier_dropout of config.json" in shown
    )
    assert SPARSE.keys().isdisjoint(json.loads((tmp_path / "config.json").read_text()))
