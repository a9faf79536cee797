"""Evaluations under another capacity or dtype than the checkpoint's own, and what answers cost.

The oracle of an option is a checkpoint that was saved with that setting.
"""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import SwitchTransformersConfig

from eval.__main__ import main
from eval.answers.batches import Request, requests_of
from eval.answers.cost import Tokens, cost_of, merge_timings, read_timings, token_flops
from eval.answers.inference import Inference, check_inference, configure, describe_capacity
from eval.answers.predict import predict
from eval.answers.predictions_file import read_predictions_file
from eval.answers.seq2seq import load_seq2seq
from eval.commands.compare import compare_runs
from eval.run import evaluate
from moe import CheckpointError, ConfigError, DataError
from tests.models.tiny import DENSE, tiny_model

FIXTURES = Path(__file__).parent / "fixtures"
DROPLESS = Inference(capacity_factor=None)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    """Checkpoints of the same weights with different settings, by name."""
    settings = {
        "tight": {"eval_capacity_factor": 0.25, "min_expert_capacity": 1},
        "wide": {"eval_capacity_factor": None, "min_expert_capacity": 1},
        "slots": {"expert_capacity": 2, "min_expert_capacity": 1},
        "dense": {**DENSE, "router_options": None},
    }
    folders = {}
    for name, changes in settings.items():
        folders[name] = tmp_path_factory.mktemp(name)
        tiny_model(**changes).save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


def ranked(folder, inference, task, path):
    """Returns the score of every choice, by request."""
    system = load_seq2seq(folder, inference=inference)
    made = predict(system, task, requests_of(task.examples("test")), "rank", path)
    return {prediction.id: prediction.scores for prediction in made.predictions}


def run(models, out, inference=None, **options):
    options = {"data": FIXTURES, "modes": ["rank"], "command": "python -m eval", **options}
    if inference is not None:
        options["inference"] = inference
    return evaluate(models, ["copa"], out=out, **options)


# ---- capacity and dtype ----


@pytest.mark.parametrize("name", ["tight", "slots"])
def test_dropless_gives_the_scores_of_a_checkpoint_without_a_capacity(name, saved, task, tmp_path):
    own = ranked(saved[name], Inference(), task, tmp_path / "own.jsonl")
    dropless = ranked(saved[name], DROPLESS, task, tmp_path / "dropless.jsonl")
    assert dropless == ranked(saved["wide"], Inference(), task, tmp_path / "wide.jsonl")
    assert own != dropless


def test_a_capacity_factor_gives_the_scores_of_a_checkpoint_with_it(saved, task, tmp_path):
    factor = Inference(capacity_factor=0.25)
    scores = ranked(saved["wide"], factor, task, tmp_path / "set.jsonl")
    assert scores == ranked(saved["tight"], Inference(), task, tmp_path / "own.jsonl")


def test_dropless_answers_do_not_depend_on_the_other_requests(saved, task, tmp_path):
    requests = requests_of(task.examples("test"))

    def change(inference):
        """Returns the largest change of a score when a request is asked alone."""
        system = load_seq2seq(saved["tight"], inference=inference)
        path = tmp_path / f"{inference.options}.jsonl"
        all_scores = predict(system, task, requests, "rank", path).predictions[0].scores
        alone = predict(system, task, requests[:1], "rank", tmp_path / "alone.jsonl")
        alone_scores = alone.predictions[0].scores
        return max(abs(all_scores[text] - alone_scores[text]) for text in all_scores)

    assert change(DROPLESS) < 1e-4
    (tmp_path / "alone.jsonl").unlink()
    assert change(Inference()) > 0.01


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["wide", "dense"])
def test_a_dtype_is_that_of_the_weights_and_changes_scores_a_little(
    name, dtype, saved, task, tmp_path
):
    system = load_seq2seq(saved[name], inference=Inference(dtype=dtype))
    assert str(system.model.dtype) == f"torch.{dtype}"
    half = ranked(saved[name], Inference(dtype=dtype), task, tmp_path / "half.jsonl")
    full = ranked(saved[name], Inference(dtype="float32"), task, tmp_path / "full.jsonl")
    differences = [abs(half[id][text] - full[id][text]) for id in full for text in full[id]]
    assert 0 < max(differences) < 1


def test_what_a_checkpoint_has_already_is_no_change(saved, folders):
    own = Inference()
    assert configure(saved["wide"], Inference(None, "float32")).changes == own
    assert configure(saved["tight"], Inference(0.25, "float32")).changes == own
    assert configure(saved["dense"], Inference(2.0)).changes == own
    assert configure(folders["t5"], DROPLESS).changes == own
    assert configure(saved["slots"], DROPLESS).changes == DROPLESS
    assert configure(saved["wide"], Inference(2.0)).changes == Inference(2.0)
    assert describe_capacity(configure(saved["slots"], own).config) == "expert_capacity 2"


def test_settings_that_do_nothing_or_cannot_be_are_refused(saved, folders, tmp_path):
    with pytest.raises(ConfigError, match="--capacity-factor is 2, and no evaluated model has"):
        check_inference(Inference(2.0), [saved["dense"], folders["t5"]])
    check_inference(Inference(2.0), [saved["dense"], saved["tight"]])
    with pytest.raises(ConfigError, match="--capacity-factor is 0; expected a finite number above"):
        check_inference(Inference(0), [saved["tight"]])
    with pytest.raises(ConfigError, match="--dtype is 'float8'; expected one of saved, float32"):
        check_inference(Inference(dtype="float8"), [saved["tight"]])  # type: ignore[arg-type]

    SwitchTransformersConfig(num_experts=3).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"type 'switch_transformers', whose capacity --dropless cannot set"
    ):
        check_inference(DROPLESS, [tmp_path])


def test_experts_that_choose_their_tokens_can_be_dropless_too(tokenizer, task, tmp_path):
    changes = {"router": "expert_choice", "router_options": None, "decoder_router": "token_choice"}
    tiny_model(**changes).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    scores = ranked(tmp_path / "model", DROPLESS, task, tmp_path / "p.jsonl")
    assert scores != ranked(tmp_path / "model", Inference(0.5), task, tmp_path / "q.jsonl")


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
    assert "bfloat16, no token is dropped" in (tmp_path / "report.md").read_text()
    assert report.failed == []

    header = read_predictions_file(tmp_path / "predictions/copa.tight.rank.jsonl").header
    assert header.inference == Inference(None, "bfloat16")


def test_a_run_does_not_go_on_with_other_settings_and_changes_nothing(saved, tmp_path):
    models = {"tight": saved["tight"]}
    run(models, tmp_path)
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    message = (
        r"copa\.tight\.rank\.jsonl holds answers of this model that were made with neither "
        r"--dropless .*; this run has --dropless\. Give the same options, or another --out"
    )
    with pytest.raises(DataError, match=message):
        run(models, tmp_path, DROPLESS)
    after = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    assert after == before
    assert run(models, tmp_path, Inference(0.25)).failed == []  # the checkpoint's own


def test_predict_refuses_the_answers_of_other_settings_itself(saved, task, tmp_path):
    ranked(saved["tight"], DROPLESS, task, tmp_path / "p.jsonl")
    with pytest.raises(DataError, match="were made with --dropless; this run has neither"):
        ranked(saved["tight"], Inference(), task, tmp_path / "p.jsonl")


def test_runs_of_one_model_with_and_without_drops_are_compared(saved, tmp_path):
    models = {"tight": saved["tight"]}
    run(models, tmp_path / "a")
    run(models, tmp_path / "b", DROPLESS)
    result = compare_runs(str(tmp_path / "a"), str(tmp_path / "b"))
    assert [(task.task, task.mode) for task in result.tasks] == [("copa", "rank")]

    # A report that names other settings than the answers is refused.
    (tmp_path / "b/report.json").write_bytes((tmp_path / "a/report.json").read_bytes())
    with pytest.raises(DataError, match=r"line 1: inference is .*, and the report is about"):
        compare_runs(str(tmp_path / "a"), str(tmp_path / "b"))


def test_options_that_contradict_each_other_are_refused(tmp_path):
    asked = ["run", "--model", "m", "--tasks", "copa", "--out", str(tmp_path / "out")]
    with pytest.raises(
        ConfigError, match="--capacity-factor: not allowed with argument --dropless"
    ):
        main([*asked, "--dropless", "--capacity-factor", "2"])
    assert not (tmp_path / "out").exists()


# ---- code beside a checkpoint ----


@pytest.mark.parametrize("part", ["config.json", "tokenizer_config.json"])
def test_code_beside_a_checkpoint_is_never_asked_about_nor_run(
    part, folders, tmp_path, monkeypatch
):
    """A tokenizer whose code is not run is read from its files; a model cannot be."""

    def refuse(prompt: str = "") -> str:
        raise AssertionError(f"asked: {prompt}")

    monkeypatch.setattr("builtins.input", refuse)
    for path in folders["t5"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "strange.py").write_text("raise AssertionError('was run')")

    content = json.loads((tmp_path / part).read_text())
    if part == "config.json":
        content |= {"model_type": "strange", "auto_map": {"AutoConfig": "strange.Config"}}
    else:
        auto_map = {"AutoTokenizer": ["strange.Tokenizer", None]}
        content |= {"tokenizer_class": "StrangeTokenizer", "auto_map": auto_map}
    (tmp_path / part).write_text(json.dumps(content))
    if part == "tokenizer_config.json":
        assert load_seq2seq(tmp_path).tokenizer("fire")["input_ids"]
        return
    with pytest.raises(CheckpointError, match="needs code that lies beside it, and such code is"):
        load_seq2seq(tmp_path)


# ---- cost ----


@pytest.mark.parametrize("name", ["wide", "dense", "t5"])
def test_operations_of_a_token_are_those_of_the_products_with_weights(name, saved, folders):
    """Counted by torch, less the products of attention and what is no product."""
    system = load_seq2seq({**saved, **folders}[name])
    flops = token_flops(system.model)
    assert flops is not None
    length = 1  # where attention between tokens costs least
    inputs = torch.full((1, length), 5)
    with FlopCounterMode(display=False) as encoder, torch.no_grad():
        encoded = system.model.get_encoder()(input_ids=inputs)
    with FlopCounterMode(display=False) as decoder, torch.no_grad():
        system.model(encoder_outputs=encoded, decoder_input_ids=inputs)
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
    reports = []
    for name in ("a", "b"):
        reports.append(run({"wide": saved["wide"]}, tmp_path / name))
    contents = [(tmp_path / name / "report.json").read_bytes() for name in ("a", "b")]
    assert contents[0] == contents[1]
    (timing,) = read_timings(tmp_path / "a")
    assert (timing.task, timing.mode, timing.examples) == ("copa", "rank", 4)
    assert timing.tokens_per_second == pytest.approx(timing.tokens / timing.seconds)
    cost = reports[0].tasks[0].systems[0].cost
    num_tokens = (cost.input_tokens + cost.output_tokens) * timing.examples
    assert timing.tokens == pytest.approx(num_tokens)
    for name in ("report.md", "report.html"):
        text = (tmp_path / "a" / name).read_text()
        assert "FLOPs per example = 2 x" in text
        assert f"{timing.tokens_per_second:,.0f}" in text


def test_a_run_that_finds_all_answers_keeps_the_times_that_they_took(saved, tmp_path):
    models = {"wide": saved["wide"]}
    run(models, tmp_path)
    before = (tmp_path / "timing.json").read_bytes()
    again = run(models, tmp_path)
    assert (tmp_path / "timing.json").read_bytes() == before
    assert again.speed("copa", again.tasks[0].systems[0]) is not None


def test_damaged_times_are_none_and_those_of_another_model_are_not_shown(saved, tmp_path):
    report = run({"wide": saved["wide"]}, tmp_path)
    (timing,) = report.timings
    assert merge_timings([timing._replace(seconds=9.0)], [timing]) == [timing]
    system = report.tasks[0].systems[0]
    assert report.speed("copa", system) == timing.tokens_per_second
    assert report.speed("rte", system) is None
    for content in ("", "7", "[7]", '{"a": 1}', "[{}]"):
        (tmp_path / "timing.json").write_text(content)
        assert read_timings(tmp_path) == []
