"""Tokens as texts that can be read on a page, whatever characters they have."""

import unicodedata
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

START = -1
"""Stands for the token that a decoder starts with, which has the id of padding."""

_START_NAME = "<start>"
_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's mark
_SPACE = "\N{OPEN BOX}"
_MOST_CHARACTERS = 200

# Control, format, surrogate, private and unassigned characters; separators.
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}


def visible_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Returns tokens as texts; one that begins a word begins with a space.

    Args:
        tokenizer: Names the tokens; an id that it does not know is shown as a number.
        ids: Token ids, or START.
    """
    texts = []
    for token_id in ids:
        if token_id == START:
            texts.append(_START_NAME)
            continue

        # A model may have more ids than its tokenizer has tokens.
        known = token_id < len(tokenizer)
        name = tokenizer.convert_ids_to_tokens(token_id) if known else None
        texts.append(f"<id {token_id}>" if name is None else visible_text(str(name)))
    return texts


def visible_text(token: str) -> str:
    """Returns a token in which every character can be seen.

    A mark at the start of a word becomes a space; spaces elsewhere, control characters and those
    that change the direction of a text become symbols; a combining character that comes first gets
    a dotted circle as its base.
    """
    begins_word = token.startswith(_WORD_START) and token != _WORD_START
    characters = token[1:] if begins_word else token
    text = "".join(map(_visible_character, characters[:_MOST_CHARACTERS]))
    if len(characters) > _MOST_CHARACTERS:
        text += "…"

    if not text:
        text = "⟨empty⟩"
    if unicodedata.category(text[0]).startswith("M"):
        text = "◌" + text
    return " " + text if begins_word else text


def _visible_character(character: str) -> str:
    code = ord(character)
    if character in (" ", _WORD_START):
        return _SPACE
    if code < 0x20:
        return chr(0x2400 + code)  # the block of control pictures
    if unicodedata.category(character) in _UNSEEN:
        return f"⟨U+{code:04X}⟩"
    return character
