"""Builds release folders of the better tiny models: the best sparse one, and its dense rival.

    python -m scripts.models --out runs/models

Takes them from the study of sparse and dense models. Corpus, tokenizer and the models of the study's first seed are
built first if missing; after an interruption the same command continues.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

from pathlib import Path

import stmoe
from eval.studies.command import study_result
from eval.studies.release import Pair, primary_runs, release_model
from eval.studies.report import STUDY_JSON, read_result, write_report
from eval.studies.runs import StudyRun, study_runs
from eval.studies.scheduler import Budget, find_progress, run_all
from eval.studies.study import Study, read_study
from moe.cli import CONTINUES, Parser, integer, path, run_main
from moe.errors import ConfigError, DataError
from moe.files import claim_folder, output_path
from moe.training.job_folder import JOB
from scripts.demo import repository_file

STUDY = "recipes/studies/sparse_against_dense.yaml"
NAMES = ("st-moe-mini", "dense-mini")
VOCAB_SIZE = 2048
PACKAGES = (
    "stdlib torch numpy scipy sklearn pandas sympy matplotlib networkx nltk transformers datasets "
    "huggingface_hub accelerate peft"
)
UNSEEN = ("docstring_topic", "wordnet_supersense")


def main(argv: list[str]) -> None:
    """Builds the folders, and trains missing models for them."""
    parser = Parser(prog="python -m scripts.models", description="Builds release folders.")
    parser.add_argument("--out", default="runs/models", help="folder of the models (runs/models)")
    parser.add_argument(
        "--studies",
        type=path,
        default=Path("runs/studies"),
        help="folder with corpus, tokenizer and the study's folder (runs/studies)",
    )
    parser.add_argument(
        "--study",
        type=path,
        default=Path(repository_file(STUDY)),
        help=f"study whose primary arms are released ({STUDY})",
    )
    parser.add_argument(
        "--jobs",
        type=integer(least=1, most=1024),
        default=2,
        help="runs at a time, if models are trained (2)",
    )
    options = parser.parse_args(argv)
    out = output_path(options.out, inputs=[options.studies, options.study])

    # Another process may be working on the study.
    study = read_study(options.study)
    if study.command != "pretrain" or study.sweep is not None:
        raise ConfigError(
            f"{options.study} must be a study of pre-training without a sweep. Give {STUDY}, or "
            "one like it."
        )
    folder = options.studies / options.study.stem
    in_use = f"Another process works on the study in {folder}. Wait for it to end."
    with claim_folder(folder, JOB, in_use=in_use):
        make_text(options.studies)
        runs = study_runs(study, folder)
        pair = best_pair(study, runs, folder, options.jobs)
        result = read_result(folder / STUDY_JSON)
        for name, run in zip(NAMES, pair, strict=True):
            target = out / name
            release_model(run, result, options.studies / "corpus", target)
            print(f"{run.name} is in {target}.")


def make_text(studies: Path) -> None:
    """Makes the corpus and the tokenizer of the studies unless they exist."""
    corpus = studies / "corpus"
    if not corpus.exists():
        sources = ["--packages", *PACKAGES.split(), "--wordnet", "--dictionary"]
        stmoe.main(["corpus", "--out", str(corpus), *sources, "--unseen", *UNSEEN])
    tokenizer = studies / "tokenizer"
    if not tokenizer.exists():
        options = ["--corpus", str(corpus), "--vocab-size", str(VOCAB_SIZE)]
        stmoe.main(["tokenizer", *options, "--out", str(tokenizer)])


def best_pair(study: Study, runs: list[StudyRun], folder: Path, jobs: int) -> Pair:
    """Returns the best model of a study and its rival, and writes the study's report.

    If no seed has both, the first seed's are trained.

    Raises:
        DataError: When training diverges.
    """
    result = study_result(study, runs, find_progress(runs), {}, _command(folder))
    pairs = primary_runs(result, runs)
    if not pairs:
        arms = (study.primary.arm, study.primary.against)
        first = [run for run in runs if run.arm in arms and run.seed == study.seeds[0]]
        run_all(first, Budget(jobs))
        result = study_result(study, runs, find_progress(runs), {}, _command(folder))
        pairs = primary_runs(result, runs)
    if not pairs:
        raise DataError(
            f"The runs of the first seed in {folder} diverged or were made elsewhere: there is no model. Remove the "
            "runs made elsewhere to train them here."
        )
    write_report(result, folder)
    return pairs[0]


def _command(folder: Path) -> str:
    """Returns the command that made a study; for a new study, this one."""
    path = folder / STUDY_JSON
    return read_result(path).command if path.exists() else "python -m scripts.models"


if __name__ == "__main__":
    run_main(main, interrupted=CONTINUES)
