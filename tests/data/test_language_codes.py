"""Languages of tokenizers: the special tokens around a text are those of transformers' own calls."""

import json

import numpy as np
import pytest
from transformers import MarianTokenizer, MBart50Tokenizer, MBartTokenizer, NllbTokenizer

from moe.data.language_codes import answer_settings, by_languages, with_languages
from moe.data.pairs import encode_pairs
from moe.data.tokenizer import load_tokenizer, prompt_ids
from moe.errors import ConfigError
from tests.hosts.test_host_verbs import gemma_tokenizer
from tests.hosts.tiny_translator import ENGLISH, NEW, save_m2m100, train_pieces

PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz"]


def saved(kind, folder):
    """Returns a folder with the files of a tokenizer, and two of its codes."""
    if kind == "m2m_100":
        return save_m2m100(folder), ("sw", "zu")
    if kind == "nllb":
        tokenizer = NllbTokenizer(vocab={piece: number for number, piece in enumerate(PIECES)})
        tokenizer.add_tokens(["new_Latn"], special_tokens=True)
        codes = ("eng_Latn", "new_Latn")
    else:
        kind = {"mbart": MBartTokenizer, "mbart50": MBart50Tokenizer}[kind]
        tokenizer = kind(vocab=[(piece, -float(number)) for number, piece in enumerate(PIECES)])
        codes = ("en_XX", "ro_RO")
    tokenizer.save_pretrained(str(folder))
    return folder, codes


@pytest.mark.parametrize("kind", ["m2m_100", "nllb", "mbart", "mbart50"])
def test_inputs_and_targets_have_the_frame_that_transformers_gives_them(kind, tmp_path):
    folder, codes = saved(kind, tmp_path / "tokenizer")
    tokenizer = load_tokenizer(folder)
    with pytest.raises(ConfigError, match="Add --target-language"):
        encode_pairs([("sea", "moon")], tokenizer, (9, 9), "none")

    pairs = [("sea", "moon", *codes), ("sun", "tree", *codes[::-1]), ("tree", "a", *codes)]
    for (inputs, targets), pair in zip(
        encode_pairs(pairs, tokenizer, (20, 20), "none"), pairs, strict=True
    ):
        tokenizer.src_lang, tokenizer.tgt_lang = pair[2:]
        assert inputs.tolist() == tokenizer(pair[0])["input_ids"]
        assert targets.tolist() == tokenizer(text_target=pair[1])["input_ids"]

    # The languages are kept where the tokenizer is saved.
    chosen = with_languages(load_tokenizer(folder), *codes)
    chosen.save_pretrained(str(tmp_path / "again"))
    again = load_tokenizer(tmp_path / "again")
    assert (again.src_lang, again.tgt_lang) == codes
    assert prompt_ids(again, ["sea"]) == [tokenizer("sea")["input_ids"]]
    (language,) = answer_settings(again).values()
    assert language in tokenizer(text_target="a")["input_ids"]
    assert answer_settings(load_tokenizer(folder)) == {}


def test_only_a_tokenizer_with_codes_takes_a_language():
    assert [numbers for _, numbers in by_languages(gemma_tokenizer(), [()] * 3)] == [[0, 1, 2]]
    with pytest.raises(ConfigError, match="the tokenizer has no languages"):
        with_languages(gemma_tokenizer(), None, "fr")

    # Columns of a table are no request.
    plain, named = encode_pairs(
        [("a", "b"), ("a", "b", "en", "fr")], gemma_tokenizer(), (9, 9), "none"
    )
    assert all(map(np.array_equal, plain, named))


@pytest.mark.filterwarnings("ignore:Recommended")
def test_marian_reads_targets_by_their_own_vocabulary(tmp_path, caplog):
    source, target = (
        train_pieces(tmp_path / side, words)
        for side, words in (("source", ENGLISH), ("target", NEW["zu"]))
    )
    for side in ("source", "target"):
        (tmp_path / f"{side}.model").rename(tmp_path / f"{side}.spm")
    pieces = ["</s>", "<unk>", *dict.fromkeys([*source, *target]), "<pad>"]
    (tmp_path / "vocab.json").write_text(json.dumps({piece: n for n, piece in enumerate(pieces)}))
    (tmp_path / "config.json").write_text('{"model_type": "sparse_marian"}')
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, MarianTokenizer)
    ((inputs, targets),) = encode_pairs([("house", "nyumba")], tokenizer, (20, 20), "none")
    assert inputs.tolist() == tokenizer("house")["input_ids"]
    assert targets.tolist() == tokenizer(text_target="nyumba")["input_ids"]
    assert targets.tolist() != tokenizer("nyumba")["input_ids"]

    encode_pairs([("house", "nyumba#")], tokenizer, (20, 20), "none")
    assert "such as '#'" in caplog.text
