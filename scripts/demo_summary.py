"""The end of the demo: its results in at most eight lines, from the files of its steps."""

from collections.abc import Mapping
from pathlib import Path

from moe.inspection.formatting import format_interval, format_score
from moe.inspection.page.report_text import domain_sentences, tables_by_domain
from moe.tracing.trace_file import read_trace
from stmoe_eval.commands.compare import compare_runs
from stmoe_eval.reports.records import TaskResult
from stmoe_eval.reports.run_folder import read_answers, read_report
from stmoe_eval.task import Example

_SYSTEMS = {
    "sparse": "32 experts",
    "copy": "copying the input",
    "nearest prefix": "copying the nearest language",
    "most similar": "the most similar seen name",
}
"""What the summary calls models and baselines, where it is something else than their name."""


def summarize(out: Path, new: Mapping[str, str]) -> list[str]:
    """Returns the summary.

    Args:
        out: Folder of a demo whose steps are finished.
        new: Names of the new languages by code.
    """
    report = read_report(out / "unseen")
    (seen,) = read_report(out / "seen").tasks
    (unseen,) = report.tasks
    lines = [f"Names seen in training, recalled: {_scores(seen)}."]
    lines.append(f"Names never seen in that language: {_scores(unseen)}.")
    if not new:
        lines = [line.replace("Names", "Pairs").replace(" in that language", "") for line in lines]
    lines += [_new_language(out / f"new-{code}", name) for code, name in new.items()]

    # The decoder's experts come last, and then how much all of them tell.
    trace = read_trace(out / "trace")
    if len(trace.facts.domains) > 1:
        lines += domain_sentences(tables_by_domain(trace)[0])[-2:]

    # Of twelve answers one that is right and no copy, if there is one.
    system = unseen.systems[0]
    examples, answers = read_answers(out / "unseen", report, unseen, system.name, system.mode)
    number = min(12, len(examples))
    evenly = [(2 * index + 1) * len(examples) // (2 * number) for index in range(number)]
    pairs = [(examples[row], answers[row]) for row in evenly]
    example, answer = max(pairs, key=lambda pair: _is_interesting(*pair))
    return [*lines, f'Try: stmoe generate --model {out / "model"} "{example.inputs}"  ({answer})']


def _scores(task: TaskResult) -> str:
    """Returns the first score of each system in %, with intervals of the models."""
    texts = []
    for system in task.systems:
        score = system.scores[0]
        text = f"{_SYSTEMS.get(system.name, system.name)} {format_score(score.value)}"
        if system.mode != "baseline":
            text += f" % ({format_interval(score.low, score.high)})"
        texts.append(text)
    return ", ".join(texts)


def _new_language(folder: Path, language: str) -> str:
    """Returns what the trained model is worth for a new language."""
    sides = [f"{side}={folder / 'eval'}" for side in ("tuned", "scratch")]
    compared = compare_runs(*sides, mode="generate").tasks[0].metrics[0]
    p = "" if compared.p_value is None else f", p = {compared.p_value:.2g}"
    return (
        f"{language} from 250 names: {format_score(compared.a)} % starting from the trained model, "
        f"{format_score(compared.b)} % from scratch (difference {format_score(compared.difference)}, "
        f"{format_interval(compared.low, compared.high)}{p})."
    )


def _is_interesting(example: Example, answer: str) -> tuple[bool, bool]:
    right = example.targets
    return answer == right, not right.isascii() and right not in example.inputs
