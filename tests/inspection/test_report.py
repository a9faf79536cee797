"""The page of a whole command: each of its numbers is computed again."""

import json
import re
from collections import Counter
from html import unescape
from importlib.metadata import version

import pytest

import stmoe
from moe import ConfigError, DataError
from moe.checksums import model_fingerprint
from moe.data.span_corruption import Noise
from moe.data.tokenizer import load_tokenizer
from moe.inspection.tables import balance_sentence, health_rows, loss_sentence
from moe.tracing.examples import corrupted_batches
from moe.tracing.recorder import record_routing
from moe.tracing.texts import corpus_texts
from tests.models.tiny import DENSE, tiny_model
from tests.training.tiny_run import write_inputs

NUM_EXPERTS, NUM_BATCHES, INPUTS_LENGTH, VOCABULARY = 7, 2, 16, 230
NOISE = Noise(0.45, 2.0)


def text_of(page, without="style"):
    """Returns the text of a page without some elements, between single spaces."""
    page = re.sub(rf"<({without})\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split())


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Returns the folder of a tiny model, beside a corpus."""
    folder = tmp_path_factory.mktemp("report")
    tokenizer = load_tokenizer(write_inputs(folder)["tokenizer"])
    noise = {"noise_density": NOISE.density, "mean_noise_span_length": NOISE.mean_span_length}
    tiny_model(vocab_size=VOCABULARY, **noise).save_pretrained(folder / "model")
    tokenizer.save_pretrained(str(folder / "model"))
    return folder


def report(inputs, out, *more):
    arguments = {"--model": inputs / "model", "--corpus": inputs / "corpus", "--out": out}
    arguments |= {"--examples": 64 * NUM_BATCHES, "--batch-size": 64}
    arguments |= {"--inputs-length": INPUTS_LENGTH}
    options = [str(part) for pair in arguments.items() for part in pair]
    stmoe.main(["inspect", "report", *options, *map(str, more)])
    return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(inputs):
    return report(inputs, inputs / "report.html")


def test_a_page_on_pairs_opens_with_the_kinds_of_text_by_expert(inputs, tmp_path, capsys):
    languages = {"ru": "name", "es": "other words", "it": "some more"}
    pairs = [
        {"inputs": f"{code}: the {number}", "targets": f"{text} {number}"}
        for number in range(5)
        for code, text in languages.items()
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    out = tmp_path / "page.html"
    options = ["--model", inputs / "model", "--pairs", path, "--by-prefix", "--out", out]
    stmoe.main(["inspect", "report", *map(str, options)])
    _, first, *_ = out.read_text(encoding="utf-8").split("<section")
    assert first.index("Spanish") < first.index("Italian") < first.index("Russian")
    assert first.count("Romance") == first.count("Slavic") == 1

    # The kinds of an expert's tokens are all of them.
    shares = Counter()
    for expert, share in re.findall(r"<title>expert (\d+): (\d+) %", first):
        shares[expert] += int(share)
    assert any(shares.values())
    assert all(total == 0 or abs(total - 100) < 2 for total in shares.values())
    shown = capsys.readouterr().out
    for sentence in ("carry 90 % of the tokens of a kind", "Mutual information of kind of text"):
        assert sentence in first and sentence in shown


def test_the_page_names_what_it_was_made_from(inputs, page):
    text = text_of(page)
    assert f"{inputs}/model , fingerprint {model_fingerprint(inputs / 'model')}" in text
    assert f"held-out text of {inputs}/corpus" in text
    assert "45 % of the tokens masked, in spans of 2 on average, as in pre-training" in text
    for name in ("stmoe", "torch", "transformers"):
        assert f"{name} {version(name)}" in text
    assert f"stmoe inspect report --model {inputs}/model" in text
    assert not re.search(r"(src|href)=\"[^#]", page)

    # Tables scroll in their own boxes.
    tables = re.findall(r"(.{20})<table", page)
    assert len(tables) == 4
    assert all(before.endswith('<div class="scroll">') for before in tables)


def test_every_number_of_the_page_is_of_its_inputs(inputs, page):
    text = text_of(page, "style|svg|code|title|h1")  # no names of tokens and files
    known = r"fingerprint [0-9a-f]{16}|(python|stmoe|torch|transformers) [\d.]+[^ ,.]*"
    text = re.sub(rf"{known}|cpu \([^)]*\)|held-out text of \S+", "", text)
    found = set(re.findall(r"\d[\d,]*(?:\.\d+)?", text))
    explained = {"0", "0.0", "1", "10", "20", "95"}  # in sentences on how to read a number
    assert not found - explained - numbers_of_the_trace(inputs)


def numbers_of_the_trace(inputs):
    """Returns the numbers of the model, its text, and a trace of the same batches."""
    tokenizer = load_tokenizer(inputs / "model")
    model = tiny_model(vocab_size=VOCABULARY)
    batches = corrupted_batches(
        corpus_texts(inputs / "corpus"),
        tokenizer,
        inputs_length=INPUTS_LENGTH,
        batch_size=64,
        noise=NOISE,
        most_examples=64 * NUM_BATCHES,
    )
    trace = record_routing(model, batches)
    texts = [balance_sentence(trace.layers), loss_sentence(trace)]
    texts += [cell for row in health_rows(trace.layers) for cell in row]
    numbers = {"2", "3", "7", "1.25", "45"}
    numbers |= {f"{model.config.num_parameters():,}", f"{model.config.num_active_parameters():,}"}
    for part in (trace.encoder, trace.decoder):
        numbers.add(f"{len(part.ids):,}")
        (layer,) = part.layers
        numbers |= numbers_of_tokens(zip(part.ids.tolist(), layer.first.tolist(), strict=True))
    numbers.add(f"{trace.facts.num_examples:,}")
    return numbers | set(re.findall(r"\d[\d,]*(?:\.\d+)?", " ".join(texts)))


def numbers_of_tokens(firsts):
    """Returns the numbers that pairs of a token and its first choice give."""
    firsts = list(firsts)
    numbers = {str(expert + 1) for expert in range(NUM_EXPERTS)}
    pairs, tokens = Counter(firsts), Counter(token for token, _ in firsts)
    chosen = Counter(expert for _, expert in firsts)
    numbers |= {f"{100 * chosen[expert] / len(firsts):.1f}" for expert in range(NUM_EXPERTS)}
    for (token, expert), count in pairs.items():
        share = chosen[expert] / len(firsts)
        lift = (count + 20 * share) / (tokens[token] + 20) / share
        numbers |= {f"{count:,}", f"{tokens[token]:,}", f"{lift:.1f}"}
    return numbers


def test_the_same_inputs_give_the_same_page(inputs, tmp_path):
    options = ["--examples", 64, "--noise-density", 0.25]
    pages = [report(inputs, tmp_path / "page.html", *options) for _ in range(2)]
    assert pages[0] == pages[1]
    text = text_of(pages[0])
    assert "25 % of the tokens masked, in spans of 2 on average (45 % in pre-training)" in text


REFUSED = [
    (["--inputs-length", "3000"], "spans, but the vocabulary has 100 sentinels"),
    (["--out", "{inputs}/model/page.html"], "model or lies in it, which is read"),
    (["--out", "{inputs}/corpus/page.html"], "corpus or lies in it, which is read"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_wrong_arguments_are_refused_in_one_line(inputs, tmp_path, arguments, message):
    arguments = [argument.format(inputs=inputs) for argument in arguments]
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        report(inputs, tmp_path / "page.html", *arguments)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "page.html").exists()


def test_a_model_without_routers_or_with_another_tokenizer_is_refused(inputs, tmp_path):
    refused = {
        "has no sparse layer": {"vocab_size": VOCABULARY, **DENSE},
        "has 230 tokens, its model 131": {},
    }
    for message, changes in refused.items():
        tiny_model(**changes).save_pretrained(tmp_path / "model")
        load_tokenizer(inputs / "model").save_pretrained(str(tmp_path / "model"))
        with pytest.raises(DataError, match=message):
            report(inputs, tmp_path / "page.html", "--model", tmp_path / "model")
