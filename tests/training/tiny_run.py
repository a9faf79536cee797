"""A corpus, a tokenizer and recipes small enough to run whole commands in seconds."""

import random
from pathlib import Path

import yaml

from moe.commands import build_corpus, train_tokenizer

MODEL = {
    "vocab_size": 230,
    "d_model": 16,
    "d_kv": 4,
    "num_heads": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_experts": 4,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "sparse_dense_stacking": True,
    "dropout_rate": 0.1,
    "group_size": 64,
}
TRAINING = {
    "steps": 40,
    "batch_size": 4,
    "micro_batch_size": 4,
    "log_every": 1,
    "evaluate_every": 10,
    "held_out_batches": 1,
    "checkpoint_every": 7,
}


def write_texts(folder: Path, number: int = 60) -> Path:
    """Writes files of made-up English."""
    rng = random.Random(0)
    syllables = ["ba", "ko", "mi", "ter", "lan", "su", "ver", "ti", "on", "al", "qui", "dro"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(300)]
    folder.mkdir(parents=True)
    for i in range(number):
        sentences = [" ".join(rng.choices(words, k=9)).capitalize() + "." for _ in range(12)]
        (folder / f"{i}.txt").write_text(" ".join(sentences) + "\n", encoding="utf-8")
    return folder


def write_inputs(folder: Path) -> dict[str, Path]:
    """Writes texts, corpus, tokenizer and recipes; returns where they are."""
    paths = {
        name: folder / name
        for name in ("texts", "corpus", "tokenizer", "pretrain.yaml", "finetune.yaml")
    }
    write_texts(paths["texts"])
    build_corpus.main(
        ["--data", str(paths["texts"]), "--out", str(paths["corpus"]), "--held-out", "0.2"]
    )
    train_tokenizer.main(
        [
            "--corpus",
            str(paths["corpus"]),
            "--out",
            str(paths["tokenizer"]),
            "--vocab-size",
            str(MODEL["vocab_size"]),
        ]
    )
    optim = {"schedule": "rsqrt", "lr": 0.2, "warmup_steps": 10, "cooldown_steps": 10}
    pretrain = {"model": MODEL, "data": {"inputs_length": 16}, "optim": optim, "training": TRAINING}
    finetune = {
        "data": {"inputs_length": 64, "targets_length": 24, "pack": True},
        "optim": {"lr": 0.02, "warmup_steps": 2},
        "training": {**TRAINING, "steps": 9},
    }
    paths["pretrain.yaml"].write_text(yaml.safe_dump(pretrain), encoding="utf-8")
    paths["finetune.yaml"].write_text(yaml.safe_dump(finetune), encoding="utf-8")
    return paths


def pretrain_arguments(inputs: dict[str, Path], out: Path, *more: object) -> list[str]:
    """Returns the command line of a pre-training run on what `write_inputs` wrote."""
    paths = ["--corpus", inputs["corpus"], "--tokenizer", inputs["tokenizer"], "--out", out]
    return [str(part) for part in ("--config", inputs["pretrain.yaml"], *paths, *more)]
