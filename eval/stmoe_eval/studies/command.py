"""python -m scripts.study: runs or resumes a study, and writes its report."""

import argparse
import shlex

from moe.cli import Parser, integer, path, real, word
from moe.errors import ConfigError
from moe.files import claim_folder, output_path
from moe.parsing import parse_yaml
from moe.training.job_folder import JOB
from stmoe_eval.reports.report_files import library_versions
from stmoe_eval.studies.analysis import StudyResult, contrast_results
from stmoe_eval.studies.outcomes import arm_size, read_outcome
from stmoe_eval.studies.report import result_lines, write_report
from stmoe_eval.studies.runs import StudyRun, chosen_runs, study_runs
from stmoe_eval.studies.scheduler import Budget, Progress, find_progress, run_all
from stmoe_eval.studies.study import SettingValue, Study, check_setting_name, read_study


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="python -m scripts.study", description="Runs a study.")
    parser.add_argument("study", type=path, help="YAML file, e.g. recipes/studies/names.yaml")
    parser.add_argument("--out", help="folder of the study (default runs/studies/NAME)")
    parser.add_argument(
        "--jobs",
        type=integer(least=1, most=1024),
        default=1,
        help="runs at a time; the processor's threads are dealt out (default 1)",
    )
    parser.add_argument(
        "--hours",
        type=real(above=0),
        help="begin no run that would probably not end within so many hours",
    )
    parser.add_argument(
        "--set",
        type=word,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="setting that wins over those of the study, e.g. training.steps=50",
    )

    # Which runs to make here: several machines can share those of a study.
    parser.add_argument(
        "--only",
        type=word,
        action="append",
        default=[],
        metavar="ARM[:SEED]",
        help="run this arm alone, or this seed of it; may be given more than once",
    )
    parser.add_argument(
        "--report", action="store_true", help="run nothing; write the report of what is complete"
    )
    return parser


def main(argv: list[str]) -> None:
    """Runs incomplete runs, writes the report and prints the results."""
    options = build_parser().parse_args(argv)
    study = read_study(options.study)
    out = output_path(options.out or f"runs/studies/{options.study.stem}", inputs=[options.study])
    overrides = read_overrides(options.set)
    runs = study_runs(study, out, overrides)
    chosen = chosen_runs(study, runs, options.only)
    budget = Budget(options.jobs, options.hours)

    in_use = f"Another process works on the study in {out}. Wait for it, or choose another --out."
    with claim_folder(out, JOB, in_use=in_use):
        if not options.report:
            print(plan_text(study, runs, options.jobs))
            run_all(chosen, budget)
        result = study_result(study, runs, find_progress(runs), overrides, command_text(options))
        write_report(result, out)
    print(*result_lines(result), sep="\n")
    print(f"All numbers are in {out / 'study.md'}. Open {(out / 'study.html').resolve().as_uri()}")


def command_text(options: argparse.Namespace) -> str:
    """Returns the command that makes a study, to run or report it."""
    words = [str(options.study)]
    if options.out:
        words += ["--out", options.out]
    if options.jobs > 1:
        words += ["--jobs", str(options.jobs)]
    if options.hours is not None:
        words += ["--hours", f"{options.hours:g}"]
    for setting in options.set:
        words += ["--set", setting]
    return f"python -m scripts.study {shlex.join(words)}"


def read_overrides(texts: list[str]) -> dict[str, SettingValue]:
    """Returns settings of the command line, whose values are read as YAML.

    Raises:
        ConfigError: When one is not NAME=VALUE, or its value is not a plain YAML value.
    """
    overrides: dict[str, SettingValue] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ConfigError(f"--set is {text!r}; expected NAME=VALUE, e.g. training.steps=50.")
        check_setting_name(name)
        advice = "Give a number, a text, true, false, null or a list of these."
        setting = parse_yaml(value, where=f"--set {name}", advice=advice)
        if isinstance(setting, dict):
            raise ConfigError(f"--set {name} is a mapping. {advice}")
        overrides[name] = setting
    return overrides


def plan_text(study: Study, runs: list[StudyRun], jobs: int) -> str:
    """Returns a description of the planned runs."""
    arms = f"{len(study.arms)} arms"
    seeds = f"{len(study.seeds)} seeds"
    steps = sum(run.recipe.training.steps for run in runs)
    complete = len(find_progress(runs).complete)
    cost = f" Cost: {study.cost}." if study.cost else ""
    return (
        f"{study.title}: {arms} x {seeds} = {len(runs)} runs, {steps:,} steps, "
        f"{jobs} at a time; {complete} are complete.{cost}"
    )


def study_result(
    study: Study,
    runs: list[StudyRun],
    progress: Progress,
    overrides: dict[str, SettingValue],
    command: str,
) -> StudyResult:
    """Returns the results of a study's complete runs."""
    # Outcomes in the order of the study, regardless of which run ended first.
    complete = {run.name for run in progress.complete}
    outcomes = []
    missing = []
    for run in runs:
        if run.name in complete:
            outcomes.append(read_outcome(study, run))
        else:
            missing.append(run.name)

    # The models of an arm have the same size for every seed.
    sizes = {}
    for run in progress.complete:
        size = None if run.arm in sizes else arm_size(run)
        if size is not None:
            sizes[run.arm] = size
    return StudyResult(
        study=study,
        command=command,
        versions=library_versions(),
        overrides=overrides,
        outcomes=outcomes,
        missing=missing,
        sizes=sizes,
        contrasts=contrast_results(study, outcomes),
    )
