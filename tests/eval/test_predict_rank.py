"""Scores of choices: by hand from the numbers in the file, and from the model by teacher forcing,
one at a time.
"""

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

import stmoe_eval.answers.likelihood
import stmoe_eval.answers.predict
from stmoe_eval.answers.likelihood import ChoiceLikelihood, Scoring
from stmoe_eval.answers.predict import predict
from stmoe_eval.answers.predictions_file import Prediction
from stmoe_eval.answers.seq2seq import load_seq2seq
from tests.eval.test_predict import requests_of
from tests.models.tiny import tiny_model

CHOICES = {
    "red": ChoiceLikelihood(-1.5, -0.75, 1),
    "dark blue": ChoiceLikelihood(-2.0, -0.25, 3),
    "": ChoiceLikelihood(0.0, -3.0, 0),
}


def make_folder(kind, tokenizer, folder):
    """Returns a folder with a tiny model of a kind, whose logits differ enough to tell tokens
    apart.
    """
    sizes = {"vocab_size": 131, "d_model": 30, "d_kv": 5, "d_ff": 31, "num_heads": 3}
    sizes |= {"num_layers": 2, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    if kind == "moe":
        model = tiny_model(eval_capacity_factor=None)
    elif kind == "dropping":
        model = tiny_model(eval_capacity_factor=0.5, min_expert_capacity=1)
    elif kind == "t5":
        model = T5ForConditionalGeneration(T5Config(**sizes, tie_word_embeddings=False))
    elif kind == "switch":
        sparse = {"num_experts": 5, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
        config = SwitchTransformersConfig(**sizes, **sparse, num_decoder_layers=2)
        model = SwitchTransformersForConditionalGeneration(config)
    else:
        model = tiny_bart()
    if kind in ("t5", "switch"):
        torch.nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_bart() -> BartForConditionalGeneration:
    """Returns a model that starts with a token of its own and has habits of generation."""
    shape = {}
    for side in ("encoder", "decoder"):
        shape |= {f"{side}_layers": 2, f"{side}_attention_heads": 3, f"{side}_ffn_dim": 31}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 1}
    tokens |= {"bos_token_id": 130, "forced_bos_token_id": 130, "forced_eos_token_id": 1}
    sizes = {"vocab_size": 131, "d_model": 30, "max_position_embeddings": 67, "init_std": 0.3}
    model = BartForConditionalGeneration(BartConfig(**sizes, **shape, **tokens))
    habits = {"num_beams": 4, "min_length": 9, "no_repeat_ngram_size": 2}
    model.generation_config.update(**habits, forced_bos_token_id=130)
    return model


def by_teacher_forcing(system, request, text):
    """Returns the likelihood of one text for one request: sums over a forward pass without a cache."""
    inputs = system.tokenizer(request.inputs, return_tensors="pt")
    first, *forced = system.start
    tokens = system.tokenizer(text, add_special_tokens=False)["input_ids"]
    target = [*forced, *tokens, system.tokenizer.eos_token_id]
    inputs["decoder_input_ids"] = torch.tensor([[first, *target[:-1]]])
    extra = {"decoder_drop_tokens": False} if system.sparse else {}
    with torch.no_grad():
        logits = system.model(**inputs, **extra).logits[0]
    log_probs = logits.log_softmax(-1).gather(-1, torch.tensor(target)[:, None]).flatten().tolist()
    return ChoiceLikelihood(sum(log_probs[:-1]), log_probs[-1], len(target) - 1)


def mixed_requests(task):
    """Requests with choices of their own: some share tokens, one is a single choice, one is empty."""
    own = [
        ("red", "green"),
        ("dark blue", "dark red", "dark"),
        ("sea",),
        ("", "leaf of the", "red"),
    ]
    return [r._replace(choices=own[n % 4]) for n, r in enumerate(requests_of(task))]


@pytest.mark.parametrize(
    ("kind", "bytes_at_once"), [("t5", 1), ("switch", 1 << 30), ("bart", 1), ("moe", 1 << 30)]
)
def test_choices_of_any_model_score_as_one_at_a_time(
    tokenizer, task, tmp_path, monkeypatch, kind, bytes_at_once
):
    monkeypatch.setattr(stmoe_eval.answers.likelihood, "_MAX_BYTES", bytes_at_once)
    system = load_seq2seq(make_folder(kind, tokenizer, tmp_path))
    requests = mixed_requests(task)
    made = predict(system, task, requests, "rank", tmp_path / "p.jsonl").predictions
    for request, prediction in list(zip(requests, made, strict=True))[::3]:
        assert tuple(prediction.choices) == request.choices
        for text in request.choices:
            expected = pytest.approx(by_teacher_forcing(system, request, text), rel=1e-6, abs=2e-5)
            assert prediction.choices[text] == expected


def test_a_sparse_decoder_drops_no_token_of_a_choice(tokenizer, task, tmp_path):
    system = load_seq2seq(make_folder("dropping", tokenizer, tmp_path))
    requests = mixed_requests(task)
    for request in requests[:8]:  # alone, for the encoder drops tokens by what is beside them
        made = predict(system, task, [request], "rank", tmp_path / "p.jsonl")
        for text in request.choices:
            expected = by_teacher_forcing(system, request, text)
            assert made.predictions[0].choices[text] == pytest.approx(expected, abs=2e-5)
        assert made.router["encoder"].fraction_dropped > 0
        assert made.router["decoder"].fraction_dropped == 0


@pytest.mark.parametrize(
    ("scoring", "scores"),
    [
        (Scoring(True, "none"), (-2.25, -2.25, -3.0)),
        (Scoring(False, "none"), (-1.5, -2.0, 0.0)),
        (Scoring(True, "tokens"), (-2.25 / 2, -2.25 / 4, -3.0)),
        (Scoring(False, "characters"), (-1.5 / 3, -2.0 / 9, 0.0)),
    ],
)
def test_each_scoring_is_what_it_says(scoring, scores):
    made = Prediction("id", "", {}, CHOICES).scored(scoring)
    assert tuple(made.scores.values()) == pytest.approx(scores)
    assert made.output == max(CHOICES, key=dict(zip(CHOICES, scores, strict=True)).get)


def test_another_scoring_is_read_from_the_file_without_the_model(folders, task, tmp_path):
    system, path = load_seq2seq(folders["moe"]), tmp_path / "p.jsonl"
    requests = mixed_requests(task)
    whole = predict(system, task, requests, "rank", path)
    broken = system._replace(model=None)
    for number, scoring in enumerate((Scoring(False), Scoring(True, "tokens"), Scoring())):
        fresh_path = tmp_path / f"{number}.jsonl"
        fresh = predict(system, task, requests, "rank", fresh_path, scoring)
        again = predict(broken, task, requests, "rank", path, scoring)
        assert again == fresh
        assert path.read_bytes() == fresh_path.read_bytes()
    assert again == whole


def test_choices_share_one_pass_of_the_encoder_and_two_of_the_decoder(
    folders, task, tmp_path, monkeypatch
):
    monkeypatch.setitem(stmoe_eval.answers.predict._MIN_ROWS, "rank", 25)
    system, shapes = load_seq2seq(folders["t5"]), {"encoder": [], "decoder": []}
    for name, seen in shapes.items():

        def tell(_, args, kwargs, output, seen=seen):
            seen.append(tuple(kwargs["input_ids"].shape))

        getattr(system.model, name).register_forward_hook(tell, with_kwargs=True)
    predict(system, task, requests_of(task), "rank", tmp_path / "p.jsonl")
    choices = [system.tokenizer(text, add_special_tokens=False) for text in task.choices]
    longest = max(len(choice["input_ids"]) for choice in choices)
    passes = [rows for rows, _ in shapes["encoder"]]  # a batch of inputs of similar lengths each
    assert sum(passes) == 25
    expected = []
    for rows in passes:
        expected += [(rows, 1), (rows * 3, longest)]
    assert shapes["decoder"] == expected
