"""What is special in single hosts: skipped layers, no mask, biases of logits, two vocabularies."""

import copy
import pickle

import pytest
import torch
from safetensors.torch import save_file

import moe
from moe.checkpoint.loading import load_model
from moe.commands.routing_inputs import load_inspected
from moe.errors import ConfigError, DataError
from moe.hosts.upcycle import upcycle_host
from moe.sparse.integration import collect_routers
from moe.surgery.upcycle import Upcycling
from moe.tracing.recorder import record_routing, traced_batches
from tests.hosts.tiny_hosts import TINY, dense_host, host_batch, sparse_host


def close(a, b, atol=1e-6):
    torch.testing.assert_close(a, b, atol=atol, rtol=1e-5)


def test_layers_that_layerdrop_skips_add_no_loss():
    fields = {"load_balance_loss_weight": 3.0, "router_z_loss_weight": 2.0}
    model = sparse_host("m2m_100", fields=fields).train()
    model.model.encoder.layerdrop = model.model.decoder.layerdrop = 0.5
    numbers = set()
    for seed in range(12):
        torch.manual_seed(seed)
        output = model(**host_batch("m2m_100"), output_router_logits=True)
        routers = [*(output.encoder_router_outputs or ()), *(output.decoder_router_outputs or ())]
        expected = output.ce_loss
        for router in routers:
            expected = expected + 3 * router.losses.load_balance_loss
            expected = expected + 2 * router.losses.router_z_loss
        close(output.loss, expected)
        output.loss.backward()
        numbers.add(len(routers))
    assert numbers == {0, 1, 2}


def test_whisper_routes_silence_whatever_mask_it_is_given(tmp_path):
    model = sparse_host("whisper", fields={"eval_capacity_factor": 1.0})
    batch = host_batch("whisper")
    features = batch["input_features"]
    frames = torch.zeros(4, 26, dtype=torch.int64)  # the mask of a feature extractor
    with collect_routers(model.model.encoder) as routers:
        masked = model.model.encoder(features, attention_mask=frames).last_hidden_state
    assert routers[0].plan.token_mask.all()
    assert torch.equal(masked, model.model.encoder(features).last_hidden_state)
    answers = [
        model.generate(features, max_new_tokens=5, **options)
        for options in ({}, {"attention_mask": frames})
    ]
    assert torch.equal(*answers)

    # Texts are refused, and a trace is of ids.
    model.save_pretrained(tmp_path)
    for load in (moe.load, load_inspected):
        with pytest.raises(ConfigError, match=r"input_features.*texts"):
            load(tmp_path)
    with pytest.raises(DataError, match="input_ids"):
        record_routing(model, traced_batches([batch]))


def test_marian_keeps_two_vocabularies_and_saves_no_positions(tmp_path):
    model = sparse_host("marian")
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.model.encoder.embed_tokens.weight.shape[0] == 131
    assert loaded.lm_head.weight is loaded.model.decoder.embed_tokens.weight
    assert loaded.lm_head.weight.shape[0] == loaded.final_logits_bias.shape[1] == 137
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name


def test_tables_of_positions_that_older_versions_saved_are_no_hindrance(tmp_path):
    model = sparse_host("m2m_100")
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    del weights["lm_head.weight"], weights["model.encoder.embed_tokens.weight"]
    del weights["model.decoder.embed_tokens.weight"]
    model.save_pretrained(tmp_path)
    table = model.model.encoder.embed_positions.weights.clone()
    weights["model.encoder.embed_positions.weights"] = torch.zeros_like(table)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(load_model(tmp_path).model.encoder.embed_positions.weights, table)


@pytest.mark.parametrize("name", ["bart", "marian", "mbart", "pegasus"])
def test_the_bias_of_the_logits_is_kept(name, tmp_path):
    dense = dense_host(name)
    sparse = sparse_host(name)
    sparse.save_pretrained(tmp_path)
    bias = load_model(tmp_path).final_logits_bias
    assert bias.std() > 0.1 and torch.equal(bias, dense.final_logits_bias)


@pytest.mark.parametrize("name", ["marian", "t5gemma"])
def test_parts_of_copies_add_each_bias_once(name):
    dense = dense_host(name)
    settings = Upcycling(num_experts=3, num_selected_experts=1, granularity=2)
    parts = upcycle_host(copy.deepcopy(dense), settings)
    batch = host_batch(name)
    real = batch["labels"] != -100
    close(parts(**batch).logits[real], dense(**batch).logits[real], atol=1e-5)


@pytest.mark.parametrize("name", sorted(TINY))
def test_classes_are_found_by_pickle_and_shift_labels_as_the_host(name):
    model = sparse_host(name)
    assert pickle.loads(pickle.dumps(type(model))) is type(model)
    config = pickle.loads(pickle.dumps(model.config))
    assert type(config) is type(model.config) and config.sparse_layers == model.config.sparse_layers
    batch = host_batch(name)
    loss = copy.deepcopy(model)(**batch).loss
    shifted = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    close(model(**batch, decoder_input_ids=shifted).loss, loss)
