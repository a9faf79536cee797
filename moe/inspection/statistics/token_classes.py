"""Classes of tokens as functions of their text, without a tagger.

A class is a function from the text of N tokens to <bool>[N]; a new one is one function:

    @TOKEN_CLASSES.register("colour")
    def is_colour(text: TokenText) -> Tensor:
        return text.of_words({"red", "green", "blue"}.__contains__)

Comes after token_text.py, before specialization.py. A piece belongs to the class of its whole word.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from moe.checks import check_choice
from moe.inspection.statistics import word_lists
from moe.inspection.statistics.token_text import TokenText, is_all_marks, read_tokens
from moe.inspection.statistics.word_lists import plain_form
from moe.registry import Registry
from moe.sparse.editing import Stack
from moe.tracing.trace import StackTrace, Trace

TokenClass = Callable[[TokenText], Tensor]
"""A function from the text of N tokens to <bool>[N]: which belong to the class."""

TOKEN_CLASSES: Registry[TokenClass] = Registry("token class")

DEFAULT_CLASSES = (
    "sentinel",
    "special",
    "punctuation",
    "code",
    "number",
    "article",
    "conjunction",
    "preposition",
    "pronoun",
    "auxiliary",
    "proper name",
    "word start",
    "word inside",
)
"""Most specific first; the last two cover every other piece of a word."""


class TokenClasses(NamedTuple):
    """Members of C classes among N tokens; classes may overlap.

    Attributes:
        names: The C names.
        members: <bool>[C, N] tokens of each class.
    """

    names: tuple[str, ...]
    members: Tensor


def classify(
    stack: StackTrace,
    tokenizer: PreTrainedTokenizerFast,
    names: Sequence[str] = DEFAULT_CLASSES,
    *,
    tokens: str = "input",
) -> TokenClasses:
    """Returns which tokens of a stack are of which class.

    Args:
        stack: The stack's part of a trace.
        tokenizer: The model's.
        names: Classes of TOKEN_CLASSES, in the order in which they claim a token for `first`.
        tokens: `input`, or for the decoder `target`: the label at each position.

    Raises:
        ConfigError: When there is no such class.
        DataError: When the tokenizer is not the model's or marks no words.
    """
    check_choice("tokens", tokens, ("input", "target"))
    ids = stack.ids if tokens == "input" else stack.targets
    text = read_tokens(tokenizer, ids.long(), stack.example)
    members = torch.stack([TOKEN_CLASSES.get(name)(text) for name in names])
    assert members.dtype == torch.bool, "a class is a mask of the tokens"
    return TokenClasses(tuple(names), members)


def domain_classes(trace: Trace, stack: Stack) -> TokenClasses:
    """Returns the kinds of text as classes of the tokens of a stack, <bool>[domains, N]."""
    example = trace.stack(stack).example
    domain = trace.domain[example]  # [N]
    names = [name or "text" for name in trace.facts.domains]
    numbers = torch.arange(len(names))
    return TokenClasses(tuple(names), domain == numbers[:, None])


# ---------------------------------------------------------------------------
# Marks of the tokenizer


@TOKEN_CLASSES.register("sentinel")
def is_sentinel(text: TokenText) -> Tensor:
    """Returns <bool>[N]: `<extra_id_n>`, which replaces a masked span."""
    return text.is_sentinel


@TOKEN_CLASSES.register("special")
def is_special(text: TokenText) -> Tensor:
    """Returns <bool>[N]: special tokens such as padding (the decoder's first input) and the end, but no sentinel."""
    return text.is_special & ~text.is_sentinel


@TOKEN_CLASSES.register("word start")
def starts_word(text: TokenText) -> Tensor:
    """Returns <bool>[N]: the first piece of a word; no punctuation."""
    return text.is_start & (text.word > 0) & ~is_punctuation(text)


@TOKEN_CLASSES.register("word inside")
def is_inside_word(text: TokenText) -> Tensor:
    """Returns <bool>[N]: a later piece of a word; no punctuation."""
    return ~text.is_start & (text.word > 0) & ~is_punctuation(text)


# ---------------------------------------------------------------------------
# The look of a word


@TOKEN_CLASSES.register("punctuation")
def is_punctuation(text: TokenText) -> Tensor:
    """Returns <bool>[N]: all characters are in Unicode's P* or S*."""
    return text.of_words(is_all_marks)


@TOKEN_CLASSES.register("number")
def is_number(text: TokenText) -> Tensor:
    """Returns <bool>[N]: the word has a digit, or is `one` to `trillion`."""
    return text.of_words(_is_number)


def _is_number(word: str) -> bool:
    if any(map(str.isdecimal, word)):
        return True

    # twenty-one
    parts = word.lower().split("-")
    return all(part in word_lists.NUMBERS for part in parts)


# snake_case, camelCase other than McDonald and MacArthur, f( and x[, :: -> == and the like.
_CODE = re.compile(
    r"\w_\w|\b_+\w|\w__"
    r"|(?<!\bM)(?<!\bMa)[a-z][A-Z]"
    r"|\w[(\[{](?!s\))"
    r"|::|->|&&|[=!+*/<>-]="
)


@TOKEN_CLASSES.register("code")
def is_code(text: TokenText) -> Tensor:
    """Returns <bool>[N]: everything between two spaces looks like code, e.g. `get_item(x)`."""
    return text.of_runs(lambda run: _CODE.search(run) is not None)


# ---------------------------------------------------------------------------
# Closed lists of words


def _add_list(name: str, words: frozenset[str]) -> None:
    """Registers the class of the words of a list."""

    @TOKEN_CLASSES.register(name)
    def are_listed(text: TokenText) -> Tensor:
        return text.of_words(lambda word: plain_form(word) in words)


for _name, _words in word_lists.BY_CLASS.items():
    _add_list(_name, _words)


# ---------------------------------------------------------------------------
# The word among others


@TOKEN_CLASSES.register("proper name")
def is_proper_name(text: TokenText) -> Tensor:
    """Returns <bool>[N]: is capitalized where no sentence starts, and rarely in lower case.

    The lower-case form must be less than a third as frequent in the same tokens. After a sentinel it
    is unknown whether a sentence starts, so no word there counts as a name.
    """
    may_be_name = text.of_words(_has_capital) & ~text.starts_sentence  # [N]

    # Number of times that each of W words is capitalized mid-sentence.
    num_words = len(text.words)
    first_pieces = text.word[text.is_start]
    occurrences = torch.bincount(first_pieces, minlength=num_words)
    names = torch.bincount(text.word[text.is_start & may_be_name], minlength=num_words)

    # Number of times that its lower-case form occurs.
    number_of = {word: number for number, word in enumerate(text.words)}
    small = torch.zeros_like(names)  # [W]
    for number in names.nonzero().flatten().tolist():
        word = text.words[int(number)]
        same = number_of.get(word.lower())
        if same is not None and same != number:
            small[number] = occurrences[same]

    is_rarer = 3 * small < names
    return may_be_name & is_rarer[text.word]


def _has_capital(word: str) -> bool:
    """Returns whether a word that is not a function word starts with a capital."""
    is_listed = plain_form(word) in word_lists.FUNCTION_WORDS
    return word[0].isupper() and word[-1].isalpha() and not is_listed
