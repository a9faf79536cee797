"""The routing view in a real browser: it runs, and mouse and keyboard do what the page says."""

import json

import pytest

from moe.inspection.page.routing_view import routing_view
from tests.inspection.chromium import Browser, find_chromium
from tests.inspection.tiny_view import (
    long_trace,
    one_example,
    statistics,
    tiny_tokenizer,
    tiny_trace,
)

# Behind the number of an expert, or in its place.
REFUSED = "\N{MULTIPLICATION SIGN}"
DROPPED = "\N{CIRCLED DIVISION SLASH}"
UNCHOSEN = "\N{EN DASH}"

PROGRAM = find_chromium()
ATTACK = '</script><img src=x onerror="window.hacked=1">'

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed"),
]


@pytest.fixture(scope="module")
def browser():
    with Browser(PROGRAM) as browser:
        yield browser


@pytest.fixture(scope="module")
def trace():
    return tiny_trace()


@pytest.fixture(scope="module")
def page(trace, tmp_path_factory):
    view = routing_view(trace, tiny_tokenizer(), **statistics(trace))
    return view.save(tmp_path_factory.mktemp("view") / "view.html")


@pytest.fixture(autouse=True)
def no_problems(browser):
    """Nothing is thrown, logged, or asked of any network, whatever a test does."""
    browser.problems.clear()
    browser.requests.clear()
    yield
    assert browser.problems == []
    assert all(request.startswith(("file:", "about:")) for request in browser.requests)


def marks(browser, stack="encoder"):
    """Returns what stands behind the tokens of a text, e.g. `3×`."""
    return browser.run(
        f"[...document.querySelectorAll('#stack-{stack} .token')].map((token) => token.dataset.mark)"
    )


def expected_marks(trace, stack, layer, example):
    """Returns the same, from the trace."""
    part = trace.stack(stack)
    start, end = part.starts[example : example + 2].tolist()
    traced = part.layers[layer]
    expected = []
    for row in range(start, end):
        first = int(traced.first[row])
        is_first = traced.expert[row] == first
        mark = str(first + 1)
        if not traced.accepted[row].any():
            mark += DROPPED
        elif not traced.accepted[row][is_first].any():
            mark += REFUSED
        expected.append(mark)
    return expected


def text(browser, selector):
    return browser.run(f"document.querySelector({json.dumps(selector)}).textContent")


def test_every_part_is_drawn_and_every_token_has_its_expert(browser, page, trace):
    browser.open(page)
    seen = set()
    for example in range(trace.facts.num_examples):
        for stack in ("encoder", "decoder"):
            expected = expected_marks(trace, stack, 0, example)
            assert marks(browser, stack) == expected
            seen |= set("".join(expected))
        browser.click("#next")
    assert {REFUSED, DROPPED} <= seen
    assert browser.count("#load figure svg") == 5
    assert browser.count("#load .bar-group") == 5 * 7
    assert browser.count("#flow figure") == 2
    assert browser.count("#ablation-bars > ol > li") == 5
    assert browser.count("#classes tbody tr") == 2


def test_the_slider_goes_through_the_layers_by_keyboard(browser, page, trace):
    browser.open(page)
    browser.run("document.querySelector('#layer-decoder').focus()")
    for layer in (1, 2, 2):
        browser.press("ArrowRight")
        assert marks(browser, "decoder") == expected_marks(trace, "decoder", layer, 0)
    assert text(browser, "#layer-decoder-name") == "3 of 3 · 7 experts · token_choice"
    assert marks(browser) == expected_marks(trace, "encoder", 0, 0)


def test_a_click_on_a_token_marks_its_expert_and_lists_its_texts(browser, page, trace):
    browser.open(page)
    browser.click("#stack-encoder .token:nth-of-type(5)")
    layer = trace.encoder.layers[0]
    expert = int(layer.first[4])
    assert f"encoder 1, expert {expert + 1}" in text(browser, "#expert h3")
    places = int((layer.first == expert).sum())
    assert f"of {places} places" in text(browser, "#texts-count")
    assert browser.count("#texts li") <= 15

    # In the text it is marked wherever it is the first choice, and only there.
    chosen = browser.run(
        "[...document.querySelectorAll('#stack-encoder .token')]"
        ".map((token) => token.classList.contains('chosen'))"
    )
    assert chosen == (layer.first[: len(chosen)] == expert).tolist()

    # All texts are listed in the end, each once; one of them leads to its example.
    while browser.run("!document.querySelector('#more-texts').hidden"):
        browser.click("#more-texts")
    assert browser.count("#texts li") == places
    browser.click("#texts li:last-child button")
    example = int(browser.run("document.querySelector('#example').value")) - 1
    assert marks(browser) == expected_marks(trace, "encoder", 0, example)
    assert browser.run("document.activeElement.classList.contains('chosen')")
    assert browser.run("document.querySelector('#texts small').textContent").startswith(
        " · example"
    )


def test_the_text_is_read_by_keyboard(browser, page, trace):
    browser.open(page)
    browser.run("document.querySelector('#stack-encoder .token').focus()")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    browser.press("ArrowLeft")
    assert browser.run("document.activeElement.dataset.token") == "1"
    assert "position 2 of 13" in text(browser, "#token")

    # Up is the next layer; the focus stays where it is.
    browser.press("ArrowUp")
    assert marks(browser) == expected_marks(trace, "encoder", 1, 0)
    assert browser.run("document.activeElement.dataset.token") == "1"
    assert "encoder 2" in text(browser, "#token h4")

    browser.press("Enter")
    expert = int(trace.encoder.layers[1].first[1]) + 1
    assert f"encoder 2, expert {expert}" in text(browser, "#expert h3")
    pressed = "document.querySelector('#stack-encoder .expert[aria-pressed=true]').textContent"
    assert browser.run(pressed) == str(expert)
    browser.press("Escape")
    assert browser.count(".chosen") == 0
    browser.press("End")
    assert browser.run("document.activeElement.dataset.token") == "12"


def test_everything_is_reached_by_tab_and_every_control_has_a_name(browser, page):
    browser.open(page)
    browser.run("document.activeElement.blur()")
    name = (
        "(() => { const at = document.activeElement;"
        "return at.id || [...at.classList, at.tagName].join(' '); })()"
    )
    reached = set()
    for _ in range(60):
        browser.press("Tab")
        reached.add(browser.run(name))
    assert {"next", "example", "numbers", "layer-encoder", "layer-decoder"} <= reached
    assert {"class-layer", "expert BUTTON", "plain BUTTON", "SUMMARY", "A"} <= reached
    assert any(name.startswith("token ") for name in reached)

    browser.call("Accessibility.enable")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "slider", "spinbutton", "checkbox", "radio", "combobox", "link", "image")
    controls = [node for node in nodes if node.get("role", {}).get("value") in roles]
    assert len(controls) > 40
    assert all(node["name"]["value"].strip() for node in controls)


def test_a_pointed_token_shows_its_probabilities_and_choices(browser, page, trace):
    browser.open(page)
    browser.hover("#stack-decoder .token:nth-of-type(3)")
    layer = trace.decoder.layers[0]
    rows = browser.run(
        "[...document.querySelectorAll('#token tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    best = layer.best_expert[2].tolist()
    assert [int(row[0]) - 1 for row in rows][:3] == best
    for row, prob in zip(rows, layer.best_prob[2].tolist(), strict=False):
        assert abs(float(row[2].strip("< %")) - 100 * prob) < 1
    by_expert = {int(row[0]) - 1: row[3] for row in rows}
    for place, expert in enumerate(layer.expert[2].tolist()):
        state = "accepted" if layer.accepted[2][place] else "refused"
        assert by_expert[expert].endswith(state)
    assert "its label" in text(browser, "#token")
    assert browser.count("#token .way .chip") == 3


def test_examples_layers_and_experts_are_chosen_by_buttons(browser, page, trace):
    browser.open(page)
    browser.click("#next")
    assert marks(browser) == expected_marks(trace, "encoder", 0, 1)
    browser.click("#previous")
    assert browser.run("document.querySelector('#previous').disabled")
    browser.click("#stack-decoder .expert:nth-of-type(3)")
    assert "decoder 1, expert 3" in text(browser, "#expert h3")
    browser.click("#ablation-bars > ol > li:last-child button")
    assert "decoder 3, expert 1" in text(browser, "#expert h3")
    assert marks(browser, "decoder") == expected_marks(trace, "decoder", 2, 0)

    # A bar of the load leads to its expert, too.
    browser.click("#load figure:nth-of-type(2) .bar-group:nth-of-type(4)")
    assert "encoder 2, expert 4" in text(browser, "#expert h3")
    browser.wait_for("document.querySelectorAll('.bar-group.chosen').length === 1")
    assert "go on to expert" not in text(browser, "#flow")
    browser.click("#load figure:nth-of-type(1) .bar-group:nth-of-type(4)")
    browser.run("document.querySelector('#flow').scrollIntoView({behavior: 'instant'})")
    sentence = "Of the tokens of encoder 1, expert 4, in encoder 2"
    browser.wait_for(f"document.querySelector('#flow').textContent.includes('{sentence}')")
    assert browser.count("#flow .followed") > 0

    # Figures follow the slider.
    browser.run("document.querySelector('#layer-encoder').focus()")
    browser.press("ArrowRight")
    browser.run("document.querySelector('#load').scrollIntoView({behavior: 'instant'})")
    browser.wait_for("!!document.querySelector('#load figure:nth-of-type(2) .bar-group.chosen')")
    assert browser.count(".bar-group.chosen") == 1


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1400, "dark")])
def test_it_fits_every_width_and_every_text_has_contrast(browser, page, width, scheme):
    browser.open(page, width=width, scheme=scheme)
    browser.click("#stack-encoder .token:nth-of-type(5)")
    assert browser.run("document.documentElement.scrollWidth") <= width
    pairs = browser.run(COLOURS_OF_TEXTS)
    assert len(pairs) > 100
    low = [pair for pair in pairs if pair[0] < 4.5]
    assert low == []


# Contrast of each element that holds text itself, over the nearest background behind it (WCAG 2).
COLOURS_OF_TEXTS = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = ([r, g, b]) => {
    const linear = [r, g, b].map((x) => x / 255).map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const background = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgb(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) { return colour; }
    }
    throw new Error("no background");
  };
  const found = [];
  for (const element of document.body.querySelectorAll("*")) {
    const holdsText = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    const isShown = element.getClientRects().length && !element.matches(":disabled, script, style, noscript *");
    if (!holdsText || !isShown) { continue; }
    const style = getComputedStyle(element);
    const isDrawn = element.namespaceURI.endsWith("svg");
    const text = luminance(rgb(isDrawn ? style.fill : style.color));
    const paper = luminance(background(element));
    const contrast = (Math.max(text, paper) + 0.05) / (Math.min(text, paper) + 0.05);
    found.push([contrast, element.tagName, element.className.toString(), element.textContent.slice(0, 30)]);
  }
  return found;
})()"""


def test_two_models_stand_side_by_side(browser, trace, tmp_path):
    other = tiny_trace(seed=1)
    view = routing_view(trace, tiny_tokenizer(), other=other)
    browser.open(view.save(tmp_path / "two.html"))
    shown = marks(browser)
    expected = expected_marks(trace, "encoder", 0, 0)
    assert shown == expected + expected_marks(other, "encoder", 0, 0)
    differs = browser.run(
        "[...document.querySelectorAll('#stack-encoder .pane:first-child .token')]"
        ".map((token) => token.classList.contains('differs'))"
    )
    firsts = [part.encoder.layers[0].first[: len(differs)] for part in (trace, other)]
    assert differs == (firsts[0] != firsts[1]).tolist()
    browser.hover("#stack-encoder .token:nth-of-type(2)")
    assert browser.count("#token table") == 2
    assert browser.count(".current") == 2
    browser.click("#differences")
    assert browser.count(".differs") == 0


def test_a_chosen_expert_is_marked_with_its_counterpart(browser, trace, tmp_path):
    order = [3, 0, 6, 1, 5, 2, -1]
    view = routing_view(
        trace, tiny_tokenizer(), other=tiny_trace(seed=1), matching={("encoder", 0): order}
    )
    browser.open(view.save(tmp_path / "two.html"))
    pressed = (
        "[...document.querySelectorAll('#stack-encoder .expert[aria-pressed=true]')]"
        ".map((button) => button.dataset.expert + ' ' + button.dataset.hue)"
    )
    browser.click("#stack-encoder .pane:first-child .expert:nth-of-type(7)")
    assert browser.run(pressed) == ["6 6", "2 6"]
    browser.click("#stack-encoder .pane:last-child .expert:nth-of-type(1)")
    assert browser.run(pressed) == ["3 3", "0 3"]
    browser.click("#stack-encoder .pane:last-child .expert:nth-of-type(7)")
    assert browser.run(pressed) == ["6 none"]


def test_a_very_long_example_is_shown_piece_by_piece(browser, trace, tmp_path):
    one = one_example(long_trace(trace, 20))
    browser.open(routing_view(one, tiny_tokenizer()).save(tmp_path / "long.html"))
    length = one.encoder.ids.numel()
    assert 2000 < length < 4000
    shown = "document.querySelectorAll('#stack-encoder .token').length"
    assert browser.run(shown) == 2000
    browser.click("#stack-encoder .more button")
    assert browser.run(shown) == length
    assert marks(browser) == expected_marks(one, "encoder", 0, 0)

    # A listed text beyond the first piece brings it along.
    browser.open(tmp_path / "long.html")
    browser.click("#stack-encoder .token")
    browser.click("#texts li:last-child button")
    assert browser.run("Number(document.activeElement.dataset.token)") > 2000


def test_of_many_experts_one_is_highlighted(browser, tmp_path):
    trace = tiny_trace(num_experts=83)
    view = routing_view(trace, tiny_tokenizer(), **statistics(trace))
    browser.open(view.save(tmp_path / "many.html"))
    assert browser.run("document.querySelector('input[value=one]').checked")
    load = trace.encoder.layers[0].stats.expert_load
    busiest = int(load.argmax()) + 1
    assert f"encoder 1, expert {busiest}" in text(browser, "#expert h3")
    assert browser.count("#stack-encoder .expert") == 32

    # Any other by its number.
    browser.run(
        "(() => { const input = document.querySelector('#stack-encoder .expert-number input');"
        "input.value = '80'; input.dispatchEvent(new Event('change')); })()"
    )
    assert "encoder 1, expert 80" in text(browser, "#expert h3")
    browser.click("#classes input[type=checkbox]")
    assert browser.count("#classes thead th") == 83 + 3


def test_no_text_becomes_a_part_of_the_page(browser, trace, tmp_path):
    facts = trace.facts._replace(domains=[ATTACK], model=ATTACK, text=ATTACK)
    given = int(trace.encoder.ids[0])
    tokenizer = tiny_tokenizer(**{f"t{given}": ATTACK})
    view = routing_view(
        trace._replace(facts=facts), tokenizer, title=ATTACK, **statistics(trace, ATTACK)
    )
    browser.open(view.save(tmp_path / "attack.html"))
    browser.click("#stack-encoder .token")
    assert browser.run("window.hacked === undefined && document.images.length === 0")
    visible = ATTACK.replace(" ", "␣")
    assert text(browser, "#stack-encoder .token") == visible
    assert text(browser, "#token code") == visible
    assert text(browser, "h1") == ATTACK
    assert ATTACK in text(browser, "#classes tbody")
    assert ATTACK in text(browser, "#example-count")


def test_a_page_without_a_sparse_decoder_layer_and_with_free_tokens_runs(browser, tmp_path):
    options = {"router": "expert_choice", "num_sparse_decoder_layers": 0, "router_options": None}
    trace = tiny_trace(**options)
    browser.open(routing_view(trace, tiny_tokenizer()).save(tmp_path / "choice.html"))
    assert "The decoder has no sparse layer" in text(browser, "#stack-decoder")
    first = trace.encoder.layers[0].first
    shown = marks(browser)
    assert [mark == UNCHOSEN for mark in shown] == (first[: len(shown)] < 0).tolist()
    browser.click("#stack-decoder .token")
    browser.click("#stack-encoder .token")
