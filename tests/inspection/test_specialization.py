"""What an expert is for: counts by hand, invariances, and p-values that are right by simulation."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import mutual_info_score

from moe import DataError
from moe.inspection.page.report_text import experts_of_most, shared_load
from moe.inspection.statistics.contingency import mutual_information
from moe.inspection.statistics.permutations import DocumentShuffle
from moe.inspection.statistics.specialization import class_p_values, class_table
from moe.inspection.statistics.token_classes import TokenClasses
from tests.inspection.by_hand import a_layer, a_stack, renamed


def classes_of(label, num_classes):
    """Returns classes of <int>[N] labels."""
    members = [torch.as_tensor(label) == number for number in range(num_classes)]
    return TokenClasses(tuple(f"class {n}" for n in range(num_classes)), torch.stack(members))


def random_tokens(seed, num_documents=40, length=13, num_classes=3, num_experts=5, own_mix=False):
    """Returns the stack, classes and documents of tokens whose experts have nothing to do with them.

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
    classes = classes_of(np.concatenate(labels), num_classes)
    return stack, classes, torch.arange(num_documents)


def one_layer(stack, classes, document, **options):
    ((p_value, *_),) = class_p_values(stack, [classes], document, **options)
    return p_value


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


def test_experts_that_carry_a_class_and_the_load_that_all_share_are_those_by_hand():
    # 10 tokens of each class, 9 of the first at two experts; the third class has none.
    experts = [0] * 5 + [1] * 4 + [2] + [1] * 2 + [2] * 3 + [3] * 5
    table = class_table(a_layer(experts, 5), classes_of([0] * 10 + [1] * 10, 3))
    assert experts_of_most(table).tolist() == [2, 3, 0]
    assert experts_of_most(table, 0.5).tolist() == [1, 1, 0]
    assert shared_load(table) == pytest.approx(0.2 + 0.1)


def test_information_is_that_of_sklearn():
    stack, classes, _ = random_tokens(6, own_mix=True)
    label = classes.members.int().argmax(dim=0)
    counts = class_table(stack.layers[0], classes).counts
    expected = mutual_info_score(label, stack.layers[0].first)
    assert float(mutual_information(counts)) == pytest.approx(expected)


def test_permuting_experts_permutes_the_tables():
    stack, classes, document = random_tokens(0)
    layer = stack.layers[0]
    order = [3, 0, 4, 1, 2]  # expert e becomes order[e]
    other = stack._replace(layers=(renamed(layer, order),))
    for field in ("counts", "load", "share", "lift"):
        of_layer = getattr(class_table(layer, classes), field)
        of_other = getattr(class_table(other.layers[0], classes), field)
        assert of_other[..., order].equal(of_layer), field
    p_value = one_layer(stack, classes, document, num_permutations=49)
    assert one_layer(other, classes, document, num_permutations=49)[:, order].equal(p_value)


def test_empty_classes_and_single_experts_say_nothing():
    stack, classes, document = random_tokens(1)
    none = torch.zeros_like(classes.members[:1])
    everything = ~none
    classes = TokenClasses(
        ("none", *classes.names, "all"), torch.cat([none, classes.members, everything])
    )
    table = class_table(stack.layers[0], classes)
    assert table.tokens[0] == 0
    for field in (table.share, table.lift):
        assert field[0].isnan().all()
        assert not field[1:].isnan().any()
    p_value = one_layer(stack, classes, document, num_permutations=19)
    assert p_value[[0, -1]].tolist() == [[1] * 5] * 2

    stack, classes, document = random_tokens(2, num_experts=1)
    assert one_layer(stack, classes, document, num_permutations=19).tolist() == [[1]] * 3
    assert class_table(stack.layers[0], classes).lift.tolist() == [[1]] * 3

    nothing = a_layer(torch.empty(0, 2, dtype=torch.int64), 5)
    assert class_table(nothing, classes_of(torch.empty(0), 2)).counts.tolist() == [[0] * 5] * 2


def test_other_tokens_are_refused():
    stack, classes, _ = random_tokens(5)
    fewer = TokenClasses(classes.names, classes.members[:, 1:])
    with pytest.raises(DataError, match="The classes cover 519 tokens; expected 520"):
        class_table(stack.layers[0], fewer)


# ---------------------------------------------------------------------------
# Shuffles


def test_documents_of_equal_length_are_exchanged_as_a_whole():
    stack = a_stack([5] * 7)
    source = DocumentShuffle(stack.example, stack.example).draw(np.random.default_rng(0))
    assert sorted(source) == list(range(35))
    example = stack.example.numpy()[source].reshape(7, 5)
    assert (example == example[:, :1]).all()
    assert example[:, 0].tolist() != list(range(7))
    assert (stack.position.numpy()[source] == stack.position.numpy()).all()


def test_documents_are_exchanged_with_those_of_similar_length():
    stack = a_stack([3, 11] * 20)
    source = DocumentShuffle(stack.example, stack.example).draw(np.random.default_rng(0))
    is_long = stack.example.numpy() % 2
    assert (is_long[source] == is_long).all()


def test_documents_of_any_length_and_of_several_examples_keep_their_places():
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 9, 60)
    document_of_example = np.sort(generator.integers(0, 41, 60))
    stack = a_stack(lengths.tolist())
    example = stack.example.numpy()
    position = stack.position.numpy()
    document = document_of_example[example]
    rank = np.concatenate([np.arange(n) for n in np.bincount(document_of_example)])[example]

    shuffle = DocumentShuffle(stack.example, torch.from_numpy(document))
    for _ in range(5):
        source = shuffle.draw(generator)
        assert sorted(source) == list(range(int(lengths.sum())))
        assert (position[source] == position).all()
        assert (rank[source] == rank).all()
    assert rank.max() > 1
    assert (document[source] != document).mean() > 0.5


def test_each_of_a_few_documents_comes_to_each_place_equally_often():
    shuffle = DocumentShuffle(torch.arange(6), torch.arange(6))
    generator = np.random.default_rng(0)
    counts = np.zeros((6, 6))
    for _ in range(1200):
        counts[np.arange(6), shuffle.draw(generator)] += 1

    # 200 expected, of deviation 13: 6 deviations are off with a chance of 1e-7.
    assert abs(counts - 200).max() < 6 * 13


@pytest.mark.parametrize("document", [[0, 1, 2, 3, 4], [0] * 9, []])
def test_too_few_documents_cannot_be_shuffled(document):
    document = torch.tensor(document)
    with pytest.raises(DataError, match=f"from {len(document.unique())} documents; .* needs 6"):
        DocumentShuffle(torch.arange(len(document)), document)


# ---------------------------------------------------------------------------
# p-values


def test_a_planted_relation_is_found_and_no_other():
    stack, classes, document = random_tokens(8)
    expert = torch.where(classes.members[1], 4, stack.layers[0].first.long() % 4)
    p_value = one_layer(stack._replace(layers=(a_layer(expert, 5),)), classes, document)
    assert p_value[1].tolist() == [pytest.approx(1 / 1001)] * 5
    assert p_value[0, :4].min() < 0.01  # they share what class 1 leaves


def test_more_layers_make_a_cell_less_surprising():
    stack, classes, document = random_tokens(9)
    both = stack._replace(layers=(stack.layers[0], random_tokens(10)[0].layers[0]))
    alone = one_layer(stack, classes, document, num_permutations=199)
    among_two = one_layer(both, classes, document, num_permutations=199)
    assert (among_two >= alone).all()
    assert (among_two > alone).any()


@pytest.mark.slow
def test_p_values_are_uniform_where_there_is_no_relation():
    smallest = []
    for seed in range(60):
        tokens = random_tokens(seed, num_documents=30, length=7)
        p_value = one_layer(*tokens, num_permutations=39, seed=seed)
        smallest.append(float(p_value.min()))

    # Fails by chance with a probability below 1e-4 (Dvoretzky, Kiefer and Wolfowitz).
    smallest = np.sort(smallest)
    bound = math.sqrt(math.log(2 / 1e-4) / (2 * len(smallest)))
    share = np.arange(1, len(smallest) + 1) / len(smallest)
    grid = 1 / 40  # p-values of 39 shuffles are multiples of it
    assert abs(share - smallest).max() < bound + grid


@pytest.mark.slow
def test_neither_the_mix_of_a_document_nor_the_position_is_a_relation():
    rejected = {"mix": 0, "position": 0}
    generator = np.random.default_rng(0)
    for seed in range(30):
        tokens = random_tokens(seed, num_documents=24, length=31, own_mix=True)
        p_value = one_layer(*tokens, num_permutations=39, seed=seed)
        rejected["mix"] += int(p_value.min() <= 0.05)

        lengths = generator.integers(10, 51, 30)
        position = np.concatenate([np.arange(n) for n in lengths])
        at_start = generator.random((2, len(position))) < 0.8**position
        label = np.where(at_start[0], 0, generator.integers(0, 3, len(position)))
        expert = np.where(at_start[1], 1, generator.integers(0, 4, len(position)))
        stack = a_stack(lengths.tolist(), a_layer(expert, 4))
        classes = classes_of(label, 3)
        p_value = one_layer(stack, classes, torch.arange(30), num_permutations=39, seed=seed)
        rejected["position"] += int(p_value.min() <= 0.05)

    # 1.5 of 30 expected: 9 and more have a probability below 1e-4.
    assert max(rejected.values()) < 9
