"""Every character of a token can be seen, in any script."""

import pytest

from moe.inspection.page.trace_content import START, visible_text, visible_tokens
from tests.inspection.tiny_view import tiny_tokenizer


@pytest.mark.parametrize(
    ("token", "text"),
    [
        ("▁the", " the"),
        ("▁", "␣"),
        ("▁▁", " ␣"),
        ("a▁b c", "a␣b␣c"),
        ("\n\t\x00", "␊␉␀"),
        ("\x7f\x9b", "⟨U+007F⟩⟨U+009B⟩"),
        ("\u202eabc\u200b", "⟨U+202E⟩abc⟨U+200B⟩"),
        ("\ud800", "⟨U+D800⟩"),
        ("▁\u0301a", " ◌\u0301a"),
        ("", "⟨empty⟩"),
        ("▁שלום", " שלום"),
    ],
)
def test_a_token_is_shown_so_that_nothing_is_hidden(token, text):
    assert visible_text(token) == text


def test_a_very_long_token_is_cut():
    assert visible_text("a" * 10_000) == "a" * 200 + "…"


def test_ids_have_the_names_of_the_tokenizer_and_others_their_number():
    tokens = visible_tokens(tiny_tokenizer(), [START, 0, 1, 5, 6, 130])
    assert tokens == ["<start>", "<pad>", "</s>", " w5", "w6", "<id 130>"]
