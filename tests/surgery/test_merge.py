"""Merging: aligned experts compute the same, equal ones merge into themselves, and groups are those of
the blackboard.
"""

import pytest
import torch

from moe import SparseConfig, STMoEForConditionalGeneration
from moe.errors import ConfigError, DataError
from moe.sparse.capacity import slots_of_expert
from moe.sparse.editing import edit_routing, sparse_layers
from moe.sparse.experts import Experts
from moe.surgery.expert_scores import Calibration
from moe.surgery.expert_statistics import ExpertStatistics
from moe.surgery.merge import (
    GROUPINGS,
    Merging,
    choose_merges,
    mean_outputs,
    merge_checkpoint,
    merge_groups,
    merged_config,
    reordered_units,
)
from tests.models.tiny import DENSE, tiny_batch, tiny_model

E, D, F = 7, 29, 31
KEYS = [("encoder", 0), ("decoder", 0)]
FORMS = [
    {"gated": True, "expert_bias": "multiplicative"},
    {"gated": False, "activation": "relu", "expert_bias": "additive"},
]


def experts_of(seed=0, **fields):
    torch.manual_seed(seed)
    config = SparseConfig(d_model=D, d_ff=F, num_experts=E, initializer_scale=1.0, **fields)
    experts = Experts(config)
    if experts.bias is not None:
        torch.nn.init.normal_(experts.bias)
    return experts


def shuffled(experts, units):
    """Changes experts to have their units in another order <int64>[E, F]."""
    with torch.no_grad():
        for name, weight in experts.named_parameters():
            for expert in range(E):
                weight[expert] = reordered_units(name, weight[expert].clone(), units[expert])
    return experts


@torch.no_grad()
def slots(experts, x):
    return experts.run_slots(x.expand(E, -1, -1), experts.product_weights())


def random_units(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(F, generator=generator) for _ in range(E)])


@pytest.mark.parametrize("form", FORMS)
def test_an_expert_with_its_units_in_another_order_computes_the_same(form):
    x = torch.randn(1, 13, D)
    expected = slots(experts_of(**form), x)
    ours = slots(shuffled(experts_of(**form), random_units()), x)
    torch.testing.assert_close(ours, expected, rtol=0, atol=5e-7 * expected.abs().max().item())


def test_groups_are_weighted_by_use_and_led_by_their_most_used_expert():
    load = torch.tensor([1, 5, 0, 3, 9, 0, 3])
    layer = merge_groups(experts_of(), torch.tensor([2, 0, 1, 2, 0, 1, 2]), load)
    # The leaders are 4 of {1, 4}, 2 of {2, 5}, and 3 of {0, 3, 6}, the first of equals.
    assert layer.expert_map.tolist() == [1, 2, 0, 1, 2, 0, 1]
    expected = [1 / 7, 5 / 14, 1 / 2, 3 / 7, 9 / 14, 1 / 2, 3 / 7]
    assert layer.weight.tolist() == pytest.approx(expected)
    for leader in (4, 2, 3):
        assert torch.equal(layer.units[leader], torch.arange(F))


def merge(model, merges, folder):
    """Returns the model with merged experts, through files."""
    (folder / "merged").mkdir(parents=True)
    model.save_pretrained(folder / "whole")
    merge_checkpoint(folder / "whole", folder / "merged", merges)
    return STMoEForConditionalGeneration.from_pretrained(folder / "merged").eval()


def logits(model):
    batch = tiny_batch()
    return model(**batch).logits[batch["labels"] != -100]


@pytest.mark.parametrize("proj", ["gated-gelu", "relu"])
def test_merging_equal_experts_changes_nothing(tmp_path, proj):
    """Experts 0, 2, 5 are one expert with their units in other orders, and so are the others."""
    fields = {"feed_forward_proj": proj, "expert_bias": "multiplicative"}
    model = tiny_model(capacity_factor=None, eval_capacity_factor=None, **fields)
    twins = torch.tensor([0, 1, 0, 1, 1, 0, 1])
    with torch.no_grad():
        for layer in sparse_layers(model).values():
            layer.experts.bias.normal_()
            for weight in layer.experts.parameters():
                weight.copy_(weight[twins])
            shuffled(layer.experts, random_units())
    merges = choose_merges(model, [tiny_batch()], Merging("output_clusters", keep=2))
    for layer in merges.values():
        assert len(set(zip(layer.expert_map.tolist(), twins.tolist(), strict=True))) == 2
    merged = merge(model, merges, tmp_path)
    assert merged.config.num_parameters() == sum(p.numel() for p in merged.parameters())
    torch.testing.assert_close(logits(merged), logits(model), atol=2e-5, rtol=1e-5)


def test_a_merged_model_computes_the_mean_of_aligned_experts(tmp_path):
    model = tiny_model(capacity_factor=None, eval_capacity_factor=None)
    merges = choose_merges(model, [tiny_batch()], Merging("m_smoe", keep=3))
    merged = merge(model, merges, tmp_path)
    for key, layer in sparse_layers(merged).items():
        before = sparse_layers(model)[key]
        assert torch.equal(layer.router.gate, before.router.gate)
        how = merges[key]
        for stored in range(3):
            down = up = 0
            for e in (how.expert_map == stored).nonzero().flatten().tolist():
                gate_up = before.experts.gate_up_proj[e].unflatten(0, (2, F))
                up += how.weight[e] * gate_up[:, how.units[e]]
                down += how.weight[e] * before.experts.down_proj[e][:, how.units[e]]
            ours = layer.experts.gate_up_proj[stored].unflatten(0, (2, F))
            torch.testing.assert_close(ours, up, rtol=1e-5, atol=1e-7, check_dtype=False)
            ours = layer.experts.down_proj[stored]
            torch.testing.assert_close(ours, down, rtol=1e-5, atol=1e-7, check_dtype=False)


def test_layers_without_a_merge_stay_as_they_are(tmp_path):
    model = tiny_model()
    merges = choose_merges(model, [tiny_batch()], Merging(keep=3))
    merged = merge(model, {KEYS[1]: merges[KEYS[1]]}, tmp_path)
    assert merged.config.encoder_expert_maps is None
    encoder, decoder = sparse_layers(merged).values()
    assert torch.equal(
        encoder.experts.down_proj, next(iter(sparse_layers(model).values())).experts.down_proj
    )
    assert decoder.experts.down_proj.shape[0] == 3


def test_a_merged_expert_has_the_slots_of_its_rows():
    """Seven rows of 2 slots each; of three stored experts the largest has three rows."""
    config = tiny_model(capacity_factor=1.25, eval_capacity_factor=None).config
    expert_map = torch.tensor([0, 1, 0, 1, 1, 2, 2])
    merged = merged_config(config, {KEYS[0]: expert_map})
    assert merged.eval_capacity_factor is None and merged.min_expert_capacity == 3 * 4
    layer = merged.sparse_config(decoder=False)
    assert slots_of_expert(config.sparse_config(decoder=False), 700, training=True) == 125
    assert slots_of_expert(layer, 700, training=True) == 3 * 125
    fixed = merged_config(
        config.replaced(eval_capacity_factor=1.0, expert_capacity=5), {KEYS[0]: expert_map}
    )
    assert fixed.expert_capacity == 15


def calibration_of(load, products=None):
    zeros = torch.zeros(len(load), dtype=torch.float64)
    statistics = ExpertStatistics(
        num_tokens=torch.tensor(sum(load)),
        load=torch.tensor(load),
        first_load=torch.tensor(load),
        gate_sum=zeros,
        first_gate_sum=zeros,
        gated_norm_sum=zeros,
        output_sum=zeros[:, None],
        logit_products=products,
    )
    calibration = Calibration(tiny_model(num_experts=len(load)), [])
    calibration.__dict__["statistics"] = dict.fromkeys(KEYS, statistics)
    return calibration


def test_rare_experts_join_the_frequent_one_whose_logits_are_most_alike():
    logits = torch.tensor([[1.0, 0], [0, 9], [-1, 1], [1, 0.5], [0.1, 1]], dtype=torch.float64).T
    calibration = calibration_of([9, 8, 1, 2, 3], logits.T @ logits)
    groups = GROUPINGS.get("m_smoe")(calibration, {KEYS[0]: 2})
    assert groups[KEYS[0]].tolist() == [0, 1, 1, 0, 1]


def test_a_budget_gives_layers_the_same_share_of_their_tokens():
    calibration = calibration_of([50, 49, 1, 0, 0])
    even = calibration.statistics[KEYS[0]]._replace(load=torch.tensor([20, 20, 20, 20, 20]))
    calibration.statistics[KEYS[1]] = even
    assert Merging(budget=7).numbers(calibration) == {KEYS[0]: 2}


def test_mean_outputs_are_over_all_tokens_whatever_their_routing():
    model = tiny_model(capacity_factor=None, eval_capacity_factor=None)
    expected = mean_outputs(Calibration(model, [tiny_batch()]))
    key, layer = next(iter(sparse_layers(model).items()))

    # One expert for all tokens, with weight 1.
    seen = []
    layer.register_forward_hook(lambda m, args, out: seen.append(out[0]))

    def to_third(scores, plan):
        one = plan.token_mask[..., None].expand_as(plan.accepted) & (plan.accepted.cumsum(-1) == 1)
        index = torch.full_like(plan.expert_index, 3)
        return plan._replace(expert_index=index, accepted=one, combine_weight=one.float())

    with edit_routing(model, {key: to_third}):
        model(**tiny_batch())
    real = tiny_batch()["attention_mask"].bool()
    mean = seen[0][real].mean(dim=0).double()
    torch.testing.assert_close(expected[key][3], mean, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        ({}, {"keep": 1}, "keep is 1; .* 2 to 6 .num_selected_experts is 2"),
        ({}, {"keep": 7}, "keep is 7; .* 2 to 6"),
        ({}, {"budget": 14}, "budget is 14; expected 4 to 13: 2 layers"),
        (DENSE, {"keep": 3}, "0 sparse layers"),
        ({"encoder_expert_maps": [[0, 1, 2, 3, 4, 5, 5]]}, {"keep": 3}, "merged experts already"),
        (
            {"router": "hash", "router_options": None, "num_selected_experts": 1},
            {"keep": 3},
            "'hash' cannot have merged experts",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused(fields, settings, message):
    with pytest.raises(ConfigError, match=message):
        choose_merges(tiny_model(**fields), [], Merging(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "keep is None and budget None"),
        ({"keep": 2, "budget": 3}, "keep is 2 and budget 3"),
        ({"method": "m-smoe", "keep": 2}, "no method of merging called 'm-smoe'.*'m_smoe'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Merging(**settings)


def test_a_text_without_tokens_is_refused():
    with pytest.raises(DataError, match="0 tokens"):
        choose_merges(tiny_model(), [], Merging(keep=3))
