"""Three made-up tasks that a tiny model learns a little of in seconds; two have a dev split."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from stmoe_eval.scores.metrics import ACCURACY, mean_of
from stmoe_eval.source import BuiltIn
from stmoe_eval.task import TASKS, Decoding, Row, Task
from stmoe_eval.text.postprocess import label_index

LABELS = ("ba", "ko", "mi")
SIZES = {"first": 101, "last": 37, "rare": 5}
DEV = 11


def _rows(name: str, split: str) -> list[Row]:
    rng = random.Random(f"{name} {split}")
    size = SIZES[name] if split == "train" else DEV
    return [{"words": tuple(rng.choices(LABELS, k=5))} for _ in range(size)]


def _preprocess(name: str):
    place = -1 if name == "last" else 0
    return lambda row: [
        {"inputs": f"{name} {' '.join(row['words'])}", "targets": row["words"][place]}
    ]


def _near(targets, answers):
    """Returns 100 where an answer is the label or the one beside it."""
    return np.asarray(
        [100.0 * (abs(one - other) <= 1) for one, other in zip(targets, answers, strict=True)]
    )


def tiny_task(name: str) -> Task:
    return Task(
        name=name,
        version=1,
        description="Made up.",
        licence="none",
        source=BuiltIn(
            lambda split: _rows(name, split),
            ("train",) if name == "rare" else ("train", "validation", "test"),
        ),
        preprocess=_preprocess(name),
        postprocess=label_index(LABELS),
        metrics=(mean_of("near", _near), ACCURACY) if name == "first" else (ACCURACY,),
        choices=LABELS,
        decoding=Decoding(max_tokens=5),
        prompt_source="this library",
    )


@contextmanager
def registered() -> Iterator[None]:
    """Puts the tasks into the registry, for as long as the block runs."""
    TASKS.names()
    for name in SIZES:
        TASKS.add(name, tiny_task(name))
    try:
        yield
    finally:
        for name in SIZES:
            del TASKS._entries[name]
