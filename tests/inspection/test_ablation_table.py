"""Verdicts by blackboard examples and simulations: no model is needed to be wrong about one."""

import math

import pytest
import torch

from moe.inspection.ablation.ablate import Ablation, LayerAblation, nearest_load
from moe.inspection.ablation.ablation_table import (
    answer_table,
    class_verdicts,
    expert_effects,
    shown_purposes,
    top_effects_text,
    verdict_table,
)
from moe.inspection.ablation.target_sets import ALL_TOKENS

E, C, G = 5, 3, 31
CLASSES = ("numbers", "names", "verbs")
RECALLED = torch.tensor([True, True, True, True, False])
LOST = torch.tensor([[True, True, False, False, False], [False, True, False, True, False]])


def ablation_of(change, random_change, masks, document, *, key=("decoder", 0)):
    """Returns the ablation with these changes <float64>[E, N] and classes <bool>[C, N]."""
    everything = torch.ones(1, masks.shape[1], dtype=torch.bool)
    sets = torch.cat([everything, masks]).double()  # [1 + C, N]
    num_documents = int(document.max()) + 1

    def by_document(values):
        sums = torch.zeros(*values.shape[:-1], num_documents, dtype=torch.float64)
        return sums.index_add(-1, document, values)

    is_chosen = torch.arange(masks.shape[1]) % 2 == 0
    load = torch.arange(len(change)) * 10 + 7
    layer = LayerAblation(
        key=key,
        sets=(ALL_TOKENS, *CLASSES[: len(masks)]),
        num_tokens=by_document(sets),
        change=by_document(change[:, None] * sets),
        random_change=by_document(random_change[:, None] * sets),
        chosen_tokens=by_document(is_chosen.double()).expand(len(change), -1),
        chosen_change=by_document(change * is_chosen),
        load=load,
        peer=nearest_load(load),
        lost=LOST,
    )
    return Ablation("drop", 2.0, masks.shape[1], num_documents, RECALLED, (layer,))


def simulated(seed, *, planted=0.0, size=0.2, skewed=False, whole_documents=False):
    """Heavy-tailed changes with effects of experts and documents; expert 2 may be for class 0.

    Classes are random: of tokens, or of whole documents as languages are.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 60, (G,), generator=generator)
    document = torch.repeat_interleave(torch.arange(G), lengths)
    N = len(document)

    def draw(*shape):
        values = torch.empty(*shape, dtype=torch.float64)
        if skewed:
            return values.exponential_(generator=generator) - 1
        return values.normal_(generator=generator)

    lot = torch.rand(C, G, generator=generator)[:, document]
    if not whole_documents:
        lot = torch.rand(C, N, generator=generator)
    masks = lot < torch.tensor([0.2, 0.1, 0.4])[:, None]
    of_expert = draw(E, 1).abs() * size
    change = of_expert * (1 + draw(E, G)[:, document] + draw(E, N) ** 3)
    random_change = of_expert * (1 + draw(E, G)[:, document] + draw(E, N) ** 3)
    change[2] += planted * masks[0]
    return ablation_of(change, random_change, masks, document)


@pytest.mark.parametrize(("skewed", "whole_documents"), [(False, False), (True, True)])
def test_random_classes_are_an_experts_own_in_at_most_5_percent_of_tables(skewed, whole_documents):
    """Each of the two comparisons alone, too: the answer asks for both."""
    num_wrong = {"yes": 0, "others": 0, "random": 0}
    for seed in range(60):
        table = simulated(seed, skewed=skewed, whole_documents=whole_documents)
        verdicts = class_verdicts(table, margin=0.0)
        num_wrong["yes"] += any(verdict.answer == "yes" for verdict in verdicts)
        num_wrong["others"] += any(verdict.over_others.low > 0 for verdict in verdicts)
        num_wrong["random"] += any(verdict.over_random.low > 0 for verdict in verdicts)
    assert max(num_wrong.values()) <= 0.05 * 60


def test_a_planted_class_is_found_and_hardly_another_cell_is():
    num_wrong = 0
    for seed in range(20):
        verdicts = class_verdicts(simulated(seed, planted=3.0))
        yes = {
            (verdict.expert, verdict.token_class) for verdict in verdicts if verdict.answer == "yes"
        }
        assert (2, "numbers") in yes
        num_wrong += len(yes) > 1
    assert num_wrong <= 0.05 * 20


def test_an_effect_that_random_choices_have_too_is_no_yes():
    """The class is only easier to hurt: any ablation hurts it more than other tokens."""
    document = torch.arange(G).repeat_interleave(20)
    masks = (torch.arange(20 * G) % 4 == 0)[None]
    noise = torch.randn(
        2, E, 20 * G, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    change = masks + 0.1 * noise[0]
    with_control = ablation_of(change, masks + 0.1 * noise[1], masks, document)
    assert {verdict.answer for verdict in class_verdicts(with_control, margin=0.1)} == {"no"}
    without = ablation_of(change, 0.1 * noise[1], masks, document)
    assert {verdict.answer for verdict in class_verdicts(without, margin=0.1)} == {"yes"}


def test_no_needs_evidence_that_the_advantage_is_below_the_margin():
    small = simulated(1, size=0.001)
    assert {verdict.answer for verdict in class_verdicts(small, margin=0.05)} == {"no"}
    assert "no" not in {verdict.answer for verdict in class_verdicts(small, margin=0.0)}
    large = simulated(1, size=2.0)
    assert {verdict.answer for verdict in class_verdicts(large)} == {"not shown"}


def test_a_class_without_tokens_or_of_one_document_is_not_shown():
    document = torch.arange(G).repeat_interleave(10)
    masks = torch.zeros(2, 10 * G, dtype=torch.bool)
    masks[1, :10] = True
    change = torch.rand(E, 10 * G, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    verdicts = class_verdicts(ablation_of(change, change / 2, masks, document))
    assert {verdict.answer for verdict in verdicts} == {"not shown"}
    assert [verdict.num_documents for verdict in verdicts[:2]] == [0, 1]
    assert math.isnan(verdicts[0].effect.value)
    assert " - " in verdict_table(verdicts)


def test_more_cells_make_wider_intervals():
    one_layer = simulated(0)
    two_layers = one_layer._replace(layers=one_layer.layers * 2)
    for narrow, wide in zip(class_verdicts(one_layer), class_verdicts(two_layers), strict=False):
        assert wide.effect.low < narrow.effect.low
        assert wide.effect.value == narrow.effect.value
    for narrow, wide in zip(expert_effects(one_layer), expert_effects(two_layers), strict=False):
        assert wide.effect.high > narrow.effect.high


def test_effects_by_hand():
    document = torch.tensor([0, 0, 1, 1])
    change = torch.tensor([[1.0, 2.0, 3.0, 6.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    masks = torch.tensor([[True, False, True, False]])
    effect, nothing = expert_effects(ablation_of(change, change / 4, masks, document))
    assert effect.effect.value == pytest.approx(3)
    assert effect.where_chosen.value == pytest.approx(2)
    assert effect.elsewhere.value == pytest.approx(4)
    assert effect.over_random.value == pytest.approx(2.25)
    assert (effect.peer, effect.over_peer.value) == (1, pytest.approx(3))
    assert nothing.effect == (0, 0, 0)
    (verdict, _) = class_verdicts(ablation_of(change, change / 4, masks, document))
    assert verdict.effect.value == pytest.approx(2)
    assert verdict.over_others.value == pytest.approx(-2)
    assert verdict.over_peer.value == pytest.approx(2)


def test_the_largest_effects_name_their_classes_or_that_nothing_was_shown():
    planted = simulated(0, planted=3.0)
    purposes = shown_purposes(planted)
    assert next(iter(purposes.items())) == ((("decoder", 0), 2), "numbers")
    assert set(list(purposes.values())[1:]) <= {"nothing was shown"}
    text = top_effects_text(planted, n=1)
    assert "decoder 1, expert 3" in text and text.endswith("for: numbers")
    assert top_effects_text(simulated(0, size=0.0)) == "nothing was shown"

    effects = {(one.key, one.expert): one.effect.value for one in expert_effects(planted)}
    values = [effects[expert] for expert in purposes]
    assert values == sorted(values, reverse=True)


def test_the_table_of_answers_counts_those_that_one_expert_alone_loses():
    *_, row = answer_table(simulated(0)).splitlines()
    assert row.split() == ["decoder", "1", "4", "of", "5", "2", "(2,", "2)", "50.0", "25.0"]
