"""Does pre-training help a tiny ST-MoE? Two tasks that Python carries, beside baselines, in 10
minutes on a CPU.

    python -m scripts.transfer --out runs/transfer [--resume]

Pre-trains on text without the files that are tested, fine-tunes one model on both tasks together,
does the same from scratch, and evaluates both models on both tasks. Every step is a command of its
own; this one says what it called.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from eval.start import answer_interrupts

    answer_interrupts()

import argparse
from pathlib import Path

from transformers.utils import logging

import eval.__main__ as evaluation
from moe.cli import RESUME, integer, run_main
from scripts import build_corpus, finetune, pretrain, train_tokenizer
from scripts.demo import job_folder, job_parser, run

TASKS = ("unicode_category", "docstring_summary")
UNSEEN = "docstring_summary"


def main(argv: list[str]) -> None:
    """Runs the steps; with --resume, what is done is kept and what was interrupted goes on."""
    finetune_config = "recipes/st_moe_tiny_finetune_offline.yaml"
    parser = job_parser(
        "transfer", "Compares with and without pre-training.", finetune_config=finetune_config
    )
    parser.add_argument(
        "--limit", type=integer(least=1), help="most examples of a task in the evaluation (all)"
    )
    options = parser.parse_args(argv)
    logging.disable_progress_bar()
    with job_folder(options) as out:
        run_stages(options, out)


def run_stages(options: argparse.Namespace, out: Path) -> None:
    """Runs the steps that are not done."""
    resume = ["--resume"] if options.resume else []
    corpus, tokenizer = out / "corpus", out / "tokenizer"
    if not corpus.exists():
        chosen = ["--data", *options.data] if options.data else ["--unseen", UNSEEN]
        run("1 Corpus", build_corpus, "--out", corpus, *chosen)
    text = ["--corpus", corpus]
    if not tokenizer.exists():
        run(
            "2 Tokenizer",
            train_tokenizer,
            *text,
            "--out",
            tokenizer,
            "--vocab-size",
            str(options.vocab_size),
        )
    settings = ["--config", options.pretrain_config, *text, "--tokenizer", tokenizer, *resume]
    run("3 Pre-train", pretrain, *settings, "--out", out / "pretrain")
    settings = [
        "--config",
        options.finetune_config,
        "--pretrained",
        out / "pretrain/model",
        *resume,
    ]
    run("4 Fine-tune on both tasks", finetune, *settings, "--out", out / "finetune")
    run(
        "  and the same from scratch",
        finetune,
        *settings,
        "--init",
        "scratch",
        "--out",
        out / "scratch",
    )
    models = [
        "--model",
        f"pre-trained={out / 'finetune/model'}",
        "--also",
        f"from-scratch={out / 'scratch/model'}",
    ]
    limit = ["--limit", str(options.limit)] if options.limit else []
    run(
        "5 Evaluate",
        evaluation,
        "run",
        *models,
        "--tasks",
        ",".join(TASKS),
        *limit,
        "--out",
        out / "eval",
    )


if __name__ == "__main__":
    run_main(main, interrupted=RESUME)
