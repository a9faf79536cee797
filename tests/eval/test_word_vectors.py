"""Vectors of words. Oracles: counts by hand, a dense decomposition by numpy, words that are used alike."""

import random

import numpy as np
import pytest

from eval.baselines import word_vectors
from eval.baselines.word_vectors import build_word_vectors, read_word_vectors, split_words
from moe import DataError
from moe.data.corpus import build_corpus, save_corpus
from moe.data.documents import Document

ANIMALS = ("dog", "cat", "horse", "cow", "sheep")
METALS = ("iron", "copper", "gold", "zinc", "lead")


def sentences(seed: int = 0) -> list[str]:
    """Animals eat, metals melt; no two words of a kind stand in one paragraph."""
    rng = random.Random(seed)
    texts = []
    for _ in range(600):
        texts.append(f"in the {rng.choice('abc')} field the {rng.choice(ANIMALS)} eats green grass")
        texts.append(f"in the {rng.choice('abc')} forge the {rng.choice(METALS)} melts at red heat")
    return texts


def cosine(vectors, one: str, other: str) -> float:
    return float(vectors.vectors[vectors.numbers[one]] @ vectors.vectors[vectors.numbers[other]])


def test_words_are_letters_or_digits_in_lower_case():
    words = " ".join(split_words("The UTF-8 codec's errors_2 Größe"))
    assert words == "the utf 8 codec s errors 2 größe"


def test_words_that_are_used_alike_are_near_though_they_never_meet():
    vectors = build_word_vectors(sentences(), "sentences")
    for words, others in ((ANIMALS, METALS), (METALS, ANIMALS)):
        assert all(cosine(vectors, words[0], word) > 0.8 for word in words)
        assert all(cosine(vectors, words[0], other) < 0.4 for other in others)

    again = build_word_vectors(sentences(), "sentences")
    assert again.numbers == vectors.numbers
    np.testing.assert_array_equal(again.vectors, vectors.vectors)


def test_neighbours_are_counted_over_their_distance_and_not_across_paragraphs(monkeypatch):
    """By hand, with a window of 2: x is no word of the vocabulary, but takes a place."""
    monkeypatch.setattr(word_vectors, "WINDOW", 2)
    numbers = {"a": 0, "b": 1, "c": 2}
    paragraphs = [["a", "b", "x", "c"], ["a", "a", "b"], ["c"]]
    expected = [[2, 1 + 1 + 0.5, 0], [1 + 1 + 0.5, 0, 0.5], [0, 0.5, 0]]
    for block in (1, 2, 5, 1 << 20):
        monkeypatch.setattr(word_vectors, "_BLOCK", block)
        counts = word_vectors._count_neighbours(paragraphs, numbers)
        np.testing.assert_allclose(counts.toarray(), expected)


def test_vectors_are_those_of_a_dense_decomposition(monkeypatch):
    monkeypatch.setattr(word_vectors, "NUM_DIMENSIONS", 5)
    texts = sentences()
    vectors = build_word_vectors(texts, "sentences")
    counts = word_vectors._count_neighbours([split_words(text) for text in texts], vectors.numbers)
    counts = counts.toarray()

    # The definition, with a loop.
    contexts = counts.sum(axis=0) ** 0.75 / (counts.sum(axis=0) ** 0.75).sum()
    association = np.zeros_like(counts)
    for word, context in np.argwhere(counts > 0):
        expected = counts[word].sum() * contexts[context]
        association[word, context] = max(np.log(counts[word, context] / expected), 0)
    left, values, _ = np.linalg.svd(association)
    dense = left[:, :5] * np.sqrt(values[:5])
    dense /= np.linalg.norm(dense, axis=1, keepdims=True)

    # Signs of dimensions are free: angles are not.
    angles = vectors.vectors @ vectors.vectors.T
    np.testing.assert_allclose(angles, dense @ dense.T, atol=1e-3)


def test_a_text_is_the_weighted_mean_of_its_known_words_and_their_maximum():
    vectors = build_word_vectors(sentences(), "sentences")
    dog, the = (vectors.vectors[vectors.numbers[word]] for word in ("dog", "the"))
    light, heavy = (vectors.weights[vectors.numbers[word]] for word in ("the", "dog"))
    assert light < heavy / 3
    mean, zeros = vectors.mean(["The dog, unheard-of!", "unheard"])
    length = np.hypot(light, heavy)
    np.testing.assert_allclose(mean, (heavy * dog + light * the) / length, rtol=1e-5)
    assert not zeros.any()
    np.testing.assert_allclose(vectors.max(["dog the"])[0], np.maximum(dog, the))
    assert not vectors.max([""])[0].any()


def test_a_corpus_gives_its_training_text_alone_and_a_large_one_a_part(tmp_path, monkeypatch):
    documents = []
    for number, text in enumerate(sentences()):
        documents.append(Document(f"{text}\n\nword{number}x", f"{number}.txt", "own", "none"))
    corpus = build_corpus(documents, held_out_fraction=0.3)
    save_corpus(corpus, tmp_path / "corpus")
    texts = list(corpus.train["text"])
    size = sum(map(len, texts))

    vectors = read_word_vectors(tmp_path / "corpus")
    np.testing.assert_array_equal(vectors.vectors, build_word_vectors(texts, "").vectors)
    assert vectors.source == f"{tmp_path / 'corpus'} (0.0 million characters)"

    monkeypatch.setattr(word_vectors, "MAX_CHARACTERS", size // 2 + 1)
    part = read_word_vectors(tmp_path / "corpus")
    np.testing.assert_array_equal(part.vectors, build_word_vectors(texts[::2], "").vectors)
    assert part.source.endswith("(0.0 of 0.0 million characters)")


def test_a_text_of_too_few_words_is_refused():
    for texts in ([], ["one word each"], ["same same same same"]):
        with pytest.raises(DataError, match=r"The text of it has [01] words that occur 3 times"):
            build_word_vectors(texts, "it")
    assert np.isfinite(build_word_vectors(["yes no " * 50], "it").vectors).all()
    with pytest.raises(DataError, match="No two words of it occur near each other"):
        build_word_vectors(["yes\nno\n" * 50], "it")
