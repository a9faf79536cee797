"""python -m scripts.study: runs or resumes a study, and writes its report."""

from moe.cli import Parser, integer, path
from moe.files import claim_folder, output_path, write_text
from moe.training.seeds import JOB
from stmoe_eval.studies.processes import run_all
from stmoe_eval.studies.results import contrast_results, read_numbers, study_markdown
from stmoe_eval.studies.study import read_study, study_runs


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
        "--report", action="store_true", help="run nothing; write the report of what is complete"
    )
    return parser


def main(argv: list[str]) -> None:
    """Runs incomplete runs, writes the report and prints the comparisons."""
    options = build_parser().parse_args(argv)
    study = read_study(options.study)
    out = output_path(options.out or f"runs/studies/{options.study.stem}", inputs=[options.study])
    runs = study_runs(study, out)

    in_use = f"Another process works on the study in {out}. Wait for it, or choose another --out."
    with claim_folder(out, JOB, in_use=in_use):
        if not options.report:
            complete = sum(run.is_complete for run in runs)
            cost = f" Cost: {study.cost}." if study.cost else ""
            print(f"{study.title}: {len(runs)} runs; {complete} are complete.{cost}")
            run_all(runs, options.jobs)
        numbers = read_numbers(study, runs)
        command = f"python -m scripts.study {options.study} --out {out}"
        write_text(out / "study.md", study_markdown(study, runs, numbers, command))
    for result in contrast_results(study, numbers):
        arm, against = result.contrast[:2]
        print(f"{arm} vs. {against}: better by {result.difference:+.4g}: {result.verdict}")
    print(f"All numbers are in {out / 'study.md'}.")
