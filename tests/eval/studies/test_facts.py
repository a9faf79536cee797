"""Random facts, sums, and the bits that a model stores of them."""

import json
import math
import unicodedata

import pytest
import torch

from moe.data.pair_files import read_pairs
from moe.data.tokenizer import load_tokenizer
from moe.errors import ConfigError, DataError
from scripts.facts import PRIME, SYLLABLES, draw_facts, draw_sums, main
from scripts.known_facts import kind_rows
from scripts.real_facts import real_facts, train_pieces
from scripts.stored_bits import stored_bits


def test_facts_are_different_questions_with_answers_of_24_bits():
    facts = draw_facts(997, seed=3)
    assert facts == draw_facts(997, seed=3) != draw_facts(997, seed=4)
    assert len({question for question, _ in facts}) == 997
    assert len(set(SYLLABLES)) == 256
    for question, answer in facts:
        assert set(question.split()) | set(answer.split()) <= set(SYLLABLES)
        assert len(question.split()) == len(answer.split()) == 3


def test_sums_are_right_and_none_is_drawn_twice():
    sums = draw_sums(499, seed=0)
    assert len(set(sums)) == 499
    for question, answer in sums:
        left, right = ("".join(reversed(part.split())) for part in question.split("+"))
        assert int("".join(reversed(answer.split()))) == (int(left) + int(right)) % PRIME


def test_the_folder_holds_pairs_and_a_tokenizer_of_one_token_for_each_symbol(tmp_path, capsys):
    out = tmp_path / "facts"
    main(["--facts", "7", "--seed", "1", "--out", str(out)])
    assert "7 random facts" in capsys.readouterr().out
    pairs = read_pairs(out / "facts.jsonl")
    assert [(pair.inputs, pair.targets) for pair in pairs] == draw_facts(7, seed=1)

    tokenizer = load_tokenizer(out / "model")
    tokens = tokenizer(pairs[0].inputs).input_ids
    assert len(tokens) == 4 and tokens[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(tokens, skip_special_tokens=True) == pairs[0].inputs

    # Another folder of the same kind is replaced, anything else is not.
    main(["--facts", "11", "--out", str(out)])
    assert len(read_pairs(out / "facts.jsonl")) == 11
    (out / "mine.txt").write_text("mine")
    with pytest.raises(DataError, match=r"mine\.txt"):
        main(["--out", str(out)])
    with pytest.raises((ConfigError, SystemExit)):
        main(["--facts", "0", "--out", str(tmp_path / "none")])
    json.loads((out / "sums_dev.jsonl").read_text().splitlines()[0])


def test_real_facts_are_those_of_python_and_have_one_answer_each():
    facts = real_facts()
    answers = dict(facts)
    assert len(answers) == len(facts) > 13_000
    assert answers["html: eacute"] == "00e9"
    assert answers["http: 404"] == "Not Found"
    assert answers["codec: latin1"] == "latin_1"
    for question, answer in facts:
        kind, _, name = question.partition(": ")
        if kind == "unicode":
            assert unicodedata.name(chr(int(answer, 16))).lower() == name

    pieces = train_pieces(facts)
    for text in ("html: eacute", "errno: ENOENT", "Not Found"):
        assert pieces.decode(pieces.encode(text).ids) == text


def test_a_model_stores_what_its_loss_lacks_of_the_entropy():
    chance = 3 * math.log(256) / 4
    assert stored_bits(chance, 10) == pytest.approx(0, abs=1e-9)
    assert stored_bits(0.0, 10) == 240
    assert stored_bits(chance / 2, 10) == pytest.approx(120)
    assert stored_bits(9.0, 10) == 0 == stored_bits(None, 10)


def test_facts_are_compared_by_kind_and_by_seed():
    kinds = ["html", "html", "mime", "html"]
    known = torch.tensor([[True, True, False, True], [True, True, True, False]])
    by_other = torch.tensor([[True, False, False, False], [True, False, True, False]])
    rows = kind_rows(kinds, known, by_other)
    assert [row[:4] for row in rows] == [
        ["html", "3", "83.3", "33.3"],
        ["mime", "1", "50.0", "50.0"],
        ["all", "4", "75.0", "37.5"],
    ]
    assert rows[0][4].startswith("+50.0 (") and rows[0][5:] == ["50.0", "0.0"]
    assert rows[1][5:] == ["0.0", "0.0"]
