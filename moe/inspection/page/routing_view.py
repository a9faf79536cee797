"""The routing view: one interactive page on the routing of a text.

It needs no other file and no network, and notebooks display it.
"""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from moe.errors import DataError
from moe.files import output_path, write_text
from moe.inspection.figures import COLOURS
from moe.inspection.html_page import render_page
from moe.inspection.page.panel_data import AblationBar, LayerClasses, check_statistics
from moe.inspection.page.trace_content import (
    Shown,
    agreements,
    model_totals,
    script_json,
    shown_content,
)
from moe.inspection.tables import loss_sentence
from moe.parsing import printable
from moe.sparse.editing import STACKS, LayerKey
from moe.tracing.trace import Trace, layer_name

MOST_BYTES = 5_000_000

GENERATOR = "stmoe routing_view"

_SCRIPTS = (
    "view_data.js",
    "view_text.js",
    "view_experts.js",
    "view_charts.js",
    "view_flow.js",
    "view_tables.js",
    "view_page.js",
)
_FRAME_HEIGHT = 860  # pixels, in a notebook

# The reserved space, as examples differ in length; and the tokens of an example below which its
# start is not worth showing.
_MARGIN = 0.99
_FEWEST_TOKENS = 16


@dataclass(frozen=True)
class RoutingView:
    """A page, which notebooks display.

    Attributes:
        html: The whole page.
    """

    html: str

    def save(self, path: Path | str) -> Path:
        """Writes the page, whole or not at all, and returns where it is.

        Args:
            path: The .html file; an existing one is replaced.

        Raises:
            ConfigError: When it is not the path of an .html file, or is inside a finished folder.
        """
        page = output_path(path, suffix=".html", option="path")
        write_text(page, self.html)
        return page

    def _repr_html_(self) -> str:
        # A frame isolates styles, and its content cannot access anything outside.
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
    ablation: Sequence[AblationBar] = (),
    title: str = "",
    most_bytes: int = MOST_BYTES,
) -> RoutingView:
    """Returns the page on a trace; panels without data are left out.

    It shows as many evenly chosen examples as fit; tables and totals cover all of them.

    Args:
        trace: Trace of the model; with `num_best` it also has probabilities to show.
        tokenizer: Names the tokens.
        other: Trace of another model on the same text, to show next to it.
        matching: For layers of the other model, the number that each expert has in the first model,
            -1 for none. By default experts of the same number correspond.
        classes: Class by expert.
        ablation: Effects of the ablation of experts on the loss, in display order.
        title: Heading of the page; by default it names the model.
        most_bytes: Maximum size of the page.

    Raises:
        ConfigError: When statistics are of layers or experts that the trace does not have.
        DataError: When there is no sparse layer, the other model read another text, or not even the
            start of one example fits.
    """
    # Reject invalid arguments before building anything.
    if not trace.layers:
        raise DataError(
            "The trace has no sparse layer, so there is no routing to show. Trace a model that has experts."
        )
    check_statistics(trace, classes, ablation)
    matching = matching or {}
    if other is not None and other.facts.inputs_fingerprint != trace.facts.inputs_fingerprint:
        raise DataError(
            f"The two models read different texts: {trace.facts.num_examples:,} and {other.facts.num_examples:,} "
            "examples of different tokens. Trace both with the same examples and the same tokenizer."
        )

    # Totals over all tokens; tables without rows and points without a value are left out.
    traces = [trace] if other is None else [trace, other]
    models = [model_totals(trace, {})]
    if other is not None:
        models.append(model_totals(other, matching))
    totals = {
        "num_examples": trace.facts.num_examples,
        "agreement": agreements(trace, other, matching) if other is not None else [],
        "classes": [table for table in classes if table.rows],
        "ablation": ablation,
    }
    contents = {
        "text": True,
        "agreement": totals["agreement"],
        "classes": totals["classes"],
        "load": True,
        "flow": any(model["flows"] for model in models),
        "ablation": totals["ablation"],
        "source": True,
    }
    panels = [name for name, content in contents.items() if content]

    # The page may run only this script, and load nothing.
    templates = files("moe.inspection").joinpath("templates")
    script = "".join(templates.joinpath(name).read_text(encoding="utf-8") for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )

    def render(shown: Shown) -> str:
        return render_page(
            "inspection.html",
            title=printable(title or _title(traces)),
            generator=GENERATOR,
            panels=panels,
            facts=list(map(_facts, traces)),
            hues=COLOURS,
            policy=policy,
            script=script,
            two_models=other is not None,
            data=script_json({**totals, **shown_content(traces, models, tokenizer, shown)}),
        )

    return RoutingView(_fitting_page(render, trace, most_bytes))


def _name(trace: Trace) -> str:
    return trace.facts.model or "a model in memory"


def _title(traces: Sequence[Trace]) -> str:
    return f"Where the tokens go in {' and in '.join(map(_name, traces))}"


def _facts(trace: Trace) -> list[tuple[str, str]]:
    """Returns the known facts of a trace as names and texts."""
    facts = trace.facts
    layers = []
    for layer in trace.layers:
        experts = f"{layer.facts.num_experts} experts, {layer.facts.router}"
        layers.append(f"{layer_name(layer.key)} ({experts})")
    in_encoder = f"{trace.encoder.ids.numel():,} in the encoder"
    in_decoder = f"{trace.decoder.ids.numel():,} in the decoder"
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
    # Unknown facts have no row.
    return [(name, printable(text)) for name, text in rows if text]


# ---------------------------------------------------------------------------
# How much text fits


def _fitting_page(render: Callable[[Shown], str], trace: Trace, most_bytes: int) -> str:
    """Returns the page with as many examples as fit, evenly chosen.

    Args:
        render: Makes the page that shows some examples.
        trace: Their trace.
        most_bytes: Largest size of the page.

    Raises:
        DataError: When not even the start of one example fits.
    """
    num_examples = trace.facts.num_examples
    bare_size = len(render(Shown([], None)).encode())
    room = most_bytes - bare_size
    if room <= 0:
        raise DataError(
            f"The page is limited to {most_bytes:,} bytes, but its tables alone take {bare_size:,}. Give a larger "
            "most_bytes, or fewer classes, steps or bars."
        )

    # Too large a page tells how many fit; some examples are longer than others.
    number = num_examples
    while number:
        examples = torch.arange(number) * num_examples // number
        page = render(Shown(examples.tolist(), None))
        size = len(page.encode())
        if size <= most_bytes:
            return page
        number = min(number - 1, int(_MARGIN * room * number / (size - bare_size)))

    # The start of the first example.
    most_tokens = max(int(trace.stack(stack).starts[1]) for stack in STACKS)
    while most_tokens >= _FEWEST_TOKENS:
        page = render(Shown([0], most_tokens))
        if len(page.encode()) <= most_bytes:
            return page
        most_tokens //= 2
    raise DataError(
        f"The page is limited to {most_bytes:,} bytes, too few for {_FEWEST_TOKENS} tokens of an example. Give a "
        "larger most_bytes."
    )
