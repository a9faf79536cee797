"""Tokens as text: the word of each piece, and where sentences start.

Comes before token_classes.py.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from moe.data.tokenizer import SPACE, piece_texts
from moe.errors import DataError

_SENTINEL = re.compile(r"<extra_id_\d+>")
_UNKNOWN = "\ue000"
"""Stands for a character that the vocabulary lacks: neither a letter nor punctuation."""

_SENTENCE_END = frozenset(".!?\u2026:")


class TokenText(NamedTuple):
    """N tokens with their words; the input of classes of tokens.

    A run is the text between two spaces. Its word is the run without the punctuation around it;
    each piece of that punctuation is a separate word. `don't` is one word. Special tokens and lone
    spaces have the empty word.

    Attributes:
        tokenizer: The model's.
        ids: <int64>[N] token ids.
        example: <int64>[N] number of each token's example.
        word: <int64>[N] word that each token is a piece of, as an index into `words`.
        words: Distinct words; the first is empty.
        run: <int64>[N] run that each token is in, as an index into `runs`.
        runs: Distinct runs; the first is empty.
        is_start: <bool>[N] first piece of its word.
        starts_sentence: <bool>[N] whether its word starts, or may start, a sentence.
        is_special: <bool>[N] special tokens, sentinels among them.
        is_sentinel: <bool>[N] sentinels.
    """

    tokenizer: PreTrainedTokenizerFast
    ids: Tensor
    example: Tensor
    word: Tensor
    words: list[str]
    run: Tensor
    runs: list[str]
    is_start: Tensor
    starts_sentence: Tensor
    is_special: Tensor
    is_sentinel: Tensor

    def of_words(self, holds: Callable[[str], bool]) -> Tensor:
        """Returns <bool>[N]: the tokens whose word satisfies `holds`, which is called once per word."""
        return _of_texts(holds, self.words)[self.word]

    def of_runs(self, holds: Callable[[str], bool]) -> Tensor:
        """Returns <bool>[N]: the tokens whose run satisfies `holds`, which is called once per run."""
        return _of_texts(holds, self.runs)[self.run]


def _of_texts(holds: Callable[[str], bool], texts: Sequence[str]) -> Tensor:
    """Returns <bool>[T]: for which texts `holds`; never for the empty one."""
    answers = [text != "" and bool(holds(text)) for text in texts]
    return torch.tensor(answers, dtype=torch.bool)


def is_mark(character: str) -> bool:
    """Returns whether a character is punctuation or a symbol."""
    return unicodedata.category(character)[0] in "PS"


def is_all_marks(word: str) -> bool:
    """Returns whether a word consists only of punctuation and symbols."""
    return all(map(is_mark, word))


def _has_end(word: str) -> bool:
    return is_all_marks(word) and not _SENTENCE_END.isdisjoint(word)


def read_tokens(tokenizer: PreTrainedTokenizerFast, ids: Tensor, example: Tensor) -> TokenText:
    """Returns the words of tokens.

    Args:
        tokenizer: The model's.
        ids: <int64>[N] token ids, one example after the other.
        example: <int64>[N] number of each token's example.

    Raises:
        DataError: When an id is not the tokenizer's, or it does not mark where words start.
    """
    # Text of each id.
    pieces, has_space, is_special_piece, is_sentinel_piece = _vocabulary(tokenizer)
    num_pieces = len(pieces)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_pieces:
        raise DataError(
            f"The tokens have ids from {int(ids.min())} to {int(ids.max())}, but the tokenizer has {num_pieces} "
            "pieces. Give the tokenizer of the model that was traced."
        )
    is_special = is_special_piece[ids]

    # A run ends where a space, a special token or another example begins.
    is_first = has_space[ids] | is_special
    is_first[:1] = True
    is_first[1:] |= is_special[:-1] | (example[1:] != example[:-1])
    bounds = [*is_first.nonzero().flatten().tolist(), ids.numel()]

    # Each distinct run is split into words once.
    words = {"": 0}
    runs = {"": 0}
    readings: dict[tuple[int, ...], tuple[str, list[str], list[bool]]] = {}
    word: list[int] = []
    run: list[int] = []
    is_start: list[bool] = []
    all_ids = ids.tolist()
    for start, end in pairwise(bounds):
        run_ids = tuple(all_ids[start:end])
        if run_ids not in readings:
            readings[run_ids] = _read_run([pieces[number] for number in run_ids])
        run_text, piece_words, starts = readings[run_ids]
        word += [words.setdefault(text, len(words)) for text in piece_words]
        run += [runs.setdefault(run_text, len(runs))] * len(piece_words)
        is_start += starts

    text = TokenText(
        tokenizer=tokenizer,
        ids=ids,
        example=example,
        word=torch.tensor(word, dtype=torch.int64),
        words=list(words),
        run=torch.tensor(run, dtype=torch.int64),
        runs=list(runs),
        is_start=torch.tensor(is_start, dtype=torch.bool),
        starts_sentence=torch.zeros_like(is_special),
        is_special=is_special,
        is_sentinel=is_sentinel_piece[ids],
    )
    return text._replace(starts_sentence=_sentence_starts(text))


def _vocabulary(tokenizer: Any) -> tuple[list[str], Tensor, Tensor, Tensor]:
    """Returns the V pieces of a tokenizer.

    Returns:
        Their texts without spaces, empty for special tokens, where a surrogate is a byte of a
        character that is split over pieces; and <bool>[V] each: whether a piece starts with a space,
        is special, and is a sentinel.

    Raises:
        DataError: When none starts with the mark of a space.
    """
    names = piece_texts(tokenizer, range(len(tokenizer)), errors="surrogateescape")
    texts = [name.replace(SPACE, " ") for name in names]
    has_space = torch.tensor([text[:1].isspace() for text in texts])
    if not has_space.any():
        raise DataError(
            f"No piece of the tokenizer starts with {SPACE!r}, the mark of a space, so words cannot be found. "
            "Give a SentencePiece or byte-level tokenizer, as T5, GPT-2 and this library have."
        )

    # An unknown character is special to the tokenizer, but part of a word to a reader.
    is_sentinel = torch.tensor([_SENTINEL.fullmatch(name) is not None for name in names])
    is_special = is_sentinel.clone()
    is_special[tokenizer.all_special_ids] = True
    unknown = tokenizer.unk_token_id
    if unknown is not None:
        is_special[unknown] = False
    pieces = []
    for number, (text, special) in enumerate(zip(texts, is_special.tolist(), strict=True)):
        piece = _UNKNOWN if number == unknown else "".join(text.split())
        pieces.append("" if special else piece)
    return pieces, has_space, is_special, is_sentinel


def _read_run(pieces: list[str]) -> tuple[str, list[str], list[bool]]:
    """Returns a run, the word of each of its pieces, and which pieces are the first of their words.

    Pieces within the word belong to it, others are separate words. A piece that begins within a
    character belongs to the piece before it.
    """
    # A lone mark of a space at the start of a run belongs to the piece after it.
    has_mark = len(pieces) > 1 and not pieces[0]
    if has_mark:
        pieces = pieces[1:]
    pieces, sizes = _whole_characters(pieces)
    text = "".join(pieces)
    first, last = _word_within(text)

    # Pieces that overlap the word belong to it.
    words: list[str] = []
    is_start: list[bool] = []
    start = 0
    in_word = False
    for piece, size in zip(pieces, sizes, strict=True):
        end = start + len(piece)
        overlaps = end > first and start < last
        words += [text[first:last] if overlaps else piece] * size
        is_start += [not (overlaps and in_word), *[False] * (size - 1)]
        in_word = overlaps
        start = end

    # The mark is the first piece of the following word.
    if has_mark:
        words.insert(0, words[0])
        is_start.insert(1, False)
    return text, words, is_start


def _whole_characters(pieces: list[str]) -> tuple[list[str], list[int]]:
    """Returns pieces joined until none begins within a character, and of how many each is made."""
    joined: list[str] = []
    sizes: list[int] = []
    for piece in pieces:
        # Every byte of UTF-8 within a character, and no other, is from 0x80 to 0xBF.
        if joined and "\udc80" <= piece[:1] <= "\udcbf":
            joined[-1] += piece
            sizes[-1] += 1
        else:
            joined.append(piece)
            sizes.append(1)
    escape = "surrogateescape"
    return [piece.encode("utf-8", escape).decode("utf-8", escape) for piece in joined], sizes


def _word_within(text: str) -> tuple[int, int]:
    """Returns where the word in a run starts and ends: without the punctuation around it."""
    first = 0
    last = len(text)
    while first < last and is_mark(text[first]):
        first += 1
    while last > first and is_mark(text[last - 1]):
        last -= 1
    return first, last


def _sentence_starts(text: TokenText) -> Tensor:
    """Returns <bool>[N]: tokens of words that start, or may start, a sentence.

    These follow one of .!?:, a special token, or the start of an example; quotation marks and
    brackets in between do not count.
    """
    number = torch.arange(len(text.ids))
    is_punctuation = text.of_words(is_all_marks)
    ends_sentence = text.of_words(_has_end) | text.is_special
    if not len(number):
        return ends_sentence

    # The last word and the last end before each token, counting from where its example begins.
    is_word = ~is_punctuation & (text.word > 0)
    last_word = _last_before(is_word, number)
    last_end = _last_before(ends_sentence, number)
    is_new = torch.ones_like(is_word)
    is_new[1:] = text.example[1:] != text.example[:-1]
    example_start = number.masked_fill(~is_new, 0).cummax(dim=0).values
    starts = (last_end > last_word) | (last_word < example_start)  # [N]

    # All pieces of a word share the answer of the first.
    first_piece = number.masked_fill(~text.is_start, 0).cummax(dim=0).values
    return starts[first_piece] & is_word


def _last_before(holds: Tensor, number: Tensor) -> Tensor:
    """Returns <int64>[N]: the last token before each one with <bool>[N] True; -1 for none."""
    last = number.masked_fill(~holds, -1).cummax(dim=0).values
    return torch.cat([last.new_full((1,), -1), last[:-1]])
