"""Experts of a prefix in one layer. Oracles: a softmax over the allowed experts in float64, and
layers that have no other experts.
"""

import pytest
import torch

from moe import ConfigError, DataError
from moe.sparse.editing import edit_routing
from moe.sparse.edits import RerouteExperts
from moe.sparse.examples import prefix_scores
from tests.sparse.by_hand import layer_with_logits, tokens
from tests.sparse.layers import DROPLESS, build_layer

COUNTS = (2, 3)  # after 5 base experts
ALLOWED = (range(5), (*range(5), 5, 6), (*range(5), 7, 8, 9))  # without a prefix, and with each
ROUTERS = ["token_choice", "batch_prioritized", "pools"]
PREFIXES = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 0, 0, 0, 0, 2, 1], [2] * 13, [0] * 13])


def layer_of(counts=COUNTS, router="token_choice", **fields):
    return build_layer(
        router, **{"num_experts": 5 + sum(counts), "prefix_experts": counts, **fields}
    )


def copy_experts(layer, other, experts):
    """Copies experts and their rows of the router from another layer."""
    with torch.no_grad():
        for ours, theirs in zip(layer.parameters(), other.parameters(), strict=True):
            ours.copy_(theirs[list(experts)])
    return layer


def is_allowed(prefixes):
    """Returns which experts each token may use <bool>[..., E]."""
    allowed = torch.zeros(*prefixes.shape, 10, dtype=torch.bool)
    for number, experts in enumerate(ALLOWED):
        allowed[..., list(experts)] |= (prefixes == number)[..., None]
    return allowed


@pytest.mark.parametrize("scale", [1, 1e4])
def test_scores_are_the_softmax_over_the_experts_that_a_token_may_use(scale):
    logits = (scale * tokens(3, 13, 10)).float()
    for prefixes in (PREFIXES, None):
        scores = prefix_scores(logits.split([5, *COUNTS], dim=-1), prefixes)
        allowed = is_allowed(torch.zeros(3, 13) if prefixes is None else prefixes)
        expected = logits.double().masked_fill(~allowed, -torch.inf)
        torch.testing.assert_close(
            scores.probs.double(), expected.softmax(-1), rtol=1e-5, atol=1e-7
        )
        assert torch.equal(scores.logits[allowed], logits[allowed])
        assert torch.count_nonzero(scores.probs[~allowed]) == 0
        normalizer = expected.logsumexp(dim=-1)
        torch.testing.assert_close(
            scores.logits.logsumexp(dim=-1).double(), normalizer, rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("router", ROUTERS)
def test_every_token_has_the_bits_of_a_layer_without_the_experts_that_it_may_not_use(router):
    """Beside tokens of other prefixes the scores; rows of other tokens change the products' order.

    Weights have rows of 64 bytes: products of others may depend on where they lie in memory.
    """
    sizes = {"d_model": 16, "d_ff": 32}
    layer = layer_of(router=router, **sizes).float()
    x = tokens(3, 13, 16).float()
    mixed = layer(x, prefix_numbers=PREFIXES)[1].router_logits.view(3, 13, 10)
    for number, experts in enumerate(ALLOWED):
        counts = (COUNTS[number - 1],) if number else ()
        alone = copy_experts(layer_of(counts, router, **sizes).float(), layer, experts)
        y, _ = layer(x, prefix_numbers=torch.full((3, 13), number))
        expected, output = alone(x, prefix_numbers=torch.full((3, 13), min(number, 1)))
        assert torch.equal(y, expected)
        here = (number == PREFIXES)[..., None]
        logits = output.router_logits.view(3, 13, -1)
        assert torch.equal(mixed[..., list(experts)] * here, logits * here)
    assert torch.equal(layer(x)[0], layer(x, prefix_numbers=0 * PREFIXES)[0])


@pytest.mark.parametrize("router", ROUTERS)
def test_rerouted_tokens_choose_no_expert_that_they_may_not_use(router):
    """Where all base experts are barred, texts without a prefix have none."""
    layer = layer_of(router=router, **DROPLESS)
    x = tokens(3, 13, 7)
    with edit_routing(layer, {("encoder", 0): RerouteExperts(*range(5))}):
        y, output = layer(x, prefix_numbers=PREFIXES)
    plan = output.plan
    index, accepted = (part.view(3, 13, 2) for part in (plan.expert_index, plan.accepted))
    allowed = is_allowed(PREFIXES)
    allowed[..., :5] = False
    assert allowed.gather(-1, index)[accepted].all()
    assert torch.equal(accepted.any(dim=-1), PREFIXES > 0)
    assert torch.equal(y.any(dim=-1), PREFIXES > 0) and y.isfinite().all()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("capacity", [None, 0.5])
@pytest.mark.parametrize("router", ROUTERS)
def test_no_token_chooses_an_expert_that_it_may_not_use(router, capacity, training):
    """Logits of 1e4 leave zeros: ties of allowed and forbidden experts."""
    options = {"second_expert_policy": "all", "eval_second_expert_policy": "all"}
    fields = {"capacity_factor": capacity, "eval_capacity_factor": capacity, "group_size": 13}
    layer = layer_with_logits(
        10, router, prefix_experts=COUNTS, num_selected_experts=4, router_options=options, **fields
    )
    layer = layer.float().train(training)
    allowed = is_allowed(PREFIXES)
    for scale in (1, 1e4):
        x = (scale * tokens(3, 13, 10).sign() * torch.rand(3, 13, 10).round()).float()
        plan = layer(x, prefix_numbers=PREFIXES, segment_ids=PREFIXES + 1)[1].plan
        assert allowed.gather(-1, plan.expert_index.view(3, 13, 4)).all()
        assert (plan.combine_weight >= 0).all()


def test_only_tokens_of_a_prefix_train_its_experts():
    layer = layer_of(router="pools", **DROPLESS).train()
    numbers = torch.where(PREFIXES == 2, 0, PREFIXES)
    y, output = layer(tokens(3, 13, 7), prefix_numbers=numbers)
    loss = y.square().sum() + output.losses.load_balance_loss + output.losses.router_z_loss
    for gradient in torch.autograd.grad(loss, list(layer.parameters())):
        assert gradient.isfinite().all()
        assert gradient[:7].flatten(1).any(dim=1).all()
        assert not gradient[7:].any()


def test_wrong_numbers_of_experts_and_inputs_of_another_shape_are_refused():
    for counts in ((4,), (1, 0), (-1,), (True,), (1.5,), "12", ("a",), 3, {1: 2}):
        with pytest.raises(
            ConfigError, match=r"^prefix_experts is .* at most 3 together, .* have 2"
        ):
            build_layer(prefix_experts=counts)
    with pytest.raises(ConfigError, match="'switch' cannot have experts of a prefix"):
        build_layer("switch", num_experts=7, prefix_experts=COUNTS)
    layer = layer_of()
    for name in ("prefix_numbers", "segment_ids"):
        with pytest.raises(DataError, match=rf"^{name} is .* expected \[3, 13\]"):
            layer(tokens(3, 13, 7), **{name: PREFIXES[:, 1:]})
