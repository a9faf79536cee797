"""GLUE: nine tasks, and the diagnostic of MNLI.

Prompts, targets and scoring are T5's. Labels of the test splits are hidden: scores are those of the
validation split; a test split gives a file for the benchmark's site. The hub's copy of MRPC has
them, since they were published before; both are then written.
"""

from collections.abc import Sequence
from typing import Any

from stmoe_eval.scores.metrics import (
    ACCURACY,
    F1_WITH_INVALID,
    MATTHEWS,
    MATTHEWS_OF_THREE,
    PEARSON,
    SPEARMAN,
    Metric,
)
from stmoe_eval.source import ColumnKinds, HubData, Interval
from stmoe_eval.submission import STSB_FILE, glue_file
from stmoe_eval.task import SPLITS, Features, Row, Task, register_task
from stmoe_eval.text import postprocess, preprocess
from stmoe_eval.text.preprocess import HIDDEN_LABEL, HIDDEN_TARGET

_FAMILY = "GLUE"
_LICENCE = "mixed: see the card of GLUE"
_SENTENCES: ColumnKinds = {"sentence1": str, "sentence2": str, "idx": int}
_PREMISE: ColumnKinds = {"premise": str, "hypothesis": str, "idx": int}


def _data(
    config: str, counts: Sequence[int], columns: ColumnKinds, *, matched: str = "", **options: Any
) -> HubData:
    """Returns a config of GLUE, whose test labels are hidden.

    Args:
        config: Name of the config.
        counts: Rows of the training, validation and test splits; of the last ones, if fewer.
        columns: Columns with the label.
        matched: `matched` or `mismatched`, where the hub has both of the evaluated splits.
        **options: Other fields of `HubData`.
    """
    if matched:
        options["hub_splits"] = {split: f"{split}_{matched}" for split in SPLITS[1:]}
    return HubData(
        "nyu-mll/glue",
        config,
        counts=dict(zip(SPLITS[-len(counts) :], counts, strict=True)),
        columns=columns,
        hidden=("test",),
        hidden_values={"label": HIDDEN_LABEL},
        **options,
    )


def _register(
    name: str,
    description: str,
    counts: Sequence[int],
    columns: ColumnKinds,
    file: str,
    metrics: tuple[Metric, ...] = (ACCURACY,),
    *,
    text: str = "",
    config: str = "",
    matched: str = "",
    numbers: bool = False,
    **options: Any,
) -> None:
    """Registers a classification of GLUE.

    Args:
        name: Name of the task.
        description: See `Task`.
        counts: See `_data`.
        columns: Columns without the label.
        file: Name of the file for the benchmark's site.
        metrics: Metrics of the task; the average over tasks uses their mean.
        text: Its name in LABELS; "" for `name`.
        config: Name of the config on the hub; "" for `name`.
        matched: See `_data`.
        numbers: Whether the site expects the number of a label instead of its text.
        **options: Other fields of `Task`.
    """
    labels = preprocess.LABELS[text or name]
    columns = {**columns, "label": int}
    label_numbers = {"label": range(len(labels))}
    task = Task(
        name=name,
        version=1,
        description=description,
        licence=_LICENCE,
        source=_data(config or name, counts, columns, labels=label_numbers, matched=matched),
        preprocess=preprocess.glue_task(text or name),
        postprocess=postprocess.label_index(labels),
        metrics=metrics,
        headline=metrics,
        choices=labels,
        ids=("idx",),
        targets_length=84,
        submission=glue_file(file, (0, 1) if numbers else labels),
        family=_FAMILY,
        **options,
    )
    register_task(task)


_register(
    "cola",
    "Whether a sentence is grammatical: acceptable or unacceptable.",
    counts=(8551, 1043, 1063),
    columns={"sentence": str, "idx": int},
    file="CoLA.tsv",
    metrics=(MATTHEWS,),
    numbers=True,
)

_register(
    "sst2",
    "Whether a phrase of a film review is positive or negative.",
    counts=(67349, 872, 1821),
    columns={"sentence": str, "idx": int},
    file="SST-2.tsv",
    numbers=True,
)


_register(
    "mrpc",
    "Whether two sentences of news say the same: equivalent or not_equivalent.",
    counts=(3668, 408, 1725),
    columns=_SENTENCES,
    file="MRPC.tsv",
    metrics=(F1_WITH_INVALID, ACCURACY),
    numbers=True,
)

_register(
    "qqp",
    "Whether two questions of Quora are the same: duplicate or not_duplicate.",
    counts=(363846, 40430, 390965),
    columns={"question1": str, "question2": str, "idx": int},
    file="QQP.tsv",
    metrics=(F1_WITH_INVALID, ACCURACY),
    numbers=True,
)


def _stsb(row: Row) -> list[Features]:
    """Returns T5's example; if the label is hidden, T5 uses a similarity of -1.0."""
    examples = preprocess.stsb(row)
    for features in examples:
        if row["label"] == HIDDEN_LABEL:
            features["targets"] = HIDDEN_TARGET
    return examples


register_task(
    Task(
        name="stsb",
        version=1,
        description="How similar two sentences are, from 0.0 to 5.0 in steps of 0.2, as text.",
        licence=_LICENCE,
        source=_data(
            "stsb",
            (5749, 1500, 1379),
            {**_SENTENCES, "label": float},
            labels={"label": Interval(0, 5)},
        ),
        preprocess=_stsb,
        postprocess=postprocess.string_to_float(),
        metrics=(PEARSON, SPEARMAN),
        headline=(PEARSON, SPEARMAN),
        ids=("idx",),
        targets_length=84,
        submission=STSB_FILE,
        family=_FAMILY,
    )
)


_register(
    "mnli",
    "Whether a text entails a sentence: entailment, neutral or contradiction; evaluated on texts of "
    "the kinds that it is trained on (matched).",
    counts=(392702, 9815, 9796),
    columns=_PREMISE,
    file="MNLI-m.tsv",
    matched="matched",
)

_register(
    "mnli_mismatched",
    "The same of other kinds of text than those of mnli, on which it is trained.",
    counts=(9832, 9847),
    columns=_PREMISE,
    file="MNLI-mm.tsv",
    config="mnli",
    matched="mismatched",
)

_register(
    "qnli",
    "Whether a sentence of Wikipedia answers a question: entailment or not_entailment.",
    counts=(104743, 5463, 5463),
    columns={"question": str, "sentence": str, "idx": int},
    file="QNLI.tsv",
)

_register(
    "glue_rte",
    "Whether a text entails a sentence; rte of SuperGLUE with GLUE's prompt.",
    counts=(2490, 277, 3000),
    columns=_SENTENCES,
    file="RTE.tsv",
    text="rte",
    config="rte",
)

_register(
    "wnli",
    "Whether a text entails the same with a noun for its pronoun; T5 trains on wsc instead.",
    counts=(635, 71, 146),
    columns=_SENTENCES,
    file="WNLI.tsv",
    numbers=True,
)

_register(
    "ax",
    "A diagnostic for models trained on mnli, over many kinds of inference; not part of the average. "
    "Its only split is hidden: rows with labels are scored when they are given.",
    counts=(1104,),
    columns=_PREMISE,
    file="AX.tsv",
    metrics=(MATTHEWS_OF_THREE,),
    split="test",
)
