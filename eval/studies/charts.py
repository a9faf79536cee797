"""Figures of a study as SVG: curves over training, numbers over a sweep, and differences."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from eval.studies.analysis import ContrastResult, StudyResult, by_arm_and_value
from eval.studies.outcomes import RunOutcome
from eval.studies.study import Measure
from moe.inspection.figures import COLOURS, GREY, STYLE, figure_svg

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
        groups = by_arm_and_value(result.outcomes)
        for number, ((arm, value), runs) in enumerate(groups.items()):
            name = f"{arm} at {value}" if value else arm
            _draw_curves(axes, name, runs, _style(number), has_tokens)
        if groups:
            axes.legend(fontsize=8)
    return figure_svg(figure)


def sweep_chart(result: StudyResult) -> str:
    """Returns the number of each arm over the values of the sweep; a cross marks a diverged run."""
    study = result.study
    assert study.sweep is not None
    values = [value for value in study.sweep.values if isinstance(value, int | float)]
    is_numeric = len(values) == len(study.sweep.values)
    with _axes(3.6) as (figure, axes):
        axes.set_xlabel(study.sweep.setting)
        axes.set_ylabel(_label(study.measure.metric, study.measure))
        if is_numeric:
            _set_places(axes, set(values))
        for number, arm in enumerate(study.arms):
            runs = [run for run in result.outcomes if run.arm == arm]
            _draw_sweep(axes, arm, runs, study.sweep.values, _style(number), is_numeric)
        axes.legend(fontsize=8)
    return figure_svg(figure)


def setting_chart(result: StudyResult) -> str:
    """Returns the number of each arm over a setting of the arms; a cross marks a diverged run."""
    study = result.study
    with _axes(4.2) as (figure, axes):
        axes.set_xlabel(study.plot_over)
        axes.set_ylabel(_label(study.measure.metric, study.measure))

        # Arms whose names differ only by the setting are one line.
        lines: dict[str, list[RunOutcome]] = {}
        places: set[float] = set()
        for arm, settings in study.arms.items():
            value = settings[study.plot_over]
            assert isinstance(value, int | float), "checked when read"
            places.add(value)
            line = lines.setdefault(arm.replace(f"-{value}", ""), [])
            line += [run._replace(value=value) for run in result.outcomes if run.arm == arm]
        _set_places(axes, places)
        for number, (line, runs) in enumerate(lines.items()):
            _draw_sweep(axes, line, runs, [], _style(number), is_numeric=True)
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
    """Returns the two arms of a comparison, and where they were compared."""
    contrast = result.contrast
    place = "" if contrast.at is None else f" at {contrast.at}"
    return f"{contrast.arm} vs. {contrast.against}{place}"


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


def _draw_sweep(
    axes: "Axes",
    arm: str,
    runs: Sequence[RunOutcome],
    values: Sequence[object],
    style: tuple[str, str],
    is_numeric: bool,
) -> None:
    """Draws the numbers of one arm over the sweep."""
    colour, dash = style
    # Dots are runs; values that are not numeric are placed side by side.
    numbers: dict[float, list[float]] = {}
    for run in runs:
        x = float(run.value) if is_numeric else float(values.index(run.value))  # type: ignore[arg-type]
        numbers.setdefault(x, []).append(run.number)
        marker = "x" if run.has_diverged else "."
        axes.plot([x], [run.number], marker, color=colour)

    # A line through the means.
    xs = sorted(numbers)
    means = [statistics.fmean(numbers[x]) for x in xs]
    axes.plot(xs, means, dash, color=colour, label=arm)
    if not is_numeric:
        axes.set_xticks(range(len(values)), [str(value) for value in values])
