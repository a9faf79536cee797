"""One valid thing of each kind, small, made once: what the cases damage copies of."""

import fcntl
import json
import shutil
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
import yaml
from safetensors.torch import load_file

import stmoe
from moe.commands import finetune, pretrain
from moe.data.tokenizer import load_tokenizer
from tests.eval.rows import FIXTURES
from tests.eval.studies.tiny_study import STUDY
from tests.models.hf_models import their_model
from tests.training.tiny_run import MODEL, TRAINING, write_inputs

REPOSITORY = Path(__file__).parents[2]
TASK = "copa"  # choices and a generation, 5 rows
SHORT = {**TRAINING, "steps": 4, "checkpoint_every": 2, "evaluate_every": 4}
PAIRS = [
    {"inputs": f"the colour of {thing}", "targets": colour}
    for thing, colour in zip("abc", "xyz", strict=True)
]
DOCUMENTS = [
    {"text": f"The sea is {word} today, and the night too."}
    for word in ("blue", "so very dark", "red", "wide")
]

_ROW_CASE = {
    "id": "boolq-1",
    "kind": "preprocess",
    "task": "super_glue/boolq",
    "input": {"question": "is it red", "passage": "It is red.", "idx": 3, "label": 1},
    "expected": [
        {"idx": 3, "inputs": "boolq passage: It is red. question: is it red", "targets": "True"}
    ],
}


def build_workspace(root: Path) -> Path:
    """Returns a folder with one valid thing of each kind; of two processes that ask for it, one
    makes it.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    with root.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "done").exists():
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                _fill(root)
            (root / "done").touch()
            shutil.copytree(root, root.with_suffix(".kept"), symlinks=True)
    return root


def _fill(root: Path) -> None:
    """Makes everything."""
    write_inputs(root)
    shutil.copytree(REPOSITORY / "recipes", root / "recipes")
    shutil.copytree(FIXTURES / TASK, root / "rows" / TASK)
    _write_texts(root)
    _write_runs(root)
    _write_models(root)
    _write_evaluations(root)


def _write_texts(root: Path) -> None:
    """Writes what a user writes by hand: lines of text and pairs, recipes, cases."""
    for name, lines in (("documents.jsonl", DOCUMENTS), ("pairs.jsonl", PAIRS)):
        (root / name).write_text(
            "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
        )
    pairs = pyarrow.Table.from_pylist(PAIRS)
    pyarrow.parquet.write_table(pairs, root / "pairs.parquet")
    lines = ["\t".join(row.values()) for row in ({"i": "inputs", "t": "targets"}, *PAIRS)]
    (root / "pairs.tsv").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (root / "cases.json").write_text(json.dumps({"cases": [_ROW_CASE]}), encoding="utf-8")
    (root / "job/tokenizer").mkdir(parents=True)  # a job that has begun
    settings = dict.fromkeys(("data", "quick"), "other")
    (root / "job/settings.json").write_text(json.dumps(settings), encoding="utf-8")
    (root / "t5x").mkdir()
    (root / "t5x/checkpoint").write_bytes(b"\x80")

    square = {"shape": [2, 2], "wraps": False, "bandwidth": "1 GB/s", "latency": "1 us"}
    network = {"name": "square", "grid": square}
    (root / "network.yaml").write_text(yaml.safe_dump(network), encoding="utf-8")

    settings = {**STUDY["settings"], "config": str(root / "pretrain.yaml")}
    study = yaml.safe_dump({**STUDY, "settings": settings})
    (root / "study.yaml").write_text(study, encoding="utf-8")

    for name in ("pretrain.yaml", "finetune.yaml"):
        recipe = yaml.safe_load((root / name).read_text(encoding="utf-8"))
        recipe["training"] = SHORT
        recipe["optim"] = {"lr": 0.02, "warmup_steps": 2}
        (root / name).write_text(yaml.safe_dump(recipe), encoding="utf-8")


def _write_runs(root: Path) -> None:
    """Pre-trains and fine-tunes for four steps each, so that two checkpoints stay."""
    inputs = ["--corpus", root / "corpus", "--tokenizer", root / "tokenizer"]
    _run(pretrain, "--config", root / "pretrain.yaml", *inputs, "--out", root / "run")
    start = [
        "--config",
        root / "finetune.yaml",
        "--pretrained",
        root / "run/model",
        "--train",
        root / "pairs.jsonl",
    ]
    _run(finetune, *start, "--out", root / "finetuned")
    few = ["--examples", 4, "--inputs-length", 16]
    traced = ["--model", root / "run/model", "--corpus", root / "corpus", "--out", root / "trace"]
    _run(stmoe, "inspect", "record", *traced, *few)
    for name, unfinished in (("run", "unfinished"), ("finetuned", "unfinished-finetuning")):
        shutil.copytree(root / name, root / unfinished, ignore=shutil.ignore_patterns("model"))


def _write_models(root: Path) -> None:
    """Writes a T5 and a Switch of transformers with the tokenizer of the run."""
    tokenizer = load_tokenizer(root / "tokenizer")
    sizes = {"vocab_size": MODEL["vocab_size"], "num_layers": 2, "num_decoder_layers": 2}
    switch = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    for name, kind, changes in (("t5", "T5 1.0", sizes), ("switch", "Switch", {**sizes, **switch})):
        their_model(kind, **changes).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)

    weights = load_file(root / "switch/model.safetensors")
    ignored = shutil.ignore_patterns("model.safetensors")
    for name in ("binary", "sharded"):
        shutil.copytree(root / "switch", root / name, ignore=ignored)
    torch.save(weights, root / "binary/pytorch_model.bin")
    their_model("Switch", **{**sizes, **switch}).save_pretrained(
        root / "sharded", max_shard_size="150KB"
    )


def _write_evaluations(root: Path) -> None:
    """Evaluates two models on one task."""
    for name, model in (("first", "run"), ("second", "finetuned")):
        shown = ["--tasks", TASK, "--data", root / "rows", "--out", root / "evaluations" / name]
        _run(stmoe, "eval", "run", "--model", root / model / "model", *shown)


def _run(module, *arguments) -> None:
    """Runs a command."""
    torch.manual_seed(0)
    module.main([str(argument) for argument in arguments])
