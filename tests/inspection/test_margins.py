"""How close choices are: gaps in probability, and what noise changes in a real model."""

import math

import pytest
import torch

from moe import ConfigError, DataError
from moe.inspection.statistics.margins import choice_margins, noise_stability
from moe.tracing.recorder import record_routing, traced_batches
from tests.inspection.by_hand import a_layer
from tests.models.tiny import tiny_batch, tiny_model


def with_probs(layer, probs):
    return layer._replace(best_prob=torch.tensor(probs).half())


def test_the_gap_is_between_the_last_choice_and_the_next():
    layer = with_probs(a_layer([[0, 1], [2, 1]], 5), [[0.5, 0.25, 0.125], [0.375, 0.375, 0.25]])
    margins = choice_margins(layer)
    assert margins.place == 2
    assert margins.gap.tolist() == [0.125, 0.125]
    single = with_probs(a_layer([0, 2], 5), [[0.5, 0.25], [0.375, 0.375]])
    assert choice_margins(single).gap.tolist() == [0.25, 0]


def test_margins_of_a_model_are_those_of_its_probabilities():
    model = tiny_model()
    batch = tiny_batch()
    trace = record_routing(model, traced_batches([batch]), num_best=3)
    margins = choice_margins(trace.encoder.layers[0])
    output = model(**batch, output_router_logits=True)
    logits = output.encoder_router_outputs[0].router_logits
    probs = logits.softmax(dim=-1).sort(dim=-1, descending=True).values
    is_real = batch["attention_mask"].bool()
    gap = (probs[..., 1] - probs[..., 2]).reshape(is_real.shape)[is_real]
    torch.testing.assert_close(margins.gap, gap, atol=1e-3, rtol=0)


def test_margins_need_one_place_more_than_there_are_choices():
    with pytest.raises(DataError, match=r"has the 0 highest probabilities .* num_best=3"):
        choice_margins(a_layer([[0, 1]], 5))
    with pytest.raises(DataError, match=r"may have 2 of 2 experts .* no next one"):
        choice_margins(with_probs(a_layer([[0, 1]], 2), [[0.5, 0.5]]))
    nothing = a_layer(torch.empty(0, 1).long(), 5)._replace(best_prob=torch.empty(0, 2).half())
    assert choice_margins(nothing).gap.numel() == 0


def test_noise_changes_more_the_more_there_is_and_the_model_nothing():
    model = tiny_model(num_sparse_encoder_layers=2).train()
    batches = [tiny_batch(seed=seed) for seed in range(2)]
    stabilities = noise_stability(model, batches, variances=(1e-12, 0.25, 4.0))
    assert model.training
    assert [s.layer for s in stabilities[::3]] == [("encoder", 0), ("encoder", 1), ("decoder", 0)]

    trace = record_routing(model, traced_batches(batches))
    for number, layer in enumerate(trace.layers):
        still, some, much = stabilities[3 * number : 3 * number + 3]
        assert (still.variance, some.variance, much.variance) == (1e-12, 0.25, 4.0)
        assert still.tokens == len(layer.first)
        assert still.kept == still.first_kept == 1
        assert 1 > some.kept > much.kept > 2 / 7 - 0.1
        assert some.first_kept > much.first_kept


def test_noise_is_drawn_from_the_seed_and_disturbs_no_other_draw():
    model = tiny_model()
    torch.manual_seed(3)
    expected = torch.rand(5)
    torch.manual_seed(3)
    first = noise_stability(model, [tiny_batch()], variances=[1.0], seed=1)
    assert torch.rand(5).equal(expected)
    again = noise_stability(model, [tiny_batch()], variances=[1.0], seed=1)
    other = noise_stability(model, [tiny_batch()], variances=[1.0], seed=2)
    assert [s.kept for s in first] == [s.kept for s in again]
    assert [s.kept for s in first] != [s.kept for s in other]
    assert not any(module._forward_hooks for module in model.modules())


def test_a_router_that_draws_its_second_choice_is_as_stable_as_it_is():
    options = {"second_expert_policy": "random", "eval_second_expert_policy": "random"}
    model = tiny_model(router_options=options)
    for stability in noise_stability(model, [tiny_batch()], variances=[1e-12]):
        assert stability.kept == stability.first_kept == 1


@pytest.mark.parametrize("router", ["hash", "expert_choice", "bias_balanced"])
def test_any_router_can_be_asked(router):
    changes = {"num_selected_experts": 1} if router == "hash" else {}
    model = tiny_model(router=router, router_options={}, num_sparse_decoder_layers=0, **changes)
    (stability,) = noise_stability(model, [tiny_batch()], variances=[2.0])
    assert (stability.kept == 1) == (router == "hash")
    assert 0 < stability.tokens <= 46


def test_hooks_are_removed_when_the_model_fails():
    model = tiny_model()
    with pytest.raises(ConfigError, match="no_such_input"):
        noise_stability(model, [{"no_such_input": torch.zeros(1)}])
    assert not any(module._forward_hooks for module in model.modules())


def test_variances_are_checked():
    for variances in ([0.0], [math.nan], ["1"]):
        with pytest.raises(ConfigError, match=r"variance is .*; expected a finite number above 0"):
            noise_stability(tiny_model(), [], variances=variances)
    with pytest.raises(ConfigError, match="expected at least one number"):
        noise_stability(tiny_model(), [], variances=[])
    with pytest.raises(ConfigError, match=r"seed is 0\.5"):
        noise_stability(tiny_model(), [], seed=0.5)
    assert noise_stability(tiny_model(), []) == []
