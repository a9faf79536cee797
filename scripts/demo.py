"""The main job: a tiny ST-MoE is pre-trained, fine-tuned, evaluated and explained, on text that Python carries.

    python -m scripts.demo --out runs/demo [--resume] [--data my.txt more.jsonl]

Every step is a command of its own; this one calls them in turn and says what it called.
"""

import argparse
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

from transformers.utils import logging

import eval.__main__ as evaluation
from moe.data.storage import whole_file, whole_folder
from moe.errors import DataError, run_main
from moe.training.metrics import METRICS_FILE, read_metrics
from scripts import build_corpus, finetune, inspect_router, pretrain, train_tokenizer

TASK = "unicode_category"
STAGES = ("pretrain", "finetune", "scratch")


def run(title: str, command: str, main: Callable[[list[str]], None], *arguments: str | Path) -> None:
    """Prints what it does and how to do it alone, then does it."""
    argv = [str(argument) for argument in arguments]
    print(f"\n== {title}\n   python -m {command} {shlex.join(argv)}", flush=True)
    main(argv)


def merge_metrics(out: Path) -> None:
    """Writes the lines of all stages to one metrics.jsonl, each with its stage."""
    with whole_file(out / METRICS_FILE) as partial, partial.open("w", encoding="utf-8") as file:
        for stage in STAGES:
            for line in read_metrics(out / stage / METRICS_FILE):
                file.write(json.dumps({"stage": stage, **line}) + "\n")


def main(argv: list[str]) -> None:
    """Runs the steps; with --resume, what is done is kept and what was interrupted goes on."""
    parser = argparse.ArgumentParser(prog="python -m scripts.demo", description="Runs the main job.")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of everything (runs/demo)")
    parser.add_argument("--data", type=Path, nargs="+", help="your text or JSONL files instead of Python's own text")
    parser.add_argument("--resume", action="store_true", help="go on where an earlier run stopped")
    parser.add_argument("--pretrain-config", default="recipes/st_moe_tiny_pretrain.yaml", help="recipe")
    parser.add_argument("--finetune-config", default="recipes/st_moe_tiny_finetune.yaml", help="recipe")
    parser.add_argument("--vocab-size", default="2048", help="of the tokenizer")
    options = parser.parse_args(argv)
    out, resume = options.out, ["--resume"] if options.resume else []
    if out.exists() and any(out.iterdir()) and not resume:
        raise DataError(f"{out} already holds a run. Give --resume to go on with it, or another --out.")
    logging.disable_progress_bar()

    corpus, tokenizer, model = out / "corpus", out / "tokenizer", out / "model"
    data = ["--data", *options.data] if options.data else []
    if not corpus.exists():
        run("1 Corpus", "scripts.build_corpus", build_corpus.main, "--out", corpus, *data)
    if not tokenizer.exists():
        size = ["--vocab-size", options.vocab_size]
        run(
            "2 Tokenizer",
            "scripts.train_tokenizer",
            train_tokenizer.main,
            "--corpus",
            corpus,
            "--out",
            tokenizer,
            *size,
        )
    config = ["--config", options.pretrain_config, "--corpus", corpus, "--tokenizer", tokenizer]
    run("3 Pre-train", "scripts.pretrain", pretrain.main, *config, "--out", out / "pretrain", *resume)
    config = ["--config", options.finetune_config, "--pretrained", out / "pretrain/model", "--task", TASK]
    run("4 Fine-tune", "scripts.finetune", finetune.main, *config, "--out", out / "finetune", *resume)
    scratch = ["--init", "scratch", "--out", out / "scratch"]
    run("  and the same from scratch", "scripts.finetune", finetune.main, *config, *scratch, *resume)
    with whole_folder(model, marker="config.json") as partial:
        shutil.copytree(out / "finetune/model", partial, dirs_exist_ok=True)
    merge_metrics(out)
    models = ["--model", f"fine-tuned={model}", "--also", f"from-scratch={out / 'scratch/model'}"]
    run("5 Evaluate", "eval", evaluation.main, "run", *models, "--tasks", TASK, "--out", out / "eval")
    metrics = [f"{stage}={out / stage / METRICS_FILE}" for stage in STAGES]
    inputs = ["--model", out / "pretrain/model", "--corpus", corpus, "--evaluation", out / "eval/report.json"]
    report = out / "report.html"
    run("6 Explain", "scripts.inspect_router", inspect_router.main, *inputs, "--metrics", *metrics, "--out", report)
    print(f"\nEverything is in {out}. Open {report.resolve().as_uri()}")


if __name__ == "__main__":
    run_main(main)
