"""Pools of experts, and where examples start. Oracle: one token at a time, in plain Python."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe.sparse.examples import example_starts, of_first_token
from moe.sparse.layer import RouterOutput
from tests.sparse.by_hand import layer_with_logits, tokens
from tests.sparse.layers import DROPLESS, build_layer
from tests.sparse.test_integration import D, sparse_encoder

ALL = {"second_expert_policy": "all"}

# Rows of a batch: the mask, the numbers of their segments, and where examples start by hand.
ROWS = {
    "right padding": ("1111000", "1112000", "1001000"),
    "left padding": ("0011111", "0022211", "0010010"),
    "holes": ("0110111", "0110112", "0100001"),
    "a start that is padding": ("1011011", "1122233", "1010010"),
    "the last segment of a row and the first of the next": ("1111111", "2222221", "1000001"),
    "all padding": ("0000000", "0000000", "0000000"),
    "padding inside of a segment": ("1110111", "1111111", "1000000"),
}


def numbers(column):
    return torch.tensor([[int(digit) for digit in row[column]] for row in ROWS.values()])


def first_tokens(starts):
    """Returns for each token of a row its example's first token, by a loop; None before any."""
    firsts, first = [], None
    for position, is_start in enumerate(starts.tolist()):
        first = position if is_start else first
        firsts.append(first)
    return firsts


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_an_example_starts_at_the_first_real_token_of_a_row_or_segment(dtype):
    mask, segments = numbers(0).bool(), numbers(1).to(dtype)
    assert torch.equal(example_starts(mask, segments).long(), numbers(2))
    expected = torch.zeros_like(mask)
    for row, is_real in enumerate(mask):
        expected[row, is_real.nonzero()[:1]] = True
    assert torch.equal(example_starts(mask), expected)


def test_a_token_takes_the_values_of_its_first_token_in_groups_of_several_rows_too():
    starts = numbers(2)[:6].bool().view(2, 21)  # segments with equal numbers meet inside of a group
    values = tokens(2, 21, 5)
    for given in (values, values > 0, values[..., 0]):
        ours = of_first_token(given, starts)
        assert ours.shape == given.shape
        for group in range(2):
            for position, first in enumerate(first_tokens(starts[group])):
                if first is not None:
                    assert torch.equal(ours[group, position], given[group, first])


# ---- pools ----


def pools(num_experts=7, **fields):
    """Returns a layer in training whose inputs are its router's logits."""
    options = {"router_options": ALL, **DROPLESS}
    return layer_with_logits(num_experts, "pools", **{**options, **fields}).train()


def sizes_of_pools(output: RouterOutput):
    """Returns the size of each token's pool <int64>[G, S]."""
    return (output.router_logits > -1e30).sum(dim=-1)


@pytest.mark.parametrize("dispatch", ["ragged", "static"])
@pytest.mark.parametrize("num_selected", [1, 4])
@pytest.mark.parametrize("segmented", [False, True])
def test_tokens_choose_among_the_experts_that_their_first_token_finds_likeliest(
    dispatch, num_selected, segmented
):
    layer = pools(dispatch=dispatch, num_selected_experts=num_selected)
    x, mask = tokens(7, 7, 7), numbers(0).bool()
    segments = numbers(1) if segmented else None
    for seed in range(3):
        torch.manual_seed(seed)
        _, output = layer(x, mask, segment_ids=segments)
        sizes = sizes_of_pools(output).view(7, 7)
        chosen = output.plan.expert_index.view(7, 7, -1)
        for row, starts in enumerate(example_starts(mask, segments)):
            for position, first in enumerate(first_tokens(starts)):
                if not mask[row, position]:
                    continue
                size = int(sizes[row, first])
                order = sorted(range(7), key=lambda expert: -x[row, first, expert])
                pool = order[:size]
                best = sorted(pool, key=lambda expert: -x[row, position, expert])
                assert chosen[row, position].tolist() == best[:num_selected]
                assert sizes[row, position] == size


def test_the_size_of_a_pool_is_any_from_the_experts_of_a_token_to_all_equally_often():
    torch.manual_seed(0)
    layer = pools(num_selected_experts=3, group_size=7)
    sizes = sizes_of_pools(layer(tokens(2003, 1, 7))[1]).flatten()
    shares = torch.bincount(sizes, minlength=8) / 2003
    assert not shares[:3].any()
    assert ((shares[3:] - 1 / 5).abs() < 5 * (0.2 * 0.8 / 2003) ** 0.5).all()


def test_pools_are_of_base_experts_and_a_text_has_those_of_its_prefix_in_addition():
    torch.manual_seed(0)
    layer = pools(10, prefix_experts=(2, 3), num_selected_experts=2, group_size=7)
    numbers = torch.arange(2001)[:, None] % 3
    output = layer(tokens(2001, 1, 10), prefix_numbers=numbers)[1]
    usable = (output.router_logits > -1e30).view(2001, 10)
    shares = torch.bincount(usable[:, :5].sum(dim=1), minlength=6) / 2001
    assert not shares[:2].any()
    assert ((shares[2:] - 1 / 4).abs() < 5 * (0.25 * 0.75 / 2001) ** 0.5).all()
    assert torch.equal(usable[:, 5:7], (numbers == 1).expand(-1, 2))
    assert torch.equal(usable[:, 7:], (numbers == 2).expand(-1, 3))


def test_the_pool_of_one_example_depends_on_no_other_and_on_no_later_token():
    layer = pools()
    x = tokens(2, 13, 7)
    segments = torch.tensor([[1] * 5 + [2] * 8, [1] * 13])
    changed = x.clone()
    changed[0, :5] = tokens(5, 7, seed=2)  # another first example
    changed[1, 1:] = tokens(12, 7, seed=3)  # the same first token
    in_pools = []
    for inputs in (x, changed):
        torch.manual_seed(0)
        output = layer(inputs, segment_ids=segments)[1]
        in_pools.append((output.router_logits > -1e30).view(2, 13, 7))
    before, after = in_pools
    assert torch.equal(before[0, 5:], after[0, 5:])
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5], before[1, 5])


def test_experts_outside_of_a_pool_are_never_chosen_even_where_all_probabilities_are_zero():
    """Of zeros in float32 the lowest expert would be chosen, which is in no small pool here."""
    layer = pools(num_selected_experts=4).float()
    x = torch.zeros(1, 13, 7)
    x[..., :3] = -4e4
    x[..., 3:] = -1e4 * torch.arange(4)
    for seed in range(3):
        torch.manual_seed(seed)
        output = layer(x)[1]
        assert set(output.plan.expert_index[0, :, 0].tolist()) == {3}
        assert (output.plan.expert_index == torch.tensor([3, 4, 5, 6])).all()
        assert output.losses.router_z_loss.isfinite()
        assert output.stats.entropy_sum.isfinite()


def test_permuting_the_experts_permutes_the_pools():
    layer, permuted = build_layer("pools", num_experts=7), build_layer("pools", num_experts=7)
    old_of_new = torch.tensor([3, 0, 6, 4, 2, 5, 1])
    with torch.no_grad():
        for ours, theirs in zip(layer.parameters(), permuted.parameters(), strict=True):
            theirs.copy_(ours[old_of_new])
    outputs = []
    for each in (layer, permuted):
        torch.manual_seed(0)
        outputs.append(each.train()(tokens(3, 13, 7)))
    (y, router), (y_permuted, router_permuted) = outputs
    logits = router.router_logits[..., old_of_new]
    torch.testing.assert_close(y, y_permuted, rtol=0, atol=1e-12)
    torch.testing.assert_close(logits, router_permuted.router_logits, rtol=0, atol=1e-12)
    assert (logits < -1e30).any()


def test_outside_training_pools_are_token_choice_bit_for_bit():
    x, mask = tokens(3, 13, 7), torch.ones(3, 13)
    ours, theirs = build_layer("pools"), build_layer("token_choice")
    (y, output), (expected, _) = ours(x, mask), theirs(x, mask)
    assert torch.equal(y, expected)
    assert not torch.equal(ours.train()(x, mask)[0], theirs.train()(x, mask)[0])
    assert (sizes_of_pools(output) == 5).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_pools_are_finite_and_the_same_with_checkpointing(dtype):
    layer = build_layer("pools", router_options=ALL).to(dtype).train()
    x = tokens(3, 13, 7).to(dtype)
    mask = torch.ones(3, 13, dtype=torch.bool)
    mask[1, 9:] = False
    mask[2] = False
    results = []
    for run in (layer, lambda *args: checkpoint(layer, *args, use_reentrant=False)):
        torch.manual_seed(0)
        y, output = run(x, mask)
        loss = y.float().square().sum() + output.losses.load_balance_loss
        loss = loss + output.losses.router_z_loss
        results.append(torch.autograd.grad(loss, list(layer.parameters())))
    assert all(gradient.isfinite().all() for gradient in results[0])
    assert results[0][0].any()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_in_another_transformer_each_sequence_has_a_pool():
    encoder: nn.Module = sparse_encoder(router="pools").train()
    outputs = []
    for layer in encoder.layers:
        layer.linear1.sparse.register_forward_hook(lambda *call: outputs.append(call[2][1]))
    encoder(torch.randn(11, 5, D))
    for output in outputs:
        in_pool = (output.router_logits > -1e30).view(11, 5, -1)
        assert (in_pool == in_pool[:, :1]).all()
        assert not (in_pool == in_pool[:1]).all()
