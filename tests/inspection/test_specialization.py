"""What an expert is for: counts by hand, invariances, and p-values that are right by simulation."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from sklearn.metrics import homogeneity_score, mutual_info_score

from moe import ConfigError, DataError
from moe.inspection.statistics.contingency import mutual_information
from moe.inspection.statistics.permutations import DocumentShuffle, TokenShuffle
from moe.inspection.statistics.specialization import class_table, specialization_test
from moe.inspection.statistics.token_classes import TokenClasses, domain_classes
from tests.inspection.by_hand import a_layer, a_stack, a_trace, places_of, renamed

NULLS = (TokenShuffle, DocumentShuffle)


def classes_of(label, num_classes, *more):
    """Returns classes of <int>[N] labels, and more rows <bool>[N]."""
    label = torch.as_tensor(label)
    members = [label == number for number in range(num_classes)]
    members += [torch.as_tensor(row) for row in more]
    return TokenClasses(tuple(f"class {n}" for n in range(len(members))), torch.stack(members))


def random_tokens(seed, num_documents=40, length=13, num_classes=3, num_experts=5, own_mix=False):
    """Returns the stack, classes and places of tokens whose experts have nothing to do with them.

    With `own_mix` each document has its own mix of classes, and its own mix of experts.
    """
    generator = np.random.default_rng(seed)
    labels = []
    experts = []
    sureness = 0.3 if own_mix else 1e6
    for _ in range(num_documents):
        of_classes = generator.dirichlet([sureness] * num_classes)
        labels.append(generator.choice(num_classes, length, p=of_classes))
        of_experts = generator.dirichlet([sureness] * num_experts)
        experts.append(generator.choice(num_experts, length, p=of_experts))
    stack = a_stack([length] * num_documents, a_layer(np.concatenate(experts), num_experts))
    return stack, classes_of(np.concatenate(labels), num_classes), places_of(stack)


# ---------------------------------------------------------------------------
# The table


def test_the_table_is_that_of_counting_by_hand():
    #                    a  a  a  a  b  b  -  -
    layer = a_layer([0, 0, 0, 1, 1, -1, 2, 2], 4)
    table = class_table(layer, classes_of([0, 0, 0, 0, 1, 1, 2, 2], 2))
    assert table.layer == ("encoder", 0)
    assert table.counts.tolist() == [[3, 1, 0, 0], [0, 1, 0, 0]]
    assert table.tokens.tolist() == [4, 1]
    torch.testing.assert_close(table.load, torch.tensor([3, 2, 2, 0]).double() / 7)
    assert table.share.tolist() == [[0.75, 0.25, 0, 0], [0, 1, 0, 0]]
    expected = torch.tensor([[0.75 / 3, 0.25 / 2, 0, math.nan], [0, 0.5, 0, math.nan]]) * 7
    torch.testing.assert_close(table.lift, expected.double(), equal_nan=True)


def test_domains_by_all_choices_add_up_to_the_choices_of_a_token():
    layer = a_layer([[0, 1], [0, 2], [2, 0], [2, 1], [2, -1]], 3)
    stack = a_stack([2, 2, 1], layer)
    trace = a_trace(stack, domains=["prose", "code"], domain=[0, 1, 1])
    table = class_table(layer, domain_classes(trace, "encoder"), choices="all")
    assert table.share.tolist() == [[1, 0.5, 0.5], [1 / 3, 1 / 3, 1]]
    assert table.share.sum(dim=1).tolist() == [2, pytest.approx(5 / 3)]

    first = class_table(layer, domain_classes(trace, "encoder"))
    assert first.share.tolist() == [[1, 0, 0], [0, 0, 1]]
    with pytest.raises(ConfigError, match="choices is 'top'; expected one of first, all"):
        class_table(layer, domain_classes(trace, "encoder"), choices="top")


# ---------------------------------------------------------------------------
# Permuting experts, empty and single things


def test_permuting_experts_permutes_the_tables_and_changes_no_score():
    stack, classes, places = random_tokens(0)
    layer = stack.layers[0]
    order = [3, 0, 4, 1, 2]  # expert e becomes order[e]
    other = renamed(layer, order)

    for field in ("counts", "load", "share", "lift"):
        of_layer = getattr(class_table(layer, classes), field)
        of_other = getattr(class_table(other, classes), field)
        assert of_other[..., order].equal(of_layer), field

    for null in NULLS:
        (test,) = specialization_test([layer], classes, places, null=null, num_permutations=49)
        (same,) = specialization_test([other], classes, places, null=null, num_permutations=49)
        assert same.p_value[:, order].equal(test.p_value)
        assert same.information == pytest.approx(test.information)
        assert same.chance == pytest.approx(test.chance)
        assert same.information_p == test.information_p


def test_an_empty_class_says_nothing():
    stack, classes, places = random_tokens(1)
    none = torch.zeros_like(classes.members[:1])
    classes = TokenClasses(("none", *classes.names), torch.cat([none, classes.members]))
    table = class_table(stack.layers[0], classes)
    assert table.tokens[0] == 0
    for field in (table.share, table.lift):
        assert field[0].isnan().all()
        assert not field[1:].isnan().any()
    (test,) = specialization_test(stack.layers, classes, places, num_permutations=19)
    assert test.p_value[0].tolist() == [1] * 5


def test_one_expert_or_one_class_tells_nothing():
    stack, classes, places = random_tokens(2, num_experts=1)
    (test,) = specialization_test(stack.layers, classes, places, num_permutations=19)
    assert test.p_value.tolist() == [[1]] * 3
    assert (test.information, test.information_p) == (0, 1)
    assert class_table(stack.layers[0], classes).lift.tolist() == [[1]] * 3

    stack, _, places = random_tokens(3)
    everything = classes_of([0] * len(stack.ids), 1)
    (test,) = specialization_test(stack.layers, everything, places, num_permutations=19)
    assert math.isnan(test.information)
    assert test.p_value.tolist() == [[1] * 5]


def test_one_document_is_tested_by_its_tokens():
    stack, classes, places = random_tokens(4, num_documents=1, length=101)
    with pytest.raises(DataError, match="or use TokenShuffle, which treats tokens as independent"):
        specialization_test(stack.layers, classes, places)
    (test,) = specialization_test(stack.layers, classes, places, null=TokenShuffle)
    assert 0 < test.p_value.min() <= 1


def test_a_stack_without_tokens_has_empty_tables():
    stack = a_stack([0, 0], a_layer(torch.empty(0, 2, dtype=torch.int64), 5))
    classes = classes_of(torch.empty(0), 2)
    assert class_table(stack.layers[0], classes).counts.tolist() == [[0] * 5] * 2
    (test,) = specialization_test(stack.layers, classes, places_of(stack), null=TokenShuffle)
    assert test.p_value.tolist() == [[1] * 5] * 2
    assert math.isnan(test.information)


def test_other_tokens_are_refused():
    stack, classes, places = random_tokens(5)
    fewer = TokenClasses(classes.names, classes.members[:, 1:])
    with pytest.raises(DataError, match="The classes cover 519 tokens; expected 520, those of"):
        class_table(stack.layers[0], fewer)
    with pytest.raises(DataError, match="The classes cover 519 tokens"):
        specialization_test(stack.layers, fewer, places)


# ---------------------------------------------------------------------------
# Information


def test_information_is_that_of_sklearn():
    stack, classes, places = random_tokens(6, own_mix=True)
    (test,) = specialization_test(stack.layers, classes, places, num_permutations=19)
    label = classes.first.numpy()
    first = stack.layers[0].first.numpy()
    assert test.information == pytest.approx(homogeneity_score(label, first))

    counts = class_table(stack.layers[0], classes).counts
    expected = mutual_info_score(label, first)
    assert float(mutual_information(counts)) == pytest.approx(expected)


def test_a_token_of_two_classes_is_of_its_first():
    stack, classes, places = random_tokens(7)
    everything = torch.ones_like(classes.members[:1])
    overlapping = TokenClasses((*classes.names, "all"), torch.cat([classes.members, everything]))
    (test,) = specialization_test(stack.layers, classes, places, num_permutations=19)
    (same,) = specialization_test(stack.layers, overlapping, places, num_permutations=19)
    assert same.information == pytest.approx(test.information)
    assert same.p_value[-1].tolist() == [1] * 5


# ---------------------------------------------------------------------------
# p-values


def test_a_planted_relation_is_found_and_no_other():
    stack, classes, places = random_tokens(8)
    expert = torch.where(classes.members[1], 4, stack.layers[0].first.long() % 4)
    for null in NULLS:
        (test,) = specialization_test([a_layer(expert, 5)], classes, places, null=null)
        assert test.p_value[1].tolist() == [pytest.approx(1 / 1001)] * 5
        assert test.p_value[0, :4].min() < 0.01  # they share what class 1 leaves
        assert test.information_p == pytest.approx(1 / 1001)
        assert test.information > 20 * test.chance


def test_an_expert_of_a_domain_is_found():
    stack, _, places = random_tokens(12)
    domain = torch.arange(40) % 2
    is_code = domain[stack.example].bool()
    generator = torch.Generator().manual_seed(0)
    goes = is_code & (torch.rand(len(is_code), generator=generator) < 0.3)
    layer = a_layer(torch.where(goes, 4, stack.layers[0].first.long()), 5)
    trace = a_trace(
        stack._replace(layers=(layer,)), domains=["prose", "code"], domain=domain.tolist()
    )
    classes = domain_classes(trace, "encoder")
    (test,) = specialization_test([layer], classes, places)
    (same,) = specialization_test(stack.layers, classes, places)
    assert test.p_value[:, 4].max() < 0.01
    assert test.information_p < 0.01
    assert same.p_value.min() > 0.05


def test_more_layers_make_a_cell_less_surprising():
    stack, classes, places = random_tokens(9)
    other = random_tokens(10)[0]
    layers = [stack.layers[0], other.layers[0]._replace(facts=other.layers[0].facts)]
    alone = specialization_test(layers[:1], classes, places, num_permutations=199)[0]
    both = specialization_test(layers, classes, places, num_permutations=199)[0]
    assert (both.p_value >= alone.p_value).all()
    assert (both.p_value > alone.p_value).any()
    assert both.information_p == alone.information_p


@pytest.mark.slow
@pytest.mark.parametrize("null", NULLS)
def test_p_values_are_uniform_where_there_is_no_relation(null):
    smallest = []
    information = []
    for seed in range(60):
        stack, classes, places = random_tokens(seed, num_documents=30, length=7)
        (test,) = specialization_test(
            stack.layers, classes, places, null=null, num_permutations=39, seed=seed
        )
        smallest.append(float(test.p_value.min()))
        information.append(test.information_p)
    for p_values in (smallest, information):
        check_uniform(p_values)


def check_uniform(p_values):
    """Fails by chance with a probability below 1e-4 (Dvoretzky, Kiefer and Wolfowitz)."""
    p_values = np.sort(p_values)
    bound = math.sqrt(math.log(2 / 1e-4) / (2 * len(p_values)))
    share = np.arange(1, len(p_values) + 1) / len(p_values)
    grid = 1 / 40  # p-values of 39 shuffles are multiples of it
    assert abs(share - p_values).max() < bound + grid


@pytest.mark.slow
def test_shuffling_tokens_takes_the_mix_of_a_document_for_a_relation():
    rejected = Counter()
    for seed in range(30):
        stack, classes, places = random_tokens(seed, num_documents=24, length=31, own_mix=True)
        for null in NULLS:
            (test,) = specialization_test(
                stack.layers, classes, places, null=null, num_permutations=39, seed=seed
            )
            rejected[null] += int(test.p_value.min() <= 0.05)

    # 1.5 of 30 expected: 9 and more have a probability below 1e-4.
    assert rejected[DocumentShuffle] < 9
    assert rejected[TokenShuffle] > 12


@pytest.mark.slow
def test_the_position_is_no_relation():
    rejected = Counter()
    generator = np.random.default_rng(0)
    for seed in range(30):
        lengths = generator.integers(10, 51, 30)
        position = np.concatenate([np.arange(n) for n in lengths])
        at_start = generator.random((2, len(position))) < 0.8**position
        label = np.where(at_start[0], 0, generator.integers(0, 3, len(position)))
        expert = np.where(at_start[1], 1, generator.integers(0, 4, len(position)))
        stack = a_stack(lengths.tolist(), a_layer(expert, 4))

        # A null that does not know of positions calls them a relation.
        places = places_of(stack)
        blind = places._replace(position=torch.zeros_like(places.position))
        nulls = {"documents": (DocumentShuffle, places), "blind": (TokenShuffle, blind)}
        for name, (null, where) in nulls.items():
            (test,) = specialization_test(
                stack.layers, classes_of(label, 3), where, null=null, num_permutations=39, seed=seed
            )
            rejected[name] += int(test.p_value.min() <= 0.05)
    assert rejected["documents"] < 9
    assert rejected["blind"] > 20
