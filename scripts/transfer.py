"""Does pre-training help a tiny ST-MoE? Two tasks, compared with baselines, in 10 minutes on a CPU.

    python -m scripts.transfer --out runs/transfer [--resume]

Pre-trains on text that comes with Python, without the tested files; fine-tunes one model on both
tasks together, and another from scratch; and evaluates both models on both tasks. Every step is a
separate command; this one runs them in turn and prints each.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import argparse
from pathlib import Path

from transformers.utils import logging

from moe.cli import RESUME, integer, run_main
from scripts.demo import build_text, job_folder, job_parser, pretrain_model, run, run_folder

TASKS = ("unicode_category", "docstring_summary")
UNSEEN = "docstring_summary"


def main(argv: list[str]) -> None:
    """Runs the steps; --resume skips finished ones and resumes the interrupted one."""
    parser = job_parser(
        "transfer",
        "Compares fine-tuning with and without pre-training.",
        pretrain_config="st_moe_tiny_pretrain",
        finetune_config="st_moe_tiny_finetune_offline",
    )
    parser.add_argument(
        "--limit", type=integer(least=1), help="most examples of a task in the evaluation (all)"
    )

    options = parser.parse_args(argv)
    logging.disable_progress_bar()
    with job_folder(options) as out:
        run_stages(options, out)


def finetune_models(options: argparse.Namespace, out: Path) -> None:
    """Fine-tunes the pre-trained model, and one of the same architecture from scratch."""
    settings = ["--config", options.finetune_config, "--pretrained", out / "pretrain/model"]
    pretrained = run_folder(out / "finetune")
    run("Fine-tune on both tasks", "stmoe", "finetune", *settings, *pretrained)
    scratch = ["--init", "scratch", *run_folder(out / "scratch")]
    run("  and the same from scratch", "stmoe", "finetune", *settings, *scratch)


def run_stages(options: argparse.Namespace, out: Path) -> None:
    """Runs the steps that are not finished."""
    text = build_text(options, out, "--unseen", UNSEEN)
    pretrain_model(options, out, text)
    finetune_models(options, out)

    models = ["--model", f"pre-trained={out / 'finetune/model'}"]
    models += ["--also", f"from-scratch={out / 'scratch/model'}"]
    limit = ["--limit", str(options.limit)] if options.limit else []
    tasks = ["--tasks", ",".join(TASKS)]
    run("Evaluate", "python -m eval", "run", *models, *tasks, *limit, "--out", out / "eval")


if __name__ == "__main__":
    run_main(main, interrupted=RESUME)
