"""Does pre-training help a tiny ST-MoE? Two tasks, beside baselines, in 10 minutes on a CPU.

    python -m scripts.transfer --out runs/transfer [--resume]

Pre-trains on text that Python carries, without the files that are tested, fine-tunes one model on
both tasks together, does the same from scratch, and evaluates both models on both tasks. Every step
is a command of its own; this one says what it called.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import argparse
from pathlib import Path

from transformers.utils import logging

import eval.__main__ as evaluation
from moe.cli import RESUME, integer, run_main
from scripts import finetune
from scripts.demo import job_folder, job_parser, pretrain_model, run

TASKS = ("unicode_category", "docstring_summary")
UNSEEN = "docstring_summary"


def main(argv: list[str]) -> None:
    """Runs the steps; with --resume, what is done is kept and what was interrupted goes on."""
    finetune_config = "recipes/st_moe_tiny_finetune_offline.yaml"
    description = "Compares with and without pre-training."
    pretrain_config = "recipes/st_moe_tiny_pretrain.yaml"
    parser = job_parser(
        "transfer", description, pretrain_config=pretrain_config, finetune_config=finetune_config
    )
    explanation = "most examples of a task in the evaluation (all)"
    parser.add_argument("--limit", type=integer(least=1), help=explanation)

    options = parser.parse_args(argv)
    logging.disable_progress_bar()
    with job_folder(options) as out:
        run_stages(options, out)


def finetune_models(options: argparse.Namespace, out: Path) -> None:
    """Fine-tunes the pre-trained model, and one of the same architecture from scratch."""
    resume = ["--resume"] if options.resume else []
    settings = [
        "--config",
        options.finetune_config,
        "--pretrained",
        out / "pretrain/model",
        *resume,
    ]
    run("4 Fine-tune on both tasks", finetune, *settings, "--out", out / "finetune")
    scratch = ["--init", "scratch", "--out", out / "scratch"]
    run("  and the same from scratch", finetune, *settings, *scratch)


def run_stages(options: argparse.Namespace, out: Path) -> None:
    """Runs the steps that are not done."""
    pretrain_model(options, out, "--unseen", UNSEEN)
    finetune_models(options, out)

    models = ["--model", f"pre-trained={out / 'finetune/model'}"]
    models += ["--also", f"from-scratch={out / 'scratch/model'}"]
    limit = ["--limit", str(options.limit)] if options.limit else []
    tasks = ["--tasks", ",".join(TASKS)]
    run("5 Evaluate", evaluation, "run", *models, *tasks, *limit, "--out", out / "eval")


if __name__ == "__main__":
    run_main(main, interrupted=RESUME)
