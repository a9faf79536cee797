"""The sparse layer against two oracles (tests/oracles/token_choice.py): a loop over tokens and the dense einsum."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe import SparseConfig, SparseFeedForward, add_stats, summarize
from moe.sparse.groups import from_groups, sequences_per_group, to_groups
from tests.oracles.token_choice import capacity_of, dense_einsum, loop_over_tokens


def build(seed=0, **changes):
    settings_ = {"d_model": 7, "d_ff": 11, "num_experts": 5, "initializer_scale": 1.0, "router_initializer_std": 0.7}
    torch.manual_seed(seed)
    return SparseFeedForward(SparseConfig(**{**settings_, **changes})).double().eval()


cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "batch": st.sampled_from([1, 2, 3]),
        "length": st.sampled_from([1, 2, 5, 13]),
        "num_experts": st.sampled_from([1, 2, 5, 17]),
        "places": st.sampled_from([1, 2, 3]),
        "factor": st.sampled_from([0.05, 0.5, 1.0, 1.25, 2.0, None]),
        "least": st.sampled_from([0, 1, 4]),
        "policy": st.sampled_from(["all", "none", "threshold"]),
        "gated": st.booleans(),
        "activation": st.sampled_from(["gelu", "relu"]),
        "bias": st.sampled_from(["none", "additive", "multiplicative"]),
        "padding": st.floats(0, 1),
        "sequences": st.sampled_from([1, 3]),
    }
)


@settings(max_examples=120, deadline=None)
@given(cases)
def test_layer_equals_the_loop_over_tokens_in_output_losses_and_every_gradient(case):
    layer = build(
        case["seed"],
        num_experts=case["num_experts"],
        num_selected_experts=min(case["places"], case["num_experts"]),
        eval_capacity_factor=case["factor"],
        min_expert_capacity=case["least"],
        eval_second_expert_policy=case["policy"],
        gated=case["gated"],
        activation=case["activation"],
        expert_bias=case["bias"],
        group_size=case["sequences"] * case["length"],
    )
    x = torch.randn(case["batch"], case["length"], 7, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(case["batch"], case["length"]) >= case["padding"]
    y, router = layer(x, mask)

    together = sequences_per_group(case["batch"], case["length"], case["sequences"] * case["length"])
    x_oracle = x.detach().clone().requires_grad_()
    groups, group_mask = to_groups(x_oracle, together), to_groups(mask, together)
    size = groups.shape[1]
    capacity = size
    if case["factor"] is not None:
        capacity = capacity_of(size, case["num_experts"], case["factor"], case["least"])
    oracle = loop_over_tokens(layer, groups, group_mask, capacity, case["policy"])

    torch.testing.assert_close(y, from_groups(oracle.output, together), rtol=0, atol=1e-12)
    torch.testing.assert_close(router.losses.load_balance_loss, oracle.load_balance_loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(router.losses.router_z_loss, oracle.router_z_loss, rtol=0, atol=1e-12)
    assert router.plan.expert_index.tolist() == oracle.expert_index
    assert router.plan.accepted.tolist() == oracle.accepted
    assert int(router.stats.dropped_tokens) == oracle.dropped_tokens
    torch.testing.assert_close(dense_einsum(layer, groups, router.plan), oracle.output, rtol=0, atol=1e-12)

    cotangent = torch.randn_like(y)
    inputs = [x, *layer.parameters()]
    oracle_inputs = [x_oracle, *layer.parameters()]
    total = (y * cotangent).sum() + router.losses.load_balance_loss + router.losses.router_z_loss
    expected = (from_groups(oracle.output, together) * cotangent).sum()
    expected = expected + oracle.load_balance_loss + oracle.router_z_loss + 0 * x_oracle.sum()
    ours = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
    theirs = torch.autograd.grad(expected, oracle_inputs, allow_unused=True, materialize_grads=True)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_slots_of_an_expert_are_distinct_and_below_capacity():
    layer = build(eval_capacity_factor=1.0, eval_second_expert_policy="all", min_expert_capacity=0)
    plan = layer(torch.randn(2, 13, 7, dtype=torch.float64))[1].plan
    for group in range(plan.slot.shape[0]):
        taken = {
            (int(e), int(s))
            for e, s, ok in zip(
                plan.expert_index[group].flatten(),
                plan.slot[group].flatten(),
                plan.accepted[group].flatten(),
                strict=True,
            )
            if ok
        }
        assert len(taken) == int(plan.accepted[group].sum())
        assert all(slot < plan.capacity for _, slot in taken)


def test_permuting_the_experts_changes_nothing_but_their_order():
    layer, permuted = build(), build()
    order = torch.tensor([3, 0, 4, 2, 1])
    with torch.no_grad():
        permuted.router.gate.copy_(layer.router.gate[order])
        permuted.experts.gate_up_proj.copy_(layer.experts.gate_up_proj[order])
        permuted.experts.down_proj.copy_(layer.experts.down_proj[order])
    x = torch.randn(3, 13, 7, dtype=torch.float64)
    (y, router), (y_permuted, router_permuted) = layer(x), permuted(x)
    torch.testing.assert_close(y, y_permuted, rtol=0, atol=1e-12)
    assert torch.equal(router.stats.expert_load[order], router_permuted.stats.expert_load)


def test_padding_takes_no_slot_and_enters_no_loss_and_no_statistic():
    layer = build(eval_capacity_factor=None)
    x = torch.randn(2, 13, 7, dtype=torch.float64)
    noise = torch.randn(2, 4, 7, dtype=torch.float64) * 100
    mask = torch.cat([torch.zeros(2, 4, dtype=torch.bool), torch.ones(2, 13, dtype=torch.bool)], dim=1)
    y, router = layer(x)
    y_padded, router_padded = layer(torch.cat([noise, x], dim=1), mask)
    torch.testing.assert_close(y_padded[:, 4:], y, rtol=0, atol=1e-12)
    assert torch.count_nonzero(y_padded[:, :4]) == 0
    for a, b in zip(router.stats, router_padded.stats, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_all_padding_is_zeros_and_finite_losses():
    y, router = build()(torch.randn(2, 3, 7, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.bool))
    assert torch.count_nonzero(y) == 0
    assert float(router.losses.load_balance_loss.detach()) == 0
    assert summarize(router.stats)["fraction_dropped"] == 0


def test_first_places_are_served_before_any_second_place():
    layer = build(num_experts=2, eval_capacity_factor=0.01, min_expert_capacity=3, eval_second_expert_policy="all")
    with torch.no_grad():
        layer.router.gate.zero_()
        layer.router.gate[0, 0] = 1.0
    x = torch.zeros(1, 5, 7, dtype=torch.float64)
    x[0, :, 0] = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0])
    plan = layer(x)[1].plan
    assert plan.expert_index[0, :, 0].tolist() == [0, 0, 1, 0, 1]
    assert plan.accepted[0, :, 0].tolist() == [True] * 5
    assert plan.accepted[0, :, 1].tolist() == [True, False, False, False, False]


def test_random_policy_keeps_a_place_with_probability_gate_over_threshold():
    from moe.sparse.router import keep_places

    torch.manual_seed(0)
    gates = torch.tensor([0.95, 0.05]).expand(1, 40_000, 2)
    kept = keep_places(gates, "random", 0.2)
    assert kept[..., 0].all()
    assert abs(kept[..., 1].double().mean().item() - 0.25) < 0.01


def test_a_single_gate_stays_raw_so_that_the_router_learns_from_the_task():
    layer = build(num_selected_experts=1)
    y, _ = layer(torch.randn(1, 13, 7, dtype=torch.float64))
    y.sum().backward()
    assert float(layer.router.gate.grad.abs().sum()) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_routing_is_float32_whatever_the_parameter_dtype(dtype):
    layer = build().to(dtype)
    y, router = layer(torch.randn(2, 13, 7).to(dtype))
    assert y.dtype == dtype
    assert router.router_logits.dtype == torch.float32
    assert router.plan.combine_weight.dtype == torch.float32


def test_routing_is_float32_under_autocast():
    layer = build().float()
    x = torch.randn(2, 13, 7)
    with torch.autocast("cpu", torch.bfloat16):
        y, router = layer(x)
    assert router.router_logits.dtype == torch.float32
    assert torch.equal(router.router_logits, layer(x)[1].router_logits)
    assert y.dtype == torch.float32


def test_bfloat16_would_move_the_papers_softmax_by_a_third():
    logits = torch.tensor([128.5] + [128.0] * 10)
    exact = logits.softmax(0)[0]
    rounded = logits.to(torch.bfloat16).float().softmax(0)[0]
    assert round(exact.item(), 3) == 0.142
    assert round(rounded.item(), 3) == 0.091


def test_statistics_add_up_over_batches():
    layer = build()
    x = torch.randn(4, 13, 7, dtype=torch.float64)
    layer.config = layer.router.config = SparseConfig(d_model=7, d_ff=11, num_experts=5, group_size=26)
    whole = layer(x)[1].stats
    parts = add_stats(layer(x[:2])[1].stats, layer(x[2:])[1].stats)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def test_summary_of_a_hand_made_load():
    layer = build(num_experts=2, num_selected_experts=1, eval_capacity_factor=None)
    stats = layer(torch.randn(1, 13, 7, dtype=torch.float64))[1].stats
    stats = stats._replace(expert_load=torch.tensor([9.0, 3.0]))
    summary = summarize(stats)
    assert summary["max_over_mean"] == 1.5
    assert summary["load_cv"] == 0.5
    assert summary["dead_experts"] == 0
    assert summary["expert_usage"] == 1.0


def test_expert_dropout_acts_in_training_only():
    layer = build(expert_dropout_rate=0.5, second_expert_policy="all", eval_second_expert_policy="all")
    x = torch.randn(1, 13, 7, dtype=torch.float64)
    assert torch.equal(layer(x)[0], layer(x)[0])
    layer.train()
    assert not torch.equal(layer(x)[0], layer(x)[0])
