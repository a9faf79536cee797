"""Overlap of test sets and texts. Oracle: sets of tuples of words; counts done by hand."""

import random

from stmoe_eval.reports.overlap import SHORTEST, SplitOverlap, measure_overlap

ALPHABET = [f"w{number}" for number in range(5)]
"""So few words that many n-grams are shared."""


def random_texts(rng: random.Random, count: int, longest: int) -> list[str]:
    texts = []
    for _ in range(count):
        words = rng.choices(ALPHABET, k=rng.randrange(longest))
        texts.append(" ".join(words))
    return texts


def grams(words: list[str], n: int) -> set[tuple[str, ...]]:
    return {tuple(words[start : start + n]) for start in range(len(words) - n + 1)}


def grams_of_input(text: str, n: int) -> set[tuple[str, ...]]:
    """Returns the n-grams of an input; a shorter one is a single one, unless it is too short."""
    size = min(n, len(text.split()))
    return grams(text.split(), size) if size >= min(n, SHORTEST) else set()


def measure(inputs: list[str], texts: list[str], n: int) -> tuple[SplitOverlap, list[bool]]:
    return measure_overlap("task", "test", inputs, texts, [n])[0]


def test_the_measure_equals_sets_of_tuples():
    rng = random.Random(0)
    inputs = ["x", *random_texts(rng, 31, 17)]
    texts = random_texts(rng, 43, 19)
    for n, (overlap, is_shared) in zip(
        (3, 7), measure_overlap("task", "test", inputs, texts, (3, 7)), strict=True
    ):
        in_text = set()
        for text in texts:
            for size in range(1, n + 1):
                in_text |= grams(text.split(), size)
        expected = [grams_of_input(text, n) for text in inputs]
        every = set().union(*expected)
        assert (overlap.task, overlap.split, overlap.n) == ("task", "test", n)
        assert is_shared == [bool(each & in_text) for each in expected]
        assert overlap.num_shared == sum(is_shared)
        assert overlap.num_compared == sum(map(bool, expected))
        assert overlap.num_ngrams == len(every)
        assert overlap.num_shared_ngrams == len(every & in_text)


def test_a_prompt_is_not_compared_and_short_inputs_are_whole_or_left_alone():
    inputs = ["find the class of: a b c d e", "find the class of: w x y z"]
    text = "Find the class of everything: a, b, c, d, e; w, x, y, z."
    overlap, is_shared = measure(inputs, [text], 8)
    assert is_shared == [True, False]
    assert (overlap.num_inputs, overlap.num_compared, overlap.num_ngrams) == (2, 1, 1)
    assert (overlap.share_of_inputs, overlap.share_of_ngrams) == (1.0, 1.0)


def test_the_measure_forgets_case_and_marks_and_knows_the_ends_of_texts():
    overlap, _ = measure([], [""], 8)
    assert overlap.share_of_inputs == overlap.share_of_ngrams == 0.0
    inputs = ["one two three four five six seven eight", "zero"]
    _, is_shared = measure(inputs, ["one two three four", "five six seven eight"], 8)
    assert is_shared == [False, False]

    inputs = ["Straße und ЁЛКА, 漢字 _und_ 7 mehr!", "x"]
    _, is_shared = measure(inputs, ["- STRASSE und ёлка 漢字 und (7) mehr"], 6)
    assert is_shared == [True, False]
