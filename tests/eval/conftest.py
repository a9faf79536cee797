"""A tiny random T5 of transformers with a small vocabulary: eval/ serves any sequence-to-sequence
checkpoint.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from moe.data.tokenizer import train_tokenizer
from stmoe_eval.pairs import PAIR_TASKS
from stmoe_eval.scores.metrics import ACCURACY
from stmoe_eval.source import BuiltIn
from stmoe_eval.task import TASKS, Decoding, Task
from stmoe_eval.text.postprocess import label_index
from tests.models.tiny import tiny_model

CHOICES = ("red", "green", "dark blue")
WORDS = ["red", "green", "dark", "blue", "fire", "grass", "sea", "leaf", "blood", "night"]
WORDS += ["name", "of", "colour"]
THINGS = {"fire": "red", "grass": "green", "sea": "dark blue", "blood": "red", "leaf": "green"}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    texts = [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 9)) for i in range(1, 60)]
    return train_tokenizer(texts, 131, tmp_path_factory.mktemp("vocabulary") / "tokenizer")


@pytest.fixture(scope="session")
def folders(tmp_path_factory, tokenizer) -> dict[str, Path]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 131, "d_model": 29, "d_kv": 5, "d_ff": 31, "num_layers": 2}
    config = T5Config(**sizes, num_heads=3, decoder_start_token_id=0, dropout_rate=0.0)
    models = {
        "t5": T5ForConditionalGeneration(config),
        "moe": tiny_model(eval_capacity_factor=None),
    }
    made = {}
    for name, model in models.items():
        made[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(made[name])
        tokenizer.save_pretrained(made[name])
    return made


def colour_task() -> Task:
    rows = []
    for i in range(5):
        for thing, colour in THINGS.items():
            inputs = f"name the colour of {'the ' * i}{thing}"
            rows.append({"id": f"{thing}-{i}", "thing": thing, "inputs": inputs, "targets": colour})
    return Task(
        name="colour",
        version=1,
        description="Colours of things.",
        licence="CC0-1.0",
        source=BuiltIn(lambda split: rows),
        preprocess=lambda row: [dict(row)],
        postprocess=label_index(CHOICES),
        metrics=(ACCURACY,),
        choices=CHOICES,
        ids=("id",),
        groups=("thing",),
        decoding=Decoding(max_tokens=7),
    )


@pytest.fixture(scope="session")
def task() -> Task:
    return colour_task()


@pytest.fixture
def short_answers(monkeypatch):
    """Lets tasks and pairs be answered with a few tokens: a random model rarely ends an answer."""
    for tasks, names in ((TASKS._entries, TASKS.names()), (PAIR_TASKS, list(PAIR_TASKS))):
        for name in names:
            decoding = tasks[name].decoding._replace(max_tokens=5)
            monkeypatch.setitem(tasks, name, replace(tasks[name], decoding=decoding))
