"""What single routers promise beside their plan: word embeddings, hashing, token dropout,
loss-free balancing.

Oracles are formulas written out here, and counts.
"""

import pytest
import torch

from moe.sparse.routers.hash_by_token import hash_expert
from tests.oracles.routing import hash_by_murmur
from tests.sparse.by_hand import assert_close
from tests.sparse.layers import DROPLESS, build_layer

# ---- hashing ----


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_hashing_gives_a_word_the_same_expert_in_every_shape_and_release(seed):
    words = [0, 1, 2, 99, 31_999, 2**30, 2**31 - 1]
    expected = [hash_by_murmur(word, 17, seed) for word in words]
    for dtype in (torch.int64, torch.int32):
        assert hash_expert(torch.tensor(words, dtype=dtype), 17, seed).tolist() == expected
    transposed = hash_expert(torch.tensor(words)[:6].reshape(2, 3).T, 17, seed).T
    assert transposed.flatten().tolist() == expected[:6]
    assert seed or expected[:5] == [9, 6, 2, 15, 14]  # a checkpoint relies on these for ever


# ---- token dropout ----


def test_token_dropout_zeroes_whole_tokens_in_training_and_scales_by_its_mean_after_it():
    layer = build_layer(router_options={"token_dropout": 0.2}, **DROPLESS, num_selected_experts=1)
    whole = build_layer(**DROPLESS, num_selected_experts=1)
    x = torch.randn(7, 97, 7, dtype=torch.float64)
    expected = whole(x)[0]
    assert_close(layer(x)[0], 0.8 * expected)

    y, output = layer.train()(x)
    kept = y.abs().sum(dim=-1) > 0
    assert 0.15 < 1 - kept.double().mean() < 0.25
    assert_close(y, expected * kept[..., None])
    assert output.stats.dropped_tokens == 0
    again = layer(x)[0].abs().sum(dim=-1) > 0
    assert not torch.equal(again, kept)


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
