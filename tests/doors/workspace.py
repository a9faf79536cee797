"""One valid thing of each kind, small, made once: what the tests damage copies of."""

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
from moe.data.tokenizer import load_tokenizer
from tests.eval.rows import FIXTURES
from tests.models.hf_models import their_model
from tests.training.tiny_run import MODEL, TRAINING, write_inputs

TASK = "copa"  # choices and a generation, 5 rows
SHORT = {**TRAINING, "steps": 2, "checkpoint_every": 2, "evaluate_every": 2}
PAIRS = [
    {"inputs": f"the colour of {thing}", "targets": colour}
    for thing, colour in zip("abc", "xyz", strict=True)
]
DOCUMENTS = [
    {"text": f"The sea is {word} today, and the night too."}
    for word in ("blue", "so very dark", "red", "wide")
]


def build_workspace(root: Path) -> Path:
    """Returns a folder with one valid thing of each kind; of two processes that ask for it, one makes it."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with root.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "done").exists():
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                _write_texts(root)
                _write_runs(root)
                _write_models(root)
            (root / "done").touch()
    return root


def _write_texts(root: Path) -> None:
    """Writes what a user writes by hand: texts, pairs, rows of a task and a recipe."""
    write_inputs(root)
    shutil.copytree(FIXTURES / TASK, root / "rows" / TASK)
    for name, rows in (("documents.jsonl", DOCUMENTS), ("pairs.jsonl", PAIRS)):
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(PAIRS), root / "pairs.parquet")
    lines = ["inputs\ttargets", *("\t".join(row.values()) for row in PAIRS)]
    (root / "pairs.tsv").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    path = root / "pretrain.yaml"
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    recipe |= {"training": SHORT, "optim": {"lr": 0.02, "warmup_steps": 2}}
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")


def _write_runs(root: Path) -> None:
    """Pre-trains for two steps, evaluates the model on one task, and traces it."""
    texts = ["--corpus", root / "corpus"]
    inputs = [*texts, "--tokenizer", root / "tokenizer"]
    run("pretrain", "--config", root / "pretrain.yaml", *inputs, "--out", root / "run")
    model = ["--model", root / "run/model"]
    rows = ["--tasks", TASK, "--data", root / "rows"]
    run("eval", "run", *model, *rows, "--out", root / "evaluations/first")
    shutil.copytree(root / "evaluations/first", root / "evaluations/second")
    length = ["--examples", 4, "--inputs-length", 16]
    run("inspect", "record", *model, *texts, "--out", root / "trace", *length)


def _write_models(root: Path) -> None:
    """Writes a Switch of transformers with the tokenizer of the run, in safetensors and in torch's format."""
    sizes = {"vocab_size": MODEL["vocab_size"], "num_layers": 2, "num_decoder_layers": 2}
    sparse = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    their_model("Switch", **sizes, **sparse).save_pretrained(root / "switch")
    load_tokenizer(root / "tokenizer").save_pretrained(root / "switch")
    ignored = shutil.ignore_patterns("model.safetensors")
    shutil.copytree(root / "switch", root / "binary", ignore=ignored)
    torch.save(load_file(root / "switch/model.safetensors"), root / "binary/pytorch_model.bin")


def run(*words: object) -> None:
    """Runs a command of `stmoe`."""
    torch.manual_seed(0)
    stmoe.main([str(word) for word in words])
