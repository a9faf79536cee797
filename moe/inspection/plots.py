"""Plots as SVG text, to stand inside a page."""

import io
import math
from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from moe.inspection.report_data import LOSSES, Line, Stage

# Okabe and Ito's colours, which colour-blind people tell apart.
_BLUE, _ORANGE, _GREEN, _PINK, _GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666"
_LABELLED_EXPERTS = 16
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


def has_curves(lines: Sequence[Line]) -> bool:
    """Returns whether a run measured anything that `plot_training` shows."""
    return any(name in LOSSES or name.startswith("router/") for line in lines for name in line)


def plot_training(lines: Sequence[Line], num_experts: int | None = None) -> str:
    """Returns the losses of a run over steps and, where it measured them, what its routers did
    meanwhile.

    Args:
        lines: Of the run; losses of it, router metrics, or both.
        num_experts: Of its sparse layers, for a line at the largest entropy; None when it is not
            known.
    """
    with_losses = any(name in line for line in lines for name in LOSSES)
    with_routers = any("router/" in name for line in lines for name in line)
    rows: list[Any] = [["loss", "loss"]] * with_losses + [["entropy", "dropped"]] * with_routers
    with rc_context(_STYLE):
        heights = [3.4] * with_losses + [2.4] * with_routers
        figure = Figure(figsize=(7.8, sum(heights)), layout="constrained")
        panels = figure.subplot_mosaic(rows, height_ratios=heights)
        if with_losses:
            _draw_losses(panels["loss"], lines)
        if with_routers:
            _draw_router(panels["entropy"], lines, "entropy", "router entropy (nats)")
            if num_experts:
                most = even_entropy(num_experts)
                label = f"most possible, ln {num_experts} = {most:.2f}"
                panels["entropy"].axhline(most, color=_GREEN, linestyle="--", label=label)
            _draw_router(panels["dropped"], lines, "fraction_dropped", "share of tokens dropped")
            for name in ("entropy", "dropped"):
                panels[name].set_ylim(bottom=0)
                _add_legend(panels[name])
    return _svg(figure)


def plot_accuracy(stages: Sequence[Stage]) -> str:
    """Returns the share of held-out target tokens that each run predicts right, over steps."""
    styles = [
        (colour, dash) for dash in ("-", "--", ":") for colour in (_BLUE, _ORANGE, _GREEN, _PINK)
    ]
    with rc_context(_STYLE):
        figure = Figure(figsize=(7.8, 3.0), layout="constrained")
        axes = figure.subplots()
        axes.set_xlabel("step")
        axes.set_ylabel("share of target tokens right")
        for number, stage in enumerate(stages):
            colour, dash = styles[number % len(styles)]
            name = stage.name.replace("$", r"\$")  # no formula
            _curve(
                axes,
                stage.lines,
                "heldout/token_accuracy",
                colour,
                name,
                marker="o",
                linestyle=dash,
            )
        axes.set_ylim(0, 1)
        _add_legend(axes)
    return _svg(figure)


def plot_load(names: Sequence[str], shares: Sequence[Sequence[float]]) -> str:
    """Returns a heat map: a row for each sparse layer, a column for each expert, coloured by load
    over even load.

    The colours are the same in every report: white is even, the deepest are half and less, and 1.5
    times and more.
    """
    num_experts = max(map(len, shares))
    with rc_context({**_STYLE, "axes.grid": False}):
        figure = Figure(figsize=(7.8, 1.3 + 0.62 * len(names)), layout="constrained")
        axes = figure.subplots()
        over_even = [[share * len(row) for share in row] for row in shares]
        steps_of_colour = colormaps["RdBu_r"].resampled(
            21
        )  # few enough to be drawn, where more would be an image
        image = axes.pcolormesh(over_even, cmap=steps_of_colour, vmin=0.5, vmax=1.5)
        axes.invert_yaxis()
        axes.set_yticks([row + 0.5 for row in range(len(names))], names)
        axes.set_xlabel("expert")

        if num_experts <= _LABELLED_EXPERTS:
            ticks = range(num_experts)
            for row, values in enumerate(over_even):
                for column, ratio in enumerate(values):
                    colour = "white" if abs(ratio - 1) > 0.38 else "black"
                    label = f"{ratio:.2f} x\n{100 * shares[row][column]:.1f} %"
                    axes.text(
                        column + 0.5,
                        row + 0.5,
                        label,
                        ha="center",
                        va="center",
                        color=colour,
                        fontsize=9,
                    )
        else:
            ticks = range(0, num_experts, -(-num_experts // _LABELLED_EXPERTS))
        axes.set_xticks([expert + 0.5 for expert in ticks], [str(expert + 1) for expert in ticks])

        bar = figure.colorbar(
            image, ax=axes, orientation="horizontal", extend="both", aspect=60, pad=0.02
        )
        bar.set_label(
            f"load over even load (1 x = {100 / num_experts:.1f} % of all slots asked for)"
        )
    return _svg(figure)


def even_entropy(num_experts: int) -> float:
    """Returns ln E: the entropy in nats of a router that prefers no expert."""
    return math.log(num_experts)


def _draw_losses(axes: Axes, lines: Sequence[Line]) -> None:
    """Draws the cross-entropies of a run, and what a model of frequencies alone would reach."""
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy (nats per token)")
    _curve(axes, lines, "train/ce_loss", _GREY, "training, all targets", alpha=0.5)
    _curve(axes, lines, "heldout/loss", _BLUE, "held-out, all targets", marker="o")
    _curve(axes, lines, "heldout/text_loss", _ORANGE, "held-out, text tokens", marker="s")
    entropy = _values(lines, "heldout/unigram_entropy")[1]
    if entropy and math.isfinite(entropy[-1]):
        label = f"token frequencies alone (unigram entropy), {entropy[-1]:.2f}"
        axes.axhline(entropy[-1], color=_GREEN, linestyle="--", label=label)
    _add_legend(axes)


def _draw_router(axes: Axes, lines: Sequence[Line], metric: str, label: str) -> None:
    """Draws a router metric of both stacks."""
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    _curve(axes, lines, f"router/encoder/{metric}", _BLUE, "encoder")
    _curve(axes, lines, f"router/decoder/{metric}", _ORANGE, "decoder")


def _add_legend(axes: Axes) -> None:
    """Adds a legend if there is anything to name."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=9)


def _curve(
    axes: Axes, lines: Sequence[Line], name: str, colour: str, label: str, **style: Any
) -> None:
    """Draws one metric over steps, if it is there; values that are no finite numbers are gaps."""
    steps, values = _values(lines, name)
    if steps:
        axes.plot(steps, values, color=colour, label=label, markersize=4, **style)


def _values(lines: Sequence[Line], name: str) -> tuple[list[float], list[float]]:
    """Returns the steps and values of a metric; NaN for an infinite value."""
    steps = [line["step"] for line in lines if name in line]
    values = [line[name] for line in lines if name in line]
    return steps, [value if math.isfinite(value) else math.nan for value in values]


def _svg(figure: Figure) -> str:
    """Returns the figure as an <svg> element."""
    text = io.StringIO()
    with rc_context(_STYLE):
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
