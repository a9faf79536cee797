"""How much of a test set occurs in a text: n-grams, runs of n words, that both contain.

Comes before `contamination`. Words are compared without case and punctuation. A text is read once, one
part at a time; memory grows with the test set only.

Source:
    GPT-3 (arXiv:2005.14165) appendix C, n-grams of 8 to 13 words; PaLM (arXiv:2204.02311) section
    8, of 8. Differs: an input of fewer than n words counts as one n-gram.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

NGRAM_SIZES = (8, 13)
SHORTEST = 5
"""Inputs of fewer words are not compared: any text may contain them."""

_WORD = re.compile(r"[^\W_]+")

Ngram = tuple[str, ...]


class SplitOverlap(NamedTuple):
    """How much of one split of a task occurs in a text.

    Attributes:
        task: Name of the task.
        split: Its split.
        n: Words of an n-gram.
        num_inputs: Number of inputs.
        num_compared: Number of inputs that are long enough to be compared.
        num_shared: Number of inputs that share an n-gram with the text.
        share_of_inputs: Share of the compared inputs that have an n-gram in common with the text.
        num_ngrams: Number of different n-grams of the inputs.
        num_shared_ngrams: Number of these n-grams that occur in the text.
        share_of_ngrams: Share of the n-grams that occur in the text.
    """

    task: str
    split: str
    n: int
    num_inputs: int
    num_compared: int
    num_shared: int
    share_of_inputs: float
    num_ngrams: int
    num_shared_ngrams: int
    share_of_ngrams: float


def measure_overlap(
    task: str,
    split: str,
    inputs: Sequence[str],
    texts: Iterable[str],
    sizes: Sequence[int] = NGRAM_SIZES,
) -> list[tuple[SplitOverlap, list[bool]]]:
    """Returns for each size of n-grams how much of a split occurs in a text, and which inputs share an n-gram.

    Args:
        task: Name of the task.
        split: Name of the split.
        inputs: Its inputs. A common prefix of all of them is a prompt and is not compared.
        texts: The text, in parts of any length; n-grams do not cross from one to the next.
        sizes: Numbers of words n.
    """
    words = _words_of_inputs(inputs)
    ngrams_by_size = {n: [_ngrams_of_input(each, n) for each in words] for n in sizes}

    # One pass over the text; n-grams of short inputs are shorter.
    wanted: set[Ngram] = set()
    for ngrams in ngrams_by_size.values():
        wanted.update(*ngrams)
    found: set[Ngram] = set()
    for text in texts:
        text_words = _words(text)
        for size in {len(ngram) for ngram in wanted}:
            found |= wanted.intersection(_runs(text_words, size))

    overlaps = []
    for n, ngrams in ngrams_by_size.items():
        is_shared = [not each.isdisjoint(found) for each in ngrams]
        different: set[Ngram] = set().union(*ngrams)
        num_compared = sum(map(bool, ngrams))
        overlap = SplitOverlap(
            task=task,
            split=split,
            n=n,
            num_inputs=len(inputs),
            num_compared=num_compared,
            num_shared=sum(is_shared),
            share_of_inputs=sum(is_shared) / max(1, num_compared),
            num_ngrams=len(different),
            num_shared_ngrams=len(different & found),
            share_of_ngrams=len(different & found) / max(1, len(different)),
        )
        overlaps.append((overlap, is_shared))
    return overlaps


def _words_of_inputs(inputs: Sequence[str]) -> list[list[str]]:
    """Returns the words of each input, without the prefix that all inputs share."""
    words = list(map(_words, inputs))
    num_common = 0
    if len(words) > 1:
        shortest = min(words, key=len)
        while num_common < len(shortest):
            if any(each[num_common] != shortest[num_common] for each in words):
                break
            num_common += 1
    return [each[num_common:] for each in words]


def _ngrams_of_input(words: list[str], n: int) -> set[Ngram]:
    """Returns the n-grams of an input; a short one is compared as a whole, a very short one not at all."""
    size = min(n, len(words))
    return set(_runs(words, size)) if size >= min(n, SHORTEST) else set()


def _runs(words: list[str], size: int) -> Iterator[Ngram]:
    """Returns all runs of so many words."""
    return zip(*(words[start:] for start in range(size)), strict=False)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())
