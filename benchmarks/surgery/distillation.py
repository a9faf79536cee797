"""Distillation: the share of a sparse teacher's advantage that a dense student keeps.

    python -m benchmarks.surgery.distillation --demo runs/demo --out runs/distillation --json distillation.json

A model of the student's shape is pre-trained alone (d). Students start from the demo's teacher (t) and are
trained in as many steps, without it and with it (s): the retained share is (s - d) / (t - d). There is none
unless the teacher is better than the model alone with every seed. All losses are measured on the same
held-out batches. The same command continues an interrupted one.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command()

import json
import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.machine import Columns, describe_machine, report_table, save_report
from moe.checkpoint.loading import load_complete
from moe.cli import Parser, integer, path, run_main
from moe.commands import distill, pretrain
from moe.data.corpus import load_corpus
from moe.data.pipeline import SpanCorruptionSource
from moe.data.tokenizer import SpecialIds, load_tokenizer
from moe.data.tokens import tokenize_corpus
from moe.files import output_path, whole_folder
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration
from moe.surgery.dense_student import StudentInit, dense_student_checkpoint, mean_gates
from moe.training.heldout_loss import HeldOut, evaluate_held_out
from moe.training.recipe import PretrainRecipe

EXPECTED = "0.1 to 0.4 of the teacher's advantage is kept"
"""A bet from Switch's tables 6 and 7, made before anything was measured."""

RECIPE = "demo_pretrain"
_BATCHES = 29  # held out
_CALIBRATION_BATCHES = 8
_COLUMNS: Columns = [
    ("student", "arm", ""),
    ("loss before", "before", ".4f"),
    ("loss", "loss", ".4f"),
    ("smallest", "least", ".4f"),
    ("largest", "most", ".4f"),
    ("retained share", "retained", ".2f"),
]


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="python -m benchmarks.surgery.distillation", description=__doc__)
    parser.add_argument("--demo", type=path, required=True, help="folder of a finished demo")
    parser.add_argument("--out", required=True, help="folder of the runs")
    parser.add_argument("--json", help="file to save the table to")
    parser.add_argument("--steps", type=integer(least=1), default=2_400, help="of a run (2400)")
    parser.add_argument(
        "--seeds", type=integer(least=0), nargs="+", default=[1, 2, 3], help="of runs (1 2 3)"
    )
    return parser


def main(argv: list[str]) -> None:
    """Trains all arms, and prints and saves their losses."""
    options = build_parser().parse_args(argv)
    out = output_path(options.out, inputs=[options.demo])
    target = None
    if options.json is not None:
        target = output_path(options.json, suffix=".json", option="--json")
    teacher = options.demo / "pretrain/model"
    held_out = _source(options.demo, teacher, held_out=True)

    # The teacher, and students of it before any training.
    losses = {"teacher": [_loss(teacher, held_out)]}
    before = {}
    for init in get_args(StudentInit):
        student = out / f"student_{init}"
        _make_student(teacher, student, init, options.demo)
        before[f"{init}, no teacher"] = before[f"{init}, teacher"] = _loss(student, held_out)

    # The arms, one seed after the other.
    for seed in options.seeds:
        for arm, run in _arms(options, teacher, out, seed).items():
            losses.setdefault(arm, []).append(_loss(run / "model", held_out))
    rows = _rows(losses, before)
    report = {
        **describe_machine(torch.device("cpu")),
        "expected": EXPECTED,
        "steps": options.steps,
        "seeds": options.seeds,
        "rows": rows,
    }
    save_report(report, target)
    print(f"Expected: {EXPECTED}.\n\n{report_table(_COLUMNS, rows)}")


def _source(demo: Path, teacher: Path, *, held_out: bool) -> SpanCorruptionSource:
    """Returns batches of the demo's corpus, masked as in its pre-training."""
    tokenizer = load_tokenizer(teacher)
    corpus = load_corpus(demo / "corpus")
    recipe, _ = pretrain.pretrain_command().parse(
        ["--config", RECIPE, "--corpus", "c", "--tokenizer", "t", "--out", "o"]
    )
    return pretrain.build_source(
        recipe,
        tokenize_corpus(corpus.held_out if held_out else corpus.train, tokenizer),
        SpecialIds.of(tokenizer),
    )


def _loss(folder: Path, source: SpanCorruptionSource) -> float:
    """Returns the held-out loss of a model in nats."""
    model = load_complete(STMoEForConditionalGeneration, folder)
    held_out = HeldOut(source, _BATCHES, SpecialIds.of(load_tokenizer(folder)))
    return evaluate_held_out(model, held_out)["heldout/loss"]


def _make_student(teacher: Path, folder: Path, init: StudentInit, demo: Path) -> None:
    """Writes a student before training, unless it is there."""
    if folder.exists():
        return
    model = load_complete(STMoEForConditionalGeneration, teacher)
    source = _source(demo, teacher, held_out=False)
    gates = mean_gates(model, map(source.batch, range(_CALIBRATION_BATCHES)))
    with whole_folder(folder, kind="model") as unfinished:
        dense_student_checkpoint(teacher, unfinished, init, gates)


def _arms(options: Namespace, teacher: Path, out: Path, seed: int) -> dict[str, Path]:
    """Trains the arms of a seed, and returns the folder of each."""
    common = ["--config", RECIPE, "--corpus", options.demo / "corpus", "--training.steps"]
    common += [options.steps, "--training.probe_every", 0, "--seed", seed, "--resume"]
    common += ["--training.evaluate_every", options.steps, "--training.held_out_batches", 1]
    arms = {"alone": out / f"alone_{seed}"}
    config = STMoEConfig.from_pretrained(out / "student_mean")
    tokenizer = ["--tokenizer", teacher]

    # The shape of the student, as settings of a recipe.
    shape = []
    for name in PretrainRecipe.model_fields:
        value = getattr(config, name)
        text = value if isinstance(value, str) else json.dumps(value)
        shape.append(f"--model.{name}={text}")
    _run(pretrain.main, [*common, *tokenizer, *shape, "--out", arms["alone"]])
    for init in ("random", "aligned_mean"):
        student = out / f"student_{init}"
        plain = arms[f"{init}, no teacher"] = out / f"{init}_plain_{seed}"
        taught = arms[f"{init}, teacher"] = out / f"{init}_taught_{seed}"
        _run(pretrain.main, [*common, *tokenizer, *shape, "--pretrained", student, "--out", plain])
        models = ["--teacher", teacher, "--student", student]
        _run(distill.main, [*common, *shape, *models, "--out", taught])
    return arms


def _run(command: Any, words: list[Any]) -> None:
    command([str(word) for word in words])


def _rows(losses: dict[str, list[float]], before: dict[str, float]) -> list[dict[str, Any]]:
    """Returns a row for each arm, with the mean over seeds."""
    alone = losses["alone"]
    (teacher,) = losses["teacher"]
    has_advantage = teacher < min(alone)
    rows = []
    for arm, values in losses.items():
        retained = None
        if has_advantage and arm not in ("teacher", "alone"):
            shares = [(own - d) / (teacher - d) for own, d in zip(values, alone, strict=True)]
            retained = statistics.mean(shares)
        rows.append(
            {
                "arm": arm,
                "before": before.get(arm),
                "loss": statistics.mean(values),
                "least": min(values),
                "most": max(values),
                "retained": retained,
            }
        )
    return rows


if __name__ == "__main__":
    run_main(main)
