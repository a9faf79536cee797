"""The main job: a tiny ST-MoE is pre-trained, fine-tuned, evaluated and explained.

All of it on text that Python carries.

    python -m scripts.demo --out runs/demo [--resume] [--data my.txt more.jsonl]

Every step is a command of its own; this one calls them in turn and says what it called.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from eval.start import answer_interrupts

    answer_interrupts()

import argparse
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from transformers.utils import logging

import eval.__main__ as evaluation
from moe.cli import RESUME, Parser, integer, path, run_main, word
from moe.commands.finetune import finetune_command
from moe.commands.pretrain import pretrain_command
from moe.errors import ConfigError, DataError
from moe.files import claim_folder, output_path, whole_folder
from moe.training.metrics import METRICS_FILE
from moe.training.stages import keep_settings, merge_metrics
from scripts import build_corpus, finetune, inspect_router, pretrain, train_tokenizer

TASK = "unicode_category"
STAGES = ("pretrain", "finetune", "scratch")


def run(title: str, module: ModuleType, *arguments: str | Path) -> None:
    """Prints what it does and how to do it alone, then does it."""
    argv = [str(argument) for argument in arguments]
    name = module.__name__.removesuffix(".__main__")
    print(f"\n== {title}\n   python -m {name} {shlex.join(argv)}", flush=True)
    module.main(argv)


def job_parser(name: str, description: str, *, finetune_config: str) -> Parser:
    """Returns the parser of a job of several stages, with the options that all of them have.

    Args:
        name: Name of the command, and of its folder in runs/.
        description: What it does.
        finetune_config: Recipe of the fine-tuning, when no other is given.
    """
    parser = Parser(prog=f"python -m scripts.{name}", description=description)
    parser.add_argument("--out", default=f"runs/{name}", help=f"folder of everything (runs/{name})")

    recipe = "recipes/st_moe_tiny_pretrain.yaml"
    parser.add_argument("--pretrain-config", type=word, default=recipe, help=f"recipe ({recipe})")
    recipe = finetune_config
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


def finetune_models(title: str, options: argparse.Namespace, out: Path, *task_options: str) -> None:
    """Fine-tunes the pre-trained model, and one of the same architecture from scratch.

    Args:
        title: Title of the step.
        options: What `job_parser` has read.
        out: Folder of the job; the models are in its finetune/model and scratch/model.
        task_options: Options that name the task, where the recipe does not.
    """
    resume = ["--resume"] if options.resume else []
    settings = ["--config", options.finetune_config, "--pretrained", out / "pretrain/model"]
    settings += [*task_options, *resume]
    run(f"4 {title}", finetune, *settings, "--out", out / "finetune")
    scratch = ["--init", "scratch", "--out", out / "scratch"]
    run("  and the same from scratch", finetune, *settings, *scratch)


def main(argv: list[str]) -> None:
    """Runs the steps; with --resume, what is done is kept and what was interrupted goes on."""
    finetune_config = "recipes/st_moe_tiny_finetune.yaml"
    parser = job_parser("demo", "Runs the main job.", finetune_config=finetune_config)
    options = parser.parse_args(argv)
    logging.disable_progress_bar()
    with job_folder(options) as out:
        run_stages(options, out)


def run_stages(options: argparse.Namespace, out: Path) -> None:
    """Runs the steps that are not done."""
    text = pretrain_model(options, out)
    finetune_models("Fine-tune", options, out, "--task", TASK)

    # One folder for whoever wants the model, and one file of all metrics.
    model = out / "model"
    with whole_folder(model, kind="model") as partial:
        shutil.copytree(out / "finetune/model", partial, dirs_exist_ok=True)
    merge_metrics(out, STAGES)

    models = ["--model", f"fine-tuned={model}", "--also", f"from-scratch={out / 'scratch/model'}"]
    run("5 Evaluate", evaluation, "run", *models, "--tasks", TASK, "--out", out / "eval")

    report = out / "report.html"
    metrics = [f"{stage}={out / stage / METRICS_FILE}" for stage in STAGES]
    inputs = [*text, "--model", out / "pretrain/model", "--evaluation", out / "eval/report.json"]
    run("6 Explain", inspect_router, *inputs, "--metrics", *metrics, "--out", report)
    print(f"\nEverything is in {out}. Open {report.resolve().as_uri()}")


if __name__ == "__main__":
    run_main(main, interrupted=RESUME)
