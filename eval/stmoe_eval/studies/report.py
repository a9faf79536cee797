"""study.json for programs, study.md and study.html for people: three views of one result.

Comes after `analysis`.
"""

import json
import statistics
from pathlib import Path

from moe.files import write_text
from moe.inspection.html_page import render_page
from moe.parsing import read_record, to_json
from stmoe_eval.reports.formatting import markdown_list, markdown_table
from stmoe_eval.studies.analysis import ContrastResult, StudyResult, by_arm
from stmoe_eval.studies.charts import contrast_name, contrasts_chart, curves_chart, setting_chart
from stmoe_eval.studies.outcomes import RunOutcome

STUDY_JSON = "study.json"

_TEMPLATES = Path(__file__).parent / "templates"
_ROUTER_METRICS = {
    "fraction_dropped": "dropped tokens (%)",
    "dead_experts": "dead experts",
    "load_cv": "load CV",
    "entropy": "entropy (nats)",
    "router_z_loss": "router z-loss",
}
_ROUTER_HEADER = ("arm", "stack", *_ROUTER_METRICS.values())


def read_result(path: Path) -> StudyResult:
    """Returns the result in a file study.json.

    Raises:
        DataError: When the file is missing or damaged.
    """
    return read_record(path, StudyResult, advice="Make it again with --report.")


def write_report(result: StudyResult, out: Path) -> None:
    """Writes study.json, study.md and study.html."""
    content = to_json(result)
    write_text(out / STUDY_JSON, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    write_text(out / "study.md", study_markdown(result))
    write_text(out / "study.html", study_html(result))


def result_lines(result: StudyResult) -> list[str]:
    """Returns the printed text: a line for each comparison, and notes about the runs."""
    unit = result.study.measure.unit
    lines = []
    for item in result.contrasts:
        line = f"{contrast_name(item)}: better by {item.difference:+.4g} {unit} ({interval_text(item)})"
        if item.low is not None:
            line += f", {seeds_text(item.num_seeds)}: {item.verdict_text}"
        lines.append(line)
    return [*lines, *run_notes(result)]


def study_markdown(result: StudyResult) -> str:
    """Returns the claim, the comparisons and the numbers of all runs as Markdown."""
    study = result.study
    lines = [f"# {study.title}", "", f"**Claim.** {study.claim}", ""]
    lines += [f"**The paper.** {study.paper}", ""]
    lines += [f"**Expected**, before the first run. {study.expected}", ""]
    lines += [*markdown_table(contrast_header(result), contrast_rows(result)), ""]
    lines += [*markdown_table(arm_header(result), arm_rows(result)), ""]

    # Dense models have no routers.
    routers = router_rows(result)
    if routers:
        lines += ["Routers at the end of training, mean over seeds:", ""]
        lines += [*markdown_table(_ROUTER_HEADER, routers), ""]
    lines += [*markdown_list(notes(result)), "", "```bash", result.command, "```", ""]
    return "\n".join(lines)


def study_html(result: StudyResult) -> str:
    """Returns the same as one page, with curves."""
    return render_page(
        "study.html",
        _TEMPLATES,
        title=result.study.title,
        study=result.study,
        notes=notes(result),
        contrast_header=contrast_header(result),
        contrast_rows=contrast_rows(result),
        contrast_chart=contrasts_chart(result.contrasts, result.study.measure.unit)
        if result.contrasts
        else "",
        arm_header=arm_header(result),
        arm_rows=arm_rows(result),
        router_header=_ROUTER_HEADER,
        router_rows=router_rows(result),
        curves=curves_chart(result) if any(run.curve for run in result.outcomes) else "",
        over_setting=setting_chart(result) if result.study.plot_over else "",
        command=result.command,
        versions=", ".join(f"{name} {version}" for name, version in result.versions.items()),
    )


# ---------------------------------------------------------------------------
# Rows


def contrast_header(result: StudyResult) -> list[str]:
    """Returns the header of `contrast_rows`, with the unit of the differences."""
    unit = f" ({result.study.measure.unit})" if result.study.measure.unit else ""
    numbers = [f"margin{unit}", "seeds", f"better by{unit}", f"95 % interval{unit}"]
    return ["comparison", "expected", *numbers, "p", "p (equal)", "verdict"]


def contrast_rows(result: StudyResult) -> list[list[str]]:
    """Returns a row for each comparison."""
    rows = []
    for item in result.contrasts:
        name = contrast_name(item)
        rows.append(
            [
                f"{name} (primary)" if item.is_primary else name,
                item.contrast.expect,
                f"{item.contrast.margin:g}",
                str(item.num_seeds),
                f"{item.difference:+.4g}",
                interval_text(item),
                _p_text(item.p_value),
                _p_text(item.equivalence_p),
                item.verdict_text,
            ]
        )
    return rows


def arm_header(result: StudyResult) -> list[str]:
    """Returns the header of `arm_rows`, with the unit of the numbers."""
    unit = result.study.measure.value_unit
    numbers = ["seeds", f"mean ({unit})" if unit else "mean", "each seed"]
    sizes = ["parameters", "active parameters", "million tokens", "CPU minutes"]
    return ["arm", *numbers, *sizes]


def arm_rows(result: StudyResult) -> list[list[str]]:
    """Returns a row for each arm."""
    rows = []
    for arm, runs in by_arm(result.outcomes).items():
        mean = statistics.fmean(run.number for run in runs)
        size = result.sizes.get(arm)
        tokens = max(run.tokens or 0 for run in runs)
        minutes = sum(run.cpu_seconds for run in runs) / 60
        rows.append(
            [
                arm,
                str(len(runs)),
                f"{mean:.4g}",
                ", ".join(map(_number_text, runs)),
                f"{size.parameters:,}" if size else "",
                f"{size.active:,}" if size else "",
                f"{tokens / 1e6:.1f}" if tokens else "",
                f"{minutes:.1f}",
            ]
        )
    return rows


def router_rows(result: StudyResult) -> list[list[str]]:
    """Returns the last logged statistics of each arm's routers, mean over seeds."""
    rows = []
    for arm, runs in by_arm(result.outcomes).items():
        for stack in ("encoder", "decoder"):
            cells = []
            for metric in _ROUTER_METRICS:
                name = f"router/{stack}/{metric}"
                values = []
                for run in runs:
                    if name in run.routers:
                        scale = 100 if metric == "fraction_dropped" else 1
                        values.append(scale * run.routers[name])
                if values:
                    cells.append(f"{statistics.fmean(values):.3g}")
            if cells:
                rows.append([arm, stack, *cells])
    return rows


def _number_text(run: RunOutcome) -> str:
    """Returns the number of a run, marked if it has diverged."""
    mark = " (diverged)" if run.has_diverged else ""
    return f"{run.number:.4g}{mark}"


def interval_text(item: ContrastResult) -> str:
    """Returns the 95 % interval of a difference, or why there is none."""
    if item.low is None or item.high is None:
        return "one seed: no interval" if item.num_seeds == 1 else "no spread over seeds"
    return f"{item.low:+.4g} to {item.high:+.4g}"


def seeds_text(number: int) -> str:
    """Returns a description of a number of seeds."""
    return "1 seed" if number == 1 else f"{number} seeds"


def _p_text(p: float | None) -> str:
    return "-" if p is None else f"{p:.2g}"


# ---------------------------------------------------------------------------
# Notes


def notes(result: StudyResult) -> list[str]:
    """Returns how numbers are computed, and which runs are missing or diverged."""
    study = result.study
    seeds = len(study.seeds)
    method = "One planned seed, so differences have no interval and are not tested"
    if seeds > 1:
        method = (
            f"Differences are means over {seeds} planned seeds, with paired Student's t intervals; "
            "p-values of all but the primary comparison are Holm-corrected"
        )
    better = f"A {study.measure.better} {study.measure.metric} is better."
    return [f"{method}. {better}", *run_notes(result)]


def run_notes(result: StudyResult) -> list[str]:
    """Returns the runs that are missing or diverged, and the changed settings."""
    sentences = []
    if result.missing:
        count = len(result.missing)
        sentences.append(f"Missing runs ({count}): {'; '.join(result.missing)}.")

    # Omitted runs are always reported.
    for run in result.outcomes:
        if run.has_diverged:
            sentences.append(f"Diverged: {run.arm}, seed {run.seed}.")
    if result.overrides:
        settings = ", ".join(f"{name} = {value}" for name, value in result.overrides.items())
        sentences.append(f"Changed on the command line: {settings}.")
    return sentences
