"""The main job: a small ST-MoE is pre-trained, fine-tuned, evaluated and explained.

All text comes with Python. The same model is also fine-tuned from scratch, and both starts choose
their learning rate on dev examples, so the evaluation shows the benefit of pre-training.

    make demo ARGS="--out runs/demo [--quick] [--resume] [--data my.txt more.jsonl]"

Every step is a separate command; this one runs them in turn and prints each.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from transformers.utils import logging

import eval.__main__ as evaluation
import stmoe
from eval.studies.outcomes import best_run_on_dev
from eval.studies.report import STUDY_JSON
from eval.studies.runs import label_budget, study_runs
from eval.studies.scheduler import StudyError, fork_process
from eval.studies.study import read_study
from moe.cli import CONTINUES, RESUME, Parser, integer, path, run_main, word
from moe.commands.finetune import finetune_command
from moe.commands.pretrain import pretrain_command
from moe.errors import ConfigError, DataError
from moe.files import claim_folder, output_path, whole_folder, write_text
from moe.training.job_folder import keep_settings, merge_metrics
from moe.training.metrics import METRICS_FILE
from moe.training.recipe import FinetuneRecipe
from scripts import facts, study
from scripts.demo_summary import summarize

TASK = "docstring_topic"
STUDY = "recipes/studies/demo.yaml"
FACTS_STUDY = "recipes/studies/demo_facts.yaml"

QUICK_NOTE = "A quick run shows every step, with models that have learned little."


class Sizes(NamedTuple):
    """Options of the steps in addition to their recipes; --quick makes them smaller.

    Attributes:
        pretrain: Options of `stmoe pretrain`.
        finetune: Settings of the fine-tunings.
        evaluate: Options of `python -m eval run`.
        facts: Options of `scripts.facts`.
        learn: Settings of the models that learn facts.
    """

    pretrain: str = ""
    finetune: str = ""
    evaluate: str = ""
    facts: str = ""
    learn: str = ""


QUICK = Sizes(
    pretrain="--training.steps 100 --data.short_steps 40 --training.probe_every 50",
    finetune="--set training.steps=20 --set mixture.dev_examples=64",
    evaluate="--limit 64",
    facts="--facts 1000",
    learn="--set training.steps=110 --set training.held_out_batches=4",
)

_ROOT = Path(__file__).resolve().parents[1]


def repository_file(name: str) -> str:
    """Returns the path of a file of the repository, regardless of the current folder.

    It stays relative if that leads to a file, since it is printed as part of commands.
    """
    return name if Path(name).is_file() else str(_ROOT / name)


_MAINS = {
    "stmoe": stmoe.main,
    "python -m eval": evaluation.main,
    "python -m scripts.facts": facts.main,
    "python -m scripts.study": study.main,
}


def run(title: str, command: str, *arguments: str | Path) -> None:
    """Prints the title of a step and its command, then runs it.

    Args:
        title: What the step does.
        command: Command as it is typed, one of those in _MAINS.
        arguments: Its arguments.
    """
    argv = [str(argument) for argument in arguments]
    print(f"\n== {title}\n   {command} {shlex.join(argv)}", flush=True)
    _MAINS[command](argv)


@contextmanager
def run_beside(title: str, log: Path, command: str, *arguments: str | Path) -> Iterator[None]:
    """Runs a step on one core, in a process of its own, while the block runs on the others.

    Args:
        title: What the step does.
        log: File for its output.
        command: As in `run`.
        arguments: Its arguments.

    Raises:
        StudyError: When the step fails; the end of its output is in the message.
    """
    argv = [str(argument) for argument in arguments]
    print(f"\n== {title}, beside the next step (output in {log})", flush=True)
    print(f"   {command} {shlex.join(argv)}", flush=True)
    child = fork_process(_run_on_one_core, log, command, argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads - 1))
    try:
        yield
        child.join()
    finally:
        torch.set_num_threads(threads)
        child.terminate()
        child.join()
    if child.exitcode:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise StudyError(f"{title} failed with exit code {child.exitcode}: {' '.join(lines[-3:])}")


def _run_on_one_core(log: Path, command: str, argv: list[str]) -> None:
    """Runs a command with its output in a file."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with log.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.argv = [command, *argv]
    run_main(_MAINS[command], interrupted=CONTINUES)


def job_parser(
    name: str, description: str, *, pretrain_config: str, finetune_config: str
) -> Parser:
    """Returns the parser of a job of several stages, with the options that all of them have.

    Args:
        name: Name of the command, and of its folder in runs/.
        description: What it does.
        pretrain_config: Default recipe of pre-training.
        finetune_config: Default recipe of fine-tuning.
    """
    parser = Parser(prog=f"python -m scripts.{name}", description=description)
    parser.add_argument("--out", default=f"runs/{name}", help=f"folder of everything (runs/{name})")

    for stage, recipe in (("pretrain", pretrain_config), ("finetune", finetune_config)):
        parser.add_argument(
            f"--{stage}-config",
            type=word,
            default=recipe,
            help=f"recipe of the {stage} stage ({recipe})",
        )
    parser.add_argument(
        "--vocab-size", type=integer(), default=2048, help="size of the vocabulary (2048)"
    )
    parser.add_argument(
        "--data", type=path, nargs="+", help="your text or JSONL files instead of Python's own text"
    )
    parser.add_argument("--resume", action="store_true", help="continue an earlier run")
    return parser


def check_inputs(options: argparse.Namespace, tokenizer: Path) -> None:
    """Raises before any stage runs if a later one would reject its inputs.

    Args:
        options: Options of `job_parser`.
        tokenizer: Folder of the tokenizer, which may not exist yet.

    Raises:
        ConfigError: When a recipe is invalid, or its vocab_size is smaller than the vocabulary.
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
    """Checks the inputs of a job, and locks its folder inside the block."""
    out = output_path(options.out, inputs=options.data or ())
    check_inputs(options, out / "tokenizer")
    in_use = f"Another process works in {out}. Wait for it, or choose another --out."
    with claim_folder(out, "job", in_use=in_use):
        settings = {name: str(value) for name, value in vars(options).items()}
        del settings["resume"], settings["out"]  # a job may be moved
        has_begun = (out / "tokenizer").exists()
        keep_settings(out, settings, resume=options.resume, has_begun=has_begun)
        yield out


def build_text(
    options: argparse.Namespace, out: Path, *corpus_options: str | Path
) -> list[str | Path]:
    """Builds corpus and tokenizer unless they exist.

    Args:
        options: Options of `job_parser`.
        out: Folder of the job.
        corpus_options: Options of the corpus if the user gives no text.

    Returns:
        The options that name the corpus to other commands.
    """
    corpus = out / "corpus"
    text: list[str | Path] = ["--corpus", corpus]
    tokenizer = out / "tokenizer"
    # A corpus without a tokenizer may come from other settings.
    if not tokenizer.exists():
        if options.data:
            corpus_options = ("--data", *options.data)
        run("Corpus", "stmoe", "corpus", "--out", corpus, *corpus_options)
        size = ["--vocab-size", str(options.vocab_size)]
        run("Tokenizer", "stmoe", "tokenizer", *text, "--out", tokenizer, *size)
    return text


def pretrain_model(
    options: argparse.Namespace, out: Path, text: Sequence[str | Path], *settings: str
) -> None:
    """Pre-trains a model on the text, into pretrain/model of the job's folder.

    Args:
        options: Options of `job_parser`.
        out: Folder of the job.
        text: Options that name the corpus.
        settings: Settings beside the recipe.
    """
    inputs = ["--config", options.pretrain_config, *text, "--tokenizer", out / "tokenizer"]
    run("Pre-train", "stmoe", "pretrain", *inputs, *settings, *run_folder(out / "pretrain"))


def run_folder(folder: Path) -> list[str | Path]:
    """Returns the options that make a training run in a folder, or resume an existing one."""
    resume = ["--resume"] if folder.exists() else []
    return ["--out", folder, *resume]


def main(argv: list[str]) -> None:
    """Runs the steps; --resume skips finished ones and resumes the interrupted one."""
    parser = job_parser(
        "demo",
        "Runs the main job.",
        pretrain_config="demo_pretrain",
        finetune_config="demo_finetune",
    )
    parser.add_argument(
        "--facts-config",
        type=word,
        default="finetune_facts",
        help="recipe of the models that learn facts (finetune_facts)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="every step in 90 seconds, with models that learn little (into runs/demo-quick)",
    )
    options = parser.parse_args(argv)
    if options.quick and options.out == parser.get_default("out"):
        options.out = "runs/demo-quick"
    finetune_command().parse(
        ["--config", options.facts_config, "--pretrained", "model", "--out", "run"]
    )
    logging.disable_progress_bar()
    with job_folder(options) as out:
        run_stages(options, out)


def run_stages(options: argparse.Namespace, out: Path) -> None:
    """Runs the steps that are not finished."""
    sizes = QUICK if options.quick else Sizes()
    text = build_text(options, out, "--unseen", TASK)

    # What experts are good for: facts, at equal cost per token.
    if not (out / "facts").exists():
        run("Facts", "python -m scripts.facts", *sizes.facts.split(), "--out", out / "facts")
    settings = ["--set", f"config={options.facts_config}", *sizes.learn.split()]
    learn = [repository_file(FACTS_STUDY), *settings, "--out", out / "knowledge"]
    beside = run_beside("Learn", out / "learn.log", "python -m scripts.study", *learn)
    with nullcontext() if (out / "knowledge" / STUDY_JSON).exists() else beside:
        pretrain_model(options, out, text, *sizes.pretrain.split())

    # Two starts at two rates, two runs at a time; each start has the rate that is best on dev.
    settings = ["--set", f"config={options.finetune_config}", *sizes.finetune.split()]
    settings += ["--jobs", "2", "--out", str(out / "finetune")]
    study_file = repository_file(STUDY)
    run("Fine-tune", "python -m scripts.study", study_file, *settings)
    overrides = {"config": options.finetune_config}
    runs = study_runs(read_study(Path(study_file)), out / "finetune", overrides)
    finetuned = best_run_on_dev(runs, "pretrained")
    scratch = best_run_on_dev(runs, "scratch")

    # One folder with the model to use, and one file with all metrics.
    model = out / "model"
    with whole_folder(model, kind="model") as partial:
        shutil.copytree(finetuned / "best/model", partial, dirs_exist_ok=True)
    shutil.copyfile(finetuned / "best/scores.json", out / "scores.json")  # how it was chosen
    stages = {"pretrain": out / "pretrain", "finetune": finetuned, "scratch": scratch}
    merge_metrics(out, stages)

    # The baselines classify by words, and by vectors of the words of the same text.
    models = ["--model", f"fine-tuned={model}", "--also", f"from-scratch={scratch / 'best/model'}"]
    baselines = [*label_budget(runs[0]), "--baseline-text", out / "corpus"]
    evaluated = ["--tasks", TASK, *baselines, *sizes.evaluate.split(), "--out", out / "eval"]
    run("Evaluate", "python -m eval", "run", *models, *evaluated)

    # Is pre-training worth it? A paired test over the answers to the same examples.
    sides = [f"fine-tuned={out / 'eval'}", f"from-scratch={out / 'eval'}"]
    run("Compare", "python -m eval", "compare", *sides, "--out", out / "compare")

    # The page opens with the summary.
    recipe = runs[0].recipe
    assert isinstance(recipe, FinetuneRecipe), "the study fine-tunes"
    lines, summary = summarize(out, labels=recipe.mixture.train_examples)
    if options.quick:
        lines.insert(0, QUICK_NOTE)
        summary = summary.model_copy(update={"sentences": [QUICK_NOTE, *summary.sentences]})
    write_text(out / "summary.json", summary.model_dump_json(indent=1) + "\n")

    report = out / "report.html"
    metrics = [f"{stage}={folder / METRICS_FILE}" for stage, folder in stages.items()]
    inputs = [*text, "--model", out / "pretrain/model", "--evaluation", out / "eval/report.json"]
    inputs += ["--summary", out / "summary.json", "--metrics", *metrics]
    run("Explain", "stmoe", "inspect", "report", *inputs, "--out", report)
    print("\n== Summary", *lines, f"Report: {report.resolve().as_uri()}", sep="\n   ")


if __name__ == "__main__":
    run_main(main, interrupted=CONTINUES if "--resume" in sys.argv else RESUME)
