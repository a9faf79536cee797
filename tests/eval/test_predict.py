"""Predictions of a run that is stopped, that grows, and of a model that learnt with sentinels."""

import pytest
import torch

import stmoe_eval.answers.predict
from moe.data.tokenizer import SpecialIds, end_with_sentinel
from stmoe_eval.answers import batches
from stmoe_eval.answers.predict import MODES, predict
from stmoe_eval.answers.seq2seq import load_seq2seq
from tests.models.tiny import tiny_model

ROWS = 7


def requests_of(task):
    return batches.requests_of(task.examples("test"))


@pytest.fixture
def dropping(tokenizer, tmp_path, monkeypatch):
    """A sparse model whose experts have room for few tokens, asked in batches of ROWS."""
    for name in ("_MAX_ROWS", "_MIN_ROWS"):
        monkeypatch.setattr(stmoe_eval.answers.predict, name, dict.fromkeys(MODES, ROWS))
    tiny_model(eval_capacity_factor=0.5, min_expert_capacity=1).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return load_seq2seq(tmp_path / "model")


@pytest.fixture
def asked(monkeypatch):
    """Collects the ids of the requests that a model really answers."""
    collected, answer = [], stmoe_eval.answers.predict._answer

    def answer_and_tell(system, task, batch, *rest):
        collected.extend(question.request.id for question in batch)
        return answer(system, task, batch, *rest)

    monkeypatch.setattr(stmoe_eval.answers.predict, "_answer", answer_and_tell)
    return collected


def log_probability(system, inputs, labels) -> float:
    with torch.no_grad():
        logits = system.model(input_ids=inputs, labels=labels).logits[0]
    return logits.log_softmax(-1).gather(-1, labels[0, :, None]).sum().item()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_stopped_run_goes_on_to_the_same_bytes_and_repeats_no_whole_batch(
    dropping, task, tmp_path, mode, asked
):
    requests, path = requests_of(task), tmp_path / "stopped.jsonl"
    expected = predict(dropping, task, requests, mode, tmp_path / "whole.jsonl")
    assert set(expected.router) == {"encoder", "decoder"}
    whole = (tmp_path / "whole.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 1 + 3 * (ROWS + 1) + 4 + 1

    # Stopped in the header, behind it, and within and behind the first batch and the last.
    for num_lines, num_bytes in ((0, 20), (1, 0), (8, 9), (9, 0), (29, 3), (30, 0)):
        path.write_bytes(b"".join(lines[:num_lines]) + b"".join(lines[num_lines:])[:num_bytes])
        asked.clear()
        assert predict(dropping, task, requests, mode, path) == expected
        assert path.read_bytes() == whole
        num_kept = 25 if num_lines == 30 else max(0, num_lines - 1) // (ROWS + 1) * ROWS
        assert len(asked) == 25 - num_kept


def test_predictions_made_beside_other_requests_are_not_reused(dropping, task, tmp_path):
    requests = requests_of(task)
    predict(dropping, task, requests[::2], "rank", tmp_path / "grown.jsonl")
    grown = predict(dropping, task, requests, "rank", tmp_path / "grown.jsonl")
    assert grown == predict(dropping, task, requests, "rank", tmp_path / "fresh.jsonl")
    assert (tmp_path / "grown.jsonl").read_bytes() == (tmp_path / "fresh.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["t5", "moe"])
def test_a_model_with_sentinels_is_asked_with_one_and_answers_without(
    folders, task, tmp_path, name
):
    system = load_seq2seq(folders[name])
    first = SpecialIds.of(system.tokenizer).first_sentinel
    system.model.generation_config.forced_bos_token_id = first
    marked = system._replace(tokenizer=end_with_sentinel(system.tokenizer, True))
    requests = requests_of(task)[::6]
    ranked = predict(marked, task, requests, "rank", tmp_path / "r.jsonl").predictions
    generated = predict(marked, task, requests, "generate", tmp_path / "g.jsonl").predictions
    for request, by_rank, answer in zip(requests, ranked, generated, strict=True):
        inputs = torch.tensor([[*system.tokenizer(request.inputs)["input_ids"][:-1], first, 1]])
        for choice in task.choices:
            labels = torch.tensor([[first, *system.tokenizer(choice)["input_ids"]]])
            assert abs(by_rank.scores[choice] - log_probability(system, inputs, labels)) < 1e-4
        tokens = system.model.generate(inputs, max_new_tokens=task.decoding.max_tokens + 1)[0]
        assert tokens[1] == first
        assert answer.output == system.tokenizer.decode(tokens[2:], skip_special_tokens=True)
