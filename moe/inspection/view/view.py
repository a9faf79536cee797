"""The routing view: one interactive page on where the tokens of a text went.

It needs no other file and no network, and shows itself in a notebook.
"""

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from moe.checks import check, check_integer
from moe.errors import DataError
from moe.files import output_path, write_text
from moe.inspection.figures import COLOURS
from moe.inspection.html_page import render_page
from moe.inspection.tables import loss_sentence
from moe.inspection.view.view_content import ModelContent, PageContent, script_json
from moe.inspection.view.view_data import (
    AblationBar,
    LayerClasses,
    SaturationPoint,
    check_statistics,
)
from moe.inspection.view.view_size import fitting_page
from moe.inspection.view.view_trace import (
    Shown,
    agreements,
    flows,
    layer_tokens,
    layer_totals,
    shown_rows,
    shown_text,
)
from moe.parsing import printable
from moe.sparse.editing import LayerKey
from moe.tracing.trace import STACKS, Trace, layer_name

MOST_BYTES = 5_000_000

GENERATOR = "stmoe routing_view"

# The eighth colour of Okabe and Ito; number 8 of 8 experts is then unlike number 1.
_HUES = (*COLOURS, "#F0E442")
_STYLES = ("routing_view.css", "view_charts.css")
_SCRIPTS = (
    "view_data.js",
    "view_text.js",
    "view_experts.js",
    "view_charts.js",
    "view_flow.js",
    "view_curves.js",
    "view_tables.js",
    "view_page.js",
)
_FRAME_HEIGHT = 860  # pixels, in a notebook


@dataclass(frozen=True)
class RoutingView:
    """A page; in a notebook it shows itself.

    Attributes:
        html: The whole page.
    """

    html: str

    def save(self, path: Path | str) -> Path:
        """Writes the page, whole or not at all, and returns where it is.

        Args:
            path: The .html file; one that is there is replaced.

        Raises:
            ConfigError: When it is no path of an .html file, or lies in a folder that is finished.
        """
        page = output_path(path, suffix=".html", option="path")
        write_text(page, self.html)
        return page

    def _repr_html_(self) -> str:
        # A frame keeps styles apart, and what is in it can reach nothing outside.
        return (
            f'<iframe srcdoc="{escape(self.html)}" sandbox="allow-scripts" title="Routing view" '
            f'style="width: 100%; height: {_FRAME_HEIGHT}px; border: 0"></iframe>'
        )


def routing_view(
    trace: Trace,
    tokenizer: PreTrainedTokenizerBase,
    *,
    other: Trace | None = None,
    matching: Mapping[LayerKey, Sequence[int]] | None = None,
    classes: Sequence[LayerClasses] = (),
    saturation: Sequence[SaturationPoint] = (),
    ablation: Sequence[AblationBar] = (),
    title: str = "",
    most_bytes: int = MOST_BYTES,
) -> RoutingView:
    """Returns the page on a trace; a part whose numbers are not given is not on it.

    As many examples are shown as fit, evenly chosen; tables and totals are of all.

    Args:
        trace: What the model did; recorded with `num_best` it has probabilities to show.
        tokenizer: Names the tokens.
        other: What another model did with the same text, to stand beside it.
        matching: For layers of the other model, the number that each expert has in the first model,
            -1 for none. Without it experts of the same number are the same.
        classes: Class by expert.
        saturation: How choices approached those of the last checkpoint.
        ablation: What the ablation of experts does to the loss, in the order to be shown.
        title: Heading of the page; by default it names the model.
        most_bytes: Largest size of the page.

    Raises:
        ConfigError: When statistics are of layers or experts that there are not.
        DataError: When there is no sparse layer, the other model read another text, or not even the
            start of one example fits.
    """
    # What can be refused before anything is built.
    check_integer("most_bytes", most_bytes, least=1)
    if not trace.layers:
        raise DataError(
            "The trace has no sparse layer, so there is no routing to show. Trace a model that has experts."
        )
    facts = {layer.key: layer.facts for layer in trace.layers}
    check_statistics(facts, classes, saturation, ablation)
    matching = matching or {}
    if other is not None:
        _check_same_text(trace, other)
    _check_matching(trace, other, matching)

    # A table without rows, and a point without a value, show nothing.
    classes = [table for table in classes if table.rows]
    saturation = [point for point in saturation if math.isfinite(point.value)]

    # What is counted over all tokens.
    models = [_model(trace, {})]
    agreement = []
    if other is not None:
        models.append(_model(other, matching))
        agreement = agreements(trace, other, matching)

    # The text, as far as there is room for it.
    page = _Page(
        title=title or _title(trace, other),
        traces=[trace] if other is None else [trace, other],
        tokenizer=tokenizer,
        totals=PageContent(
            num_examples=trace.facts.num_examples,
            models=models,
            agreement=agreement,
            classes=classes,
            saturation=saturation,
            ablation=ablation,
        ),
    )
    return RoutingView(fitting_page(page.render, trace, most_bytes))


@dataclass(frozen=True)
class _Page:
    """The page but for the choice of what is shown token by token."""

    title: str
    traces: Sequence[Trace]
    tokenizer: PreTrainedTokenizerBase
    totals: PageContent

    def render(self, shown: Shown) -> str:
        trace = self.traces[0]
        text = shown_text(trace, self.tokenizer, shown)

        # What each layer of each model did with these tokens.
        models = []
        for traced, model in zip(self.traces, self.totals.models, strict=True):
            tokens = []
            for layer in traced.layers:
                rows = shown_rows(traced.stack(layer.facts.stack), shown)
                tokens.append(layer_tokens(layer, rows))
            models.append(replace(model, tokens=tokens))

        # Which examples these are.
        numbers = list(shown.examples)
        names = trace.facts.domains
        domains = [names[number] for number in trace.domain[numbers].tolist()]
        content = replace(
            self.totals,
            examples=numbers,
            documents=trace.document[numbers].tolist(),
            domains=domains,
            texts=text.texts,
            ids=text.ids,
            stacks=text.stacks,
            models=models,
        )
        return self._page(content)

    def _page(self, content: PageContent) -> str:
        # Only this script may run, and nothing may be loaded.
        script = "".join(_read(name) for name in _SCRIPTS)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = (
            f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
            "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
        )
        return render_page(
            "routing_view.html",
            title=printable(self.title),
            generator=GENERATOR,
            policy=policy,
            hues=_HUES,
            style="".join(map(_read, _STYLES)),
            script=script,
            facts=[_facts(traced) for traced in self.traces],
            has_flows=any(model.flows for model in content.models),
            content=content,
            data=script_json(content),
        )


def _model(trace: Trace, matching: Mapping[LayerKey, Sequence[int]]) -> ModelContent:
    layers = []
    matches = []
    for layer in trace.layers:
        layers.append(layer_totals(layer))
        matches.append(list(matching.get(layer.key, ())))
    return ModelContent(name=_name(trace), layers=layers, flows=flows(trace), matches=matches)


def _name(trace: Trace) -> str:
    return trace.facts.model or "a model in memory"


def _title(trace: Trace, other: Trace | None) -> str:
    if other is None:
        return f"Where the tokens go in {_name(trace)}"
    return f"Where the tokens go in {_name(trace)} and in {_name(other)}"


def _facts(trace: Trace) -> list[tuple[str, str]]:
    """Returns names and texts of what is known of a trace, as far as it is known."""
    facts = trace.facts
    in_encoder = f"{trace.encoder.ids.numel():,} in the encoder"
    in_decoder = f"{trace.decoder.ids.numel():,} in the decoder"

    # Layers differ in experts and routers.
    layers = []
    for layer in trace.layers:
        experts = f"{layer.facts.num_experts} experts, {layer.facts.router}"
        layers.append(f"{layer_name(layer.key)} ({experts})")

    rows = [
        ("model", _name(trace)),
        ("fingerprint", facts.model_fingerprint),
        ("sparse layers", ", ".join(layers)),
        ("text", facts.text),
        ("loss", loss_sentence(trace)),
        ("examples", f"{facts.num_examples:,}"),
        ("tokens", f"{in_encoder}, {in_decoder}"),
        ("hash of the input", facts.inputs_fingerprint),
        ("recorded by", facts.command),
        ("with", f"stmoe {facts.library}"),
    ]
    # An unknown fact has no row.
    return [(name, printable(text)) for name, text in rows if text]


def _read(name: str) -> str:
    return files("moe.inspection").joinpath("templates", name).read_text(encoding="utf-8")


def _check_same_text(trace: Trace, other: Trace) -> None:
    """Raises a DataError unless both models read the same tokens."""
    same = True
    for stack in STACKS:
        part = trace.stack(stack)
        other_part = other.stack(stack)
        same = same and torch.equal(part.ids, other_part.ids)
        same = same and torch.equal(part.starts, other_part.starts)
    if same:
        return

    # The hashes tell which trace is which.
    raise DataError(
        f"The two models read different texts: {trace.facts.num_examples:,} and {other.facts.num_examples:,} examples "
        f"with the hashes {trace.facts.inputs_fingerprint[:12]} and {other.facts.inputs_fingerprint[:12]}. Trace both "
        "with the same examples and the same tokenizer."
    )


def _check_matching(
    trace: Trace, other: Trace | None, matching: Mapping[LayerKey, Sequence[int]]
) -> None:
    """Raises a ConfigError unless each layer of a matching has a number for each expert."""
    known = {} if other is None else {layer.key: layer.facts for layer in other.layers}
    firsts = {layer.key: layer.facts for layer in trace.layers}
    for key, numbers in matching.items():
        expected = "layers of `other` that `trace` has too"
        check(key in known and key in firsts, "a layer of matching", key, expected)

        num_experts = known[key].num_experts
        reason = f"{num_experts} numbers, one for each expert of {layer_name(key)} of `other`"
        check(len(numbers) == num_experts, f"matching of {key}", list(numbers), reason)
        for number in numbers:
            check_integer(
                f"a number in the matching of {key}",
                number,
                least=-1,
                most=firsts[key].num_experts - 1,
                reason="it is the last expert of the first model",
            )
