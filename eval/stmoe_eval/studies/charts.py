"""Figures of a study as SVG: curves over training, numbers over a setting, and differences."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from moe.inspection.figures import COLOURS, GREY, STYLE, figure_svg
from stmoe_eval.studies.analysis import ContrastResult, StudyResult, by_arm
from stmoe_eval.studies.outcomes import RunOutcome
from stmoe_eval.studies.study import Measure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DASHES = ("-", "--", ":")  # one for each round of the colours
_WIDTH = 7.8  # inches


def curves_chart(result: StudyResult) -> str:
    """Returns the metric of the curves over tokens or steps: each seed thin, the mean of an arm bold."""
    # Tokens compare runs of different batches; fine-tuning has only steps.
    has_tokens = all(run.tokens for run in result.outcomes)
    measure = result.study.measure
    with _axes(4.2) as (figure, axes):
        axes.set_xlabel("training tokens (millions)" if has_tokens else "training step")
        axes.set_ylabel(_label(measure.curve or measure.metric, measure))
        groups = by_arm(result.outcomes)
        for number, (arm, runs) in enumerate(groups.items()):
            _draw_curves(axes, arm, runs, _style(number), has_tokens)
        if groups:
            axes.legend(fontsize=8)
    return figure_svg(figure)


def setting_chart(result: StudyResult) -> str:
    """Returns the number of each arm over a setting of the arms; a cross marks a diverged run."""
    study = result.study
    with _axes(4.2) as (figure, axes):
        axes.set_xlabel(study.plot_over)
        axes.set_ylabel(_label(study.measure.metric, study.measure))

        # Arms whose names differ only by the setting are one line.
        runs_by_arm = by_arm(result.outcomes)
        lines: dict[str, dict[float, list[RunOutcome]]] = {}
        places: set[float] = set()
        for arm, settings in study.arms.items():
            value = settings[study.plot_over]
            assert isinstance(value, int | float), "checked when read"
            places.add(value)
            if arm in runs_by_arm:
                lines.setdefault(arm.replace(f"-{value}", ""), {})[value] = runs_by_arm[arm]
        _set_places(axes, places)
        for number, (name, runs_by_value) in enumerate(lines.items()):
            _draw_line(axes, name, runs_by_value, _style(number))
        axes.legend(fontsize=8)
    return figure_svg(figure)


def contrasts_chart(contrasts: Sequence[ContrastResult], unit: str) -> str:
    """Returns each difference, in a unit, with its 95 % interval; right of zero the first arm is better."""
    with _axes(0.9 + 0.36 * len(contrasts)) as (figure, axes):
        axes.axvline(0, color=GREY, linewidth=1)
        has_interval = any(result.low is not None for result in contrasts)
        interval = ", with 95 % interval" if has_interval else ""
        axes.set_xlabel(f"first arm better by ({unit or 'unit of the metric'}){interval}")

        # The primary comparison has its own colour.
        for row, result in enumerate(contrasts):
            colour = COLOURS[1] if result.is_primary else COLOURS[0]
            axes.plot([result.difference], [row], "o", color=colour)
            if result.low is not None and result.high is not None:
                axes.plot([result.low, result.high], [row, row], color=colour)
        axes.set_yticks(range(len(contrasts)), list(map(contrast_name, contrasts)))
        axes.invert_yaxis()
    return figure_svg(figure)


@contextmanager
def _axes(height: float) -> Iterator[tuple["Figure", "Axes"]]:
    """Yields a new figure, `height` inches high, and its axes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        yield figure, figure.subplots()


def contrast_name(result: ContrastResult) -> str:
    """Returns the two arms of a comparison."""
    return f"{result.contrast.arm} vs. {result.contrast.against}"


def _label(metric: str, measure: Measure) -> str:
    """Returns a metric of a study with its unit."""
    unit = "nats per token" if metric.endswith("loss") else measure.value_unit
    return f"{metric} ({unit})" if unit else metric


def _set_places(axes: "Axes", places: set[float]) -> None:
    """Marks the values of a setting on the horizontal axis, logarithmic unless one is below 0."""
    if min(places) > 0:
        axes.set_xscale("log")
    elif min(places) == 0:
        axes.set_xscale("symlog", linthresh=min(places - {0}, default=1))
    axes.set_xticks(sorted(places), [f"{place:g}" for place in sorted(places)])
    axes.minorticks_off()


def _style(number: int) -> tuple[str, str]:
    """Returns colour and dash of the arm of that number."""
    dash = _DASHES[number // len(COLOURS) % len(_DASHES)]
    return COLOURS[number % len(COLOURS)], dash


def _draw_curves(
    axes: "Axes", name: str, runs: Sequence[RunOutcome], style: tuple[str, str], has_tokens: bool
) -> None:
    """Draws the curves of one arm."""
    colour, dash = style
    # Each seed as a thin line.
    values_by_x: dict[float, list[float]] = {}
    for run in runs:
        scale = 1.0
        if has_tokens and run.tokens is not None:
            scale = run.tokens / run.steps / 1e6
        xs: list[float] = []
        ys: list[float] = []
        for point in run.curve:
            if point.value is not None:
                xs.append(point.step * scale)
                ys.append(point.value)
        axes.plot(xs, ys, dash, color=colour, linewidth=0.6, alpha=0.5)
        for x, y in zip(xs, ys, strict=True):
            values_by_x.setdefault(x, []).append(y)

    # The mean where every seed has a value.
    xs = []
    means = []
    for x in sorted(values_by_x):
        if len(values_by_x[x]) == len(runs):
            xs.append(x)
            means.append(statistics.fmean(values_by_x[x]))
    axes.plot(xs, means, dash, color=colour, linewidth=1.8, label=name)


def _draw_line(
    axes: "Axes", name: str, runs_by_value: dict[float, list[RunOutcome]], style: tuple[str, str]
) -> None:
    """Draws numbers over a setting: dots are runs, the line goes through their means."""
    colour, dash = style
    for value, runs in runs_by_value.items():
        for run in runs:
            marker = "x" if run.has_diverged else "."
            axes.plot([value], [run.number], marker, color=colour)

    values = sorted(runs_by_value)
    means = []
    for value in values:
        means.append(statistics.fmean(run.number for run in runs_by_value[value]))
    axes.plot(values, means, dash, color=colour, label=name)
