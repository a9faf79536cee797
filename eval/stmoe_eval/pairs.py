"""Your own pairs of texts as a task: `stmoe eval run --pairs FILE`.

The metrics follow from the targets, as in `stmoe finetune --train`. A task's name encodes them, so that two runs can be
compared without the file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe.checksums import sha256_of
from moe.data.folders import files_of
from moe.data.pair_files import Pair, read_pairs
from moe.errors import DataError
from moe.training.pair_scores import ANSWER_TOKENS, PAIR_METRICS, Scorer, kind_of_targets
from stmoe_eval.scores.metrics import Metric, Values, mean_of
from stmoe_eval.source import BuiltIn
from stmoe_eval.task import TASKS, Decoding, Features, Row, Task
from stmoe_eval.text.postprocess import unchanged

_MOST_CHOICES = 100
"""Labels beyond which none are ranked: each is scored for each input."""


def _source(origin: str, dev: Sequence[Pair] = (), train: Sequence[Pair] = ()) -> BuiltIn:
    """Returns the rows of files of pairs.

    Args:
        origin: The evaluated file and its hash.
        dev: Pairs that are evaluated.
        train: Pairs that the baselines are fitted to.
    """

    def read(split: str) -> list[Row]:
        return [pair._asdict() for pair in (train if split == "train" else dev)]

    return BuiltIn(read, ("train", "validation") if train else ("validation",), origin=origin)


def _preprocess(row: Row) -> list[Features]:
    return [{"inputs": row["inputs"], "targets": row["targets"], "group": row["group"] or ""}]


def _metric(name: str, scorer: Scorer) -> Metric:
    return mean_of(name, partial(_percentages, scorer))


def _percentages(scorer: Scorer, targets: Values, answers: Values) -> NDArray[np.float64]:
    return 100 * np.asarray(scorer(targets, answers))


PAIR_TASKS: dict[str, Task] = {}
"""Tasks of pairs by name, without rows."""

for _kind, _scorers in PAIR_METRICS.items():
    PAIR_TASKS[f"pairs_{_kind}"] = Task(
        name=f"pairs_{_kind}",
        version=2,
        description="Pairs of texts of a user.",
        licence="not stated",
        source=_source("a file of pairs"),
        preprocess=_preprocess,
        postprocess=unchanged,
        metrics=tuple(_metric(name, scorer) for name, scorer in _scorers.items()),
        groups=("group",),
        decoding=Decoding(max_tokens=ANSWER_TOKENS),
        prompt_source="the file",
        family="Own pairs",
    )


def find_task(name: str) -> Task:
    """Returns the task called `name`, from the registry or made of the user's own pairs."""
    return PAIR_TASKS.get(name) or TASKS.get(name)


def read_pairs_task(
    path: Path, train: Path | None = None, columns: Mapping[str, str] | None = None
) -> Task:
    """Returns the task of a table of pairs in a file.

    Args:
        path: The evaluated pairs.
        train: Pairs for fitting the baselines, without those whose inputs are equal; None for no
            baselines.
        columns: See `read_pairs`.

    Raises:
        DataError: When a file is missing, or a row is not a pair.
    """
    for source in filter(None, (path, train)):
        files = files_of(source)
        if not files or not all(file.is_file() for file in files):
            raise DataError(
                f"{source} is not a file. Give a .jsonl, .csv, .tsv or .parquet file with inputs and targets, or a "
                "folder of them."
            )
    digests = [sha256_of(file) for file in files_of(path)]
    digest = digests[0] if len(digests) == 1 else sha256("".join(digests).encode()).hexdigest()
    dev = read_pairs(path, columns)

    # A run holds a part of its file out: no baseline may use that part.
    evaluated = {pair.inputs for pair in dev}
    train_pairs = (
        [pair for pair in read_pairs(train, columns) if pair.inputs not in evaluated]
        if train
        else []
    )

    task = PAIR_TASKS[f"pairs_{kind_of_targets([pair.targets for pair in dev])}"]
    labels: Sequence[str] = ()
    if task.name == "pairs_labels":
        labels = sorted({pair.targets for pair in [*dev, *train_pairs]})
    names = ", ".join(metric.name for metric in task.metrics)
    has_groups = any(pair.group is not None for pair in dev)
    return replace(
        task,
        description=(
            f"Own pairs, by {names}. Each pair is a group of its own"
            f"{', except those with a `group`' if has_groups else ''}. Inputs are truncated at "
            f"{task.inputs_length} tokens."
        ),
        source=_source(f"{path} (SHA-256 {digest[:16]})", dev, train_pairs),
        choices=tuple(labels) if len(labels) <= _MOST_CHOICES else (),
    )
