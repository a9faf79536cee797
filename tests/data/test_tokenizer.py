"""The vocabulary. Oracle: the sentencepiece library on the same spiece.model; T5's layout of ids."""

import json
import re
import shutil
from pathlib import Path

import numpy
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

import moe  # noqa: F401  registers the model type "st_moe"
from moe.data.tokenizer import SpecialIds, sentinel, train_tokenizer
from moe.errors import DataError
from tests.data.conftest import VOCAB_SIZE, docstrings_of

SENTINELS = [sentinel(number) for number in range(100)]


@pytest.fixture(scope="module")
def reference(tokenizer_folder):
    return sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_folder / "spiece.model"))


def as_text(tokenizer, texts):
    """Returns ids as sentencepiece does: no end token, and special tokens in the text are text."""
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    return tokenizer(texts, **options)["input_ids"]


def test_ids_are_laid_out_as_in_t5_and_scores_are_on_the_grid(tokenizer, reference):
    assert tokenizer.convert_tokens_to_ids(["<pad>", "</s>", "<unk>"]) == [0, 1, 2]
    descending = list(range(VOCAB_SIZE - 1, VOCAB_SIZE - 101, -1))
    assert tokenizer.convert_tokens_to_ids(SENTINELS) == descending
    assert len(tokenizer) == len(tokenizer.get_vocab()) == VOCAB_SIZE
    assert SpecialIds.of(tokenizer) == (0, 1, VOCAB_SIZE - 1, 100)
    scores = [reference.get_score(piece) for piece in range(reference.get_piece_size())]
    assert min(scores) < -5 and all((64 * score).is_integer() for score in scores)


def test_every_text_ends_with_the_end_token_and_comes_back(tokenizer):
    text = "Return the message of the header, and the value."
    ids = tokenizer(text)["input_ids"]
    assert ids[-1] == 1 and ids.count(1) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer(text, text)["input_ids"] == ids + ids
    cut = tokenizer(text, truncation=True, max_length=3)["input_ids"]
    assert len(cut) == 3 and cut[-1] == 1


def test_batches_are_padded_with_a_mask_and_no_token_types(tokenizer):
    texts = ["the", "the message of the header"]
    batch = tokenizer(texts, padding=True)
    assert sorted(batch) == ["attention_mask", "input_ids"]
    lengths = [len(tokenizer(text)["input_ids"]) for text in texts]
    assert [sum(mask) for mask in batch["attention_mask"]] == lengths
    assert batch["input_ids"][0][-1] == 0


def test_sentinels_in_a_text_are_single_tokens_and_spaces_around_them_vanish(tokenizer):
    # SeqIO's vocabularies_test.py test_extra_ids: nothing stands between two sentinels.
    text = "<extra_id_0> <extra_id_1> the <extra_id_9>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    the = tokenizer("the", add_special_tokens=False)["input_ids"]
    assert ids == [VOCAB_SIZE - 1, VOCAB_SIZE - 2, *the, VOCAB_SIZE - 10]


def test_it_agrees_with_sentencepiece_on_lines_and_whole_files(tokenizer, reference, english):
    """Those it was trained on, and those of another package."""
    files = docstrings_of(Path(numpy.fft.__file__).parent)
    for texts, least in ((english, 1_400), (files, 500)):
        lines = sorted({line for text in texts for line in text.splitlines()})
        assert len(lines) > least
        assert as_text(tokenizer, lines) == reference.encode(lines)
        assert as_text(tokenizer, texts) == reference.encode(texts)
    assert max(map(len, files)) > 20_000


LATIN = st.characters(min_codepoint=32, max_codepoint=0x17F) | st.sampled_from("=- \t\n漢ﬁ①½…</s>")


@settings(max_examples=50)
@example("\x85 a\x85")
@given(st.text(alphabet=LATIN, max_size=60))
def test_it_agrees_with_sentencepiece_on_any_latin_text(tokenizer, reference, text):
    assert as_text(tokenizer, [text]) == reference.encode([text])


def test_it_differs_from_sentencepiece_only_where_a_mark_follows_a_ligature(tokenizer, reference):
    letters = [f"the {letter}{chr(mark)}" for letter in "aeiouy" for mark in range(0x300, 0x370)]
    assert as_text(tokenizer, letters) == reference.encode(letters)
    ligature_with_mark = "ﬁ\u0301"
    assert as_text(tokenizer, "ﬁ") == reference.encode("ﬁ")
    assert as_text(tokenizer, ligature_with_mark) == reference.encode("fi")
    assert reference.encode(ligature_with_mark) == [*reference.encode("fi"), 2]


def test_auto_tokenizer_loads_the_folder_with_and_without_a_model_beside_it(
    tokenizer, tokenizer_folder, tmp_path
):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "model")
    text = "the message <extra_id_0> of the header"
    for _ in range(2):
        loaded = AutoTokenizer.from_pretrained(folder)
        assert isinstance(loaded, PreTrainedTokenizerFast)
        assert loaded(text) == tokenizer(text)
        assert loaded.get_vocab() == tokenizer.get_vocab()
        assert loaded.model_max_length == 512
        (folder / "config.json").write_text(json.dumps({"model_type": "st_moe"}), encoding="utf-8")
    assert AutoConfig.from_pretrained(folder).model_type == "st_moe"


def test_the_same_text_gives_the_same_files_in_silence(english, tokenizer_folder, tmp_path, capfd):
    train_tokenizer(english, VOCAB_SIZE, tmp_path / "again")
    for path in sorted(tokenizer_folder.iterdir()):
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name
    assert capfd.readouterr() == ("", "")


def test_a_vocabulary_that_the_texts_do_not_give_says_which_size_is_possible(english, tmp_path):
    for texts, size, reason in (
        (english[:50], 500_000, r"a value <= (\d+)"),
        (english, 107, r"7 vs (\d+)"),
        ([], 2048, "(no text)"),
    ):
        with pytest.raises(DataError, match=rf"{size - 100} pieces.*{size}: .*{reason}") as error:
            train_tokenizer(texts, size, tmp_path / "none")
        if size == 500_000:
            largest = 100 + int(re.findall(reason, str(error.value))[0])
    assert not (tmp_path / "none").exists()
    assert len(train_tokenizer(english[:50], largest, tmp_path / "largest")) == largest
    with pytest.raises(DataError, match=f"a value <= {largest - 100}"):
        train_tokenizer(english[:50], largest + 1, tmp_path / "none")
