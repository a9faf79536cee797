"""The main job: a small ST-MoE learns names in 12 languages, and is tuned, tested and explained.

Greek for `el: Côte d’Ivoire` is `Ακτή Ελεφαντοστού`. A dense model of equal cost per token learns the
same names, and both are asked for names that they have seen and for names that they have not.

    make demo ARGS="--out runs/demo [--quick] [--resume] [--data pairs.jsonl]"

Every step is a separate command; this one runs them in turn and prints each. Pairs of your own take the
place of the names; a model is pre-trained on text of your own.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import json
import os
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from transformers.utils import logging

import stmoe
from moe.cli import CONTINUES, RESUME, Parser, path, run_main
from moe.commands.names import NAMES, SEEN
from moe.data.names import LANGUAGES_FILE, NEW, english_name
from moe.data.pair_files import hold_out, read_pairs
from moe.errors import ConfigError, DataError
from moe.files import claim_folder, output_path, whole_folder, write_text
from moe.json_lines import check_settings
from moe.parsing import read_record, read_text
from scripts.demo_summary import summarize
from stmoe_eval.studies.processes import check_exit, start_command

DENSE = "--model.num_experts 0 --model.num_sparse_encoder_layers 0 --model.num_sparse_decoder_layers 0 --model.d_ff 192"
"""The dense model that costs as much per token as the sparse one of recipes/names.yaml."""

QUICK_NOTE = "A quick run shows every step, with models that have learned little."


class Sizes(NamedTuple):
    """Options of the steps in addition to their recipes; --quick makes them smaller.

    Attributes:
        names: Options of `stmoe names`.
        train: Options of the training on all languages.
        tune: Options of the fine-tuning on a new language.
        limit: Most examples of an evaluation.
        new: Codes of the new languages.
    """

    names: str = ""
    train: str = "--training.evaluate_every 500 --mixture.dev_examples 200"
    tune: str = ""
    limit: int = 2000
    new: Sequence[str] = NEW


QUICK = Sizes(
    train="--training.steps 60 --optim.cooldown_steps 30 --training.evaluate_every 60 --mixture.dev_examples 20",
    tune="--training.steps 8 --optim.cooldown_steps 0",
    limit=50,
)

_TEXT = "--training.steps 2000 --training.batch_size 24 --optim.cooldown_steps 500"
_QUICK_TEXT = "--training.steps 100 --training.batch_size 24 --optim.cooldown_steps 50"


def run(title: str, *arguments: str | Path) -> None:
    """Prints the title of a step and its command, then runs it.

    Args:
        title: What the step does.
        arguments: Verb and options of its command.
    """
    argv = [str(argument) for argument in arguments]
    print(f"\n== {title}\n   stmoe {shlex.join(argv)}", flush=True)
    stmoe.main(argv)


@contextmanager
def run_beside(title: str, log: Path, *arguments: str | Path) -> Iterator[None]:
    """Runs a step on one core, in a process of its own, while the block runs on another.

    Args:
        title: What the step does.
        log: File for its output.
        arguments: As in `run`.

    Raises:
        StudyError: When the step fails; the end of its output is in the message.
    """
    argv = [str(argument) for argument in arguments]
    print(f"\n== {title}, beside the next step (output in {log})", flush=True)
    print(f"   stmoe {shlex.join(argv)}", flush=True)
    core = max(os.sched_getaffinity(0))
    child = start_command(argv, log, cores=[core], threads=1)
    try:
        yield
        child.join()
    finally:
        child.terminate()
        child.join()
    check_exit(child, title, log)


def run_folder(folder: Path) -> list[str | Path]:
    """Returns the options that make a training run in a folder, or resume an existing one."""
    resume = ["--resume"] if folder.exists() else []
    return ["--out", folder, *resume]


def main(argv: list[str]) -> None:
    """Runs the steps; --resume skips finished ones and resumes the interrupted one."""
    parser = Parser(prog="python -m scripts.demo", description="Runs the main job.")
    parser.add_argument("--out", default="runs/demo", help="folder of everything (runs/demo)")
    parser.add_argument(
        "--data", type=path, nargs="+", help="your pairs, or your text, instead of names"
    )
    parser.add_argument("--resume", action="store_true", help="continue an earlier run")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="every step in 90 seconds, with models that learn little (into runs/demo-quick)",
    )
    options = parser.parse_args(argv)
    if options.quick and options.out == parser.get_default("out"):
        options.out = "runs/demo-quick"
    data = options.data or []
    for file in data:
        if not file.exists():
            raise DataError(f"--data {file} does not exist. Give files, or folders of them.")

    # The models are tiny: each is trained on one core.
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    out = output_path(options.out, inputs=data)
    in_use = f"Another process works in {out}. Wait for it, or choose another --out."
    with claim_folder(out, "job", in_use=in_use):
        _keep_settings(out, data, options)
        if data and not _holds_pairs(data[0]):
            run_text(out, data, *(_QUICK_TEXT if options.quick else _TEXT).split())
            return
        lines = run_pairs(out, QUICK if options.quick else Sizes(), data)
    print("\n== Summary", *([QUICK_NOTE] if options.quick else []), *lines, sep="\n   ")


def _keep_settings(out: Path, data: Sequence[Path], options: Namespace) -> None:
    """Writes the settings of a new demo, or checks that a resumed one has the same settings.

    Raises:
        ConfigError: When the demo in the folder has other settings, or is not resumed.
    """
    file = out / "settings.json"
    settings = {"data": " ".join(map(str, data)), "quick": str(options.quick)}

    # Before the first stage is finished, earlier settings may have caused its failure.
    if (out / "tokenizer").exists() and file.exists():
        if not options.resume:
            raise ConfigError(f"{out} holds a run already. Give --resume, or another --out.")
        check_settings(file, read_record(file, dict[str, str]), settings)
    write_text(file, json.dumps(settings))


def _holds_pairs(file: Path) -> bool:
    """Returns whether a file is a table of pairs rather than text."""
    if file.suffix == ".jsonl":
        return '"inputs"' in read_text(file).partition("\n")[0]
    return file.suffix in (".csv", ".tsv", ".parquet")


def run_text(out: Path, data: Sequence[Path], *settings: str) -> None:
    """Runs the steps on own text that are not finished: pre-training, and the routing of the text."""
    corpus = out / "corpus"
    tokenizer = out / "tokenizer"
    if not tokenizer.exists():
        run("Corpus", "corpus", "--data", *data, "--out", corpus)
        run("Tokenizer", "tokenizer", "--corpus", corpus, "--bytes", "--out", tokenizer)
    inputs = ["--config", "st_moe_mini_pretrain", "--corpus", corpus, "--tokenizer", tokenizer]
    folder = run_folder(out / "pretrain")
    run("Pre-train", "pretrain", *inputs, *settings, *folder)

    model = ["--model", out / "pretrain/model", "--corpus", corpus]
    run("Explain", "inspect", "report", *model, "--out", out / "report.html")


def run_pairs(out: Path, sizes: Sizes, data: Sequence[Path] = ()) -> list[str]:
    """Runs the steps on pairs that are not finished, and returns the summary.

    Args:
        out: Folder of the job.
        sizes: Options of the steps.
        data: Tables of own pairs; empty for names.
    """
    names = out / "names"
    tokenizer = out / "tokenizer"
    train = names / "train.jsonl"
    if not names.exists():
        if data:
            split_pairs(data, names)
        else:
            run("Names", "names", *sizes.names.split(), "--out", names)
    if not tokenizer.exists():
        vocabulary = ["--bytes", "--vocab-size", "4000", "--out", tokenizer]
        run("Tokenizer", "tokenizer", "--pairs", train, *vocabulary)

    # Two models of equal cost per token.
    inputs = ["--config", "names", "--init", "scratch", "--pretrained", tokenizer]
    inputs += ["--train", train, "--dev", names / "dev.jsonl", *sizes.train.split()]
    dense = [*inputs, *DENSE.split(), *run_folder(out / "dense")]
    with run_beside("Train a dense model", out / "dense.log", "finetune", *dense):
        sparse = [*inputs, *run_folder(out / "sparse")]
        run("Train a model with 32 experts", "finetune", *sparse)
    model = out / "model"
    with whole_folder(model, kind="model") as partial:
        shutil.copytree(out / "sparse/model", partial, dirs_exist_ok=True)
        if not data:  # texts in other languages are refused
            shutil.copyfile(names / LANGUAGES_FILE, partial / LANGUAGES_FILE)

    # Memory and generalization.
    models = ["--model", f"sparse={model}", "--also", f"dense={out / 'dense/model'}"]
    models += ["--limit", str(sizes.limit)]
    seen = ["eval", "run", "--pairs", names / "seen.jsonl", *models, "--out", out / "seen"]
    with run_beside("Names seen", out / "seen.log", *seen):
        unseen = ["--pairs", names / "test.jsonl", "--train-pairs", train, *models]
        run("Names never seen", "eval", "run", *unseen, "--out", out / "unseen")

    new = {} if data else {code: english_name(code) for code in sizes.new}
    for code, language in new.items():
        learn_language(out, code, language, sizes)

    # What the experts are for.
    test = ["--pairs", names / "test.jsonl", "--by-prefix", "--examples", str(sizes.limit)]
    traced = ["--model", model, *test]
    run("Record", "inspect", "record", *traced, "--out", out / "trace")
    report = out / "report.html"
    run("Explain", "inspect", "report", *traced, "--out", report)
    experts, scores = (page.resolve().as_uri() for page in (report, out / "seen/report.html"))
    return [*summarize(out, new), f"Pages: {experts} (experts), {scores} (scores)"]


def split_pairs(data: Sequence[Path], folder: Path) -> None:
    """Writes own pairs like the names: to train on, to choose by, to test, and some that are seen."""
    pairs = [pair for file in data for pair in read_pairs(file)]
    rest, test = hold_out(pairs, 0.1)
    train, dev = hold_out(rest, 0.05)
    parts = {"train.jsonl": train, "dev.jsonl": dev, "test.jsonl": test, "seen.jsonl": train[:SEEN]}
    with whole_folder(folder, kind=NAMES) as partial:
        for name, part in parts.items():
            lines = [json.dumps(pair._asdict(), ensure_ascii=False) + "\n" for pair in part]
            (partial / name).write_text("".join(lines), encoding="utf-8")


def learn_language(out: Path, code: str, language: str, sizes: Sizes) -> None:
    """Fine-tunes on 250 names of a new language from two starts, and compares their answers."""
    folder = out / f"new-{code}"
    folder.mkdir(exist_ok=True)
    inputs = ["--config", "names_new_language", "--pretrained", out / "model"]
    few = out / f"names/new-{code}-train.jsonl"
    inputs += ["--train", few, "--dev_share", "0", *sizes.tune.split()]
    scratch = [*inputs, "--init", "scratch", *run_folder(folder / "scratch")]
    log = folder / "scratch.log"
    with run_beside(f"{language} from scratch", log, "finetune", *scratch):
        tuned = run_folder(folder / "tuned")
        run(f"{language} from the trained model", "finetune", *inputs, *tuned)

    tested = ["--pairs", out / f"names/new-{code}-test.jsonl", "--limit", str(sizes.limit)]
    models = ["--model", f"tuned={folder / 'tuned/model'}"]
    models += ["--also", f"scratch={folder / 'scratch/model'}"]
    run(f"Test {language}", "eval", "run", *tested, *models, "--out", folder / "eval")
    sides = [f"{side}={folder / 'eval'}" for side in ("tuned", "scratch")]
    run(f"Compare {language}", "eval", "compare", *sides, "--out", folder / "compare")


if __name__ == "__main__":
    run_main(main, interrupted=CONTINUES if "--resume" in sys.argv else RESUME)
