"""study.json for programs, study.md and study.html for people: three views of one result.

Comes after `analysis`; `measured` puts the results of several studies on one page.
"""

import json
import statistics
from collections import Counter
from pathlib import Path

from eval.reports.formatting import markdown_list, markdown_table
from eval.studies.analysis import ArmNumber, ContrastResult, StudyResult, by_arm_and_value
from eval.studies.charts import (
    contrast_name,
    contrasts_chart,
    curves_chart,
    setting_chart,
    sweep_chart,
)
from eval.studies.repeats import repeat_sentence
from moe.files import write_text
from moe.inspection.html_page import render_page
from moe.parsing import read_record, to_json

STUDY_JSON = "study.json"

_TEMPLATES = Path(__file__).parent / "templates"
_CONTRAST_HEADER = (
    "comparison",
    "expected",
    "margin",
    "seeds",
    "better by",
    "95 % interval",
    "p",
    "p, equal",
    "verdict",
)
_ROUTER_METRICS = ("fraction_dropped", "dead_experts", "load_cv", "entropy", "router_z_loss")
_ROUTER_HEADER = ("arm", "at", "stack", *_ROUTER_METRICS)
_ARM_HEADER = (
    "arm",
    "at",
    "seeds",
    "mean",
    "each seed",
    "parameters",
    "active",
    "million tokens",
    "CPU minutes",
)


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
    """Returns what is printed: a line for each comparison, and what a reader must know of the runs."""
    unit = result.study.measure.unit
    lines = []
    for item in result.contrasts:
        text = f"{contrast_name(item)}: better by {item.difference:+.4g} {unit}"
        if item.low is None or item.high is None:
            lines.append(f"{text} ({seeds_text(item.num_seeds)}, no interval)")
        else:
            interval = f"95 % interval {interval_text(item)}, {seeds_text(item.num_seeds)}"
            lines.append(f"{text} ({interval}): {item.verdict_text}")
    return [*lines, *run_notes(result)]


def study_markdown(result: StudyResult) -> str:
    """Returns the claim, the comparisons and the numbers of all runs as Markdown."""
    return "\n".join([f"# {result.study.title}", "", *study_body(result), ""])


def study_body(result: StudyResult) -> list[str]:
    """Returns the lines of a study below its title."""
    return [f"**Claim.** {result.study.claim}", "", *study_details(result)]


def study_details(result: StudyResult) -> list[str]:
    """Returns the lines of a study below its claim."""
    study = result.study
    lines = [f"**The paper.** {study.paper}", ""]
    lines += [f"**Expected**, before the first run. {study.expected}", ""]
    lines += [*markdown_table(_CONTRAST_HEADER, contrast_rows(result)), ""]
    lines += [*markdown_table(_ARM_HEADER, arm_rows(result)), ""]

    # Dense models have no routers.
    routers = router_rows(result)
    if routers:
        lines += ["Routers at the end of training, means over seeds:", ""]
        lines += [*markdown_table(_ROUTER_HEADER, routers), ""]
    return [*lines, *markdown_list(notes(result)), "", "```bash", result.command, "```"]


def study_html(result: StudyResult) -> str:
    """Returns the same as one page, with curves."""
    return render_page(
        "study.html",
        _TEMPLATES,
        title=result.study.title,
        study=result.study,
        notes=notes(result),
        contrast_header=_CONTRAST_HEADER,
        contrast_rows=contrast_rows(result),
        contrast_chart=contrasts_chart(result.contrasts) if result.contrasts else "",
        arm_header=_ARM_HEADER,
        arm_rows=arm_rows(result),
        router_header=_ROUTER_HEADER,
        router_rows=router_rows(result),
        curves=curves_chart(result) if any(run.curve for run in result.outcomes) else "",
        sweep=sweep_chart(result) if result.study.sweep else "",
        over_setting=setting_chart(result) if result.study.plot_over else "",
        command=result.command,
        versions=", ".join(f"{name} {version}" for name, version in result.versions.items()),
    )


# ---------------------------------------------------------------------------
# Rows


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


def arm_rows(result: StudyResult) -> list[list[str]]:
    """Returns a row for each arm and value of the sweep."""
    rows = []
    for (arm, value), numbers in by_arm_and_value(result.numbers).items():
        mean = sum(number.number for number in numbers) / len(numbers)
        size = result.sizes.get(arm)
        rows.append(
            [
                arm,
                value,
                str(len(numbers)),
                f"{mean:.4g}",
                ", ".join(map(_number_text, numbers)),
                f"{size.parameters:,}" if size else "",
                f"{size.active:,}" if size else "",
                *_cost(result, arm, value),
            ]
        )
    return rows


def router_rows(result: StudyResult) -> list[list[str]]:
    """Returns what the routers of each arm did in their last logged update, means over seeds."""
    rows = []
    for (arm, value), runs in by_arm_and_value(result.outcomes).items():
        for stack in ("encoder", "decoder"):
            cells = []
            for metric in _ROUTER_METRICS:
                name = f"router/{stack}/{metric}"
                values = []
                for run in runs:
                    if name in run.routers:
                        values.append(run.routers[name])
                if values:
                    cells.append(f"{statistics.fmean(values):.3g}")
            if cells:
                rows.append([arm, value, stack, *cells])
    return rows


def _number_text(number: ArmNumber) -> str:
    """Returns the number of one seed, marked when a run behind it has diverged."""
    mark = " (diverged)" if number.has_diverged else ""
    return f"{number.number:.4g}{mark}"


def _cost(result: StudyResult, arm: str, value: str) -> list[str]:
    """Returns million tokens of a run and minutes of the processor of all runs of an arm."""
    # Without a value of the sweep the runs at all of them count.
    tokens = 0
    seconds = 0.0
    for run in result.outcomes:
        if run.arm == arm and value in ("", str(run.value)):
            tokens = max(tokens, run.tokens or 0)
            seconds += run.cpu_seconds
    return [f"{tokens / 1e6:.1f}" if tokens else "", f"{seconds / 60:.1f}"]


def interval_text(item: ContrastResult) -> str:
    """Returns the 95 % interval of a difference; empty for a single seed."""
    if item.low is None or item.high is None:
        return ""
    return f"{item.low:+.4g} to {item.high:+.4g}"


def seeds_text(number: int) -> str:
    """Returns a number of seeds in words."""
    return "1 seed" if number == 1 else f"{number} seeds"


def _p_text(p: float | None) -> str:
    return "" if p is None else f"{p:.2g}"


# ---------------------------------------------------------------------------
# Notes


def notes(result: StudyResult) -> list[str]:
    """Returns what a reader must know: what is missing, what diverged, where curves cross."""
    study = result.study
    seeds = len(study.seeds)
    better = f"a {study.measure.better} {study.measure.metric} is better"
    sentence = (
        f"Differences are means over seeds, of which {seeds} were planned, with the interval of "
        f"Student's t of paired seeds; {better}. p-values of all but the primary comparison are "
        "corrected after Holm."
    )
    return [sentence, *run_notes(result)]


def run_notes(result: StudyResult) -> list[str]:
    """Returns which runs are missing, diverged or made elsewhere, and where curves cross."""
    sentences = []
    if result.missing:
        count = len(result.missing)
        sentences.append(f"Not complete, {count} runs: {'; '.join(result.missing)}.")

    # No run is left out in silence.
    for run in result.outcomes:
        if not run.has_diverged:
            continue
        place = "" if run.value is None else f" at {run.value}"
        sentences.append(f"Diverged: {run.arm}{place}, seed {run.seed}.")
    sources = Counter(run.taken_from for run in result.outcomes if run.taken_from)
    for source, count in sources.items():
        runs = "1 run was" if count == 1 else f"{count} runs were"
        sentences.append(f"{runs} made by `{source}`.")
    if result.overrides:
        settings = ", ".join(f"{name} = {value}" for name, value in result.overrides.items())
        sentences.append(f"Changed on the command line: {settings}.")
    return [*sentences, *crossing_sentences(result), *map(repeat_sentence, result.repeats)]


def crossing_sentences(result: StudyResult) -> list[str]:
    """Returns from how many tokens on the primary arm is ahead; nothing where no seed has both arms."""
    crossing = result.crossing
    if crossing is None or not crossing.tokens_by_seed:
        return []
    seeds = []
    for seed, tokens in crossing.tokens_by_seed.items():
        seeds.append(f"seed {seed}: {'never' if tokens is None else f'{tokens / 1e6:.1f}M'}")
    text = f"The primary arm is ahead for good from ({', '.join(seeds)}) tokens on"
    if crossing.tokens is None:
        return [text + "."]
    text += f", in the mean from {crossing.tokens / 1e6:.1f}M"
    if crossing.low is not None and crossing.high is not None:
        text += f" (95 % interval {crossing.low / 1e6:.1f}M to {crossing.high / 1e6:.1f}M)"
    return [text + "."]
