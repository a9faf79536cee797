"""Classes of tokens: each piece is of the class of its word, by rules that need no model."""

import itertools

import pytest
import torch

from moe import ConfigError, DataError
from moe.inspection.statistics import word_lists
from moe.inspection.statistics.token_classes import (
    DEFAULT_CLASSES,
    TOKEN_CLASSES,
    classify,
    domain_classes,
)
from tests.inspection.by_hand import a_stack, a_tokenizer, a_trace, ids_of

# Pieces of a text, and the class of each.
TEXT = [
    ("~In", "preposition"),
    ("~19 90", "number"),
    (",", "punctuation"),
    ("~the", "article"),
    ("~(", "punctuation"),
    ("dog", "word start"),
    (")", "punctuation"),
    ("~does n ' t", "auxiliary"),
    ("~walk", "word start"),
    ("ing", "word inside"),
    ("~get _ item ( x", "code"),
    (")", "punctuation"),
    ("~and", "conjunction"),
    ("~it ' s", "pronoun"),
    ("~Par is", "proper name"),
    ("<extra_id_1>", "sentinel"),
    ("~twenty - one", "number"),
    ("~--", "punctuation"),
    ("<unk>", "word start"),
    ("~3 . 5", "number"),
    (".", "punctuation"),
    ("</s>", "special"),
]
SENTENCE = [(piece, name) for pieces, name in TEXT for piece in pieces.split()]


def a_text(*examples):
    """Returns a stack of examples of pieces, and the tokenizer that has them."""
    pieces = [piece for example in examples for piece in example]
    tokenizer = a_tokenizer(*(piece for piece in pieces if not piece.startswith("<")))
    stack = a_stack([len(example) for example in examples], ids=ids_of(tokenizer, pieces))
    return stack, tokenizer


def classes_of(*examples, names=DEFAULT_CLASSES):
    """Returns the name of the first class of each piece."""
    stack, tokenizer = a_text(*examples)
    return first_names(classify(stack, tokenizer, names))


def first_names(classes):
    rows = classes.members.T.tolist()
    return [next(itertools.compress(classes.names, row), "none") for row in rows]


def test_each_piece_is_of_the_class_of_its_word():
    pieces = [piece for piece, _ in SENTENCE]
    assert list(zip(pieces, classes_of(pieces), strict=True)) == SENTENCE


def test_an_unknown_character_is_a_part_of_its_word():
    assert classes_of(["~caf", "<unk>", "~the"]) == ["word start", "word inside", "article"]


def test_a_mark_of_a_space_alone_goes_with_what_follows():
    expected = ["article", "article", "punctuation", "punctuation", "none"]
    assert classes_of(["~", "the", "~", "(", "~"]) == expected


def test_a_name_has_a_capital_within_a_sentence_and_is_rare_without():
    names = ["proper name"]
    text = ["~The", "~dog", "~saw", "~Rex", ".", "~Rex", "~saw", "~March", '~"', "Rex", '"']
    expected = [0, 0, 0, 1, 0, 0, 0, 1, 0, 1, 0]
    assert [name == "proper name" for name in classes_of(text, names=names)] == expected

    # "march" is a third as frequent as "March": a word that stands at the start of a title.
    marches = ["~saw", "~March", "~saw", "~March", "~saw", "~March", "~march"]
    assert "proper name" not in classes_of(marches, names=names)
    assert classes_of(marches[:-1], names=names).count("proper name") == 3


def test_nothing_is_called_a_name_where_a_sentence_may_start():
    names = ["proper name"]
    for before in ([], ["~so", "."], ["~so", "?", '"'], ["<extra_id_0>"], ["~so", ":", "~("]):
        assert "proper name" not in classes_of([*before, "~Rex", "~saw"], names=names), before
    assert "proper name" not in classes_of(["~saw", "~I", "~saw", "~It"], names=names)
    assert "proper name" in classes_of(["~saw", "~US"], names=names)


def test_a_word_ends_with_its_example():
    assert classes_of(["~th"], ["e"]) == ["word start", "word start"]
    assert classes_of(["~th", "e"]) == ["article", "article"]


def test_code_is_told_from_prose():
    def is_code(run):
        return classes_of(["~" + run], names=["code"]) == ["code"]

    for run in ("snake_case", "camelCase", "f(x)", "x[0]", "std::move", "x->y", "a+=1", "__init__"):
        assert is_code(run), run
    for run in ("McDonald", "MacArthur", "word(s)", "(see", "Paris", "3.5", "don't", "and/or"):
        assert not is_code(run), run


def test_no_word_is_on_two_lists_of_function_words():
    lists = [word_lists.ARTICLES, word_lists.CONJUNCTIONS, word_lists.PREPOSITIONS]
    lists += [word_lists.PRONOUNS, word_lists.AUXILIARIES]
    assert sum(map(len, lists)) == len(word_lists.FUNCTION_WORDS)
    assert all(word == word.lower() for word in word_lists.FUNCTION_WORDS)


def test_the_plain_form_of_a_word():
    words = ["The", "can't", "it\u2019s", "US", "I", "s"]
    assert list(map(word_lists.plain_form, words)) == ["the", "can", "it", "US", "i", "s"]


def test_every_class_of_the_registry_says_yes_or_no_of_each_token():
    stack, tokenizer = a_text([piece for piece, _ in SENTENCE])
    names = TOKEN_CLASSES.names()
    assert set(DEFAULT_CLASSES) <= set(names)
    assert classify(stack, tokenizer, names).members.shape == (len(names), len(SENTENCE))

    empty = a_stack([0, 0])
    assert classify(empty, tokenizer, names).members.shape == (len(names), 0)


def test_a_class_of_ones_own_is_one_function(monkeypatch):
    monkeypatch.setattr(TOKEN_CLASSES, "_entries", dict(TOKEN_CLASSES._entries))

    @TOKEN_CLASSES.register("colour")
    def is_colour(text):
        return text.of_words(lambda word: word.lower() in {"red", "green"})

    @TOKEN_CLASSES.register("wrong")
    def wrong(text):
        return text.ids

    assert classes_of(["~Re", "d", "~dog"], names=["colour"]) == ["colour", "colour", "none"]
    with pytest.raises(AssertionError, match="a class is a mask of the tokens"):
        classes_of(["~Re", "d", "~dog"], names=["wrong"])


def test_targets_are_the_decoders_alone():
    pieces = ["<pad>", "~the", "~dog"]
    encoder, tokenizer = a_text(pieces)
    decoder = encoder._replace(targets=torch.tensor(ids_of(tokenizer, [*pieces[1:], "</s>"])))
    names = ["article", "special"]
    assert first_names(classify(decoder, tokenizer, names)) == ["special", "article", "none"]
    targets = classify(decoder, tokenizer, names, tokens="target")
    assert first_names(targets) == ["article", "none", "special"]
    with pytest.raises(ConfigError, match="tokens is 'output'; expected one of input, target"):
        classify(encoder, tokenizer, names, tokens="output")


def test_what_cannot_be_classed_is_refused():
    stack, tokenizer = a_text(["~the"])
    with pytest.raises(ConfigError, match=r"'artikle'\. Did you mean 'article'"):
        classify(stack, tokenizer, ["artikle"])
    with pytest.raises(DataError, match=r"ids from 999 to 999, but the tokenizer has 7 pieces"):
        classify(a_stack([1], ids=[999]), tokenizer)
    with pytest.raises(DataError, match="so words cannot be found"):
        classify(stack, a_tokenizer("the"))


def test_a_domain_is_a_class():
    stack = a_stack([2, 1, 3])
    trace = a_trace(stack, domains=["", "code"], domain=[0, 1, 0])
    classes = domain_classes(trace, "encoder")
    assert classes.names == ("text", "code")
    assert classes.members.int().tolist() == [[1, 1, 0, 1, 1, 1], [0, 0, 1, 0, 0, 0]]
