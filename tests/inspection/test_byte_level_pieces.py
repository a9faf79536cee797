"""A byte-level vocabulary is shown as text, though its pieces may end within a character."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.data.tokenizer import piece_texts, train_byte_tokenizer
from moe.inspection.page.trace_content import visible_tokens
from moe.inspection.statistics.token_text import read_tokens

NAMES = [
    "Ακτή Ελεφαντοστού",
    "Ελλάδα",
    "象牙海岸",
    "象牙",
    "Кот-д'Ивуар",
    "חוף השנהב",
    "Côte d'Ivoire",
    "Elfenbeinküste (Afrika)",
]
VOCABULARY = 500  # room for every name

# Letters of one to four bytes, most of them in no name; punctuation of one and of three.
_LETTERS = st.sampled_from("aZéßκτήЖдשנ象牙羅馬アラ한𐌰𐌱")
_MARKS = st.sampled_from(".,(“”…—")
_WORD = st.tuples(st.text(_MARKS, max_size=2), st.text(_LETTERS, max_size=7), st.text(_MARKS))
TEXTS = st.lists(_WORD.map("".join).filter(bool), min_size=1, max_size=5).map(" ".join)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_byte_tokenizer(NAMES * 3, VOCABULARY, tmp_path_factory.mktemp("bytes") / "names")


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@given(text=TEXTS)
def test_pieces_runs_and_words_make_up_the_text(tokenizer, text):
    ids = ids_of(tokenizer, text)
    pieces = piece_texts(tokenizer, ids, errors="surrogateescape")
    joined = "".join(pieces).encode("utf-8", "surrogateescape").decode()
    assert joined.replace("\u2581", " ") == text

    # Each run is the text between two spaces; its words follow each other without a gap.
    read = read_tokens(tokenizer, torch.tensor(ids), torch.zeros(len(ids), dtype=torch.int64))
    starts_run = [piece.startswith("\u2581") for piece in pieces]
    starts_run[0] = True
    runs = [read.runs[run] for run, starts in zip(read.run, starts_run, strict=True) if starts]
    assert runs == text.split()
    words = [read.words[word] for word in read.word[read.is_start]]
    assert "".join(words) == text.replace(" ", "")


def test_the_pieces_of_a_character_are_of_one_word(tokenizer):
    ids = ids_of(tokenizer, "(羅馬” 3")
    shown = r"( \xe7 \xbe \x85 \xe9 \xa6 \xac \xe2 \x80 \x9d ␣ 3"
    assert visible_tokens(tokenizer, ids) == shown.split()
    read = read_tokens(tokenizer, torch.tensor(ids), torch.zeros(len(ids), dtype=torch.int64))
    assert [read.words[word] for word in read.word] == ["("] + ["羅馬"] * 6 + ["”"] * 3 + ["3"] * 2
    assert read.is_start.nonzero().flatten().tolist() == [0, 1, 7, 10]


def test_a_text_that_is_cut_within_a_character_is_read(tokenizer):
    ids = ids_of(tokenizer, "羅")[1:] + ids_of(tokenizer, "a 羅")[:-1]
    read = read_tokens(tokenizer, torch.tensor(ids), torch.zeros(len(ids), dtype=torch.int64))
    assert read.word.tolist() == [1, 1, 1, 2, 2, 2]
    assert "a" in read.words[1]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Ακτή Ελεφαντοστού", ["Ακτή", " Ελεφαντοστού"]),
        ("Ακτές", ["Ακτ\\xce", r"\xad", r"\xcf", r"\x82"]),
        ("象牙海岸", ["象牙海岸"]),
        ("Côte\n", ["Côte", "␊"]),
    ],
)
def test_greek_and_chinese_tokens_are_readable(tokenizer, text, tokens):
    assert visible_tokens(tokenizer, ids_of(tokenizer, text)) == tokens
