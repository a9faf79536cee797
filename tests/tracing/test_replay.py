"""Replay. Oracles: the recorded model itself, bit for bit; a model whose routers say the same."""

import copy

import pytest
import torch

from moe import DataError
from moe.sparse.all_routers import load_routers
from moe.sparse.editing import sparse_layers
from moe.tracing.recorder import record_routing, traced_batches
from moe.tracing.replay import replay_routing
from tests.tracing.models import E, build_batch, build_model, rows_of

BATCH = build_batch()


def gradients(model, batch=BATCH):
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return output.logits.detach(), gradients


def other_routing(model, seed=5):
    """Returns the model with other gates."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in sparse_layers(other).values():
            if hasattr(layer.router, "gate"):
                layer.router.gate.normal_(generator=generator)
    return other


@pytest.mark.parametrize("router", load_routers().names())
def test_what_was_recorded_is_replayed_bit_for_bit(router):
    model = build_model(router)
    trace = record_routing(model, traced_batches([BATCH]))
    logits, expected = gradients(model)
    with replay_routing(model, trace):
        replayed_logits, replayed = gradients(model)
    assert torch.equal(replayed_logits, logits)
    for name, gradient in expected.items():
        assert gradient is replayed[name] is None or torch.equal(replayed[name], gradient)

    # As in the recording, without a gradient: attention takes other kernels with one.
    with torch.inference_mode():
        expected_logits = model(**BATCH).logits
    with replay_routing(model, trace, weights="replay"):
        with torch.inference_mode():
            assert torch.equal(model(**BATCH).logits, expected_logits)

        # Recorded weights teach the router nothing beside its losses.
        model.config.router_z_loss_weight = 0.0
        model.config.load_balance_loss_weight = 0.0
        _, replayed = gradients(model)
    for name, gradient in replayed.items():
        assert "router.gate" not in name or gradient is None or not gradient.any()


@pytest.mark.parametrize("dispatch", ["ragged", "static"])
def test_another_router_sends_tokens_where_the_trace_says(dispatch):
    model = build_model(dispatch=dispatch)
    trace = record_routing(model, traced_batches([BATCH]))
    other = other_routing(model)
    expected = model(**BATCH).logits
    assert not torch.allclose(other(**BATCH).logits, expected)
    with replay_routing(other, trace, weights="replay"):
        torch.testing.assert_close(other(**BATCH).logits, expected)
        replayed = record_routing(other, traced_batches([BATCH]))
    for layer, recorded in zip(replayed.layers, trace.layers, strict=True):
        assert torch.equal(layer.choices, recorded.choices)
        assert torch.equal(layer.accepted, recorded.accepted)


def test_examples_are_found_in_other_batches_and_in_another_order():
    model = build_model(eval_capacity_factor=None)
    trace = record_routing(model, traced_batches([BATCH]))
    other = other_routing(model)
    expected = model(**BATCH).logits
    order = [4, 1, 5, 0]
    with replay_routing(other, trace, weights="replay"):
        logits = other(**rows_of(BATCH, order)).logits
    real = BATCH["labels"][order] >= 0
    torch.testing.assert_close(logits[real], expected[order][real])


def test_examples_with_equal_inputs_are_told_apart_by_what_the_decoder_reads():
    model = build_model(eval_capacity_factor=None)
    batch = rows_of(BATCH, [0, 0, 1])
    batch["labels"] = BATCH["labels"][[0, 2, 1]]
    trace = record_routing(model, traced_batches([batch]))
    other = other_routing(model)
    second = rows_of(batch, [1])
    with replay_routing(other, trace, weights="replay"):
        logits = other(**second).logits
    real = second["labels"] >= 0
    torch.testing.assert_close(logits[real], model(**second).logits[real])


def test_generation_is_replayed_step_by_step():
    model = build_model(eval_capacity_factor=None)
    inputs = {name: value for name, value in BATCH.items() if name != "labels"}
    settings = {"max_new_tokens": 9, "do_sample": False}

    # One sequence ends early.
    free = model.generate(**inputs, **settings, min_new_tokens=9)
    early = int(free[2, 3])
    generated = model.generate(**inputs, **settings, eos_token_id=early)
    labels = generated[:, 1:].clone()
    ended = (labels == early).cumsum(1).sub((labels == early).long()) > 0
    labels[ended] = -100
    assert ended.any()

    trace = record_routing(model, traced_batches([{**inputs, "labels": labels}]))
    other = other_routing(model)
    assert not torch.equal(other.generate(**inputs, **settings, eos_token_id=early), generated)
    with replay_routing(other, trace, weights="replay"):
        replayed = other.generate(**inputs, **settings, eos_token_id=early)
    assert torch.equal(replayed, generated)


def changed(name, row, value):
    batch = {key: tensor.clone() for key, tensor in BATCH.items()}
    batch[name][row, 1] = value
    return batch


def test_other_inputs_are_refused():
    model = build_model()
    trace = record_routing(model, traced_batches([BATCH]))
    inputs = {name: value for name, value in BATCH.items() if name != "labels"}
    longer = torch.nn.functional.pad(BATCH["labels"][:1], (0, 1), value=7)
    embedded = {**BATCH, "inputs_embeds": model.get_input_embeddings()(BATCH["input_ids"])}
    del embedded["input_ids"]
    for batch, message in (
        (changed("input_ids", 3, 60), "no example with the encoder's tokens"),
        (changed("labels", 0, 60), "the decoder reads"),
        ({**rows_of(BATCH, [0]), "labels": longer}, "the decoder reads"),
        (embedded, "got no token ids"),
    ):
        with pytest.raises(DataError, match=message), replay_routing(model, trace):
            model(**batch)
    with pytest.raises(DataError, match="no beams"), replay_routing(model, trace):
        model.generate(**inputs, max_new_tokens=3, num_beams=2)


def test_other_layers_are_refused():
    trace = record_routing(build_model(), traced_batches([BATCH]))
    for changes in ({"num_sparse_encoder_layers": 1}, {"num_experts": E - 1}):
        other = build_model(**changes)
        with pytest.raises(DataError, match="same sparse layers"), replay_routing(other, trace):
            pass


def test_a_stack_without_sparse_layers_still_says_which_examples_these_are():
    model = build_model(num_sparse_encoder_layers=0)
    trace = record_routing(model, traced_batches([BATCH]))
    other = other_routing(model)
    with replay_routing(other, trace, weights="replay"):
        torch.testing.assert_close(other(**BATCH).logits, model(**BATCH).logits)
