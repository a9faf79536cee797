"""The main job: a small ST-MoE is pre-trained, fine-tuned, evaluated and explained.

All of it on text that Python carries. The model is fine-tuned once more from scratch, and both
starts choose their rate on dev examples, so that the evaluation tells what pre-training is worth.

    python -m scripts.demo --out runs/demo [--resume] [--data my.txt more.jsonl]

Every step is a command of its own; this one calls them in turn and says what it called.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import argparse
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from transformers.utils import logging

import eval.__main__ as evaluation
from eval.studies.outcomes import best_run_on_dev
from eval.studies.runs import label_budget, study_runs
from eval.studies.study import read_study
from moe.cli import RESUME, Parser, integer, path, run_main, word
from moe.commands.finetune import finetune_command
from moe.commands.pretrain import pretrain_command
from moe.errors import ConfigError, DataError
from moe.files import claim_folder, output_path, whole_folder
from moe.training.job_folder import keep_settings, merge_metrics
from moe.training.metrics import METRICS_FILE
from scripts import build_corpus, inspect_router, pretrain, study, train_tokenizer

TASK = "docstring_topic"
STUDY = "recipes/studies/demo.yaml"

_ROOT = Path(__file__).resolve().parents[1]


def repository_file(name: str) -> str:
    """Returns the path of a file of the repository, whatever the current folder.

    It stays relative where that leads to a file, since it is printed as part of commands.
    """
    return name if Path(name).is_file() else str(_ROOT / name)


def run(title: str, module: ModuleType, *arguments: str | Path) -> None:
    """Prints what it does and how to do it alone, then does it."""
    argv = [str(argument) for argument in arguments]
    name = module.__name__.removesuffix(".__main__")
    print(f"\n== {title}\n   python -m {name} {shlex.join(argv)}", flush=True)
    module.main(argv)


def job_parser(
    name: str, description: str, *, pretrain_config: str, finetune_config: str
) -> Parser:
    """Returns the parser of a job of several stages, with the options that all of them have.

    Args:
        name: Name of the command, and of its folder in runs/.
        description: What it does.
        pretrain_config: Recipe of the pre-training, when no other is given.
        finetune_config: Recipe of the fine-tuning, when no other is given.
    """
    parser = Parser(prog=f"python -m scripts.{name}", description=description)
    parser.add_argument("--out", default=f"runs/{name}", help=f"folder of everything (runs/{name})")

    recipe = repository_file(pretrain_config)
    parser.add_argument("--pretrain-config", type=word, default=recipe, help=f"recipe ({recipe})")
    recipe = repository_file(finetune_config)
    parser.add_argument("--finetune-config", type=word, default=recipe, help=f"recipe ({recipe})")
    explanation = "of the tokenizer (2048)"
    parser.add_argument("--vocab-size", type=integer(), default=2048, help=explanation)
    explanation = "your text or JSONL files instead of Python's own text"
    parser.add_argument("--data", type=path, nargs="+", help=explanation)
    parser.add_argument("--resume", action="store_true", help="go on where an earlier run stopped")
    return parser


def check_inputs(options: argparse.Namespace, tokenizer: Path) -> None:
    """Raises before any stage runs when a later one would fail for what it is given.

    Args:
        options: What `job_parser` has read.
        tokenizer: Folder of the tokenizer, which may be made yet.

    Raises:
        ConfigError: When a recipe cannot be used, or its model has no room for the vocabulary.
        DataError: When a file of text is missing.
    """
    argv = ["--config", options.pretrain_config, "--out", "run"]
    recipe, _ = pretrain_command().parse([*argv, "--tokenizer", "tokenizer", "--corpus", "corpus"])
    argv = ["--config", options.finetune_config, "--out", "run"]
    finetune_command().parse([*argv, "--pretrained", "model"])

    size = recipe.build_config().vocab_size
    if options.vocab_size > size and not tokenizer.exists():
        raise ConfigError(
            f"--vocab-size is {options.vocab_size}; expected at most {size}, model.vocab_size in "
            f"{options.pretrain_config}. Choose a smaller vocabulary, or set model.vocab_size."
        )
    for text in options.data or ():
        if not text.exists():
            raise DataError(f"--data {text} does not exist. Give files, or folders of them.")


@contextmanager
def job_folder(options: argparse.Namespace) -> Iterator[Path]:
    """Checks what a job is given, and holds its folder inside the block."""
    out = output_path(options.out, inputs=options.data or ())
    check_inputs(options, out / "tokenizer")
    taken = f"Another process works in {out}. Wait for it, or choose another --out."
    with claim_folder(out, "job", taken=taken):
        settings = {name: str(value) for name, value in vars(options).items() if name != "resume"}
        keep_settings(out, settings, options.resume)
        yield out


def pretrain_model(
    options: argparse.Namespace, out: Path, *corpus_options: str | Path
) -> list[str | Path]:
    """Makes corpus and tokenizer, unless they are there, and pre-trains a model on them.

    Args:
        options: What `job_parser` has read.
        out: Folder of the job; the model is in its pretrain/model.
        corpus_options: Options of the corpus when the user gives no text.

    Returns:
        The options with which other commands find the corpus.
    """
    corpus = out / "corpus"
    if not corpus.exists():
        if options.data:
            corpus_options = ("--data", *options.data)
        run("1 Corpus", build_corpus, "--out", corpus, *corpus_options)

    text: list[str | Path] = ["--corpus", corpus]
    tokenizer = out / "tokenizer"
    if not tokenizer.exists():
        size = ["--vocab-size", str(options.vocab_size)]
        run("2 Tokenizer", train_tokenizer, *text, "--out", tokenizer, *size)

    resume = ["--resume"] if options.resume else []
    settings = ["--config", options.pretrain_config, *text, "--tokenizer", tokenizer, *resume]
    run("3 Pre-train", pretrain, *settings, "--out", out / "pretrain")
    return text


def main(argv: list[str]) -> None:
    """Runs the steps; with --resume, what is done is kept and what was interrupted goes on."""
    parser = job_parser(
        "demo",
        "Runs the main job.",
        pretrain_config="recipes/demo_pretrain.yaml",
        finetune_config="recipes/demo_finetune.yaml",
    )
    options = parser.parse_args(argv)
    logging.disable_progress_bar()
    with job_folder(options) as out:
        run_stages(options, out)


def run_stages(options: argparse.Namespace, out: Path) -> None:
    """Runs the steps that are not done."""
    text = pretrain_model(options, out, "--unseen", TASK)

    # Two starts at two rates, two runs at a time; each start has the rate that is best on dev.
    settings = ["--set", f"config={options.finetune_config}", "--jobs", "2"]
    study_file = repository_file(STUDY)
    run("4 Fine-tune", study, study_file, *settings, "--out", out / "finetune")
    overrides = {"config": options.finetune_config}
    runs = study_runs(read_study(Path(study_file)), out / "finetune", overrides)
    finetuned = best_run_on_dev(runs, "pretrained")
    scratch = best_run_on_dev(runs, "scratch")

    # One folder for whoever wants the model, and one file of all metrics.
    model = out / "model"
    with whole_folder(model, kind="model") as partial:
        shutil.copytree(finetuned / "best/model", partial, dirs_exist_ok=True)
    stages = {"pretrain": out / "pretrain", "finetune": finetuned, "scratch": scratch}
    merge_metrics(out, stages)

    # Beside the models stand classifiers of words, and of vectors of the words of the same text.
    models = ["--model", f"fine-tuned={model}", "--also", f"from-scratch={scratch / 'best/model'}"]
    baselines = [*label_budget(runs[0]), "--baseline-text", out / "corpus"]
    run(
        "5 Evaluate", evaluation, "run", *models, "--tasks", TASK, *baselines, "--out", out / "eval"
    )

    # What pre-training is worth, tested on pairs of answers to the same examples.
    sides = [f"fine-tuned={out / 'eval'}", f"from-scratch={out / 'eval'}"]
    run("6 Compare", evaluation, "compare", *sides, "--out", out / "compare")

    report = out / "report.html"
    metrics = [f"{stage}={folder / METRICS_FILE}" for stage, folder in stages.items()]
    inputs = [*text, "--model", out / "pretrain/model", "--evaluation", out / "eval/report.json"]
    run("7 Explain", inspect_router, "report", *inputs, "--metrics", *metrics, "--out", report)
    print(f"\nEverything is in {out}. Open {report.resolve().as_uri()}")


if __name__ == "__main__":
    run_main(main, interrupted=RESUME)
