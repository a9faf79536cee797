"""What a null exchanges: tokens within deciles of their position, or whole documents."""

import numpy as np
import pytest
import torch

from moe import ConfigError, DataError
from moe.inspection.statistics.permutations import (
    DocumentShuffle,
    TokenShuffle,
    check_permutations,
    position_deciles,
    share_at_least,
    token_places,
)
from tests.inspection.by_hand import a_stack, a_trace, places_of


def test_equal_positions_are_in_the_same_decile():
    assert position_deciles(np.arange(20)).tolist() == [n // 2 for n in range(20)]
    assert position_deciles(np.array([0, 1] * 10)).tolist() == [0, 5] * 10
    assert position_deciles(np.zeros(7)).tolist() == [0] * 7
    assert position_deciles(np.zeros(0)).tolist() == []


def test_tokens_are_exchanged_within_their_decile():
    places = places_of(a_stack([37, 41, 3]))
    source = TokenShuffle(places).draw(np.random.default_rng(0))
    assert sorted(source) == list(range(81))
    assert source.tolist() != list(range(81))
    deciles = position_deciles(places.position.numpy())
    assert (deciles[source] == deciles).all()


def test_documents_of_equal_length_are_exchanged_as_a_whole():
    places = places_of(a_stack([5] * 7))
    source = DocumentShuffle(places).draw(np.random.default_rng(0))
    assert sorted(source) == list(range(35))
    example = places.example.numpy()[source].reshape(7, 5)
    assert (example == example[:, :1]).all()
    assert example[:, 0].tolist() != list(range(7))
    assert (places.position.numpy()[source] == places.position.numpy()).all()


def test_documents_of_any_length_and_of_several_examples_keep_their_places():
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 9, 60)
    document = np.sort(generator.integers(0, 41, 60))
    places = places_of(a_stack(lengths.tolist()), document.tolist())
    rank = np.concatenate([np.arange(n) for n in np.bincount(document)])[places.example.numpy()]

    shuffle = DocumentShuffle(places)
    for _ in range(5):
        source = shuffle.draw(generator)
        assert sorted(source) == list(range(int(lengths.sum())))
        assert (places.position.numpy()[source] == places.position.numpy()).all()
        assert (rank[source] == rank).all()
    assert rank.max() > 1
    changed = places.document.numpy()[source] != places.document.numpy()
    assert changed.mean() > 0.5


def test_each_of_a_few_documents_comes_to_each_place_equally_often():
    places = places_of(a_stack([1] * 6))
    shuffle = DocumentShuffle(places)
    generator = np.random.default_rng(0)
    counts = np.zeros((6, 6))
    for _ in range(1200):
        counts[np.arange(6), shuffle.draw(generator)] += 1

    # 200 expected, of deviation 13: 6 deviations are off with a chance of 1e-7.
    assert abs(counts - 200).max() < 6 * 13


def test_too_few_documents_cannot_be_shuffled():
    with pytest.raises(DataError, match=r"from 5 documents; .* needs 6 at least. Trace more"):
        DocumentShuffle(places_of(a_stack([3] * 5)))
    with pytest.raises(DataError, match="from 1 documents"):
        DocumentShuffle(places_of(a_stack([3] * 9), [0] * 9))
    with pytest.raises(DataError, match="from 0 documents"):
        DocumentShuffle(places_of(a_stack([0] * 9)))


def test_places_are_those_of_a_trace():
    trace = a_trace(a_stack([2, 0, 3]), document=[7, 8, 7])
    places = token_places(trace, "encoder")
    assert places.position.tolist() == [0, 1, 0, 1, 2]
    assert places.example.tolist() == [0, 0, 2, 2, 2]
    assert places.document.tolist() == [7] * 5


def test_a_p_value_is_the_share_of_shuffles_that_are_as_large():
    statistics = torch.tensor([3.0, 1.0, 3.0, 5.0])
    values = torch.tensor([[0.0, 3.0], [4.0, 5.0]])
    assert share_at_least(statistics, values).tolist() == [[1.0, 0.75], [0.25, 0.25]]


def test_a_test_needs_enough_shuffles():
    with pytest.raises(ConfigError, match=r"num_permutations is 18; expected an integer from 19"):
        check_permutations(18, 0)
    with pytest.raises(ConfigError, match="seed is -1"):
        check_permutations(19, -1)
