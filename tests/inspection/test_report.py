"""The page of a whole command: each of its numbers is computed again, and what was not given is not
spoken of.
"""

import json
import math
import re
from collections import Counter
from html.parser import HTMLParser
from importlib.metadata import version

import pytest
import torch

from moe import CheckpointError, ConfigError, DataError
from moe.checksums import model_fingerprint
from moe.commands import inspect_router
from moe.data.corpus import load_corpus
from moe.data.pipeline import SpanCorruptionSource
from moe.data.span_corruption import Noise
from moe.data.tokenizer import SpecialIds, load_tokenizer
from moe.data.tokens import tokenize_corpus
from moe.inspection.figures import draw_load
from tests.models.tiny import DENSE, tiny_model
from tests.training.tiny_run import write_inputs

NUM_EXPERTS, NUM_BATCHES, INPUTS_LENGTH, VOCABULARY = 7, 2, 16, 230
NOISE = Noise(0.45, 2.0)
LINES = [
    {"step": 0, "heldout/loss": 7.125, "heldout/text_loss": 7.5, "heldout/unigram_entropy": 4.75},
    {
        "step": 10,
        "train/ce_loss": 5.5,
        "router/encoder/entropy": 1.25,
        "router/encoder/fraction_dropped": 0.0625,
    },
    {"step": 10, "heldout/loss": 3.875, "heldout/text_loss": 4.25, "heldout/unigram_entropy": 4.75}
    | {"heldout/token_accuracy": 0.21875},
]


def a_score(value, low, high):
    return {
        "metric": "accuracy",
        "value": value,
        "stderr": 1.0,
        "low": low,
        "high": high,
        "note": "",
    }


def a_system(name, mode, *score):
    return {
        "name": name,
        "mode": mode,
        "scores": [a_score(*score)],
        "num_examples": 1234,
        "router": None,
    }


def an_evaluation(**models):
    systems = [
        a_system("mine", "generate", 71.5, 67.25, 75.75),
        a_system("mine", "rank", 72.5, 68.5, 76.5),
        a_system("other", "generate", 73.0, 69.0, 77.0),
        a_system("majority", "baseline", 5.5, 1.5, 9.5),
    ]
    task = {
        "task": "colour",
        "description": "What colour?",
        "split": "test",
        "num_examples": 1234,
        "num_groups": 321,
    }
    return {
        "models": {
            name: {"folder": f"runs/{name}", "fingerprint": digest}
            for name, digest in models.items()
        },
        "tasks": [{**task, "systems": systems}],
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
    (folder / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    digest = model_fingerprint(folder / "run/model")
    (folder / "report.json").write_text(
        json.dumps(an_evaluation(mine=digest, other="0f0f0f0f0f0f0f0f"))
    )
    return folder


def arguments_of(inputs, out, *more, run="run"):
    arguments = {"--model": inputs / run / "model", "--corpus": inputs / "corpus", "--out": out}
    arguments |= {"--batches": NUM_BATCHES, "--inputs-length": INPUTS_LENGTH}
    options = [str(part) for pair in arguments.items() for part in pair]
    return ["report", *options, *map(str, more)]


@pytest.fixture(scope="module")
def everything(inputs):
    """Returns the page of a run with metrics and an evaluation."""
    more = [
        "--metrics",
        f"first={inputs}/run/metrics.jsonl",
        "--evaluation",
        inputs / "report.json",
    ]
    inspect_router.main(arguments_of(inputs, inputs / "report.html", *more))
    return (inputs / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def nothing_more(inputs):
    """Returns the page of a model alone, without a run around it."""
    inspect_router.main(arguments_of(inputs, inputs / "bare.html", run="bare"))
    return (inputs / "bare.html").read_text(encoding="utf-8")


def test_without_metrics_evaluation_and_recipe_nothing_is_said_of_them(nothing_more):
    text = " ".join(Text(nothing_more).all)
    for word in ("Training", "Evaluation", "scratch", "gain", "overlap", "points", "updates"):
        assert word not in text, word
    assert "not known: no recipe.yaml lies beside the folder of the model" in text
    assert "There is no capacity in evaluation" not in text
    assert "15 % of the tokens masked, in spans of 3 on average (the model does not say" in text


def test_a_noise_density_of_the_users_is_stated_beside_that_of_pre_training(inputs, tmp_path):
    out = tmp_path / "report.html"
    inspect_router.main(arguments_of(inputs, out, "--noise-density", 0.25))
    text = " ".join(Text(out.read_text(encoding="utf-8")).all)
    assert "25 % of the tokens masked, in spans of 2 on average (45 % in pre-training)" in text


def test_the_page_names_what_it_was_made_from(inputs, everything):
    text = " ".join(" ".join(Text(everything).all).split())
    assert f"{inputs}/run/model , fingerprint {model_fingerprint(inputs / 'run/model')}" in text
    assert "seed: 41 optim: lr: 0.75" in text
    assert f"held-out part of {inputs}/corpus" in text
    assert f"{NUM_BATCHES} of 64 examples, each of {INPUTS_LENGTH} encoder and" in text
    assert "45 % of the tokens masked, in spans of 2 on average, as in pre-training; seed 0" in text
    for name in ("stmoe", "torch", "transformers"):
        assert f"{name} {version(name)}" in text
    assert f"stmoe inspect report --model {inputs}/run/model" in text
    assert "first: the run of the traced model" in text
    assert "mine is runs/mine, the traced model." in text
    assert "other is runs/other, not the traced model: fingerprint 0f0f0f0f0f0f0f0f." in text
    assert "shape failed: No rows." in text
    assert not re.search(r"(src|href)=\"[^#]", everything)


def test_every_number_of_the_page_is_computed_again_from_its_inputs(inputs, everything):
    text = " ".join(Text(everything).measured)
    text = re.sub(
        r"fingerprint [0-9a-f]{16}|(python|stmoe|torch|transformers) [\d.]+[^ ,.]*|arXiv:[\d.]+",
        "",
        text,
    )
    text = re.sub(r"cpu \([^)]*\)|Table 14|ln E", "", text)
    found = Counter(re.findall(r"\d[\d,]*(?:\.\d+)?", text))

    explained = {"0", "1", "10", "20", "95"}  # in sentences on how to read a number
    unexplained = set(found) - explained - numbers_of_the_model(inputs) - numbers_of_the_files()
    assert not unexplained


def numbers_of_the_files():
    """Returns the numbers that metrics and evaluation give."""
    numbers = {"10", "4.25", "3.88", "4.75", "0.50", "21.88", "6.25"}
    numbers |= {f"{math.exp(4.25):.0f}", f"{math.exp(4.75):.0f}", "1,234", "321"}
    numbers |= {
        "71.5",
        "67.2",
        "75.8",
        "72.5",
        "68.5",
        "76.5",
        "73.0",
        "69.0",
        "77.0",
        "5.5",
        "1.5",
        "9.5",
    }
    return numbers | {f"{73.0 - 71.5:.1f}", f"{71.5 - 5.5:.1f}"}


def numbers_of_the_model(inputs):
    """Returns the numbers that the model, its text and a loop over its tokens give."""
    tokenizer = load_tokenizer(inputs / "run/model")
    model = tiny_model(vocab_size=VOCABULARY)
    corpus = load_corpus(inputs / "corpus")
    tokens = tokenize_corpus(corpus.held_out, tokenizer)
    source = SpanCorruptionSource(
        tokens,
        SpecialIds.of(tokenizer),
        inputs_length=INPUTS_LENGTH,
        batch_size=64,
        seed=0,
        noise=NOISE,
    )
    numbers = {
        f"{model.config.num_parameters():,}",
        f"{model.config.num_active_parameters():,}",
        "2",
        "3",
        "7",
        "1.25",
    }
    numbers |= {
        f"{len(corpus.held_out):,}",
        f"{tokens.size:,}",
        f"{source.num_examples:,}",
        "64",
        "128",
        "45",
    }
    numbers |= {str(length) for length in source.lengths}
    if source.num_examples < 128:
        numbers.add(f"{128 / source.num_examples:.1f}")

    targets, losses = [], []
    firsts, loads, entropies, dropped, accepted, slots = ([[], []] for _ in range(6))
    for step in range(NUM_BATCHES):
        batch = source.batch(step)
        with torch.no_grad():
            output = model(**batch)
        log_probs = output.logits.double().log_softmax(-1)
        losses += (-log_probs.gather(-1, batch["labels"][..., None])).flatten().tolist()
        targets += batch["labels"].flatten().tolist()
        decoder_ids = model.prepare_decoder_input_ids_from_labels(batch["labels"])
        sides = (
            (batch["input_ids"], output.encoder_router_outputs[0]),
            (decoder_ids, output.decoder_router_outputs[0]),
        )
        for side, (ids, router) in enumerate(sides):
            logits = router.router_logits.double().flatten(0, 1)
            probs = logits.softmax(-1)
            plan = router.plan
            firsts[side] += zip(ids.flatten().tolist(), logits.argmax(-1).tolist(), strict=True)
            loads[side] += plan.expert_index[plan.requested].tolist()
            accepted[side].append(int(plan.accepted.sum()))
            slots[side].append(plan.capacity * NUM_EXPERTS * plan.expert_index.shape[0])
            entropies[side] += (-(probs * probs.log()).sum(-1)).tolist()
            dropped[side] += (~plan.accepted.any(-1)).flatten().tolist()

    frequencies = [count / len(targets) for count in Counter(targets).values()]
    unigram_entropy = -sum(share * math.log(share) for share in frequencies)
    numbers |= {f"{sum(losses) / len(targets):.2f}", f"{unigram_entropy:.2f}"}

    numbers |= {f"{NUM_EXPERTS * 2}", f"{math.log(NUM_EXPERTS):.2f}"}
    num_dead = 0
    for side in (0, 1):
        num_tokens = len(firsts[side])
        load = Counter(loads[side])
        even = len(loads[side]) / NUM_EXPERTS
        counts = [load[expert] for expert in range(NUM_EXPERTS)]
        deviation = math.sqrt(sum((count - even) ** 2 for count in counts) / NUM_EXPERTS)
        entropy = sum(entropies[side]) / num_tokens
        num_dead += counts.count(0)
        numbers |= {f"{num_tokens:,}", f"{max(counts) / even:.2f}", f"{min(counts) / even:.2f}"}
        numbers |= {
            f"{100 * sum(dropped[side]) / num_tokens:.2f}",
            f"{deviation / even:.2f}",
            f"{entropy:.2f}",
        }
        numbers |= {
            f"{math.exp(entropy):.1f}",
            f"{100 * sum(accepted[side]) / sum(slots[side]):.0f}",
        }
        numbers |= {
            f"{counts.index(max(counts)) + 1}",
            f"{counts.index(min(counts)) + 1}",
            f"{counts.count(0)}",
        }
        numbers |= numbers_of_tokens(firsts[side], SpecialIds.of(tokenizer))
    return numbers | {f"{num_dead}"}


def numbers_of_tokens(firsts, ids):
    """Returns the numbers that pairs of a token and its first choice give."""
    numbers = {str(expert + 1) for expert in range(NUM_EXPERTS)}
    pairs, tokens = Counter(firsts), Counter(token for token, _ in firsts)
    chosen = Counter(expert for _, expert in firsts)
    numbers |= {f"{100 * chosen[expert] / len(firsts):.1f}" for expert in range(NUM_EXPERTS)}
    for (token, expert), count in pairs.items():
        share = chosen[expert] / len(firsts)
        lift = (count + 20 * share) / (tokens[token] + 20) / share
        numbers |= {f"{count:,}", f"{tokens[token]:,}", f"{lift:.1f}"}

    lowest = ids.first_sentinel - ids.num_sentinels + 1
    sentinels = [expert for token, expert in firsts if token >= lowest]
    text = [
        expert for token, expert in firsts if token < lowest and token not in (ids.eos, ids.pad)
    ]
    for group in (sentinels, text):
        shares = [count / len(group) for count in Counter(group).values()]
        entropy = -sum(share * math.log(share) for share in shares)
        numbers |= {f"{len(group):,}", f"{entropy:.2f}", f"{math.exp(entropy):.1f}"}
    return numbers


def test_the_map_says_each_load_over_the_even_one():
    svg = draw_load(["encoder 1"], [[0.5, 0.25, 0.25, 0.0]]).svg
    for label in ("2.00 x", "50.0 %", "1.00 x", "25.0 %", "0.00 x", "0.0 %"):
        assert f">{label}<" in svg
    many = draw_load(["encoder 1", "decoder 1"], [[1 / 128] * 128] * 2).svg
    assert ">1.00 x<" not in many
    assert "1 x = 0.8 %" in many


def run_with(inputs, tmp_path, lines=None, report=None):
    """Returns the text of a page with other metrics or another evaluation."""
    more = []
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        more += ["--metrics", f"a $x^2$ <run>={tmp_path}/metrics.jsonl"]
    if report is not None:
        (tmp_path / "eval").mkdir()
        (tmp_path / "eval/report.json").write_text(json.dumps(report))
        more += ["--evaluation", tmp_path / "eval"]
    inspect_router.main([*arguments_of(inputs, tmp_path / "page.html", *more), "--batches", "1"])
    return " ".join(
        " ".join(Text((tmp_path / "page.html").read_text(encoding="utf-8")).all).split()
    )


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (4.25, "this is 0.50 nats below: the model knows more than that."),
        (5.25, "this is 0.50 nats above: they alone would predict as well or better."),
        (math.nan, "no number of nats for a text token. That is no finite number."),
        (1e30, "equally likely tokens."),
    ],
)
def test_what_is_said_of_a_loss_follows_from_it(inputs, tmp_path, loss, sentence):
    lines = [
        {
            "step": 5,
            "heldout/text_loss": loss,
            "heldout/unigram_entropy": 4.75,
            "heldout/token_accuracy": 0.5,
        }
    ]
    text = run_with(inputs, tmp_path, lines)
    assert sentence in text
    assert ("knows more" in text) == (loss == 4.25)
    assert "of the traced model" not in text


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ((73.0, 69.0, 77.0), "1.5 points below other by generate; their 95 % intervals overlap"),
        (
            (60.0, 56.0, 64.0),
            "11.5 points above other by generate; their 95 % intervals do not overlap.",
        ),
        ((60.0, None, None), None),
    ],
)
def test_what_is_said_of_two_systems_follows_from_their_intervals(
    inputs, tmp_path, other, sentence
):
    report = an_evaluation(mine="0" * 16)
    report["tasks"][0]["systems"] = [
        a_system("mine", "generate", 71.5, 67.25, 75.75),
        a_system("other", "generate", *other),
    ]
    text = run_with(inputs, tmp_path, report=report)
    assert (sentence or "mine is runs/mine") in text
    assert sentence or "points" not in text
    assert "from scratch" not in text


def test_the_same_inputs_give_the_same_page(inputs, tmp_path):
    pages = []
    for _ in range(2):
        run_with(inputs, tmp_path, LINES)
        pages.append((tmp_path / "page.html").read_bytes())
    assert pages[0] == pages[1]


METRICS = '{"step": 1, "train/ce_loss": 2.0}\n'
DAMAGED_METRICS = {
    "absent": (None, "cannot be read: No such file"),
    "empty": ("", "measures none of train/ce_loss"),
    "other lines": ('{"prompt": "x"}\n{}\n', "line 1: step is None; expected a number of updates"),
    "a word": (
        METRICS + '{"step": 2, "train/ce_loss": "low"}\n' + METRICS,
        "line 2: train/ce_loss is 'low'",
    ),
    "a flag": ('{"step": true, "train/ce_loss": 1}\n', "line 1: step is True"),
    "backwards": (
        '{"step": 9, "train/ce_loss": 1}\n' + METRICS,
        "line 2: step 1 comes after step 9",
    ),
    "a whole job's": (
        '{"stage": "pretrain", "step": 1, "train/ce_loss": 1}\n',
        "line 1 is of stage 'pretrain' of a",
    ),
    "nothing plotted": ('{"step": 1, "mine": 1.0}\n', "measures none of train/ce_loss"),
}


@pytest.mark.parametrize(("content", "message"), DAMAGED_METRICS.values(), ids=DAMAGED_METRICS)
def test_damaged_metrics_are_refused_by_line(inputs, tmp_path, content, message):
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as caught:
        inspect_router.main(
            arguments_of(inputs, tmp_path / "page.html", "--metrics", f"mine={path}")
        )
    assert str(path) in str(caught.value)
    assert not (tmp_path / "page.html").exists()


def changed(*keys, value):
    """Returns an evaluation with one value changed."""
    report = an_evaluation(mine="0" * 16)
    place = report
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return json.dumps(report)


SCORE = ("tasks", 0, "systems", 0, "scores", 0)
DAMAGED_EVALUATIONS = {
    "absent": (None, "cannot be read: No such file"),
    "other fields": ('{"accuracy": 3}', "models is missing"),
    "no tasks": (changed("tasks", value=None), "tasks is None"),
    "no scores": (
        changed("tasks", 0, "systems", 0, "scores", value=[]),
        "tasks.0.systems.0.scores is \\[\\]",
    ),
    "a word": (changed(*SCORE, "value", value="good"), "scores.0.value is 'good'"),
    "beyond 100": (changed(*SCORE, "value", value=1e308), "scores.0.value is 1e\\+308"),
    "no examples": (changed("tasks", 0, "num_examples", value=0), "tasks.0.num_examples is 0"),
}


@pytest.mark.parametrize(
    ("content", "message"), DAMAGED_EVALUATIONS.values(), ids=DAMAGED_EVALUATIONS
)
def test_a_damaged_evaluation_is_refused_by_field(inputs, tmp_path, content, message):
    path = tmp_path / "report.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as caught:
        inspect_router.main(arguments_of(inputs, tmp_path / "page.html", "--evaluation", path))
    assert str(path) in str(caught.value)
    assert not (tmp_path / "page.html").exists()


REFUSED = {
    "no batch": (["--batches", "0"], "--batches is 0; expected an integer from 1 to 100,000"),
    "endless": (["--batches", "1000000000"], "--batches is 1000000000"),
    "no length": (
        ["--inputs-length", "0"],
        "--inputs-length is 0; expected an integer of at least 4",
    ),
    "longer than the text": (
        ["--inputs-length", "1000000000"],
        "the held-out text has so many tokens",
    ),
    "more spans than sentinels": (
        ["--inputs-length", "3000"],
        "spans, but the vocabulary has 100 sentinels",
    ),
    "no name": (["--metrics", "metrics.jsonl"], "--metrics is 'metrics.jsonl'; expected NAME=FILE"),
    "no file": (["--metrics", "mine="], "expected NAME=FILE"),
    "a name that cannot be shown": (["--metrics", "a\nb=c"], "in printable characters"),
    "absent model": (["--model", "nowhere"], "nowhere holds no model"),
    "NUL in the model": (["--model", "a\0b"], "--model is 'a.x00b'; expected a path"),
    "absent corpus": (["--corpus", "nowhere"], "nowhere is not a corpus"),
    "no page": (["--out", ""], "--out is empty"),
    "weights": (
        ["--out", "{inputs}/run/model/model.safetensors"],
        "expected a file that ends in .html",
    ),
    "a folder of that name": (["--out", "{inputs}/folder.html"], "is a folder"),
    "below a file": (["--out", "{inputs}/other.html/page.html"], "lies below .*other.html, a file"),
    "another page": (
        ["--out", "{inputs}/other.html"],
        "is no page of this command, so it is not overwritten",
    ),
    "inside a model": (["--out", "{inputs}/bare/model/page.html"], "lies in .*model, a model"),
    "inside what is read": (
        ["--out", "{inputs}/corpus/page.html"],
        "lies in .*corpus, which is read",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_in_one_message(inputs, tmp_path, arguments, message):
    (inputs / "folder.html").mkdir(exist_ok=True)
    (inputs / "other.html").write_text("<!doctype html><title>Mine</title>")
    arguments = [argument.format(inputs=inputs) for argument in arguments]
    with pytest.raises((ConfigError, DataError, CheckpointError), match=message) as caught:
        inspect_router.main([*arguments_of(inputs, tmp_path / "page.html"), *arguments])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "page.html").exists()
    assert (inputs / "other.html").read_text() == "<!doctype html><title>Mine</title>"


def test_a_name_is_given_to_one_run(inputs, tmp_path):
    metrics = f"mine={inputs}/run/metrics.jsonl"
    with pytest.raises(ConfigError, match="gives the name 'mine' twice"):
        inspect_router.main(
            arguments_of(inputs, tmp_path / "page.html", "--metrics", metrics, metrics)
        )


def test_a_model_without_routers_or_with_another_tokenizer_is_refused(inputs, tmp_path):
    tokenizer = load_tokenizer(inputs / "run/model")
    for name, changes in (("dense", DENSE), ("small", {})):
        tiny_model(**{"vocab_size": VOCABULARY if changes else 131, **changes}).save_pretrained(
            tmp_path / name
        )
        tokenizer.save_pretrained(str(tmp_path / name))
    for name, message in (
        ("dense", "has no sparse layer"),
        ("small", "has 230 tokens, its model 131"),
    ):
        with pytest.raises(DataError, match=message):
            inspect_router.main(
                [*arguments_of(inputs, tmp_path / "page.html"), "--model", str(tmp_path / name)]
            )


def test_a_damaged_recipe_is_named(inputs, tmp_path):
    tiny_model(vocab_size=VOCABULARY).save_pretrained(tmp_path / "run/model")
    load_tokenizer(inputs / "run/model").save_pretrained(str(tmp_path / "run/model"))
    (tmp_path / "run/recipe.yaml").write_text("seed: [")
    with pytest.raises(ConfigError, match=r"recipe\.yaml is not YAML"):
        inspect_router.main(
            [*arguments_of(inputs, tmp_path / "page.html"), "--model", str(tmp_path / "run/model")]
        )
