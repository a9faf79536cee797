"""Losses, gradients and statistics do not depend on how a batch is cut into micro-batches.

The oracle is the whole batch in one call of one process. Where shares are taken over more than one
group, a part needs the totals of all parts; its loss is then a sum that is divided by the count of
all parts.
"""

import pytest
import torch

from moe.sparse.losses import add_totals, balance_totals, balance_within
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
        ({}, [6]),
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


def test_statistics_of_two_calls_are_those_of_both():
    layer = build("group")
    whole = part(layer, 0, BATCH)[-1].stats
    parts = part(layer, 0, 1)[-1].stats + part(layer, 1, 5)[-1].stats
    assert_all_close(parts, whole, atol=1e-10)
