"""The routing view: its numbers are the trace's, it needs nothing else, and no text can break out."""

import base64
import hashlib
import re
from collections import Counter
from html.parser import HTMLParser

import pytest
import torch

from moe import ConfigError, DataError
from moe.inspection.page.panel_data import AblationBar, LayerClasses
from moe.inspection.page.routing_view import routing_view
from moe.tracing.trace import ACCEPTED, NOT_REQUESTED
from tests.inspection.tiny_view import (
    content_of,
    long_trace,
    one_example,
    rows_of,
    stack_of,
    statistics,
    tiny_tokenizer,
    tiny_trace,
    unpacked,
    view_of,
)
from tests.models.tiny import DENSE

CASES = {
    "token choice": {},
    "one expert": {"num_experts": 1, "num_selected_experts": 1, "router": "switch"}
    | {"router_options": None},
    "experts choose": {"router": "expert_choice", "num_sparse_decoder_layers": 0}
    | {"router_options": None},
    "300 experts": {"num_experts": 300},
    "layers that differ": {"encoder_experts": [7, 4], "decoder_experts": [5, 3, 7]},
}


@pytest.fixture(scope="module")
def trace():
    return tiny_trace()


@pytest.fixture(scope="module", params=list(CASES))
def case(request):
    trace = tiny_trace(num_best=1 if request.param == "one expert" else 3, **CASES[request.param])
    return trace, view_of(trace, **statistics(trace))


# ---------------------------------------------------------------------------
# Numbers


def test_each_token_has_the_choices_of_the_trace(case):
    trace, page = case
    content = content_of(page)
    for layer, tokens in zip(trace.layers, content["models"][0]["tokens"], strict=True):
        rows = rows_of(trace, content, layer.facts.stack)
        counts = unpacked(tokens["num_choices"]).tolist()
        experts = iter(unpacked(tokens["expert"]).tolist())
        weights = iter(unpacked(tokens["weight"]).tolist())
        assert len(rows) == len(counts)
        for row, count in zip(rows, counts, strict=True):
            shown = {}
            for place in range(count):
                expert = next(experts)
                shown[expert] = next(weights)
                assert place > 0 or expert == layer.first[row]
            assert set(shown) == _requested(layer, row)
            assert count > 0 or layer.first[row] == -1

            # Weights in 254 steps; 0 is a refusal.
            choices = torch.stack([layer.expert[row], layer.state[row], layer.gate[row]], dim=1)
            for expert, state, gate in choices.tolist():
                if state == ACCEPTED:
                    weight = (shown[expert] - 1) / 254 * tokens["largest_weight"]
                    assert weight == pytest.approx(gate, abs=tokens["largest_weight"] / 254)
                elif state != NOT_REQUESTED:
                    assert shown[expert] == 0
        assert next(experts, None) is None


def _requested(layer, row):
    experts = layer.expert[row][layer.state[row] != NOT_REQUESTED]
    return set(experts.tolist())


def test_each_token_has_its_text_and_its_probabilities(case):
    trace, page = case
    content = content_of(page)
    tokenizer = tiny_tokenizer()
    for name in ("encoder", "decoder"):
        rows = rows_of(trace, content, name)
        stack = stack_of(content, name)
        shown = [content["texts"][token] for token in unpacked(stack["token"])]
        for text, token in zip(shown, trace.stack(name).ids[rows].tolist(), strict=True):
            assert text == _text(tokenizer, token, name)

    labels = [content["texts"][token] for token in unpacked(stack_of(content, "decoder")["target"])]
    assert labels == [_text(tokenizer, token, "") for token in trace.decoder.targets.tolist()]

    for layer, tokens in zip(trace.layers, content["models"][0]["tokens"], strict=True):
        rows = rows_of(trace, content, layer.facts.stack)
        experts = torch.from_numpy(unpacked(tokens["best_expert"]).astype("int64"))
        probs = torch.from_numpy(unpacked(tokens["best_prob"]).astype("float32")) / 255
        torch.testing.assert_close(experts, layer.best_expert[rows].long().flatten())
        torch.testing.assert_close(
            probs, layer.best_prob[rows].float().flatten(), atol=1 / 500, rtol=0
        )


def _text(tokenizer, token, stack):
    if stack == "decoder" and token == tokenizer.pad_token_id:
        return "<start>"
    if token >= len(tokenizer):
        return f"<id {token}>"
    return tokenizer.convert_ids_to_tokens(token).replace("▁", " ")


def test_totals_are_the_traces_statistics(case):
    trace, page = case
    for layer, totals in zip(trace.layers, content_of(page)["models"][0]["layers"], strict=True):
        assert (totals["stack"], totals["layer"]) == layer.key
        assert totals["load"] == layer.stats.expert_load.tolist()
        assert totals["accepted"] == layer.stats.accepted_load.tolist()
        assert totals["dropped_tokens"] == int((~layer.accepted.any(dim=1)).sum())
        assert totals["num_tokens"] == layer.first.numel()
        counts = Counter(layer.first.tolist())
        assert totals["first"] == [counts[expert] for expert in range(layer.facts.num_experts)]


def test_the_flow_counts_the_pairs_of_first_choices(case):
    trace, page = case
    content = content_of(page)
    flows = {(flow["stack"], flow["layer"]): flow for flow in content["models"][0]["flows"]}
    assert len(flows) == len(trace.layers) - 1 - bool(trace.decoder.layers)
    for (name, number), flow in flows.items():
        first, second = trace.stack(name).layers[number : number + 2]
        pairs = Counter(zip(first.first.tolist(), second.first.tolist(), strict=True))
        assert sum(map(sum, flow["counts"])) == first.first.numel()
        for i, expert in enumerate(flow["nodes"]):
            for j, other in enumerate(flow["next_nodes"]):
                if expert >= 0 and other >= 0:
                    assert flow["counts"][i][j] == pairs[expert, other]
        for expert, following in enumerate(flow["next_experts"]):
            most = [count for (e, n), count in pairs.items() if e == expert and n >= 0]
            most.sort(reverse=True)
            assert [count for _, count in following if count] == most[: len(following)]
            assert all(pairs[expert, other] == count for other, count in following)


def test_few_experts_are_nodes_and_of_many_the_busiest(case):
    trace, page = case
    for flow in content_of(page)["models"][0]["flows"]:
        layer = trace.stack(flow["stack"]).layers[flow["layer"]]
        experts = [node for node in flow["nodes"] if node >= 0]
        if layer.facts.num_experts <= 16:
            assert experts == list(range(layer.facts.num_experts))
        else:
            counts = torch.bincount(layer.first.long().clamp(min=0), minlength=300)
            assert counts[experts].min() >= counts.sort(descending=True).values[14]
            assert len(experts) == 15
            assert -1 in flow["nodes"]
        assert (-2 in flow["nodes"]) == bool((layer.first < 0).any())


def test_statistics_come_as_they_are_given_and_what_is_not_known_as_null(trace):
    given = statistics(trace)
    content = content_of(view_of(trace, **given))
    assert len(content["classes"]) == len(trace.layers)
    rows = content["classes"][0]["rows"]
    assert rows[0]["entropy"] == {"value": 1.25, "low": 1.0, "high": 1.5}
    assert rows[0]["lifts"][:2] == [2.0, 0.5]
    assert rows[1]["shares"] == [None] * 7
    assert content["ablation"][0]["low"] == 0.125


# ---------------------------------------------------------------------------
# The page


class Page(HTMLParser):
    """Tags with their attributes, and the texts of headings."""

    def __init__(self, page):
        super().__init__()
        self.tags = []
        self.headings = []
        self._open = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._open.append(tag)

    def handle_data(self, data):
        if self._open and self._open[-1] in ("h1", "h2") and data.strip():
            self.headings.append(data)

    def handle_endtag(self, tag):
        self._open.append("")

    def ids(self):
        return {attributes["id"] for _, attributes in self.tags if "id" in attributes}


def test_nothing_is_loaded_and_only_the_pages_own_script_may_run(case):
    _, page = case
    assert not re.search(r"https?:|//[a-z0-9-]+\.[a-z]", page)
    parsed = Page(page)
    for _, attributes in parsed.tags:
        assert "src" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("href", "#").startswith("#")

    [policy] = [
        attributes["content"]
        for tag, attributes in parsed.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    [script] = re.findall(r"<script>(.*?)</script>", page, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; script-src 'sha256-{digest}';")
    assert page.index("Content-Security-Policy") < page.index("<style>")


def test_the_same_trace_gives_the_same_bytes(trace):
    assert view_of(trace, **statistics(trace)) == view_of(tiny_trace(), **statistics(trace))


def test_a_part_without_numbers_is_not_there(trace):
    empty = LayerClasses(("encoder", 0), [])
    bare = Page(view_of(trace, classes=[empty]))
    assert {"text", "load", "flow", "source"} <= bare.ids()
    assert not {"classes", "ablation", "agreement"} & bare.ids()
    full = Page(view_of(trace, other=trace, **statistics(trace)))
    assert {"classes", "ablation", "agreement"} <= full.ids()
    assert len(full.headings) == 8

    one_layer = tiny_trace(1, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1)
    assert "flow" not in Page(view_of(one_layer)).ids()

    content = content_of(view_of(tiny_trace(1, num_best=0)))
    assert {tokens["num_best"] for tokens in content["models"][0]["tokens"]} == {0}


def test_the_page_names_what_was_traced(trace):
    facts = trace.facts._replace(model="runs/a", text="letters", command="stmoe x", loss=1.25)
    page = view_of(trace._replace(facts=facts))
    assert "<h1>Where the tokens go in runs/a</h1>" in page
    for text in ("letters", "1.25 nats for each target", "stmoe x", "encoder 1 (7 experts"):
        assert text in page
    assert facts.inputs_fingerprint in page
    assert "<title>mine</title>" in view_of(trace, title="mine")


ATTACK = '</script><script>window.hacked=1</script><img src=x onerror="hacked=2">\u2028<!--{{7*7}}'


def test_no_text_can_break_out_of_its_place(trace):
    facts = trace.facts._replace(domains=[ATTACK], model=ATTACK, text=ATTACK, command=ATTACK)
    attacked = trace._replace(facts=facts)
    tokenizer = tiny_tokenizer(t20=ATTACK, t21="▁" + ATTACK)
    options = {"other": attacked, "title": ATTACK, **statistics(trace, ATTACK)}
    page = routing_view(attacked, tokenizer, **options).html
    assert page.count("<script") == 2
    assert page.count("</script") == 2
    assert "<img" not in page
    [data] = re.findall(r'id="data">(.*?)</script>', page, re.S)
    assert not {"<", ">", "&", "\u2028"} & set(data)

    # The texts are all there, letter by letter.
    content = content_of(page)
    assert content["domains"][0] == ATTACK
    assert content["models"][0]["name"] == ATTACK
    assert content["ablation"][0]["verdict"] == ATTACK
    assert ATTACK in Page(page).headings[0]


def test_bytes_that_are_no_text_do_not_stop_the_page(trace, tmp_path):
    broken = b"a\xff".decode(errors="surrogateescape")
    facts = trace.facts._replace(model=broken, domains=[broken])
    view = routing_view(trace._replace(facts=facts), tiny_tokenizer())
    page = view.save(tmp_path / "a.html").read_text(encoding="utf-8")
    assert content_of(page)["models"][0]["name"] == broken


def test_a_notebook_shows_the_whole_page_in_a_frame(trace):
    view = routing_view(trace, tiny_tokenizer(), title='"quoted" & <b>')
    [(tag, attributes)] = Page(view._repr_html_()).tags
    assert tag == "iframe"
    assert attributes["srcdoc"] == view.html
    assert attributes["sandbox"] == "allow-scripts"


# ---------------------------------------------------------------------------
# Size


def test_a_long_trace_is_shown_in_part_and_counted_whole(trace):
    tokens = trace.encoder.ids.numel() + trace.decoder.ids.numel()
    many = long_trace(trace, 20_000 // tokens + 1)
    page = view_of(many, most_bytes=400_000)
    assert 0.8 * 400_000 < len(page.encode()) <= 400_000

    # Examples at even distances, and totals of all.
    content = content_of(page)
    distances = torch.tensor(content["examples"]).diff()
    assert distances.max() - distances.min() <= 1
    assert len(content["examples"]) < content["num_examples"] == many.facts.num_examples
    totals = content["models"][0]["layers"][0]
    assert totals["num_tokens"] == many.encoder.ids.numel() >= 10_000


def test_of_an_example_that_is_too_long_the_start_is_shown(trace):
    one = one_example(long_trace(trace, 50))
    content = content_of(view_of(one, most_bytes=110_000))
    for name in ("encoder", "decoder"):
        length = one.stack(name).ids.numel()
        stack = stack_of(content, name)
        assert stack["lengths"] == [length]
        assert 16 <= stack["starts"][1] < length
        shown = [content["ids"][token] for token in unpacked(stack["token"])]
        expected = one.stack(name).ids[: len(shown)].tolist()
        assert [token for token in shown if token >= 0] == [token for token in expected if token]


def test_a_size_that_nothing_fits_in_is_refused(trace):
    with pytest.raises(DataError, match=r"is limited to 2,000 bytes, but its tables alone take"):
        view_of(trace, most_bytes=2000)


# ---------------------------------------------------------------------------
# Two models


def test_two_models_agree_as_far_as_their_first_choices_do(trace):
    other = tiny_trace(seed=1)
    content = content_of(view_of(trace, other=other))
    assert [len(model["layers"]) for model in content["models"]] == [5, 5]
    for row, first, second in zip(content["agreement"], trace.layers, other.layers, strict=True):
        assert row["same"] == int((first.first == second.first).sum())
        assert row["num_tokens"] == first.first.numel()
        shares = [torch.bincount(layer.first.long(), minlength=7) for layer in (first, second)]
        chance = float((shares[0] * shares[1]).sum()) / first.first.numel() ** 2
        assert row["by_chance"] == pytest.approx(chance, rel=1e-4)


def test_experts_that_were_matched_agree_under_their_numbers(trace):
    # The same model with its experts in another order.
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    renamed = []
    for layer in trace.encoder.layers:
        renamed.append(layer._replace(first=order[layer.first.long()].to(torch.int8)))
    other = trace._replace(encoder=trace.encoder._replace(layers=tuple(renamed)))
    numbers = order.argsort().tolist()
    matching = {("encoder", 0): numbers, ("encoder", 1): numbers}
    content = content_of(view_of(trace, other=other, matching=matching))
    assert all(row["same"] == row["num_tokens"] for row in content["agreement"])
    assert content["models"][1]["matches"][0] == numbers
    assert content["models"][1]["matches"][2] == []

    plain = content_of(view_of(trace, other=other))["agreement"]
    assert plain[0]["same"] < plain[0]["num_tokens"]


def test_models_that_read_different_texts_are_refused(trace):
    with pytest.raises(DataError, match=r"read different texts: 12 and 4 examples"):
        view_of(trace, other=tiny_trace(1))


# ---------------------------------------------------------------------------
# Wrong input


def test_a_dense_model_has_nothing_to_show():
    with pytest.raises(DataError, match="has no sparse layer, so there is no routing to show"):
        dense = tiny_trace(1, num_best=0, **DENSE)
        view_of(dense)


def test_statistics_of_other_layers_or_experts_are_refused(trace):
    bar = AblationBar("decoder", 9, 0, 0, 0, 0, "")
    with pytest.raises(ConfigError, match=r"a layer of statistics is .*decoder"):
        view_of(trace, ablation=[bar])
    with pytest.raises(ConfigError, match=r"expert of an ablation is 7; .* 0 to 6"):
        view_of(trace, ablation=[bar._replace(layer=0, expert=7)])
