"""Does pre-training help a tiny ST-MoE? Two tasks that Python carries, beside baselines, in 10 minutes on a CPU.

    python -m scripts.transfer --out runs/transfer [--resume]

Pre-trains on text without the files that are tested, fine-tunes one model on both tasks together, does the same from
scratch, and evaluates both models on both tasks. Every step is a command of its own; this one says what it called.
"""

import argparse
from pathlib import Path

from transformers.utils import logging

import eval.__main__ as evaluation
from moe.errors import run_main
from moe.training.stages import keep_settings
from scripts import build_corpus, finetune, pretrain, train_tokenizer
from scripts.demo import run

TASKS = ("unicode_category", "docstring_summary")
UNSEEN = "docstring_summary"


def main(argv: list[str]) -> None:
    """Runs the steps; with --resume, what is done is kept and what was interrupted goes on."""
    parser = argparse.ArgumentParser(prog="python -m scripts.transfer", description="Compares with and without.")
    for name, default, explanation in (
        ("out", "runs/transfer", "folder of everything"),
        ("pretrain-config", "recipes/st_moe_tiny_pretrain.yaml", "recipe"),
        ("finetune-config", "recipes/st_moe_tiny_finetune_offline.yaml", "recipe, which names the tasks"),
        ("vocab-size", "2048", "of the tokenizer"),
    ):
        parser.add_argument(f"--{name}", default=default, help=f"{explanation} ({default})")
    parser.add_argument("--data", type=Path, nargs="+", help="text to pre-train on instead of Python's own")
    parser.add_argument("--limit", help="most examples of a task in the evaluation (all)")
    parser.add_argument("--resume", action="store_true", help="go on where an earlier run stopped")
    options = parser.parse_args(argv)
    out, resume = Path(options.out), ["--resume"] if options.resume else []
    keep_settings(out, {name: str(value) for name, value in vars(options).items() if name != "resume"}, options.resume)
    logging.disable_progress_bar()

    corpus, tokenizer = out / "corpus", out / "tokenizer"
    if not corpus.exists():
        chosen = ["--data", *options.data] if options.data else ["--unseen", UNSEEN]
        run("1 Corpus", build_corpus, "--out", corpus, *chosen)
    text = ["--corpus", corpus]
    if not tokenizer.exists():
        run("2 Tokenizer", train_tokenizer, *text, "--out", tokenizer, "--vocab-size", options.vocab_size)
    settings = ["--config", options.pretrain_config, *text, "--tokenizer", tokenizer, *resume]
    run("3 Pre-train", pretrain, *settings, "--out", out / "pretrain")
    settings = ["--config", options.finetune_config, "--pretrained", out / "pretrain/model", *resume]
    run("4 Fine-tune on both tasks", finetune, *settings, "--out", out / "finetune")
    run("  and the same from scratch", finetune, *settings, "--init", "scratch", "--out", out / "scratch")
    models = ["--model", f"pre-trained={out / 'finetune/model'}", "--also", f"from-scratch={out / 'scratch/model'}"]
    limit = ["--limit", options.limit] if options.limit else []
    run("5 Evaluate", evaluation, "run", *models, "--tasks", ",".join(TASKS), *limit, "--out", out / "eval")


if __name__ == "__main__":
    run_main(main)
