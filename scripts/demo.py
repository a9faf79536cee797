"""The main job: a tiny ST-MoE is pre-trained, fine-tuned, evaluated and explained, on text that Python carries.

    python -m scripts.demo --out runs/demo [--resume] [--data my.txt more.jsonl]

Every step is a command of its own; this one calls them in turn and says what it called.
"""

import argparse
import shlex
import shutil
from pathlib import Path
from types import ModuleType

from transformers.utils import logging

import eval.__main__ as evaluation
from moe.errors import run_main
from moe.files import whole_folder
from moe.training.metrics import METRICS_FILE
from moe.training.stages import keep_settings, merge_metrics
from scripts import build_corpus, finetune, inspect_router, pretrain, train_tokenizer

TASK = "unicode_category"
STAGES = ("pretrain", "finetune", "scratch")


def run(title: str, module: ModuleType, *arguments: str | Path) -> None:
    """Prints what it does and how to do it alone, then does it."""
    argv = [str(argument) for argument in arguments]
    print(f"\n== {title}\n   python -m {module.__name__.removesuffix('.__main__')} {shlex.join(argv)}", flush=True)
    module.main(argv)


def main(argv: list[str]) -> None:
    """Runs the steps; with --resume, what is done is kept and what was interrupted goes on."""
    parser = argparse.ArgumentParser(prog="python -m scripts.demo", description="Runs the main job.")
    for name, default, explanation in (
        ("out", "runs/demo", "folder of everything"),
        ("pretrain-config", "recipes/st_moe_tiny_pretrain.yaml", "recipe"),
        ("finetune-config", "recipes/st_moe_tiny_finetune.yaml", "recipe"),
        ("vocab-size", "2048", "of the tokenizer"),
    ):
        parser.add_argument(f"--{name}", default=default, help=f"{explanation} ({default})")
    parser.add_argument("--data", type=Path, nargs="+", help="your text or JSONL files instead of Python's own text")
    parser.add_argument("--resume", action="store_true", help="go on where an earlier run stopped")
    options = parser.parse_args(argv)
    out, resume = Path(options.out), ["--resume"] if options.resume else []
    keep_settings(out, {name: str(value) for name, value in vars(options).items() if name != "resume"}, options.resume)
    logging.disable_progress_bar()

    corpus, tokenizer, model, report = (out / name for name in ("corpus", "tokenizer", "model", "report.html"))
    if not corpus.exists():
        run("1 Corpus", build_corpus, "--out", corpus, *(["--data", *options.data] if options.data else []))
    text = ["--corpus", corpus]
    if not tokenizer.exists():
        run("2 Tokenizer", train_tokenizer, *text, "--out", tokenizer, "--vocab-size", options.vocab_size)
    settings = ["--config", options.pretrain_config, *text, "--tokenizer", tokenizer, *resume]
    run("3 Pre-train", pretrain, *settings, "--out", out / "pretrain")
    settings = ["--config", options.finetune_config, "--pretrained", out / "pretrain/model", "--task", TASK, *resume]
    run("4 Fine-tune", finetune, *settings, "--out", out / "finetune")
    run("  and the same from scratch", finetune, *settings, "--init", "scratch", "--out", out / "scratch")
    with whole_folder(model, kind="model") as partial:
        shutil.copytree(out / "finetune/model", partial, dirs_exist_ok=True)
    merge_metrics(out, STAGES)
    models = ["--model", f"fine-tuned={model}", "--also", f"from-scratch={out / 'scratch/model'}"]
    run("5 Evaluate", evaluation, "run", *models, "--tasks", TASK, "--out", out / "eval")
    metrics = [f"{stage}={out / stage / METRICS_FILE}" for stage in STAGES]
    inputs = [*text, "--model", out / "pretrain/model", "--evaluation", out / "eval/report.json"]
    run("6 Explain", inspect_router, *inputs, "--metrics", *metrics, "--out", report)
    print(f"\nEverything is in {out}. Open {report.resolve().as_uri()}")


if __name__ == "__main__":
    run_main(main)
