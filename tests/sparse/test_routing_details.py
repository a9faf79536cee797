"""What single routers promise beside their plan: word embeddings, hashing, loss-free balancing,
second chances.

Oracles are formulas written out here, and counts.
"""

import pytest
import torch

from moe.sparse.routers.hash_by_token import hash_expert
from tests.sparse.layers import DROPLESS, GATED_NAMES, build_layer

# ---- the gate sees word embeddings ----


def with_words(mode, router="token_choice"):
    """Returns what the router made of random tokens and word embeddings, and these."""
    layer = build_layer(router, router_input=mode)
    x = torch.randn(3, 13, 7, dtype=torch.float64, requires_grad=True)
    words = torch.randn(3, 13, 7, dtype=torch.float64, requires_grad=True)
    y, router_output = layer(x, word_embeddings=words)
    return layer, x, words, y, router_output


@pytest.mark.parametrize("mode", ["concat", "concat_stop_gradient", "add", "add_stop_gradient"])
def test_the_gate_sees_the_word_embedding_behind_or_on_top_of_the_hidden_state(mode):
    for name in GATED_NAMES:
        layer, x, words, _, router = with_words(mode, name)
        seen = torch.cat([x, words], dim=-1) if mode.startswith("concat") else x + words
        assert layer.router.gate.shape == (5, 14 if mode.startswith("concat") else 7)
        expected = (seen @ layer.router.gate.T).reshape(router.router_logits.shape)
        torch.testing.assert_close(router.router_logits, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["concat", "add"])
def test_the_word_embedding_gets_a_gradient_only_without_stop(mode):
    gradients = []
    for stop in ("", "_stop_gradient"):
        _, x, words, y, router = with_words(mode + stop)
        loss = y.square().sum() + router.losses.router_z_loss
        gradients.append(torch.autograd.grad(loss, (x, words), allow_unused=True))
    (d_x, d_words), (d_x_stopped, d_words_stopped) = gradients
    assert torch.count_nonzero(d_words) == d_words.numel()
    assert d_words_stopped is None
    assert torch.equal(d_x_stopped, d_x)


@pytest.mark.parametrize("mode", ["concat", "add"])
def test_experts_never_see_the_word_embedding(mode):
    layer, x, _, y, router = with_words(mode)
    with torch.no_grad():
        dispatcher = layer.start_dispatcher(router.plan)
        outputs = dispatcher.combine(layer.experts(dispatcher.dispatch(x.reshape(-1, 7))))
    torch.testing.assert_close(outputs.reshape(x.shape), y, rtol=0, atol=1e-12)


# ---- hashing ----


@pytest.mark.parametrize(("seed", "num_experts"), [(0, 2), (1, 17), (12345, 128)])
def test_hashing_spreads_a_vocabulary_as_evenly_as_dice_would(seed, num_experts):
    ids = torch.arange(10_007)
    counts = torch.bincount(hash_expert(ids, num_experts, seed), minlength=num_experts).double()
    even = 10_007 / num_experts
    chi_square = float(((counts - even).square() / even).sum())
    freedom = num_experts - 1  # mean of chi-square, and half of its variance
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5
    assert int((counts == 0).sum()) == 0


def test_neighbouring_ids_and_other_seeds_do_not_share_an_expert_more_often_than_chance():
    ids = torch.arange(10_007)
    expert = hash_expert(ids, 17, seed=0)
    pairs = [(expert[distance:], expert[:-distance]) for distance in (1, 2, 16, 17, 1024)]
    pairs += [(expert, hash_expert(ids, 17, seed)) for seed in (1, 17)]
    for a, b in pairs:
        same = (a == b).double().mean()
        assert abs(float(same) - 1 / 17) < 4 * (1 / 17 / 10_007) ** 0.5


def hash_by_hand(word, num_experts, seed):
    """The finaliser of MurmurHash3 on 31 bits, in whole numbers without a limit."""
    mixed = (2 * word + 1 + seed * 0x9E3779B1) % 2**31
    mixed = (mixed ^ mixed >> 16) * 0x45D9F3B % 2**31
    mixed = (mixed ^ mixed >> 16) * 0x119DE1F3 % 2**31
    return (mixed ^ mixed >> 15) % num_experts


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_hashing_gives_a_word_the_same_expert_in_every_shape_and_release(seed):
    words = [0, 1, 2, 99, 31_999, 2**30, 2**31 - 1]
    expected = [hash_by_hand(word, 17, seed) for word in words]
    for dtype in (torch.int64, torch.int32):
        assert hash_expert(torch.tensor(words, dtype=dtype), 17, seed).tolist() == expected
    transposed = hash_expert(torch.tensor(words)[:6].reshape(2, 3).T, 17, seed).T
    assert transposed.flatten().tolist() == expected[:6]
    assert seed or expected[:5] == [9, 6, 2, 15, 14]  # a checkpoint relies on these for ever


def test_hash_routing_follows_the_ids_with_weight_one_and_no_parameter():
    layer = build_layer("hash", router_options={"seed": 3}, **DROPLESS)
    ids = torch.randint(0, 997, (3, 13))
    plan = layer(torch.randn(3, 13, 7, dtype=torch.float64), token_ids=ids)[1].plan
    assert torch.equal(plan.expert_index.flatten(), hash_expert(ids, 5, 3).flatten())
    assert set(plan.combine_weight.flatten().tolist()) == {1.0}
    assert not list(layer.router.parameters())


# ---- loss-free balancing ----


def skewed_layer(**options):
    """Returns a layer that likes its first experts, and tokens."""
    router_options = {"update_rate": 0.01, **options}
    layer = build_layer("bias_balanced", router_options=router_options, **DROPLESS)
    layer.router.load_steps.zero_()
    with torch.no_grad():
        layer.router.gate[:, 0] = torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0])
    x = torch.randn(7, 53, 7, dtype=torch.float64)
    x[..., 0] = 1.0
    return layer, x


def imbalance(layer, x):
    load = layer(x)[1].stats.expert_load.double()
    return float(load.max() / load.mean())


def test_updates_move_the_load_towards_balance():
    layer, x = skewed_layer()
    first = imbalance(layer, x)
    for _ in range(60):
        layer.router.update(layer(x)[1].stats)
    assert first > 1.4
    assert imbalance(layer, x) < 1.1


@pytest.mark.parametrize("normalize", [True, False])
def test_the_bias_steers_the_choice_and_never_enters_the_weight(normalize):
    layer, x = skewed_layer(normalize_gates=normalize)
    before = layer(x)[1].plan
    layer.router.load_steps.copy_(torch.tensor([-60, -20, 0, 20, 60]))
    _, router = layer(x)
    plan, probs = router.plan, router.router_logits.softmax(dim=-1)
    assert not torch.equal(plan.expert_index, before.expert_index)
    gates = probs.gather(-1, plan.expert_index)
    if normalize:
        gates = gates / gates.sum(dim=-1, keepdim=True)
    # The sum has 1e-9 added.
    torch.testing.assert_close(plan.combine_weight, gates, rtol=1e-5, atol=0)
    biased = probs + torch.tensor([-0.6, -0.2, 0.0, 0.2, 0.6], dtype=torch.float64)
    assert torch.equal(plan.expert_index, biased.topk(2).indices)


def test_the_biases_are_saved_and_loaded_with_the_layer_exactly():
    layer, x = skewed_layer()
    for _ in range(13):
        layer.router.update(layer(x)[1].stats)
    assert int(layer.router.load_steps.abs().sum()) > 0
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    other = build_layer("bias_balanced", seed=1, router_options={"update_rate": 0.01}, **DROPLESS)
    other.load_state_dict(state)
    assert torch.equal(other.router.load_steps, layer.router.load_steps)
    assert torch.equal(other(x)[0], layer(x)[0])
    layer.to(torch.bfloat16)
    assert torch.equal(layer.router.load_steps, other.router.load_steps)
    other.router.reset_parameters()
    assert torch.count_nonzero(other.router.load_steps) == 0


def test_other_routers_learn_nothing_from_an_update():
    for name in set(GATED_NAMES) - {"bias_balanced"}:
        layer = build_layer(name)
        before = {key: value.clone() for key, value in layer.state_dict().items()}
        layer.router.update(layer(torch.randn(2, 13, 7, dtype=torch.float64))[1].stats)
        assert all(torch.equal(before[key], value) for key, value in layer.state_dict().items())


# ---- no token left behind ----


@pytest.mark.parametrize("factor", [0.75, 1.0, 1.25])
def test_second_chances_leave_fewer_tokens_behind_than_switch(factor):
    fields = {"eval_capacity_factor": factor, "min_expert_capacity": 0, "group_size": 53}
    switch, again = build_layer("switch", **fields), build_layer("no_token_left_behind", **fields)
    again.load_state_dict(switch.state_dict())
    x = torch.randn(7, 53, 7, dtype=torch.float64)
    stats_switch, stats = switch(x)[1].stats, again(x)[1].stats
    assert int(stats.num_slots) == int(stats_switch.num_slots)
    assert int(stats.dropped_tokens) < int(stats_switch.dropped_tokens)
    assert int(stats.accepted_load.sum()) == int(stats.num_tokens) - int(stats.dropped_tokens)
    assert bool((stats.accepted_load >= stats_switch.accepted_load).all())


def test_as_many_candidates_as_experts_and_room_for_all_leave_nobody_behind():
    fields = {"eval_capacity_factor": 1.0, "min_expert_capacity": 0, "group_size": 55}
    x = torch.randn(7, 55, 7, dtype=torch.float64)  # 5 experts with 11 slots each
    left = []
    for num_candidates in (1, 2, 3, 5):
        options = {"num_candidates": num_candidates}
        layer = build_layer("no_token_left_behind", router_options=options, **fields)
        left.append(int(layer(x)[1].stats.dropped_tokens))
    assert left == sorted(left, reverse=True)
    assert left[0] > left[1] > 0
    assert left[-1] == 0
