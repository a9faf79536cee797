"""Plots as SVG text, to stand inside a page."""

import io
import math
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

Lines = Sequence[dict[str, Any]]
"""Lines of a metrics.jsonl."""

# Okabe and Ito's colours, which colour-blind people tell apart.
_BLUE, _ORANGE, _GREEN, _PINK, _GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666"
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "moe",
    "font.family": "sans-serif",
}


def plot_pretraining(lines: Lines) -> str:
    """Returns the losses of a pre-training run over steps, with the line that a unigram model would reach."""
    figure, axes = _figure("step", "cross-entropy (nats per token)")
    _curve(axes, lines, "train/ce_loss", _GREY, "training, all targets", alpha=0.5)
    _curve(axes, lines, "heldout/loss", _BLUE, "held-out, all targets", marker="o")
    _curve(axes, lines, "heldout/text_loss", _ORANGE, "held-out, text tokens", marker="s")
    entropy = _values(lines, "heldout/unigram_entropy")[1]
    if entropy:
        axes.axhline(entropy[-1], color=_GREEN, linestyle="--", label=f"unigram entropy of text, {entropy[-1]:.2f}")
    axes.legend()
    return _svg(figure)


def plot_finetuning(stages: dict[str, Lines]) -> str:
    """Returns the share of right target tokens on validation data over steps, a curve for each stage."""
    figure, axes = _figure("step", "right target tokens")
    for (name, lines), colour in zip(stages.items(), (_BLUE, _ORANGE, _GREEN, _PINK), strict=False):
        _curve(axes, lines, "heldout/token_accuracy", colour, name, marker="o")
    axes.set_ylim(0, 1)
    axes.legend()
    return _svg(figure)


def plot_router(lines: Lines, metric: str, label: str, *, bound: tuple[float, str] | None = None) -> str:
    """Returns a router metric of both stacks over steps.

    Args:
        lines: Of a run.
        metric: Its name behind `router/encoder/`.
        label: Of the vertical axis, with its unit.
        bound: A horizontal line and its label.
    """
    figure, axes = _figure("step", label, height=2.6)
    _curve(axes, lines, f"router/encoder/{metric}", _BLUE, "encoder")
    _curve(axes, lines, f"router/decoder/{metric}", _ORANGE, "decoder")
    if bound:
        axes.axhline(bound[0], color=_GREEN, linestyle="--", label=bound[1])
    axes.set_ylim(bottom=0)
    axes.legend()
    return _svg(figure)


def plot_load(names: Sequence[str], shares: Sequence[Sequence[float]]) -> str:
    """Returns a heat map: a row for each sparse layer, a column for each expert, its share of the load in per cent."""
    num_experts = max(map(len, shares))
    with rc_context({**_STYLE, "axes.grid": False}):
        figure = Figure(figsize=(7.4, 0.9 + 0.55 * len(names)), layout="constrained")
        axes = figure.subplots()
        most = max(2 / num_experts, *map(max, shares))
        axes.imshow(shares, cmap="cividis", vmin=0, vmax=most, aspect="auto")
        axes.set_yticks(range(len(names)), names)
        axes.set_xticks(range(num_experts), [str(expert + 1) for expert in range(num_experts)])
        axes.set_xlabel("expert")
        for row, values in enumerate(shares):
            for column, share in enumerate(values):
                colour = "black" if share > most / 2 else "white"
                axes.text(column, row, f"{100 * share:.0f} %", ha="center", va="center", color=colour)
    return _svg(figure)


def even_entropy(num_experts: int) -> float:
    """Returns ln E: the entropy in nats of a router that prefers no expert."""
    return math.log(num_experts)


def _figure(x_label: str, y_label: str, height: float = 3.6) -> tuple[Figure, Axes]:
    """Returns an empty figure with named axes."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(7.4, height), layout="constrained")
        axes = figure.subplots()
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
    return figure, axes


def _curve(axes: Axes, lines: Lines, name: str, colour: str, label: str, **style: Any) -> None:
    """Draws one metric over steps, if it is there."""
    steps, values = _values(lines, name)
    if steps:
        axes.plot(steps, values, color=colour, label=label, markersize=4, **style)


def _values(lines: Lines, name: str) -> tuple[list[int], list[float]]:
    """Returns the steps and values of a metric."""
    found = [(line["step"], line[name]) for line in lines if name in line]
    return [step for step, _ in found], [value for _, value in found]


def _svg(figure: Figure) -> str:
    """Returns the figure as an <svg> element."""
    text = io.StringIO()
    with rc_context(_STYLE):
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
