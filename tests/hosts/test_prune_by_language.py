"""stmoe prune with languages, on a tiny sparse M2M100."""

import json
import math

import pytest
import torch
from transformers import M2M100Tokenizer

import stmoe
from moe.checkpoint.loading import load_model
from moe.errors import ConfigError, DataError
from moe.hosts.upcycle import upcycle_host_folder
from moe.surgery.upcycle import Upcycling
from tests.hosts.tiny_translator import save_m2m100, write_pairs

COLUMNS = ("source_language", "target_language", "inputs", "targets")
PAIRS = [
    ("en", "sw", "house", "inzu"),
    ("en", "zu", "sea", "nyanja"),
    ("zu", "sw", "mtengo", "igiti"),
    ("zu", "en", "dzuwa", "sun"),
    ("en", "sw", "moon", "ukwezi"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with a model and a table of pairs."""
    folder = tmp_path_factory.mktemp("languages")
    (folder / "model").mkdir()
    upcycling = Upcycling(num_experts=5, fields={"router_initializer_std": 1.0})
    upcycle_host_folder(save_m2m100(folder / "dense"), folder / "model", upcycling)
    write_pairs(folder / "pairs.jsonl", [dict(zip(COLUMNS, pair, strict=True)) for pair in PAIRS])
    return folder


def prune(folder, target, source_language, target_language):
    words = ["prune", "--from", folder / "model", "--to", target, "--mmap", "--keep", 3, 2]
    words += ["--score", "importance", "--pairs", folder / "pairs.jsonl"]
    words += ["--source-language", source_language, "--target-language", target_language]
    stmoe.main([str(word) for word in words])


@torch.no_grad()
def first_choices(model, tokenizer, pair):
    """Returns first choices and their gates in each stack, on a pair and on its input with the model's answer."""
    tokenizer.src_lang, tokenizer.tgt_lang, text, target = pair
    batch = tokenizer(text, text_target=target, return_tensors="pt")
    given = torch.cat([torch.tensor([[2]]), batch["labels"][:, :1]], dim=1)
    answer = model.generate(**batch, decoder_input_ids=given, max_new_tokens=64, num_beams=1)
    choices = {"encoder": [], "decoder": []}
    for labels in (batch["labels"], answer[:, 1:]):
        output = model(**{**batch, "labels": labels}, output_router_logits=True)
        for stack in choices:
            (router,) = getattr(output, f"{stack}_router_outputs")
            gates, experts = router.router_logits.flatten(0, 1).softmax(-1).topk(2)
            choices[stack] += zip(
                experts[:, 0].tolist(), (gates[:, 0] / gates.sum(-1)).tolist(), strict=True
            )
    return choices


def test_the_encoder_keeps_experts_of_the_source_language_and_the_decoder_of_the_target(
    folder, tmp_path
):
    prune(folder, tmp_path / "pruned", "en", "sw")
    model = load_model(folder / "model")
    tokenizer = M2M100Tokenizer.from_pretrained(str(folder / "model"))
    choices = {"encoder": [], "decoder": []}
    for pair in PAIRS:
        of_pair = first_choices(model, tokenizer, pair)
        choices["encoder"] += of_pair["encoder"] if pair[0] == "en" else []
        choices["decoder"] += of_pair["decoder"] if pair[1] == "sw" else []

    report = json.loads((tmp_path / "pruned/surgery.json").read_text())
    of_encoder, of_decoder = report["tables"][0]["rows"]
    for stack, row in (("encoder", of_encoder), ("decoder", of_decoder)):
        of_stack = choices[stack]
        importance = []
        for expert in range(5):
            gates = [gate for first, gate in of_stack if first == expert]
            mean_gate = sum(gates) / max(len(gates), 1)
            importance.append(len(gates) / len(of_stack) * math.exp(mean_gate))
        best = torch.tensor(importance).argsort(descending=True, stable=True).tolist()
        shown = sorted(best[3:] if stack == "encoder" else best[:2])
        scores = ", ".join(f"{expert + 1} ({importance[expert]:.3g})" for expert in shown)
        assert row[1:] == (
            ["3 of 5", scores] if stack == "encoder" else ["2 of 5", f"all but {scores}"]
        )

    # The losses are those of the pairs of both languages.
    assert report["effects"]["changed_answers"][1] == 2


@pytest.mark.parametrize(
    ("source", "target", "error", "message"),
    [
        ("sw", "en", DataError, "source_language is 'sw'; expected one of en, zu"),
        ("zu", "zu", DataError, "target_language is 'zu'; expected one of en, sw"),
        ("en", "swa", ConfigError, "'swa'.* sw"),
    ],
)
def test_languages_without_pairs_are_refused(folder, tmp_path, source, target, error, message):
    with pytest.raises(error, match=message):
        prune(folder, tmp_path / "pruned", source, target)
    assert not list(tmp_path.iterdir())
