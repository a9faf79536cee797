"""NLLB-MoE read from the layouts of the hub against tests/oracles/nllb_moe.py.

Names come from transformers' class, whose computation is wrong from 5.0.0 on.
"""

import dataclasses
import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

from moe import CheckpointError, ConfigError
from moe.checkpoint.loading import load_model
from moe.commands import convert as convert_command
from moe.convert.nllb_moe import from_nllb_moe_config
from moe.hosts import records
from moe.hosts.all_hosts import count_parameters
from moe.sparse.editing import sparse_layers
from moe.sparse.layer import SparseFeedForward
from moe.surgery.prune import Pruning, choose_experts, prune_checkpoint
from tests.oracles import nllb_moe as oracle
from tests.sparse.by_hand import assert_close

FIELDS = {
    "vocab_size": 61,
    "d_model": 14,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_ffn_dim": 22,
    "decoder_ffn_dim": 26,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 7,
    "num_experts": 5,
    "encoder_sparse_step": 2,
    "decoder_sparse_step": 4,
    "init_std": 0.2,
}
LANGUAGE = 60
SOURCE = torch.tensor([[LANGUAGE - 1, 5, 17, 9, 44, 23, 2], [LANGUAGE - 2, 31, 8, 2, 1, 1, 1]])
TARGET = torch.tensor([[2, LANGUAGE, 7, 33, 19], [2, LANGUAGE, 50, 2, 1]])


def checkpoint():
    """Returns a config.json, and weights under the names of the hub."""
    torch.manual_seed(0)
    model = NllbMoeForConditionalGeneration(NllbMoeConfig(**FIELDS))
    weights = {}
    for name, weight in model.model.state_dict().items():
        if not name.endswith("embed_tokens.weight"):
            std = 0.3 if "norm" in name or name.endswith("bias") else 0.0
            weights[name] = weight + std * torch.randn_like(weight)
    return {**model.config.to_dict(), "architectures": ["NllbMoeModel"]}, weights


def write(folder, config, weights):
    """Writes a checkpoint as the hub has it: pickled shards and their index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = list(weights)
    index = {}
    for number in range(3):
        file = f"pytorch_model-{number + 1:05}-of-00003.bin"
        part = names[number * len(names) // 3 : (number + 1) * len(names) // 3]
        torch.save({name: weights[name].clone() for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    content = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "pytorch_model.bin.index.json").write_text(content)
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A checkpoint of the hub: its folder, config.json and weights."""
    config, weights = checkpoint()
    return write(tmp_path_factory.mktemp("nllb") / "hub", config, weights), config, weights


@pytest.fixture(scope="module")
def layer(hub):
    """Its first sparse layer."""
    return sparse_layers(load_model(hub[0]))["encoder", 0]


def only_experts(weights, encoder, decoder):
    """Returns the weights with some experts of each layer, numbered anew, and their rows of the router."""
    left = {}
    for name, weight in weights.items():
        experts = encoder if name.startswith("encoder") else decoder
        prefix, number, leaf = re.fullmatch(r"(.*expert_)?(\d*)(.*)", name).groups()
        if name.endswith("classifier.weight"):
            left[name] = weight[experts]
        elif prefix is None:
            left[name] = weight
        elif int(number) in experts:
            left[f"{prefix}{experts.index(int(number))}{leaf}"] = weight
    return left


def assert_is_right(model, config, weights):
    """Holds the logits of real positions to the oracle, in float32 and in float64."""
    expected = oracle.logits(weights, config, SOURCE, TARGET)
    masks = {"attention_mask": SOURCE != 1, "decoder_attention_mask": TARGET != 1}
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        with torch.no_grad():
            ours = model.to(dtype)(SOURCE, decoder_input_ids=TARGET, use_cache=False, **masks)
        ours = ours.logits[TARGET != 1].double()
        assert_close(ours, expected[TARGET != 1], tolerance=tolerance)


@pytest.mark.parametrize("fraction", [1, 0.3])
def test_a_checkpoint_of_the_hub_computes_what_its_authors_wrote(fraction, tmp_path):
    config, weights = checkpoint()
    config["moe_eval_capacity_token_fraction"] = fraction
    model = load_model(write(tmp_path / "hub", config, weights))
    assert type(model) is records.SparseM2M100ForConditionalGeneration
    assert_is_right(model, config, weights)
    convert_command.main(["--from", str(tmp_path / "hub"), "--to", str(tmp_path / "ours")])
    assert_is_right(load_model(tmp_path / "ours"), config, weights)
    assert_is_right(load_model(tmp_path / "ours", mmap=True), config, weights)
    with pytest.raises(CheckpointError, match=r"nllb-moe.*stmoe convert --from"):
        load_model(tmp_path / "hub", mmap=True)


def test_settings_that_are_given_count_more_than_those_of_the_hub(hub):
    config = records.SparseM2M100Config.from_pretrained(hub[0])
    config.encoder_layerdrop = 0.0
    assert load_model(hub[0], config=config).model.encoder.layerdrop == 0.0


def test_a_checkpoint_that_transformers_wrote_is_read_too(hub, tmp_path):
    _, config, weights = hub
    theirs = NllbMoeForConditionalGeneration(NllbMoeConfig.from_dict(config))
    theirs.model.load_state_dict(weights, strict=False)
    theirs.tie_weights()
    theirs.save_pretrained(tmp_path / "theirs")
    assert_is_right(load_model(tmp_path / "theirs"), config, weights)


def test_layers_of_a_pruned_checkpoint_have_the_experts_that_its_index_lists(hub, tmp_path):
    _, config, weights = hub
    kept = only_experts(weights, encoder=[0, 1, 2], decoder=[0, 1])
    model = load_model(write(tmp_path / "pruned", config, kept))
    assert model.settings.encoder_experts == (3, 3) and model.settings.decoder_experts == (2,)
    assert_is_right(model, config, kept)


def test_a_pruned_model_computes_what_the_authors_do_with_the_experts_that_stay(hub, tmp_path):
    folder, config, weights = hub
    batch = {"input_ids": SOURCE, "attention_mask": SOURCE != 1, "labels": TARGET}
    kept = choose_experts(load_model(folder), [batch], Pruning("importance", keep=(3, 2))).kept
    kept["encoder", 1] = kept["encoder", 0]
    (tmp_path / "ours").mkdir()
    prune_checkpoint(folder, tmp_path / "ours", kept)
    left = only_experts(weights, kept["encoder", 0].tolist(), kept["decoder", 0].tolist())
    assert_is_right(load_model(tmp_path / "ours"), config, left)


def test_generation_speaks_the_forced_language_and_equals_the_oracle_with_and_without_a_cache(hub):
    folder, config, weights = hub
    model = load_model(folder, dropless=True)
    ids = torch.tensor([[2, LANGUAGE]] * 2)
    for _ in range(7):
        chosen = oracle.logits(weights, config, SOURCE, ids)[:, -1].argmax(-1)
        ended = (ids[:, 1:] == 2).any(dim=1)
        ids = torch.cat([ids, chosen.masked_fill(ended, 1)[:, None]], dim=1)
    for use_cache in (True, False):
        options = {"forced_bos_token_id": LANGUAGE, "do_sample": False, "max_new_tokens": 8}
        ours = model.generate(
            SOURCE, attention_mask=(SOURCE != 1).long(), use_cache=use_cache, **options
        )
        assert ours.tolist() == ids[:, : ours.shape[1]].tolist() and ours.shape[1] == 9


def test_the_model_of_the_hub_has_the_54_billion_parameters_of_its_authors(tmp_path):
    config = {"model_type": "nllb_moe", "vocab_size": 256206, "d_model": 2048}
    for stack in ("encoder", "decoder"):
        config |= {f"{stack}_layers": 24, f"{stack}_ffn_dim": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert count_parameters(tmp_path)[0] == 54_500_569_088


@settings(max_examples=20)
@given(
    fraction=st.sampled_from([0.1, 0.25, 0.34, 0.5, 1.0]),
    prioritized=st.booleans(),
    before=st.booleans(),
    num_tokens=st.integers(1, 17),
    seed=st.integers(0, 1000),
)
def test_the_layer_queues_and_weighs_as_the_authors_do(
    hub, layer, fraction, prioritized, before, num_tokens, seed
):
    _, config, weights = hub
    config = {**config, "moe_eval_capacity_token_fraction": fraction}
    config["normalize_router_prob_before_dropping"] = before
    fields = from_nllb_moe_config(config)["sparse_layers"]["layer"]
    fields["router"] = "batch_prioritized" if prioritized else "token_choice"
    ours = SparseFeedForward(dataclasses.replace(layer.config, **fields))
    ours.load_state_dict(layer.state_dict())

    torch.manual_seed(seed)
    x = torch.randn(1, num_tokens, 14, dtype=torch.float64)
    real = torch.rand(1, num_tokens) < 0.8
    name = "encoder.layers.1.ffn"
    weights = {key: weights[key].double() for key in weights if key.startswith(name)}
    config["batch_prioritized_routing"] = prioritized
    with torch.no_grad():
        y = ours.double().eval()(x, real)[0][0]
        expected = oracle.sparse(weights, name, config, x[0], real[0].tolist())
    assert_close(y, expected, tolerance=1e-8 if before else 1e-12)


REFUSED = {
    "router_bias": True,
    "second_expert_policy": "sampling",
    "batch_prioritized_routing": True,
    "tie_word_embeddings": False,
    "activation_function": "tanh",
    "num_experts": "5",
    "moe_token_dropout": 1.0,
}


@pytest.mark.parametrize(("field", "value"), REFUSED.items())
def test_a_config_that_is_not_supported_is_refused_by_its_value(field, value, tmp_path):
    config, weights = checkpoint()
    folder = write(tmp_path / "hub", {**config, field: value}, weights)
    with pytest.raises(ConfigError, match=rf"(?s){field.removeprefix('moe_')}.*{value}"):
        load_model(folder)


def test_a_damaged_index_and_another_number_of_experts_than_stored_are_refused(tmp_path):
    config, weights = checkpoint()
    folder = write(tmp_path / "hub", {**config, "num_experts": 7}, weights)
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": 5}')
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin\.index\.json cannot be used"):
        load_model(folder)
    (folder / "pytorch_model.bin.index.json").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"24 missing: encoder.layers.1.ffn.experts.expert_5"):
        load_model(folder)
