"""Random facts, sums, and the bits that a model stores of them."""

import json
import math

import pytest
import torch

from moe.data.pair_files import read_pairs
from moe.data.tokenizer import load_tokenizer
from moe.errors import ConfigError, DataError
from moe.sparse.editing import edit_routing
from moe.sparse.edits import DropExperts
from scripts.fact_experts import answers_right, layer_row
from scripts.facts import PRIME, SYLLABLES, draw_facts, draw_sums, main
from scripts.stored_bits import stored_bits
from tests.models.tiny import tiny_batch, tiny_model


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
    assert "7 facts" in capsys.readouterr().out
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


def test_a_model_stores_what_its_loss_lacks_of_the_entropy():
    chance = 3 * math.log(256) / 4
    assert stored_bits(chance, 10) == pytest.approx(0, abs=1e-9)
    assert stored_bits(0.0, 10) == 240
    assert stored_bits(chance / 2, 10) == pytest.approx(120)
    assert stored_bits(9.0, 10) == 0 == stored_bits(None, 10)


def test_an_answer_is_right_if_greedy_decoding_gives_it_with_and_without_experts():
    model = tiny_model(eval_capacity_factor=None)
    batch = tiny_batch(batch=11, targets=3)
    del batch["labels"]
    edits = {("encoder", 0): DropExperts(0, 1, 2), ("decoder", 0): DropExperts(0, 1, 2)}

    def decode():
        tokens = model.generate(**batch, max_new_tokens=3, do_sample=False, eos_token_id=[])
        return tokens[:, 1:]

    answers = decode()
    with edit_routing(model, edits):
        without_experts = decode()
    batches = [{**batch, "labels": answers}]
    assert answers_right(model, batches, {}).all()
    same = (answers == without_experts).all(-1)
    assert answers_right(model, batches, edits).tolist() == same.tolist()
    assert 0 < same.sum() < 11


def test_the_row_of_a_layer_counts_answers_that_one_expert_alone_loses():
    recalled = torch.tensor([True, True, True, True, False])
    lost = torch.tensor([[True, True, False, False, False], [False, True, False, True, False]])
    row = layer_row(("decoder", 1), recalled, lost)
    assert row == ["decoder 1", "4 of 5", "2 (2, 2)", "50.0", "25.0"]
