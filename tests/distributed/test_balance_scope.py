"""Losses, gradients and statistics do not depend on how a batch is cut into micro-batches and
ranks.

The oracle is the whole batch in one call of one process. Where shares are taken over more than one
group, a part needs the totals of all parts; its loss is then a sum that is divided by the count of
all parts.
"""

import pytest
import torch

from moe.distributed.collectives import sum_over_ranks
from moe.sparse.losses import BalanceTotals, add_totals, balance_totals, balance_within
from moe.sparse.stats import RouterStats
from tests.distributed.ranks import run_ranks
from tests.sparse.layers import DROPLESS, assert_all_close, build_layer

BATCH, LENGTH = 6, 13


def build(scope, **fields):
    """Returns a layer whose groups are single sequences, so that every cut falls between groups."""
    return build_layer(balance_scope=scope, group_size=LENGTH, **DROPLESS, **fields)


def batch():
    """Returns a batch with padding, whose last two sequences are nothing else."""
    torch.manual_seed(1)
    mask = torch.rand(BATCH, LENGTH) > 0.2
    mask[4:] = False
    return torch.randn(BATCH, LENGTH, 7, dtype=torch.float64), mask


def weighed(y, first):
    """Returns a loss of the task that is a sum over sequences, each with its own weight."""
    weights = torch.arange(first + 1, first + 1 + y.shape[0], dtype=torch.float64)
    return (y * weights[:, None, None]).square().sum()


def sums_and_gradients(layer, total, losses):
    """Returns the three sums of a part, its two counts, and the gradients of each sum."""
    sums = [total, losses.load_balance_sum, losses.router_z_sum]
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    parameters = list(layer.parameters())
    grads = [torch.autograd.grad(x, parameters, **options) for x in sums]
    return [x.detach() for x in (*sums, losses.load_balance_count, losses.router_z_count)], grads


def part(layer, start, count, totals=None):
    """Returns sums, counts and gradients of `count` sequences from `start`, balanced within
    `totals`.
    """
    x, mask = (value[start : start + count] for value in batch())
    y, router = layer(x, mask)
    losses = router.losses if totals is None else balance_within(router.losses, totals)
    return *sums_and_gradients(layer, weighed(y, start), losses), router


def add(a, b):
    """Returns the sum of two nested lists of tensors."""
    return [add(x, y) for x, y in zip(a, b, strict=True)] if isinstance(a, list | tuple) else a + b


def means(numbers, grads):
    """Returns the losses and their gradients: sums divided by counts."""
    task, balance, z, balance_count, z_count = numbers
    counts = (torch.ones(()), balance_count, z_count)
    losses = [x / count for x, count in zip((task, balance, z), counts, strict=True)]
    return losses, [[x / count for x in group] for group, count in zip(grads, counts, strict=True)]


def assert_same(ours, theirs):
    """Compares losses and gradients; those of the task are as large as a thousand."""
    assert_all_close(ours[0], theirs[0], atol=1e-10)
    for a, b in zip(ours[1], theirs[1], strict=True):
        assert_all_close(a, b, atol=1e-9)


# ---- micro-batches of one process ----


DETERMINISTIC = {"second_expert_policy": "all", "eval_second_expert_policy": "all"}


@pytest.mark.parametrize(
    ("fields", "cut"),
    [
        ({}, [1] * 6),
        ({"convention": "flaxformer"}, [3, 3]),
        ({"convention": "mesh_tensorflow", "router_options": DETERMINISTIC}, [1, 4, 1]),
    ],
    ids=str,
)
def test_wide_scopes_do_not_depend_on_the_cut_into_micro_batches(fields, cut):
    layer = build("global", **fields)
    *whole, router = part(layer, 0, BATCH)
    starts = [sum(cut[:index]) for index in range(len(cut))]

    totals = None
    for start, count in zip(starts, cut, strict=True):
        with torch.no_grad():
            one = balance_totals(part_losses(layer, start, count))
        totals = one if totals is None else add_totals(totals, one)
    assert_all_close(totals, (router.losses.choices, router.losses.num_share_tokens), atol=0)

    numbers, grads = None, None
    for start, count in zip(starts, cut, strict=True):
        ours, our_grads, _ = part(layer, start, count, totals)
        numbers, grads = (
            (ours, our_grads) if numbers is None else (add(numbers, ours), add(grads, our_grads))
        )
    assert_same(means(numbers, grads), means(*whole))


def part_losses(layer, start, count):
    x, mask = (value[start : start + count] for value in batch())
    return layer(x, mask)[1].losses


def test_the_scope_of_a_micro_batch_is_one_call_however_many_groups_it_has():
    layer = build("micro_batch")
    losses = part_losses(layer, 0, BATCH)
    choices, probs, count = losses.choices, losses.prob_sums, losses.num_share_tokens
    expected = 5 * ((choices / count) * (probs / count)).sum()
    torch.testing.assert_close(losses.load_balance_loss, expected, rtol=0, atol=1e-12)
    by_groups = build("group")(*batch())[1].losses.load_balance_loss
    assert abs(float((by_groups - expected).detach())) > 1e-3


def test_the_scope_of_a_group_does_not_depend_on_the_cut_and_needs_no_totals():
    layer = build("group")
    *whole, _ = part(layer, 0, BATCH)
    first, second = part(layer, 0, 4)[:2], part(layer, 4, 2)[:2]
    assert_same(means(*add(list(first), list(second))), means(*whole))


def test_totals_of_one_process_are_its_own():
    losses = part_losses(build("global"), 0, BATCH)
    totals = balance_totals(losses)
    assert_all_close(totals, (losses.choices, losses.num_share_tokens), atol=0)
    assert not any(total.requires_grad for total in totals)
    assert_all_close(balance_within(losses, totals), losses, atol=1e-12)


# ---- ranks ----


def on_a_rank(rank, num_ranks, cut):
    """Returns what one rank knows, for each scope; a rank of padding only has nothing to add."""
    answers = {}
    start, count = sum(cut[:rank]), cut[rank]
    for scope in ("group", "micro_batch", "ranks", "global"):
        layer = build(scope)
        totals = None
        if scope in ("ranks", "global"):
            totals = balance_totals(part_losses(layer, start, count))
        if scope == "global":  # the batch is twice what the ranks hold: two micro-batches of each
            totals = add_totals(totals, balance_totals(part_losses(layer, start, count)))
        numbers, grads, router = part(layer, start, count, totals)
        answers[scope] = numbers, [list(group) for group in grads]
        answers[f"{scope}_stats"] = list(router.stats.all_reduce())
    left = torch.tensor([rank + 1, 10 * rank])
    summed = sum_over_ranks(left)
    answers["sum"] = summed, left
    return answers


@pytest.mark.slow
def test_several_ranks_equal_one_process_in_losses_gradients_and_statistics(tmp_path):
    cut = [1, 3, 2]  # the last rank has padding alone
    answers = run_ranks(on_a_rank, len(cut), tmp_path, cut)
    for scope in ("group", "ranks", "global"):
        numbers, grads = answers[0][scope]
        for answer in answers[1:]:
            numbers, grads = add(numbers, answer[scope][0]), add(grads, answer[scope][1])
        *whole, router = part(build(scope), 0, BATCH)
        if scope == "global":  # twice the same batch has the same shares
            totals = BalanceTotals(2 * router.losses.choices, 2 * router.losses.num_share_tokens)
            *whole, router = part(build(scope), 0, BATCH, totals)
        assert_same(means(numbers, grads), means(*whole))

    for scope in ("group", "micro_batch", "ranks"):
        expected = part(build(scope), 0, BATCH)[-1].stats
        for answer in answers:
            summed = RouterStats(*answer[f"{scope}_stats"])
            # A rank's loss is balanced within its call: a sum over ranks is no loss of them all.
            if scope != "group":
                summed = summed._replace(load_balance_sum=expected.load_balance_sum)
            assert_all_close(summed, expected, atol=1e-10)

    micro_batches = [
        part(build("micro_batch"), sum(cut[:rank]), cut[rank]) for rank in range(len(cut))
    ]
    for answer, (numbers, grads, _) in zip(answers, micro_batches, strict=True):
        assert_all_close(answer["micro_batch"][0], numbers, atol=1e-10)
        for ours, theirs in zip(answer["micro_batch"][1], grads, strict=True):
            assert_all_close(ours, theirs, atol=1e-9)

    ranks = range(len(cut))
    for rank, answer in enumerate(answers):
        summed, left = answer["sum"]
        assert summed.tolist() == [sum(r + 1 for r in ranks), sum(10 * r for r in ranks)]
        assert left.tolist() == [rank + 1, 10 * rank]  # the input stays as it is


def test_statistics_of_two_calls_are_those_of_both():
    layer = build("group")
    whole = part(layer, 0, BATCH)[-1].stats
    parts = part(layer, 0, 1)[-1].stats + part(layer, 1, 5)[-1].stats
    assert_all_close(parts, whole, atol=1e-10)
