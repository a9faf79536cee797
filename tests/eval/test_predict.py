"""Predictions against a slow oracle that scores one choice of one example at a time."""

import json

import pytest
import torch

import eval.predict
from eval.predict import MODES, Request, load_seq2seq, predict, read_predictions
from moe import CheckpointError, ConfigError


def requests_of(task):
    return [Request(example.id, example.inputs) for example in task.examples("test")]


@pytest.mark.parametrize("name", ["t5", "moe"])
def test_rank_equals_scoring_one_choice_of_one_example_at_a_time(folders, task, tmp_path, name):
    system = load_seq2seq(folders[name])
    predictions = predict(system, task, requests_of(task), "rank", tmp_path / "p.jsonl")
    for request, prediction in zip(requests_of(task)[::6], predictions[::6], strict=True):
        inputs = system.tokenizer(request.inputs, return_tensors="pt")
        for choice in task.choices:
            labels = system.tokenizer(choice, return_tensors="pt").input_ids
            with torch.no_grad():
                logits = system.model(input_ids=inputs.input_ids, labels=labels).logits[0]
            expected = logits.log_softmax(-1).gather(-1, labels[0, :, None]).sum().item()
            assert abs(prediction.scores[choice] - expected) < 1e-4
        assert prediction.output == max(prediction.scores, key=prediction.scores.get)


@pytest.mark.parametrize("name", ["t5", "moe"])
def test_generation_does_not_depend_on_batch_mates(folders, task, tmp_path, name):
    system = load_seq2seq(folders[name])
    together = predict(system, task, requests_of(task), "generate", tmp_path / "a.jsonl")
    for request, prediction in zip(requests_of(task)[::7], together[::7], strict=True):
        alone = predict(system, task, [request], "generate", tmp_path / f"{request.id}.jsonl")
        assert alone[0].output == prediction.output


@pytest.mark.parametrize("mode", MODES)
def test_an_interrupted_run_goes_on_and_makes_nothing_twice(folders, task, tmp_path, mode, monkeypatch):
    system, requests = load_seq2seq(folders["t5"]), requests_of(task)
    whole = predict(system, task, requests, mode, tmp_path / "whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "torn.jsonl").write_text("".join(lines[:9]) + lines[9][:20])
    asked = []
    original = getattr(eval.predict, f"_{mode}")
    monkeypatch.setattr(eval.predict, f"_{mode}", lambda s, t, batch: asked.extend(batch) or original(s, t, batch))
    resumed = predict(system, task, requests, mode, tmp_path / "torn.jsonl")
    assert [p.output for p in resumed] == [p.output for p in whole]
    assert len(asked) == len(requests) - 8
    asked.clear()
    predict(system, task, requests, mode, tmp_path / "torn.jsonl")
    assert asked == []


def test_predictions_of_another_model_are_not_reused(folders, task, tmp_path):
    path = tmp_path / "p.jsonl"
    predict(load_seq2seq(folders["t5"]), task, requests_of(task), "generate", path)
    first = json.loads(path.read_text().splitlines()[0])
    predict(load_seq2seq(folders["moe"]), task, requests_of(task), "generate", path)
    assert read_predictions(path, first) == {}
    assert json.loads(path.read_text().splitlines()[0])["model"] != first["model"]


def test_a_request_never_holds_the_reference():
    assert Request._fields == ("id", "inputs")


def test_a_folder_without_a_model_and_an_unknown_mode_are_refused(folders, task, tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no model: it has no config\.json"):
        load_seq2seq(tmp_path)
    with pytest.raises(ConfigError, match=r"no mode 'guess'\. Choose from generate, rank"):
        predict(load_seq2seq(folders["t5"]), task, [], "guess", tmp_path / "p.jsonl")
