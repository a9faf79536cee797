"""Evaluations under another capacity or dtype than the checkpoint's own, and what answers cost.

The oracle of an option is a checkpoint that was saved with that setting.
"""

import json
from functools import cache

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import SwitchTransformersConfig

from moe import ConfigError, DataError
from stmoe_eval.answers.batches import Request, requests_of
from stmoe_eval.answers.cost import Tokens, cost_of, read_timings, token_flops
from stmoe_eval.answers.inference import Inference, configure, describe_capacity
from stmoe_eval.answers.predict import predict
from stmoe_eval.answers.predictions_file import read_predictions_file
from stmoe_eval.answers.seq2seq import load_seq2seq
from stmoe_eval.commands.compare import compare_runs
from stmoe_eval.run import evaluate
from tests.eval.conftest import colour_task
from tests.eval.rows import FIXTURES
from tests.models.tiny import DENSE, tiny_model

AS_SAVED = Inference()
DROPLESS = Inference(capacity_factor=None)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    """Checkpoints of the same weights with different settings, by name."""
    settings = {
        "tight": {"eval_capacity_factor": 0.25, "min_expert_capacity": 1},
        "wide": {"eval_capacity_factor": None, "min_expert_capacity": 1},
        "slots": {"expert_capacity": 2, "min_expert_capacity": 1},
        "dense": {**DENSE, "router_options": None},
        "choice": {"router": "expert_choice", "decoder_router": "token_choice"},
    }
    settings["choice"]["router_options"] = None
    folders = {}
    for name, changes in settings.items():
        folders[name] = tmp_path_factory.mktemp(name)
        tiny_model(**changes).save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


def run(models, out, inference=AS_SAVED):
    options = {"data": FIXTURES, "modes": ["rank"], "command": "stmoe eval"}
    return evaluate(models, ["copa"], out=out, inference=inference, **options)


# ---- capacity and dtype ----


@pytest.fixture(scope="module")
def scores_of(saved, tmp_path_factory):
    """Returns the score of every choice, by request; nothing is answered twice."""
    task = colour_task()

    @cache
    def ranked(name, inference=AS_SAVED):
        path = tmp_path_factory.mktemp("ranked") / "p.jsonl"
        system = load_seq2seq(saved[name], inference=inference)
        made = predict(system, task, requests_of(task.examples("test")), "rank", path)
        return {prediction.id: prediction.scores for prediction in made.predictions}

    return ranked


def test_a_capacity_that_is_set_gives_the_scores_of_a_checkpoint_with_it(scores_of):
    wide = scores_of("wide")
    assert scores_of("wide", Inference(capacity_factor=0.25)) == scores_of("tight") != wide
    assert scores_of("tight", DROPLESS) == scores_of("slots", DROPLESS) == wide
    assert scores_of("slots") != wide
    assert scores_of("choice", DROPLESS) != scores_of("choice", Inference(0.5))


def test_dropless_answers_do_not_depend_on_the_other_requests(saved, scores_of, task, tmp_path):
    (request, *_) = requests_of(task.examples("test"))
    for inference, depends in ((DROPLESS, False), (Inference(), True)):
        system = load_seq2seq(saved["tight"], inference=inference)
        path = tmp_path / f"{depends}.jsonl"
        (alone,) = predict(system, task, [request], "rank", path).predictions
        beside_others = scores_of("tight", inference)[request.id]
        change = max(abs(alone.scores[text] - beside_others[text]) for text in beside_others)
        assert change > 0.01 if depends else change < 1e-4


@pytest.mark.parametrize(("name", "dtype"), [("wide", "bfloat16"), ("dense", "float16")])
def test_a_dtype_is_that_of_the_weights_and_changes_scores_a_little(name, dtype, saved, scores_of):
    system = load_seq2seq(saved[name], inference=Inference(dtype=dtype))
    assert str(system.model.dtype) == f"torch.{dtype}"
    half = scores_of(name, Inference(dtype=dtype))
    full = scores_of(name, Inference(dtype="float32"))
    differences = [abs(half[id][text] - full[id][text]) for id in full for text in full[id]]
    assert 0 < max(differences) < 1


def test_what_a_checkpoint_has_already_is_no_change(saved, folders, tmp_path):
    own = Inference()
    assert configure(saved["wide"], Inference(None, "float32")).changes == own
    assert configure(saved["tight"], Inference(0.25, "float32")).changes == own
    assert configure(folders["t5"], DROPLESS).changes == own
    assert configure(saved["slots"], DROPLESS).changes == DROPLESS
    assert describe_capacity(configure(saved["slots"], own).config) == "expert_capacity 2"

    SwitchTransformersConfig(num_experts=3).save_pretrained(tmp_path)
    message = "'switch_transformers', whose capacity --dropless cannot set"
    with pytest.raises(ConfigError, match=message):
        configure(tmp_path, DROPLESS)


# ---- runs ----


def test_the_settings_stand_in_report_and_predictions(saved, tmp_path):
    models = {"tight": saved["tight"], "wide": saved["wide"]}
    report = run(models, tmp_path, Inference(None, "bfloat16"))
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["settings"]["inference"] == {"capacity_factor": None, "dtype": "bfloat16"}
    tight, wide = (content["models"][name] for name in models)
    assert (tight["dtype"], tight["capacity"]) == ("bfloat16", "none")
    assert tight["inference"] == {"capacity_factor": None, "dtype": "bfloat16"}
    assert wide["inference"] == {"capacity_factor": "saved", "dtype": "bfloat16"}
    assert "bfloat16, no capacity limit" in (tmp_path / "report.md").read_text()
    assert report.failed == []

    header, _ = read_predictions_file(tmp_path / "predictions/copa.tight.rank.jsonl")
    assert header.inference == Inference(None, "bfloat16")


def test_runs_with_other_settings_are_compared_and_not_mixed(saved, tmp_path):
    models = {"tight": saved["tight"]}
    first, second = tmp_path / "a", tmp_path / "b"
    run(models, first)

    def contents():
        return {path: path.is_file() and path.read_bytes() for path in first.rglob("*")}

    before = contents()
    message = (
        r"copa\.tight\.rank\.jsonl holds answers of this model that were made with neither "
        r"--dropless .*; this run has --dropless\. Give the same options, or another --out"
    )
    with pytest.raises(DataError, match=message):
        run(models, first, DROPLESS)
    assert contents() == before
    assert run(models, first, Inference(0.25)).failed == []  # the checkpoint's own

    run(models, second, DROPLESS)
    result = compare_runs(str(first), str(second))
    assert [(task.task, task.mode) for task in result.tasks] == [("copa", "rank")]

    # A report that names other settings than the answers is refused.
    (second / "report.json").write_bytes((first / "report.json").read_bytes())
    with pytest.raises(DataError, match=r"line 1: inference is .*, but the report has"):
        compare_runs(str(first), str(second))


# ---- cost ----


@pytest.mark.parametrize("name", ["wide", "dense", "t5"])
def test_operations_of_a_token_are_those_of_the_products_with_weights(name, saved, folders):
    """Counted by torch for one token, where attention costs least."""
    system = load_seq2seq({**saved, **folders}[name])
    inputs = torch.tensor([[5]])
    with FlopCounterMode(display=False) as encoder, torch.no_grad():
        encoded = system.model.get_encoder()(input_ids=inputs)
    with FlopCounterMode(display=False) as decoder, torch.no_grad():
        system.model(encoder_outputs=encoded, decoder_input_ids=inputs)
    flops = token_flops(system.model)
    assert flops.of_input == pytest.approx(encoder.get_total_flops(), rel=0.1)
    assert flops.of_output == pytest.approx(decoder.get_total_flops(), rel=0.1)


def test_the_cost_of_an_example_is_the_mean_over_all(saved, task, tmp_path):
    system = load_seq2seq(saved["wide"])
    requests = [Request("a", "fire", ("red",)), Request("b", "sea of grass", ("red", "green"))]
    made = predict(system, task, requests, "rank", tmp_path / "p.jsonl")
    tokens = [len(system.tokenizer(request.inputs)["input_ids"]) for request in requests]
    choices = ["red", "red", "green"]
    num_outputs = sum(len(system.tokenizer(text)["input_ids"]) for text in choices)  # with the end
    assert made.tokens == Tokens(2, sum(tokens), num_outputs)

    flops = token_flops(system.model)
    cost = cost_of(made.tokens, flops)
    total = sum(tokens) * flops.of_input + num_outputs * flops.of_output
    assert cost == (sum(tokens) / 2, num_outputs / 2, total / 2)


def test_two_runs_write_the_same_report_and_keep_their_times_apart(saved, tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    report = run({"wide": saved["wide"]}, first)
    run({"wide": saved["wide"]}, second)
    assert (first / "report.json").read_bytes() == (second / "report.json").read_bytes()

    (timing,) = read_timings(first)
    assert (timing.task, timing.mode, timing.examples) == ("copa", "rank", 4)
    assert timing.tokens_per_second == pytest.approx(timing.tokens / timing.seconds)
    system = report.tasks[0].systems[0]
    num_tokens = (system.cost.input_tokens + system.cost.output_tokens) * timing.examples
    assert timing.tokens == pytest.approx(num_tokens)
    for name in ("report.md", "report.html"):
        text = (first / name).read_text()
        assert "FLOPs per example = 2 ×" in text
        assert f"{timing.tokens_per_second:,.0f}" in text
    assert report.speed("copa", system) == timing.tokens_per_second
    assert report.speed("rte", system) is None

    # A run that finds all answers keeps the times that they took; damaged times are none.
    before = (first / "timing.json").read_bytes()
    again = run({"wide": saved["wide"]}, first)
    assert (first / "timing.json").read_bytes() == before
    assert again.speed("copa", again.tasks[0].systems[0]) is not None
    (first / "timing.json").write_text("[{}]")
    assert read_timings(first) == []
