"""Twins and parts of experts: the same outputs, and what is said where they are not."""

import re

import pytest
import torch

from moe import STMoEForConditionalGeneration
from moe.errors import ConfigError
from moe.sparse.editing import sparse_layers
from moe.surgery.add_experts import AddedExperts, add_experts
from tests.models.tiny import UL2_AND_UMT5, tiny_batch, tiny_model
from tests.surgery.tiny_prefixes import AZ, MK, add_prefixes, batch_with, parent_model

DENSE = {"num_experts": 0, "num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0}
SINGLE = {"num_selected_experts": 1, "router_options": None}
DEFAULT = {"router_options": {"second_expert_policy": "all"}}  # threshold 0.2 in evaluation


def enlarge(model, folder, **settings):
    model.save_pretrained(folder / "before")
    (folder / "after").mkdir()
    add_experts(folder / "before", folder / "after", AddedExperts(**settings))
    return STMoEForConditionalGeneration.from_pretrained(folder / "after").eval()


def logits_of(model):
    with torch.no_grad():
        return model(**tiny_batch()).logits[tiny_batch()["labels"] != -100]


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"granularity": 2}, {"decoder_experts": [4]}),
        (
            {"num_experts": 21, "granularity": 2},
            {"expert_bias": "multiplicative", "num_shared_experts": 1},
        ),
        ({"num_experts": 14, "granularity": 3}, {"eval_capacity_factor": 0.7, **DEFAULT}),
        ({"granularity": 3}, {"feed_forward_proj": "relu", "expert_bias": "additive"}),
        ({"num_experts": 14}, {"router": "switch", **SINGLE}),
        ({"num_experts": 14, "granularity": 2}, UL2_AND_UMT5),
        ({"num_experts": 14}, {"router": "bias_balanced", "router_options": None}),
        ({"num_experts": 14}, {"router": "batch_prioritized", "decoder_router": "token_choice"}),
    ],
)
def test_more_experts_compute_the_same(tmp_path, settings, fields):
    model = tiny_model(**{"d_ff": 36, "min_expert_capacity": 1, **fields})
    for layer in sparse_layers(model).values():
        if hasattr(layer.router, "load_steps"):
            layer.router.load_steps += torch.arange(7) * 20
        for name, bias in layer.named_parameters():
            if name.endswith("experts.bias"):
                torch.nn.init.uniform_(bias, 0.5, 1.5)
    larger = enlarge(model, tmp_path, **settings)
    torch.testing.assert_close(logits_of(larger), logits_of(model), atol=1e-5, rtol=1e-5)

    # In training too, where the policy is `all` and there is no exploration.
    if fields.get("router") != "switch" and "decoder_router" not in fields:
        difference = logits_of(larger.train()) - logits_of(model.train())
        assert difference.abs().max() < 1e-5
    factor = settings.get("num_experts", 7) // 7 * settings.get("granularity", 1)
    assert larger.config.num_selected_experts == factor * model.config.num_selected_experts
    rows = sparse_layers(larger)["encoder", 0].router.gate.unflatten(0, (7, factor))
    assert torch.equal(rows, rows[:, :1].expand_as(rows))


def test_experts_of_a_prefix_get_twins_and_parts_of_their_own(tmp_path):
    model = add_prefixes(parent_model(), [MK, AZ])
    larger = enlarge(model, tmp_path, num_experts=24, granularity=2)
    assert larger.config.prefix_counts() == (12, 8)
    for records in ([MK, AZ], []):
        batch = batch_with(*records)
        is_target = batch["labels"] != -100
        torch.testing.assert_close(
            larger(**batch).logits[is_target],
            model(**batch).logits[is_target],
            atol=1e-5,
            rtol=1e-5,
        )


def test_the_balance_loss_stays_where_it_counts_first_choices(tmp_path):
    model = tiny_model()
    before = model(**tiny_batch())
    after = enlarge(model, tmp_path, num_experts=14)(**tiny_batch())
    torch.testing.assert_close(after.load_balance_loss, before.load_balance_loss)
    assert after.router_z_loss > before.router_z_loss

    counts_all = tiny_model(convention="flaxformer")
    (tmp_path / "all").mkdir()
    larger = enlarge(counts_all, tmp_path / "all", num_experts=14)
    ratio = larger(**tiny_batch()).load_balance_loss / counts_all(**tiny_batch()).load_balance_loss
    torch.testing.assert_close(ratio, torch.tensor(2.0))
    assert "2 times as large" in " ".join(AddedExperts(14).changes(counts_all.config))


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        ({"router_options": {}}, "each twin is drawn for itself in training"),
        ({"router_options": {"eval_second_expert_policy": "none"}}, "one twin .* in evaluation"),
        (
            {"router_options": {"eval_second_expert_threshold": 0.6}},
            "in evaluation: its gate can be below the threshold 0.6",
        ),
        ({"router": "switch", **SINGLE}, "exploration of router 'switch' in training is lost"),
    ],
)
def test_what_is_not_exact_is_said(fields, change):
    changes = AddedExperts(14).changes(tiny_model(**fields).config)
    assert re.search(change, " ".join(changes))


@pytest.mark.parametrize(
    ("settings", "fields", "message"),
    [
        ({"num_experts": 10}, {}, "num_experts is 10; expected a multiple of 7"),
        ({"num_experts": 14}, DENSE, "num_experts of the model is 0"),
        ({"granularity": 2}, {}, "granularity is 2; expected a divisor of 31"),
        ({"num_experts": 7}, {}, "7 experts already"),
        ({"num_experts": 14}, {"router": "hash", **SINGLE}, "router 'hash', which cannot choose"),
        (
            {"num_experts": 14},
            {"router": "bias_balanced", "router_options": {"score": "sigmoid"}},
            "score of router 'bias_balanced' is 'sigmoid'; expected softmax",
        ),
    ],
)
def test_what_does_not_fit_is_refused(settings, fields, message):
    with pytest.raises(ConfigError, match=message):
        AddedExperts(**settings).config(tiny_model(**fields).config)
