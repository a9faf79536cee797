"""The verbs of `stmoe inspect`, on a model with words: what they print and write.

Oracles: the functions that they call; the model itself, which replays its own routing exactly.
"""

import json
import re
import shutil

import pytest
import torch
from tokenizers import processors

import stmoe
from moe import DataError
from moe.commands.routing_inputs import tokenizer_fingerprint
from moe.data.tokenizer import load_tokenizer
from moe.inspection.statistics.routing_entropy import sentinel_entropies
from moe.sparse.editing import sparse_layers
from moe.tracing.trace_file import read_trace
from tests.models.tiny import tiny_model
from tests.training.tiny_run import MODEL, write_inputs
from tests.training.tiny_tasks import registered


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with a corpus, two models that differ in their routers, texts and pairs."""
    folder = tmp_path_factory.mktemp("verbs")
    paths = write_inputs(folder)
    tokenizer = load_tokenizer(paths["tokenizer"])
    for name, seed in (("model", 0), ("other", 1)):
        model = tiny_model(
            vocab_size=MODEL["vocab_size"], noise_density=0.4, mean_noise_span_length=2.0
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for layer in sparse_layers(model).values():
                layer.router.gate.normal_(generator=generator)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(str(folder / name))

    paragraphs = [f"This is the sentence number {n}, and it has some words." for n in range(11)]
    (folder / "mine.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in paragraphs)
    )
    (folder / "pairs.jsonl").write_text(
        "".join(json.dumps({"inputs": text, "targets": "some words"}) + "\n" for text in paragraphs)
    )
    return folder


def run(*arguments):
    stmoe.main(["inspect", *map(str, arguments)])


@pytest.fixture(scope="module")
def trace(folder):
    out = folder / "trace"
    run("record", "--model", folder / "model", "--corpus", folder / "corpus", "--out", out,
        "--examples", 20, "--inputs-length", 24, "--best", 3)  # fmt: skip
    return out


@pytest.mark.parametrize(
    ("source", "examples", "domains"),
    [
        (["--text", "left={0}/mine.jsonl", "right={0}/mine.jsonl"], 13, ["left", "right"]),
        (["--pairs", "{0}/pairs.jsonl"], 11, ["pairs"]),
        (["--pairs", "{0}/pairs.jsonl", "--generate"], 11, ["pairs"]),
        (["--task", "first"], 11, ["first"]),
    ],
)
def test_every_kind_of_text_is_recorded(folder, tmp_path, capsys, source, examples, domains):
    source = [text.format(folder) for text in source]
    with registered():
        run(
            "record",
            "--model",
            folder / "model",
            *source,
            "--examples",
            13,
            "--out",
            tmp_path / "t",
        )
    facts = read_trace(tmp_path / "t").facts
    assert facts.num_examples == examples
    assert facts.domains == domains
    assert facts.command.startswith("stmoe inspect record --model")
    assert f"{examples} examples" in capsys.readouterr().out


def test_a_model_that_has_moved_or_changed_since_it_was_traced_must_be_named(folder, tmp_path):
    model = tmp_path / "moved"
    shutil.copytree(folder / "model", model)
    trace = tmp_path / "trace"
    pairs = ["--pairs", folder / "pairs.jsonl", "--examples", 5]
    run("record", "--model", model, *pairs, "--out", trace)

    other = ["--trace", trace, "--model", folder / "other", "--out", tmp_path / "page.html"]
    model.rename(tmp_path / "away")
    with pytest.raises(DataError, match=r"traced model .*moved, and is not there"):
        run("compare", *other)
    run("compare", *other, "--traced-model", tmp_path / "away")

    shutil.copytree(folder / "other", model)
    with pytest.raises(DataError, match="has changed since it was traced"):
        run("compare", *other)
    run("compare", *other, "--traced-model", model)


def test_the_view_has_classes_of_tokens_and_prints_the_tables(folder, trace, tmp_path, capsys):
    page = tmp_path / "view.html"
    run("view", "--trace", trace, "--out", page)
    printed = capsys.readouterr().out
    tokenizer = load_tokenizer(folder / "model")
    first = sentinel_entropies(read_trace(trace), tokenizer)[0]["all_tokens"]
    assert f"{first.value:.2f} ({first.low:.2f} to {first.high:.2f})" in printed
    assert re.search(r"encoder 1 +\d\.\d\d \(\d\.\d\d to \d\.\d\d\)", printed)
    assert "punctuation" in page.read_text(encoding="utf-8")


def test_two_models_are_compared(folder, trace, tmp_path, capsys):
    # They have the same weights but for their routers.
    page = tmp_path / "compare.html"
    run("compare", "--trace", trace, "--model", folder / "other", "--out", page)
    printed = capsys.readouterr().out
    routing, weights = re.findall(r"difference by [a-z ]+?  +([-+]\d\.\d{4})", printed)
    first, second = re.findall(r"loss of \S+ +(\d\.\d{4})", printed)
    assert float(routing) + float(weights) == pytest.approx(float(second) - float(first), abs=3e-4)
    assert page.is_file()


def test_an_ablation_is_kept_and_shown(folder, trace, tmp_path, capsys):
    out = tmp_path / "ablation.json"
    run("ablate", "--trace", trace, "--kind", "reroute", "--out", out)
    kept = json.loads(out.read_text())
    num_experts = sum(layer.facts.num_experts for layer in read_trace(trace).layers)
    assert len(kept["effects"]) == num_experts
    assert kept["intervention"] == "reroute" and kept["recalled"] == 0
    printed = capsys.readouterr().out
    assert "encoder 1     1  " in printed
    page = tmp_path / "view.html"
    run("view", "--trace", trace, "--ablation", out, "--out", page)
    assert "reroute" in page.read_text(encoding="utf-8")

    # An ablation of other examples says so.
    other = tmp_path / "other"
    pairs = ["--pairs", folder / "pairs.jsonl", "--examples", 5]
    run("record", "--model", folder / "model", *pairs, "--out", other)
    with pytest.raises(DataError, match="was computed on inputs"):
        run("view", "--trace", other, "--ablation", out, "--out", page)


def test_what_a_tokenizer_adds_to_texts_does_not_make_it_another_one(folder):
    tokenizer, other = (load_tokenizer(folder / "model") for _ in range(2))
    names = ("<extra_id_0>", "</s>")
    special = list(zip(names, tokenizer.convert_tokens_to_ids(names), strict=True))
    other._tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <extra_id_0> </s>", special_tokens=special
    )
    assert other("words").input_ids != tokenizer("words").input_ids
    assert tokenizer_fingerprint(other) == tokenizer_fingerprint(tokenizer)


def test_a_trace_of_another_tokenizer_is_refused(folder, trace, tmp_path):
    model = tmp_path / "model"
    tokenizer = load_tokenizer(folder / "model")
    tokenizer.add_tokens(["entirely"])
    tokenizer.save_pretrained(str(model))
    tiny_model(vocab_size=MODEL["vocab_size"] + 1).save_pretrained(model)
    with pytest.raises(DataError, match="the token ids would stand for different words"):
        run("compare", "--trace", trace, "--model", model, "--out", tmp_path / "page.html")
