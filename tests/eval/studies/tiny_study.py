"""A study small enough to be run in seconds."""

from pathlib import Path

import yaml

from stmoe_eval.studies.command import main
from tests.training.tiny_run import write_inputs

STUDY = {
    "title": "Balance",
    "claim": "It matters.",
    "paper": "It does.",
    "expected": "It will.",
    "command": "pretrain",
    "settings": {
        "config": "pretrain.yaml",
        "corpus": "{studies}/corpus",
        "tokenizer": "{studies}/tokenizer",
        "optim.cooldown_steps": 2,
        "training.steps": 6,
        "training.evaluate_every": 3,
        "training.checkpoint_every": 2,
    },
    "arms": {"with": {}, "without": {"model.load_balance_loss_weight": 0.0}},
    "seeds": [3, 5],
    "measure": {"metric": "heldout/loss"},
    "primary": {"arm": "with", "against": "without"},
}


def write_studies(folder: Path, **changes: object) -> Path:
    """Writes a folder with a corpus, a tokenizer and study.yaml."""
    write_inputs(folder)
    (folder / "study.yaml").write_text(yaml.safe_dump({**STUDY, **changes}))
    return folder


def run_study(studies: Path, out: Path, *options: str) -> None:
    """Runs the study of a folder."""
    main([str(studies / "study.yaml"), "--out", str(out), *options])
