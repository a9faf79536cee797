"""GLUE: nine tasks, and the diagnostic of MNLI.

Prompts, targets and scoring are T5's. Labels of the test splits are hidden: scores are those of the
validation split; a test split gives a file for the benchmark's site. Of MRPC the hub's copy has
them, since they were published before; there both come out.
"""

from collections.abc import Mapping
from dataclasses import replace

from eval.row_schema import ColumnKinds, Interval, LabelValues
from eval.scores.metrics import (
    ACCURACY,
    F1_WITH_INVALID,
    MATTHEWS,
    MATTHEWS_OF_THREE,
    PEARSON,
    SPEARMAN,
    Metric,
)
from eval.source import HubData
from eval.submission import STSB_FILE, glue_file
from eval.task import Features, Row, Task, register_task
from eval.text import postprocess, preprocess
from eval.text.preprocess import HIDDEN_LABEL, HIDDEN_TARGET

_FAMILY = "GLUE"
_LICENCE = "mixed: see the card of GLUE"
_SENTENCES: ColumnKinds = {"sentence1": str, "sentence2": str, "idx": int}
_PREMISE: ColumnKinds = {"premise": str, "hypothesis": str, "idx": int}
_ZERO_ONE = (0, 1)


def _data(
    config: str,
    counts: Mapping[str, int],
    columns: ColumnKinds,
    label: LabelValues,
    *,
    label_kind: type = int,
    hub_splits: Mapping[str, str] | None = None,
) -> HubData:
    """Returns a config of GLUE.

    Args:
        config: Of the repository.
        counts: Rows by split.
        columns: Without the label.
        label: Values of the label.
        label_kind: Kind of the label's column.
        hub_splits: The hub's name of a split, where it is another.
    """
    return HubData(
        "nyu-mll/glue",
        config,
        counts=counts,
        columns={**columns, "label": label_kind},
        labels={"label": label},
        hidden=("test",),
        hidden_values={"label": HIDDEN_LABEL},
        hub_splits=hub_splits or {},
    )


def _classification(
    name: str,
    description: str,
    source: HubData,
    file: str,
    metrics: tuple[Metric, ...] = (ACCURACY,),
    *,
    text: str = "",
    numbers: bool = False,
) -> Task:
    """Returns a classification of GLUE.

    Args:
        name: Name of the task.
        description: See `Task`.
        source: Its rows.
        file: Name of the site's file.
        metrics: Its metrics; their mean is its score in the average.
        text: Its name in LABELS; "" for `name`.
        numbers: Whether the site takes the number of a label in place of its text.
    """
    labels = preprocess.LABELS[text or name]
    submission = glue_file(file, _ZERO_ONE if numbers else labels)
    return Task(
        name=name,
        version=1,
        description=description,
        licence=_LICENCE,
        source=source,
        preprocess=preprocess.glue_task(text or name),
        postprocess=postprocess.label_index(labels),
        metrics=metrics,
        headline=metrics,
        choices=labels,
        ids=("idx",),
        targets_length=84,
        submission=submission,
        family=_FAMILY,
    )


# ---------------------------------------------------------------------------
# One sentence

register_task(
    _classification(
        name="cola",
        description="Whether a sentence is grammatical: acceptable or unacceptable.",
        source=_data(
            "cola",
            counts={"train": 8551, "validation": 1043, "test": 1063},
            columns={"sentence": str, "idx": int},
            label=range(2),
        ),
        file="CoLA.tsv",
        metrics=(MATTHEWS,),
        numbers=True,
    )
)

register_task(
    _classification(
        name="sst2",
        description="Whether a phrase of a film review is positive or negative.",
        source=_data(
            "sst2",
            counts={"train": 67349, "validation": 872, "test": 1821},
            columns={"sentence": str, "idx": int},
            label=range(2),
        ),
        file="SST-2.tsv",
        numbers=True,
    )
)


# ---------------------------------------------------------------------------
# Two sentences that mean the same

register_task(
    _classification(
        name="mrpc",
        description="Whether two sentences of news say the same: equivalent or not_equivalent.",
        source=_data(
            "mrpc",
            counts={"train": 3668, "validation": 408, "test": 1725},
            columns=_SENTENCES,
            label=range(2),
        ),
        file="MRPC.tsv",
        metrics=(F1_WITH_INVALID, ACCURACY),
        numbers=True,
    )
)

register_task(
    _classification(
        name="qqp",
        description="Whether two questions of Quora are the same: duplicate or not_duplicate.",
        source=_data(
            "qqp",
            counts={"train": 363846, "validation": 40430, "test": 390965},
            columns={"question1": str, "question2": str, "idx": int},
            label=range(2),
        ),
        file="QQP.tsv",
        metrics=(F1_WITH_INVALID, ACCURACY),
        numbers=True,
    )
)


def _stsb(row: Row) -> list[Features]:
    """Returns T5's example; where the label is hidden, T5 has it as a similarity of -1.0."""
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
            counts={"train": 5749, "validation": 1500, "test": 1379},
            columns=_SENTENCES,
            label=Interval(0, 5),
            label_kind=float,
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


# ---------------------------------------------------------------------------
# Inference

_mnli = register_task(
    _classification(
        name="mnli",
        description=(
            "Whether a text entails a sentence: entailment, neutral or contradiction; evaluated on "
            "texts of the kinds that it is trained on (matched)."
        ),
        source=_data(
            "mnli",
            counts={"train": 392702, "validation": 9815, "test": 9796},
            columns=_PREMISE,
            label=range(3),
            hub_splits={"validation": "validation_matched", "test": "test_matched"},
        ),
        file="MNLI-m.tsv",
    )
)

register_task(
    replace(
        _mnli,
        name="mnli_mismatched",
        description="The same of other kinds of text than those of mnli, on which it is trained.",
        source=_data(
            "mnli",
            counts={"validation": 9832, "test": 9847},
            columns=_PREMISE,
            label=range(3),
            hub_splits={"validation": "validation_mismatched", "test": "test_mismatched"},
        ),
        submission=glue_file("MNLI-mm.tsv", preprocess.THREE_WAY),
    )
)

register_task(
    _classification(
        name="qnli",
        description=(
            "Whether a sentence of Wikipedia answers a question: entailment or not_entailment."
        ),
        source=_data(
            "qnli",
            counts={"train": 104743, "validation": 5463, "test": 5463},
            columns={"question": str, "sentence": str, "idx": int},
            label=range(2),
        ),
        file="QNLI.tsv",
    )
)

register_task(
    _classification(
        name="glue_rte",
        description="Whether a text entails a sentence; rte of SuperGLUE with GLUE's prompt.",
        source=_data(
            "rte",
            counts={"train": 2490, "validation": 277, "test": 3000},
            columns=_SENTENCES,
            label=range(2),
        ),
        file="RTE.tsv",
        text="rte",
    )
)

register_task(
    _classification(
        name="wnli",
        description=(
            "Whether a text entails the same with a noun for its pronoun; T5 trains on wsc instead."
        ),
        source=_data(
            "wnli",
            counts={"train": 635, "validation": 71, "test": 146},
            columns=_SENTENCES,
            label=range(2),
        ),
        file="WNLI.tsv",
        numbers=True,
    )
)

register_task(
    replace(
        _mnli,
        name="ax",
        description=(
            "A diagnostic for models trained on mnli, over many kinds of inference; not part of the "
            "average. Its only split is hidden: rows with labels are scored when they are given."
        ),
        source=_data("ax", counts={"test": 1104}, columns=_PREMISE, label=range(3)),
        preprocess=preprocess.glue_task("ax"),
        metrics=(MATTHEWS_OF_THREE,),
        headline=(MATTHEWS_OF_THREE,),
        split="test",
        submission=glue_file("AX.tsv", preprocess.THREE_WAY),
    )
)
