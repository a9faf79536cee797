"""Plots of the report, as SVG text."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moe.inspection.figures import BLUE, COLOURS, GREEN, GREY, ORANGE, STYLE, figure_svg
from moe.inspection.report.report_data import LOSSES, Line, Stage, metric_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 7.8  # inches
_LOSS_HEIGHT = 3.4
_ROUTER_HEIGHT = 2.4
_LABELLED_EXPERTS = 16


# ---------------------------------------------------------------------------
# Training


def has_curves(lines: Sequence[Line]) -> bool:
    """Returns whether a run measured anything that `plot_training` shows."""
    return _has_losses(lines) or _has_router_metrics(lines)


def plot_training(lines: Sequence[Line], num_experts: int | None = None) -> str:
    """Returns the losses of a run over steps and, where it measured them, what its routers did.

    Args:
        lines: Lines of the run with losses, router metrics, or both.
        num_experts: Experts of its sparse layers, for a line at the largest entropy; None when that
            is not known.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # One row of panels for the losses, one for the routers.
    rows: list[Any] = []
    heights: list[float] = []
    if _has_losses(lines):
        rows.append(["loss", "loss"])
        heights.append(_LOSS_HEIGHT)
    if _has_router_metrics(lines):
        rows.append(["entropy", "dropped"])
        heights.append(_ROUTER_HEIGHT)

    with rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
        panels = figure.subplot_mosaic(rows, height_ratios=heights)
        if "loss" in panels:
            _draw_losses(panels["loss"], lines)
        if "entropy" in panels:
            _draw_entropy(panels["entropy"], lines, num_experts)
            _draw_dropped(panels["dropped"], lines)
    return figure_svg(figure)


def plot_accuracy(stages: Sequence[Stage]) -> str:
    """Returns the share of held-out target tokens that each run predicts right, over steps."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Runs differ in colour, then in dash.
    styles = []
    for dash in ("-", "--", ":"):
        for colour in COLOURS[:4]:
            styles.append((colour, dash))

    with rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, 3.0), layout="constrained")
        axes = figure.subplots()
        axes.set_xlabel("step")
        axes.set_ylabel("share of target tokens right")
        for number, stage in enumerate(stages):
            colour, dash = styles[number % len(styles)]
            name = stage.name.replace("$", r"\$")  # no formula
            style = {"marker": "o", "linestyle": dash}
            _draw_curve(axes, stage.lines, "heldout/token_accuracy", colour, name, **style)
        axes.set_ylim(0, 1)
        _add_legend(axes)
    return figure_svg(figure)


def even_entropy(num_experts: int) -> float:
    """Returns ln E: the entropy in nats of a router that prefers no expert."""
    return math.log(num_experts)


def _has_losses(lines: Sequence[Line]) -> bool:
    return not metric_names(lines).isdisjoint(LOSSES)


def _has_router_metrics(lines: Sequence[Line]) -> bool:
    return any(name.startswith("router/") for name in metric_names(lines))


def _draw_losses(axes: "Axes", lines: Sequence[Line]) -> None:
    """Draws the cross-entropies of a run, and what a model of frequencies alone would reach."""
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy (nats per token)")
    _draw_curve(axes, lines, "train/ce_loss", GREY, "training, all targets", alpha=0.5)
    _draw_curve(axes, lines, "heldout/loss", BLUE, "held-out, all targets", marker="o")
    _draw_curve(axes, lines, "heldout/text_loss", ORANGE, "held-out, text tokens", marker="s")

    # What is known without a model: the entropy of token frequencies.
    _, entropy = _steps_and_values(lines, "heldout/unigram_entropy")
    if entropy and math.isfinite(entropy[-1]):
        label = f"token frequencies alone (unigram entropy), {entropy[-1]:.2f}"
        axes.axhline(entropy[-1], color=GREEN, linestyle="--", label=label)
    _add_legend(axes)


def _draw_entropy(axes: "Axes", lines: Sequence[Line], num_experts: int | None) -> None:
    """Draws the routers' entropy, below a line at the largest that there is."""
    _draw_router_metric(axes, lines, "entropy", "router entropy (nats)")
    if num_experts:
        largest = even_entropy(num_experts)
        label = f"most possible, ln {num_experts} = {largest:.2f}"
        axes.axhline(largest, color=GREEN, linestyle="--", label=label)
    axes.set_ylim(bottom=0)
    _add_legend(axes)


def _draw_dropped(axes: "Axes", lines: Sequence[Line]) -> None:
    """Draws the share of tokens that reach no expert."""
    _draw_router_metric(axes, lines, "fraction_dropped", "share of tokens dropped")
    axes.set_ylim(bottom=0)
    _add_legend(axes)


def _draw_router_metric(axes: "Axes", lines: Sequence[Line], metric: str, label: str) -> None:
    """Draws a router metric of both stacks."""
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    _draw_curve(axes, lines, f"router/encoder/{metric}", BLUE, "encoder")
    _draw_curve(axes, lines, f"router/decoder/{metric}", ORANGE, "decoder")


def _draw_curve(
    axes: "Axes", lines: Sequence[Line], name: str, colour: str, label: str, **style: Any
) -> None:
    """Draws one metric over steps, if it is there; values that are no finite numbers are gaps."""
    steps, values = _steps_and_values(lines, name)
    if steps:
        axes.plot(steps, values, color=colour, label=label, markersize=4, **style)


def _steps_and_values(lines: Sequence[Line], name: str) -> tuple[list[float], list[float]]:
    """Returns the steps and values of a metric; NaN for an infinite value."""
    steps = []
    values = []
    for line in lines:
        if name in line:
            steps.append(line["step"])
            values.append(line[name] if math.isfinite(line[name]) else math.nan)
    return steps, values


# ---------------------------------------------------------------------------
# Load


def plot_load(names: Sequence[str], shares: Sequence[Sequence[float]]) -> str:
    """Returns a heat map: a row for each sparse layer, a column for each expert, coloured by load
    over even load.

    The colours are the same in every report: white is even, the deepest are half and less, and 1.5
    times and more.
    """
    from matplotlib import colormaps, rc_context
    from matplotlib.figure import Figure

    num_experts = max(map(len, shares))
    over_even = [load_over_even(row) for row in shares]

    with rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(_WIDTH, 1.3 + 0.62 * len(names)), layout="constrained")
        axes = figure.subplots()
        # Steps of colour are few enough to be drawn, where more would be an image.
        colours = colormaps["RdBu_r"].resampled(21)
        image = axes.pcolormesh(over_even, cmap=colours, vmin=0.5, vmax=1.5)

        # The first layer stands at the top; ticks are in the middle of cells.
        axes.invert_yaxis()
        axes.set_yticks([row + 0.5 for row in range(len(names))], names)
        axes.set_xlabel("expert")

        step = 1
        if num_experts <= _LABELLED_EXPERTS:
            _label_cells(axes, shares, over_even)
        else:
            step = math.ceil(num_experts / _LABELLED_EXPERTS)
        experts = range(0, num_experts, step)
        axes.set_xticks([expert + 0.5 for expert in experts], [str(n + 1) for n in experts])

        bar = figure.colorbar(
            image, ax=axes, orientation="horizontal", extend="both", aspect=60, pad=0.02
        )
        bar.set_label(
            f"load over even load (1 x = {100 / num_experts:.1f} % of all slots asked for)"
        )
    return figure_svg(figure)


def load_over_even(shares: Sequence[float]) -> list[float]:
    """Returns each expert's load over the even load."""
    return [share * len(shares) for share in shares]


def _label_cells(
    axes: "Axes", shares: Sequence[Sequence[float]], over_even: Sequence[Sequence[float]]
) -> None:
    """Writes load over even load, and the share, into each cell of a heat map."""
    for row, ratios in enumerate(over_even):
        for column, ratio in enumerate(ratios):
            axes.text(
                column + 0.5,
                row + 0.5,
                f"{ratio:.2f} x\n{100 * shares[row][column]:.1f} %",
                ha="center",
                va="center",
                color="white" if abs(ratio - 1) > 0.38 else "black",  # on a deep or a pale colour
                fontsize=9,
            )


# ---------------------------------------------------------------------------
# Figures


def _add_legend(axes: "Axes") -> None:
    """Adds a legend if there is anything to name."""
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        axes.legend(fontsize=9)
