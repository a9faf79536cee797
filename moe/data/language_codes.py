"""Languages of a tokenizer that has codes for them, such as those of M2M100, NLLB and mBART.

Comes after `tokenizer`. The code of its language is one of the special tokens around a text; the
generation settings of a model choose that of its answers.
"""

import copy
import difflib
from collections.abc import Iterable, Iterator
from typing import Any

from moe.checks import check
from moe.data.tokenizer import target_frame


def with_languages(tokenizer: Any, source: str | None = None, target: str | None = None) -> Any:
    """Returns a tokenizer with other languages of inputs and targets, which it keeps when it is saved.

    Args:
        tokenizer: Not changed.
        source: Code of the language of inputs; None for the one that it has.
        target: Code of the language of targets; likewise.

    Raises:
        ConfigError: When the tokenizer has no such code; names the nearest.
    """
    given = {"src_lang": source, "tgt_lang": target}
    given = {name: code for name, code in given.items() if code is not None}
    if not given:
        return tokenizer
    codes = _language_codes(tokenizer)
    copied = copy.deepcopy(tokenizer)
    for name, code in given.items():
        nearest = difflib.get_close_matches(code[:80], codes, n=3, cutoff=0.3) or codes[:3]
        expected = f"one of the tokenizer's {len(codes)}, such as {', '.join(nearest)}"
        none = "none, since the tokenizer has no languages"
        check(code in codes, "The code of a language", code, expected if codes else none)
        setattr(copied, name, code)
    return copied


def by_languages(
    tokenizer: Any, languages: Iterable[tuple[Any, ...]]
) -> Iterator[tuple[Any, list[int]]]:
    """Yields a tokenizer for each combination of languages, and the numbers of the pairs that have it.

    Args:
        tokenizer: Has the languages of pairs without their own.
        languages: Source and target language of each pair; an empty tuple for the tokenizer's.
    """
    numbers_of: dict[tuple[Any, ...], list[int]] = {}
    for number, pair in enumerate(languages):
        numbers_of.setdefault(pair, []).append(number)
    for pair, numbers in numbers_of.items():
        yield for_pair(tokenizer, pair), numbers


def for_pair(tokenizer: Any, languages: tuple[Any, ...]) -> Any:
    """Returns a tokenizer with the languages of a pair; one without languages reads all of them alike."""
    return with_languages(tokenizer, *languages) if _language_codes(tokenizer) else tokenizer


def _language_codes(tokenizer: Any) -> list[str]:
    """Returns the codes of a tokenizer; none if it has no languages."""
    if not hasattr(tokenizer, "tgt_lang"):
        return []
    codes = getattr(tokenizer, "lang_code_to_token", None)  # M2M100's `fr` has the token `__fr__`
    if codes:
        return list(codes)
    control = set(tokenizer.special_tokens_map.values())
    tokens = tokenizer.added_tokens_decoder.values()
    return [token.content for token in tokens if token.special and token.content not in control]


def answer_settings(tokenizer: Any) -> dict[str, Any]:
    """Returns the generation settings for answers in the tokenizer's target language; none without one."""
    if getattr(tokenizer, "tgt_lang", None) is None:
        return {}

    # The language is the first token of a target, or, in mBART, what the decoder starts with.
    start, end = target_frame(tokenizer)
    return {"forced_bos_token_id": start[0]} if start else {"decoder_start_token_id": end[-1]}
