"""Choices that become those of the last step: shares, chance, and what is not comparable."""

import math

import pytest
import torch
from sklearn.metrics import cohen_kappa_score

from moe import DataError
from moe.inspection.statistics.saturation import (
    Snapshot,
    choice_agreement,
    saturation_curve,
    snapshot,
)
from tests.inspection.by_hand import a_layer, a_stack, a_trace, renamed


def random_choices(num_tokens, num_experts, num_choices, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, num_experts, generator=generator).topk(num_choices).indices


def test_the_share_is_that_of_experts_in_both():
    a = torch.tensor([[0, 1], [2, 3], [4, 0], [1, -1], [-1, -1]])
    b = torch.tensor([[1, 0], [2, 4], [1, 2], [1, 3], [-1, -1]])
    agreement = choice_agreement(a, b, 5)
    assert agreement.share == pytest.approx((1 + 0.5 + 0 + 0.5) / 4)
    assert agreement.chance == pytest.approx((2 + 2 + 2 + 1) / 4 / 5)


def test_random_choices_are_zero_beyond_chance_and_equal_ones_are_one():
    a = random_choices(20_000, 7, 2, seed=0)
    chance = choice_agreement(a, random_choices(20_000, 7, 2, seed=1), 7)
    assert chance.chance == pytest.approx(2 / 7)
    assert abs(chance.corrected) < 0.02
    assert abs(chance.load_corrected) < 0.02
    same = choice_agreement(a, a.flip(1).to(torch.int8), 7)  # the order of choices is no matter
    assert (same.share, same.corrected, same.load_corrected) == (1, 1, pytest.approx(1))


def test_corrected_by_load_it_is_cohens_kappa():
    generator = torch.Generator().manual_seed(0)
    a = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]), 500, True, generator=generator)
    b = torch.where(torch.rand(500, generator=generator) < 0.5, a, a.flip(0))
    agreement = choice_agreement(a, b, 3)
    assert agreement.load_corrected == pytest.approx(cohen_kappa_score(a, b))
    assert agreement.load_chance > agreement.chance == pytest.approx(1 / 3)


def test_a_router_that_sends_all_to_one_expert_is_not_called_saturated():
    collapsed = torch.zeros(11, dtype=torch.int64)
    agreement = choice_agreement(collapsed, collapsed, 5)
    assert agreement.corrected == 1
    assert math.isnan(agreement.load_corrected)


def a_step(step, choices, inputs="abc", num_experts=5):
    layer = a_layer(choices, num_experts)
    return snapshot(step, a_trace(a_stack([len(choices)], layer), inputs=inputs))


def test_the_curve_goes_to_the_last_step():
    start = torch.tensor([[0, 1], [0, 1], [0, 1]])
    middle = torch.tensor([[0, 2], [3, 1], [2, 3]])
    end = torch.tensor([[0, 2], [1, 3], [4, 3]])
    curve = saturation_curve([a_step(10, start), a_step(20, middle), a_step(50, end)])

    assert [point.step for point in curve] == [10, 20, 50]
    assert {point.layer for point in curve} == {("encoder", 0)}
    assert [point.all_choices.share for point in curve] == pytest.approx([1 / 3, 5 / 6, 1])
    assert [point.first.share for point in curve] == pytest.approx([1 / 3, 1 / 3, 1])


def test_a_probe_may_keep_first_choices_alone():
    first = {("decoder", 0): torch.tensor([0, 1, 1], dtype=torch.int16)}
    start = Snapshot(1, "abc", {("decoder", 0): 3}, first, first)
    now = {("decoder", 0): torch.tensor([0, 1, 2], dtype=torch.int16)}
    curve = saturation_curve([start, start._replace(step=2, first=now, choices=now)])
    assert [point.first.share for point in curve] == pytest.approx([2 / 3, 1])


def test_renaming_experts_in_all_steps_changes_nothing():
    order = [3, 1, 4, 0, 2]
    layers = [a_layer(random_choices(50, 5, 2, seed), 5) for seed in range(3)]
    curves = []
    for of_step in (layers, [renamed(layer, order) for layer in layers]):
        traces = [a_trace(a_stack([50], layer)) for layer in of_step]
        curves.append(saturation_curve([snapshot(n, trace) for n, trace in enumerate(traces)]))
    for one, other in zip(*curves, strict=True):
        assert one.first == pytest.approx(other.first)


def test_a_text_without_tokens_has_no_saturation():
    nothing = torch.empty(0, 2, dtype=torch.int64)
    assert math.isnan(choice_agreement(nothing, nothing, 5).share)


def test_what_cannot_be_compared_is_refused():
    choices = [[0, 1], [2, 3]]
    with pytest.raises(DataError, match="There are 1 snapshots; expected at least 2"):
        saturation_curve([a_step(1, choices)])
    with pytest.raises(DataError, match="Step 1 comes after step 1; expected increasing steps"):
        saturation_curve([a_step(1, choices), a_step(1, choices)])
    with pytest.raises(DataError, match="Step 1 has choices on inputs 'abc', step 2 on 'other'"):
        saturation_curve([a_step(1, choices), a_step(2, choices, inputs="other")])
    with pytest.raises(DataError, match=r"'encoder', 0\): 5.* by layer, step 2 has .*: 7"):
        saturation_curve([a_step(1, choices), a_step(2, choices, num_experts=7)])
    with pytest.raises(DataError, match="The choices cover 2 and 3 tokens"):
        choice_agreement(torch.zeros(2), torch.zeros(3), 5)
    with pytest.raises(DataError, match="experts from -1 to 5; expected -1 for none, or 0 to 4"):
        choice_agreement(torch.tensor([-1, 5]), torch.zeros(2), 5)
