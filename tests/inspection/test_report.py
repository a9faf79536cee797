"""The page of a whole command: each of its numbers is computed again, and what was not given is not
spoken of.
"""

import json
import re
from collections import Counter
from html.parser import HTMLParser
from importlib.metadata import version

import pytest

import stmoe
from moe import CheckpointError, ConfigError, DataError
from moe.checksums import model_fingerprint
from moe.data.corpus import load_corpus
from moe.data.span_corruption import Noise
from moe.data.tokenizer import load_tokenizer
from moe.inspection.page.evaluation_panel import read_evaluation
from moe.inspection.page.report_inputs import read_stages
from moe.inspection.statistics.routing_entropy import sentinel_entropies, sentinel_rows
from moe.inspection.tables import balance_sentence, health_rows, loss_sentence
from moe.tracing.examples import corrupted_batches
from moe.tracing.recorder import record_routing
from moe.tracing.texts import corpus_texts
from tests.models.tiny import DENSE, tiny_model
from tests.training.tiny_run import write_inputs

NUM_EXPERTS, NUM_BATCHES, INPUTS_LENGTH, VOCABULARY = 7, 2, 16, 230
NOISE = Noise(0.45, 2.0)
NGRAMS = {"heldout/unigram": 4.75, "heldout/bigram": 4.5, "heldout/trigram": 4.375}
LINES = [
    {"step": 0, "heldout/loss": 7.125, "heldout/text_loss": 7.5} | NGRAMS,
    {"step": 10, "train/ce_loss": 5.5}
    | {"router/encoder/entropy": 1.25, "router/encoder/fraction_dropped": 0.0625},
    {
        "step": 10,
        "heldout/loss": 3.875,
        "heldout/text_loss": 4.25,
        "heldout/token_accuracy": 0.21875,
    }
    | NGRAMS,
]
TUNED = [
    {"step": 0, "heldout/loss": 9.875, "heldout/text_loss": 9.625, "heldout/token_accuracy": 0.5},
    {"step": 10, "eval/colour/accuracy": 31.25, "eval/mean": 31.25},
    {"step": 20, "eval/colour/accuracy": 33.75, "eval/mean": 33.75},
    {"step": 30, "eval/colour/accuracy": 32.5, "eval/mean": 32.5, "heldout/text_loss": 8.625},
]


def a_system(name, mode, value, low, high):
    score = {"metric": "accuracy", "value": value, "stderr": 1.0, "low": low, "high": high}
    scores = [score | {"note": ""}]
    return {"name": name, "mode": mode, "scores": scores, "num_examples": 1234, "router": None}


def an_evaluation(**models):
    systems = [
        a_system("mine", "generate", 71.5, 67.25, 75.75),
        a_system("mine", "rank", 72.5, 68.5, 76.5),
        a_system("other", "generate", 73.0, 69.0, 77.0),
        a_system("majority", "baseline", 5.5, 1.5, 9.5),
    ]
    task = {"task": "colour", "description": "What colour?", "split": "test"}
    task |= {"num_examples": 1234, "num_groups": 321, "systems": systems}
    evaluated = {}
    for name, digest in models.items():
        evaluated[name] = {"folder": f"runs/{name}", "fingerprint": digest}
    return {
        "models": evaluated,
        "tasks": [task],
        "failed": [{"task": "shape", "message": "No rows."}],
        "versions": {"torch": "9.8.7"},
    }


class Text(HTMLParser):
    """The text of a page: all of it, and that of measurements, without figures, names of tokens,
    files and commands.
    """

    def __init__(self, page):
        super().__init__()
        self._open, self.all, self.measured = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "path", "use"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("meta", "path", "use"):
            assert self._open.pop() == tag

    def handle_data(self, data):
        if "style" in self._open:
            return
        self.all.append(data)
        if not {"svg", "code", "pre", "summary", "title", "h1"} & set(self._open):
            self.measured.append(data)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Returns the folder of a run with a tiny model, beside a corpus, and of its files."""
    folder = tmp_path_factory.mktemp("report")
    paths = write_inputs(folder)
    tokenizer = load_tokenizer(paths["tokenizer"])
    for name, noise in (("run", NOISE), ("bare", Noise(None, None))):
        model = tiny_model(
            vocab_size=VOCABULARY,
            noise_density=noise.density,
            mean_noise_span_length=noise.mean_span_length,
        )
        model.save_pretrained(folder / name / "model")
        tokenizer.save_pretrained(str(folder / name / "model"))
    (folder / "run/recipe.yaml").write_text("seed: 41\noptim:\n  lr: 0.75\n")
    for name, lines in (("run", LINES), ("bare", TUNED)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / name / "metrics.jsonl").write_text(text)
    digest = model_fingerprint(folder / "run/model")
    (folder / "report.json").write_text(
        json.dumps(an_evaluation(mine=digest, other="0f0f0f0f0f0f0f0f"))
    )
    return folder


def arguments_of(inputs, out, *more, run="run"):
    arguments = {"--model": inputs / run / "model", "--corpus": inputs / "corpus", "--out": out}
    arguments |= {"--examples": 64 * NUM_BATCHES, "--batch-size": 64}
    arguments |= {"--inputs-length": INPUTS_LENGTH}
    options = [str(part) for pair in arguments.items() for part in pair]
    return ["report", *options, *map(str, more)]


@pytest.fixture(scope="module")
def everything(inputs):
    """Returns the page of a run with metrics and an evaluation."""
    metrics = ["--metrics", f"first={inputs}/run/metrics.jsonl"]
    metrics += [f"tuned={inputs}/bare/metrics.jsonl"]
    more = [*metrics, "--evaluation", inputs / "report.json"]
    stmoe.main(["inspect", *arguments_of(inputs, inputs / "report.html", *more)])
    return (inputs / "report.html").read_text(encoding="utf-8")


def test_a_page_on_pairs_opens_with_the_kinds_of_text_by_expert(inputs, tmp_path):
    languages = {"ru": "name", "es": "other words", "it": "some more"}
    pairs = [
        {"inputs": f"{code}: the {number}", "targets": f"{text} {number}"}
        for number in range(5)
        for code, text in languages.items()
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    out = tmp_path / "page.html"
    model = str(inputs / "run/model")
    options = ["--pairs", str(path), "--by-prefix", "--out", str(out)]
    options += ["--evaluation", f"Names={answered(tmp_path / 'run')}"]
    stmoe.main(["inspect", "report", "--model", model, *options])
    page = out.read_text(encoding="utf-8")
    first, second = page.split("<section")[1:3]
    assert first.index("Spanish") < first.index("Italian") < first.index("Russian")
    assert first.count("Romance") == first.count("Slavic") == 1
    assert "Mutual information of kind of text and expert" in first
    assert "<h3>Names</h3>" in second
    assert second.count("✓") == 1
    assert '<td data-label="answered" dir="auto">blue</td>' in second
    assert 'id="sentinels"' not in page


def answered(folder):
    """Returns the folder of an evaluation with two answers, of which one is right."""
    for name in ("examples", "predictions"):
        (folder / name).mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps(an_evaluation(mine="0" * 16)))
    examples = [{"id": str(n), "inputs": f"sky {n}", "targets": "red"} for n in range(2)]
    answers = [{"model": "x"}, {"id": "0", "output": "red"}, {"id": "1", "output": "blue"}]
    for file, rows in (
        ("examples/colour", examples),
        ("predictions/colour.mine.generate", answers),
    ):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{file}.jsonl").write_text(text)
    return folder


def test_without_metrics_evaluation_and_recipe_the_page_does_not_mention_them(inputs, tmp_path):
    out = tmp_path / "bare.html"
    stmoe.main(["inspect", *arguments_of(inputs, out, run="bare")])
    text = " ".join(Text(out.read_text(encoding="utf-8")).all)
    for word in ("Training", "Evaluation", "scratch", "gain", "overlap", "points", "updates"):
        assert word not in text, word
    assert "not known: no recipe.yaml lies beside the folder of the model" in text
    assert "There is no capacity in evaluation" not in text
    assert "15 % of the tokens masked, in spans of 3 on average (the model does not say" in text


def test_the_page_names_what_it_was_made_from(inputs, everything):
    text = " ".join(" ".join(Text(everything).all).split())
    assert f"{inputs}/run/model , fingerprint {model_fingerprint(inputs / 'run/model')}" in text
    assert "seed: 41 optim: lr: 0.75" in text
    assert f"held-out text of {inputs}/corpus" in text
    assert "45 % of the tokens masked, in spans of 2 on average, as in pre-training" in text
    for name in ("stmoe", "torch", "transformers"):
        assert f"{name} {version(name)}" in text
    assert f"stmoe inspect report --model {inputs}/run/model" in text
    assert "first: the run of the traced model" in text
    assert "mine is runs/mine, the traced model." in text
    assert "other is runs/other, not the traced model: fingerprint 0f0f0f0f0f0f0f0f." in text
    assert "shape failed: No rows." in text
    assert not re.search(r"(src|href)=\"[^#]", everything)


def test_every_number_of_the_page_is_of_its_inputs(inputs, everything):
    text = " ".join(Text(everything).measured)
    known = r"fingerprint [0-9a-f]{16}|(python|stmoe|torch|transformers) [\d.]+[^ ,.]*|arXiv:[\d.]+"
    text = re.sub(rf"{known}|cpu \([^)]*\)|Table 14|ln E|held-out text of \S+", "", text)
    found = set(re.findall(r"\d[\d,]*(?:\.\d+)?", text))
    explained = {"0", "0.0", "1", "10", "20", "95"}  # in sentences on how to read a number
    assert not found - explained - numbers_of_the_trace(inputs) - NUMBERS_OF_THE_FILES


# What metrics and evaluation give, and the difference to the baseline.
IN_PERCENT = (71.5, 67.25, 75.75, 72.5, 68.5, 76.5, 73.0, 69.0, 77.0, 5.5, 1.5, 9.5, 66.0, 33.75)
IN_NATS = (4.25, *NGRAMS.values(), 21.875, 6.25)
NUMBERS_OF_THE_FILES = {"10", "20", "1,234", "321"}
NUMBERS_OF_THE_FILES |= {f"{number:.1f}" for number in IN_PERCENT}
NUMBERS_OF_THE_FILES |= {f"{number:.2f}" for number in IN_NATS}


def numbers_of_the_trace(inputs):
    """Returns the numbers of the model, its text, and a trace of the same batches."""
    tokenizer = load_tokenizer(inputs / "run/model")
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
    texts += [cell for row in sentinel_rows(sentinel_entropies(trace, tokenizer)) for cell in row]
    numbers = {"2", "3", "7", "1.25", "45"}
    numbers |= {f"{model.config.num_parameters():,}", f"{model.config.num_active_parameters():,}"}
    for split in load_corpus(inputs / "corpus")[:2]:
        numbers |= {f"{len(split):,}", f"{sum(map(len, split['text'])):,}"}
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


def test_the_page_opens_with_the_scores_and_their_comparison(everything):
    first = everything[everything.index("<section") :]
    first = first[: first.index("</section>")]
    assert first.count("<svg") == 1
    for text in (
        "mine: 71.5 %",
        "other: 73.0 %",
        "majority: 5.5 %",
        "score (%), with 95 % interval",
    ):
        assert f">{text}<" in first
    text = " ".join(Text(first).all)
    assert "mine by generate: 71.5 % (67.2 to 75.8) accuracy." in text
    assert "1.5 points below other: 73.0 % (69.0 to 77.0); the intervals overlap." in text
    assert "66.0 points above majority: 5.5 % (1.5 to 9.5); the intervals do not overlap." in text


def test_a_fine_tuning_shows_dev_scores_and_no_held_out_loss(everything):
    text = " ".join(" ".join(Text(everything).all).split())
    assert "Best dev score: 33.8 % after 20 steps" in text
    assert "mean dev score (%)" in text
    for loss in ("9.88", "9.62", "8.62", "50.00"):
        assert loss not in text


def test_every_table_scrolls_in_its_own_box_and_none_is_raw_markdown(everything):
    tables = re.findall(r"(.{20})<table", everything)
    assert len(tables) >= 6
    assert all(before.endswith('<div class="scroll">') for before in tables)
    assert "| --- |" not in everything
    assert "<th>held-out documents</th>" in re.sub(' class="number"', "", everything)


def test_the_page_defines_a_dead_expert_where_it_counts_them(everything):
    text = " ".join(Text(everything).all)
    assert "An expert is dead if no token requests it" in text
    assert "An expert with 0.0 % of the first choices is not dead if" in text


def test_systems_are_compared_by_their_intervals(tmp_path):
    def comparisons(*other):
        report = an_evaluation(mine="0" * 16)
        first = a_system("mine", "generate", 71.5, 67.25, 75.75)
        report["tasks"][0]["systems"] = [first, a_system("other", "generate", *other)]
        (tmp_path / "report.json").write_text(json.dumps(report))
        return read_evaluation(tmp_path / "report.json")["tasks"][0]["comparisons"]

    _, near = comparisons(73.0, 69.0, 77.0)
    assert near == "1.5 points below other: 73.0 % (69.0 to 77.0); the intervals overlap."
    _, far = comparisons(60.0, 56.0, 64.0)
    assert far == "11.5 points above other: 60.0 % (56.0 to 64.0); the intervals do not overlap."
    assert comparisons(60.0, None, None)[1] == "11.5 points above other: 60.0 %."
    assert len(comparisons(None, None, None)) == 1


def test_the_same_inputs_give_the_same_page_with_any_name_of_a_run(inputs, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    pages = []
    for _ in range(2):
        name = f"a $x^2$ <run>={metrics}"
        arguments = arguments_of(inputs, tmp_path / "page.html", "--metrics", name)
        stmoe.main(["inspect", *arguments, "--examples", "64", "--noise-density", "0.25"])
        pages.append((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert pages[0] == pages[1]
    text = " ".join(Text(pages[0]).all)
    assert "of the traced model" not in text
    assert "25 % of the tokens masked, in spans of 2 on average (45 % in pre-training)" in text


METRICS = '{"step": 1, "train/ce_loss": 2.0}\n'
DAMAGED_METRICS = [
    ('{"prompt": "x"}\n{}\n', "line 1: prompt is 'x'"),
    (METRICS + '{"train/ce_loss": 1}\n', "line 2 has no step"),
    ('{"step": 9, "train/ce_loss": 1}\n' + METRICS, "line 2: step 1 comes after a later one"),
    (METRICS + '{"step": 2, "train/ce_loss": "low"}\n', "line 2: train/ce_loss is 'low'"),
    ('{"step": 1, "mine": 1.0}\n', "measures none of train/ce_loss"),
]


@pytest.mark.parametrize(("content", "message"), DAMAGED_METRICS)
def test_damaged_metrics_are_refused_by_line(tmp_path, content, message):
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        read_stages([f"mine={path}"])
    assert str(path) in str(caught.value)


def changed(*keys, value):
    """Returns an evaluation with one value changed."""
    report = an_evaluation(mine="0" * 16)
    place = report
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return json.dumps(report)


SCORES = ("tasks", 0, "systems", 0, "scores")
DAMAGED_EVALUATIONS = [
    (changed(*SCORES, 0, "value", value="good"), "is not an evaluation"),
    (changed("tasks", 0, "systems", value=[]), "is not an evaluation"),
    (changed("tasks", value=3), "is not an evaluation"),
    (changed("tasks", value={}), "its tasks are not a list"),
    (changed("tasks", 0, "task", value=7), "a name is not a text"),
    ("{}", "is not an evaluation: it has no 'models'"),
]


@pytest.mark.parametrize(("content", "message"), DAMAGED_EVALUATIONS)
def test_a_damaged_evaluation_is_refused(tmp_path, content, message):
    path = tmp_path / "report.json"
    path.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        read_evaluation(path)
    assert str(path) in str(caught.value)


REFUSED = [
    (["--inputs-length", "3000"], "spans, but the vocabulary has 100 sentinels"),
    (["--metrics", "a\nb=c"], "in printable characters"),
    (["--metrics", "{inputs}/run/metrics.jsonl"], "expected NAME=FILE"),
    (
        ["--metrics", "a={inputs}/run/metrics.jsonl", "a={inputs}/run/metrics.jsonl"],
        "each name once",
    ),
    (["--out", "{inputs}/other.html"], "was not written by this command, so it is not overwritten"),
    (["--out", "{inputs}/bare/model/page.html"], "lies in .*model, a model"),
    (["--out", "{inputs}/corpus/page.html"], "corpus or lies in it, which is read"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_wrong_arguments_are_refused_in_one_line(inputs, tmp_path, arguments, message):
    (inputs / "other.html").write_text("<!doctype html><title>Mine</title>")
    arguments = [argument.format(inputs=inputs) for argument in arguments]
    with pytest.raises((ConfigError, DataError, CheckpointError), match=message) as caught:
        stmoe.main(["inspect", *arguments_of(inputs, tmp_path / "page.html"), *arguments])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "page.html").exists()
    assert (inputs / "other.html").read_text() == "<!doctype html><title>Mine</title>"


def test_a_model_without_routers_or_with_another_tokenizer_is_refused(inputs, tmp_path):
    refused = {
        "has no sparse layer": {"vocab_size": VOCABULARY, **DENSE},
        "has 230 tokens, its model 131": {},
    }
    for message, changes in refused.items():
        tiny_model(**changes).save_pretrained(tmp_path / "model")
        load_tokenizer(inputs / "run/model").save_pretrained(str(tmp_path / "model"))
        arguments = arguments_of(inputs, tmp_path / "page.html")
        with pytest.raises(DataError, match=message):
            stmoe.main(["inspect", *arguments, "--model", str(tmp_path / "model")])
