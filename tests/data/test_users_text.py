"""Users' text as tokens. Oracle: sentencepiece, which never reads a control symbol from a text."""

import json
import shutil

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from moe.data.pairs import encode_pairs
from moe.data.tokenizer import prompt_ids, text_ids
from moe.data.tokens import encode_texts

CONTROL = ["</s>", "<pad>", "<unk>"]
# The fourth is </s> in wide letters, which the vocabulary reads as narrow ones.
SPECIALS = [*CONTROL, "\uff1c\uff0f\uff53\uff1e", "<extra_id_0>", "<extra_id_99>", "<extra_id_100>"]
WORDS = st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=0x17F), max_size=9)
TEXTS = st.lists(WORDS | st.sampled_from([*SPECIALS, " ", "the"]), max_size=7).map("".join)
ORDINARY = TEXTS.filter(lambda text: not any(name in text for name in SPECIALS[:4]))


@pytest.fixture(scope="module")
def t5(tokenizer_folder, tmp_path_factory):
    """The tokenizer that transformers makes of the same spiece.model."""
    folder = tmp_path_factory.mktemp("t5")
    shutil.copy(tokenizer_folder / "spiece.model", folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "t5"}), encoding="utf-8")
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def reference(tokenizer_folder):
    return sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_folder / "spiece.model"))


@settings(max_examples=150)
@example("w</s>w <pad> <unk>")
@given(TEXTS)
def test_a_text_is_read_as_sentencepiece_reads_it_whatever_it_says(tokenizer, t5, reference, text):
    expected = reference.encode(text)
    assert text_ids(tokenizer, [text]) == [expected]
    if text.split() == [
        word for word in text.split(" ") if word
    ]:  # T5Tokenizer splits at others, too
        assert text_ids(t5, [text]) == [expected]


@settings(max_examples=150)
@given(ORDINARY)
def test_text_without_control_tokens_has_the_tokens_of_transformers(tokenizer, t5, text):
    for each in (tokenizer, t5):
        assert text_ids(each, [text], markers=True) == [
            each(text, add_special_tokens=False)["input_ids"]
        ]
        assert prompt_ids(each, [text]) == [each(text)["input_ids"]]
        cut = each(text, truncation=True, max_length=5)["input_ids"]
        assert prompt_ids(each, [text], 5) == [cut]


@pytest.mark.parametrize("name", ["tokenizer", "t5"])
def test_pairs_and_prompts_have_sentinels_but_no_control_token(name, request, reference):
    tokenizer = request.getfixturevalue(name)
    first = tokenizer.convert_tokens_to_ids("<extra_id_0>")
    pair = ("the <extra_id_0> of", "<s>w</s> and <pad> more")
    ((inputs, targets),) = encode_pairs([pair], tokenizer, (64, 64), "none")
    assert inputs.tolist() == [*reference.encode("the"), first, *reference.encode("of"), 1]
    assert targets.tolist() == [*reference.encode(pair[1]), 1]
    assert prompt_ids(tokenizer, ["w</s>w", ""]) == [[*reference.encode("w</s>w"), 1], [1]]


def test_text_of_a_corpus_has_no_sentinel(tokenizer, t5):
    for each in (tokenizer, t5):
        (ids,) = encode_texts(["the <extra_id_0> value</s>"], each)
        assert ids.min() >= 2 and ids.max() < each.convert_tokens_to_ids("<extra_id_99>")


def test_tokens_that_a_user_added_are_markers():
    """As Gemma's: merges of letters, and special tokens beside those that end and fill texts."""
    letters = {f"<0x{byte:02X}>": byte + 9 for byte in range(256)}
    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, **letters}
    backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    named = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<turn>", "<turn>!"]})
    text = "<bos>a<turn>b<eos>"
    raw = [byte + 9 for byte in b"<bos>ab<eos>"]
    turn = tokenizer.convert_tokens_to_ids("<turn>")
    assert text_ids(tokenizer, [text], markers=True) == [[*raw[:6], turn, *raw[6:]]]
    assert text_ids(tokenizer, ["<turn>!"], markers=True) == [[turn + 1]], "the longer one"
    assert turn not in text_ids(tokenizer, [text])[0]
    assert not np.isin(text_ids(tokenizer, [text])[0], [0, 1, 2, 3]).any()
