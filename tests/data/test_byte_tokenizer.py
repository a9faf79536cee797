"""The byte-level vocabulary: every text of every script is tokens and comes back.

Oracle: the text itself.
"""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from moe import ConfigError
from moe.commands import train_tokenizer as train_tokenizer_command
from moe.data.tokenizer import (
    SpecialIds,
    load_tokenizer,
    prompt_ids,
    sentinel,
    text_ids,
    train_byte_tokenizer,
)

TEXTS = [
    "el: Ivory Coast",
    "Ακτή Ελεφαντοστού",
    "ja: Japan",
    "日本",
    "hi: India",
    "भारत",
    "<pad></s>",
] * 9
VOCAB_SIZE = 409
CONTROL = {0, 1, 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("bytes") / "tokenizer"
    train_byte_tokenizer(TEXTS, VOCAB_SIZE, out)
    return out


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


MIXED = st.lists(st.sampled_from([*TEXTS, "</s>", "<pad>", "<unk>", sentinel(0), " ", "\n"])).map(
    "".join
)


@settings(max_examples=200)
@example("\x85 a\x85  b ")
@example("e\u0301 ﬁ ① \u200c\U0010ffff")
@given(st.text(max_size=40) | MIXED)
def test_every_text_decodes_to_itself_and_writes_no_special_token(tokenizer, text):
    (ids,) = text_ids(tokenizer, [text])
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert not CONTROL & set(ids)
    assert max(ids, default=0) < VOCAB_SIZE - 100


def test_a_prompt_ends_once_and_its_sentinels_are_tokens(tokenizer):
    (ids,) = prompt_ids(tokenizer, [f"a</s>{sentinel(3)}<pad>"])
    assert [token for token in ids if token in CONTROL] == [1]
    assert ids[-1] == 1 and VOCAB_SIZE - 4 in ids


def test_the_same_texts_give_the_same_files_which_auto_tokenizer_loads(folder, tokenizer, tmp_path):
    train_byte_tokenizer(TEXTS, VOCAB_SIZE, tmp_path / "again")
    for path in folder.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded("日本") == tokenizer("日本")
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert SpecialIds.of(tokenizer) == (0, 1, VOCAB_SIZE - 1, 100)


def test_few_texts_give_fewer_pieces_and_too_small_a_vocabulary_is_refused(tmp_path):
    assert len(train_byte_tokenizer(["ab ab"], 5_000, tmp_path / "few")) == 256 + 103 + 2
    with pytest.raises(ConfigError, match=r"vocab_size.*358.*256 bytes"):
        train_byte_tokenizer(TEXTS, 358, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_the_command_trains_on_inputs_and_targets_of_pairs(tmp_path, capsys):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"inputs": "el: wwww wwww", "targets": "zzzz zzzz"}\n' * 9)
    words = ["--pairs", str(pairs), "--vocab-size"]
    train_tokenizer_command.main([*words, "109", "--out", str(tmp_path / "pieces")])
    train_tokenizer_command.main([*words, "999", "--out", str(tmp_path / "bytes"), "--bytes"])
    assert str(tmp_path / "bytes") in capsys.readouterr().out

    tokenizer = load_tokenizer(tmp_path / "bytes")
    assert {"Ġwwww", "zzzz"} <= tokenizer.get_vocab().keys()
    assert 2 not in tokenizer("Ж")["input_ids"]
    assert 2 in load_tokenizer(tmp_path / "pieces")("Ж")["input_ids"]
