"""The verbs of `stmoe` on hosts with text: upcycle, inspect and generate, with the host's own tokenizer."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import stmoe
from moe.checkpoint.loading import load_model
from moe.commands.routing_inputs import load_inspected
from moe.errors import ConfigError, DataError
from moe.tracing.examples import SourceText, continued_batches, paired_batches
from moe.tracing.replay import replay_routing
from moe.tracing.trace import REFUSED
from moe.tracing.trace_file import read_trace
from tests.hosts.tiny_hosts import dense_host, sparse_host

BOS, EOS = 2, 1
TEXT = " ".join(f"w{4 + number % 120}" for number in range(50))
each_host = pytest.mark.parametrize("name", ["m2m_100", "marian", "t5gemma2"])


def gemma_tokenizer():
    """Returns a tokenizer that puts <bos> before a text and has no sentinels, as Gemma's."""
    words = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"▁w{number}" for number in range(4, 128))]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
    )


def save(model, folder):
    model.save_pretrained(folder)
    gemma_tokenizer().save_pretrained(str(folder))
    return folder


def write_pairs(path):
    rows = [{"inputs": f"w{n} w{n + 1} w{n + 2}", "targets": f"w{n + 5}"} for n in range(4, 11)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*arguments):
    stmoe.main([str(argument) for argument in arguments])


def test_text_is_continued_with_the_special_tokens_of_the_host():
    texts = [SourceText(TEXT, "", 0, "mine")]
    (batch,) = continued_batches(texts, gemma_tokenizer(), inputs_length=8, batch_size=9)
    ids = gemma_tokenizer()(TEXT, add_special_tokens=False)["input_ids"]
    inputs, labels = batch.batch["input_ids"], batch.batch["labels"]
    assert inputs[0].tolist() == [BOS, *ids[:7]] and labels[0].tolist() == ids[7:14]
    last = labels[-1][labels[-1] != -100].tolist()
    assert last[-1] == EOS and EOS not in labels[:-1]
    read = []
    for row, mask, targets in zip(inputs, batch.batch["attention_mask"], labels, strict=True):
        read += row[mask.bool()].tolist()[1:] + targets[targets != -100].tolist()
    assert read == [*ids, EOS]


def test_pairs_have_the_frame_of_the_tokenizer():
    pairs = [SourceText("w4 w5", "w6", 0, "mine")]
    (batch,) = paired_batches(
        pairs, gemma_tokenizer(), inputs_length=9, targets_length=9, batch_size=1
    )
    assert batch.batch["input_ids"].tolist() == [[BOS, 4, 5]]
    assert batch.batch["labels"].tolist() == [[6, EOS]]


@each_host
@pytest.mark.parametrize("source", ["--text", "--pairs"])
def test_upcycling_on_text_keeps_the_loss_and_the_answers(name, source, tmp_path):
    dense = save(dense_host(name), tmp_path / "dense")
    data = tmp_path / "mine.txt"
    data.write_text(TEXT)
    if source == "--pairs":
        data = write_pairs(tmp_path / "mine.jsonl")
    target = tmp_path / "sparse"
    run("upcycle", "--from", dense, "--to", target, "--experts", 3, source, data, "--inputs-length", 8)  # fmt: skip
    report = json.loads((target / "surgery.json").read_text())
    before, after = report["effects"]["loss"]
    assert before > 1 and after == pytest.approx(before, abs=1e-5)
    assert report["effects"]["changed_answers"] == [0, 7 if source == "--pairs" else 4]
    sizes = {size: (old, new) for size, old, new in report["sizes"]}
    numbers = [model.num_parameters() for model in (dense_host(name), load_model(target))]
    assert sizes["parameters"] == tuple(numbers)
    card = (target / "README.md").read_text()
    assert "load_model" in card and "loss (nats)" in card


def test_masks_need_sentinels(tmp_path):
    folder = save(sparse_host("t5gemma"), tmp_path / "host")
    text = tmp_path / "mine.txt"
    text.write_text(TEXT)
    with pytest.raises(ConfigError, match=r"--noise-density 0\.3.*extra_id_0"):
        run("inspect", "record", "--model", folder, "--text", text,
            "--noise-density", 0.3, "--out", tmp_path / "trace")  # fmt: skip


@each_host
def test_a_host_is_recorded_viewed_and_ablated(name, tmp_path, capsys):
    model = sparse_host(name, differ=True)
    folder = save(model, tmp_path / "host")
    text = tmp_path / "mine.txt"
    text.write_text(TEXT)
    trace_folder = tmp_path / "trace"
    run("inspect", "record", "--model", folder, "--text", text,
        "--inputs-length", 8, "--out", trace_folder)  # fmt: skip
    trace = read_trace(trace_folder)

    page = tmp_path / "view.html"
    run("inspect", "view", "--trace", trace_folder, "--out", page)
    html = page.read_text(encoding="utf-8")
    assert "w17" in html and "decoder 1" in html

    ablation = tmp_path / "ablation.json"
    run("inspect", "ablate", "--trace", trace_folder, "--out", ablation)
    kept = json.loads(ablation.read_text())
    assert len(kept["effects"]) == 10

    # What these verbs need, hosts do not have.
    for verb, arguments in (
        ("report", ["--model", folder, "--corpus", folder, "--out", tmp_path / "a.html"]),
        ("compare", ["--trace", trace_folder, "--model", folder, "--out", tmp_path / "a.html"]),
    ):
        with pytest.raises(ConfigError, match=rf"{verb}.*{type(model).__name__}"):
            run("inspect", verb, *arguments)
    with pytest.raises(ConfigError, match="replay"), replay_routing(model, trace):
        pass
    run("generate", "--model", folder, "--max-new-tokens", 5, "w4 w5")
    assert "w" in capsys.readouterr().out.splitlines()[-1]


def test_dropless_changes_the_settings_and_the_layers(tmp_path):
    tight = sparse_host("t5gemma", fields={"eval_capacity_factor": 0.5})
    folder = save(tight, tmp_path / "host")
    batch = {"input_ids": torch.arange(4, 30)[None], "labels": torch.arange(5, 18)[None]}
    dropless = load_model(folder, dropless=True).eval()
    for model, factor, dropped in ((load_model(folder).eval(), 0.5, True), (dropless, None, False)):
        assert model.settings.layer["eval_capacity_factor"] == factor
        assert model.config.sparse_layers["layer"]["eval_capacity_factor"] == factor
        output = model(**batch, output_router_logits=True)
        (router,) = output.encoder_router_outputs
        assert bool(router.stats.dropped_tokens) is dropped

    # A dense host has no capacity to change.
    dense = save(dense_host("t5gemma"), tmp_path / "dense")
    with pytest.raises(DataError, match="no sparse layer"):
        load_inspected(dense, dropless=True)

    # The same with the command, on the answers of the host.
    pairs = write_pairs(tmp_path / "mine.jsonl")
    for options, dropped in (([], True), (["--dropless", "--generate"], False)):
        out = tmp_path / f"trace{dropped}"
        run("inspect", "record", "--model", folder, "--pairs", pairs, "--out", out, *options)
        lost = [bool((layer.state == REFUSED).any()) for layer in read_trace(out).layers]
        assert any(lost) is dropped
