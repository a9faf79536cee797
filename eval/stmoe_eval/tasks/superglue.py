"""SuperGLUE: eight tasks, two diagnostics, and definite pronoun resolution.

T5 trains on the last in addition to WSC. Prompts, targets and scoring are T5's. Labels of the test
splits
are hidden: scores are those of the validation split, as in the paper's Table 10; a test split gives
a file for the leaderboard.
"""

from collections.abc import Sequence
from typing import Any

from stmoe_eval.scores.metrics import (
    ACCURACY,
    GENDER_PARITY,
    MACRO_F1,
    MATTHEWS,
    MULTIRC_EM,
    MULTIRC_F1A,
    RECORD_EM,
    RECORD_F1,
)
from stmoe_eval.source import ColumnKinds, HubData
from stmoe_eval.submission import MULTIRC_FILE, RECORD_FILE, SubmissionFile, superglue_file
from stmoe_eval.task import SPLITS, Features, Row, Task, register_task
from stmoe_eval.text import postprocess, preprocess, wsc
from stmoe_eval.text.preprocess import HIDDEN_LABEL, TWO_WAY

_FAMILY = "SuperGLUE"
_MIXED = "mixed: see the card of SuperGLUE"
_FALSE_TRUE = ("false", "true")  # as the site writes them


def _data(config: str, counts: Sequence[int], columns: ColumnKinds, **options: Any) -> HubData:
    """Returns a config of SuperGLUE. If it has a training split, its test labels are hidden.

    Args:
        config: Name of the config.
        counts: Rows of the training, validation and test splits; of the last one, if it is alone.
        columns: Columns with the label.
        **options: Other fields of `HubData`.
    """
    return HubData(
        "aps/super_glue",
        config,
        counts=dict(zip(SPLITS[-len(counts) :], counts, strict=True)),
        columns=columns,
        hidden=("test",) if len(counts) > 1 else (),
        **options,
    )


def _labelled(config: str, counts: Sequence[int], columns: ColumnKinds, num_labels: int) -> HubData:
    """Returns a config of SuperGLUE with the column `label`; `columns` are the others."""
    return _data(
        config,
        counts,
        {**columns, "label": int},
        labels={"label": range(num_labels)},
        hidden_values={"label": HIDDEN_LABEL},
    )


def _register(
    name: str,
    description: str,
    licence: str,
    counts: Sequence[int],
    columns: ColumnKinds,
    submission: SubmissionFile,
    **options: Any,
) -> None:
    """Registers a classification in GLUE's format; its name selects prompt and labels.

    Args:
        name: Name of the task, and of its config.
        description: See `Task`.
        licence: Licence of the data.
        counts: See `_data`.
        columns: Columns without the label.
        submission: The file for the benchmark's site.
        **options: Other fields of `Task`, in place of those of a classification.
    """
    labels = preprocess.LABELS[name]
    fields: dict[str, Any] = {
        "preprocess": preprocess.glue_task(name),
        "postprocess": postprocess.label_index(labels),
        "metrics": (ACCURACY,),
        "choices": labels,
        "ids": ("idx",),
        **options,
    }
    task = Task(
        name=name,
        version=1,
        description=description,
        licence=licence,
        source=_labelled(name, counts, columns, len(labels)),
        submission=submission,
        family=_FAMILY,
        **fields,
    )
    register_task(task)


# ---------------------------------------------------------------------------
# Classifications

_register(
    "boolq",
    "A yes/no question about a paragraph of Wikipedia, to True or False.",
    licence="CC BY-SA 3.0",
    counts=(9427, 3270, 3245),
    columns={"question": str, "passage": str, "idx": int},
    submission=superglue_file("BoolQ.jsonl", _FALSE_TRUE),
)

_register(
    "cb",
    "Whether a text commits its author to the clause in it: entailment, contradiction or neutral "
    "(CommitmentBank). The paper prints accuracy; the leaderboard averages it with the F1 over all "
    "three classes.",
    licence=_MIXED,
    counts=(250, 56, 250),
    columns={"premise": str, "hypothesis": str, "idx": int},
    submission=superglue_file("CB.jsonl", preprocess.LABELS["cb"]),
    metrics=(ACCURACY, MACRO_F1),
    headline=(ACCURACY, MACRO_F1),
)

_register(
    "copa",
    "Which of two sentences is the cause, or the effect, of a third: choice1 or choice2.",
    licence="BSD-2-Clause",
    counts=(400, 100, 500),
    columns={"premise": str, "choice1": str, "choice2": str, "question": str, "idx": int},
    submission=superglue_file("COPA.jsonl", (0, 1)),
)

_register(
    "rte",
    "Whether a text entails a sentence: entailment or not_entailment.",
    licence=_MIXED,
    counts=(2490, 277, 3000),
    columns={"premise": str, "hypothesis": str, "idx": int},
    submission=superglue_file("RTE.jsonl", TWO_WAY),
)

_register(
    "wic",
    "Whether a word means the same in two sentences: True or False.",
    licence="CC BY-NC 4.0",
    counts=(5428, 638, 1400),
    columns={"word": str, "sentence1": str, "sentence2": str, "idx": int},
    submission=superglue_file("WiC.jsonl", _FALSE_TRUE),
)

# A question has several answers, each right or wrong.
_register(
    "multirc",
    "Whether an answer to a question about a paragraph is right, True or False; a question has "
    "several answers. F1 is over all answers, exact match over questions.",
    licence="research use",
    counts=(27243, 4848, 9693),
    columns={
        "paragraph": str,
        "question": str,
        "answer": str,
        "idx": {"paragraph": int, "question": int, "answer": int},
    },
    submission=MULTIRC_FILE,
    postprocess=postprocess.multirc,
    metrics=(MULTIRC_F1A, MULTIRC_EM),
    headline=(MULTIRC_F1A, MULTIRC_EM),
    ids=("idx/paragraph", "idx/question", "idx/answer"),
    groups=("idx/paragraph", "idx/question"),
)


# ---------------------------------------------------------------------------
# ReCoRD: the entity that fills a gap


def _record_train(row: Row) -> list[Features]:
    """Maps a query to each of its answers; entities are sorted, as in T5's copy of the data."""
    entities = sorted(set(row["entities"]))
    examples = preprocess.record({**row, "entities": entities})
    for number, features in enumerate(examples):
        features["idx/answer"] = number
        features["entities"] = entities
    return examples


def _record(row: Row) -> list[Features]:
    return _record_train(row)[:1]


def _entities(features: Features) -> tuple[str, ...]:
    return tuple(features["entities"])


register_task(
    Task(
        name="record",
        version=1,
        description=(
            "The entity of a news text that fills the gap in a query; every answer of the query "
            "counts as right. Training has an example for each of them, 138,854 in all."
        ),
        licence="Apache-2.0; texts of CNN and Daily Mail",
        source=_data(
            "record",
            (100730, 10000, 10000),
            columns={
                "passage": str,
                "query": str,
                "entities": [str],
                "answers": [str],
                "idx": {"passage": int, "query": int},
            },
            hidden_values={"answers": []},
        ),
        submission=RECORD_FILE,
        preprocess=_record,
        for_training=_record_train,
        postprocess=postprocess.record,
        metrics=(RECORD_EM, RECORD_F1),
        headline=(RECORD_EM, RECORD_F1),
        choices=_entities,
        ids=("idx/passage", "idx/query", "idx/answer"),
        groups=("idx/passage", "idx/query"),
        family=_FAMILY,
    )
)


# ---------------------------------------------------------------------------
# WSC and definite pronoun resolution: the noun that a pronoun refers to


def _wsc_train(row: Row) -> list[Features]:
    return wsc.wsc_simple(row, correct_referent_only=True)


def _dpr(row: Row) -> list[Features]:
    """Returns an example of definite pronoun resolution with its candidates."""
    examples = wsc.definite_pronoun_resolution_simple(row)
    for features in examples:
        features["candidates"] = row["candidates"]
    return examples


def _candidates(features: Features) -> tuple[str, ...]:
    return tuple(features["candidates"])


register_task(
    Task(
        name="wsc",
        version=1,
        description=(
            "The noun that a marked pronoun stands for, in words; it is right when its words agree "
            "with the candidate of a row of label 1, or disagree in a row of label 0. Training has "
            "the 259 rows of label 1."
        ),
        licence="CC BY 4.0",
        source=_labelled(
            "wsc.fixed",
            (554, 104, 146),
            columns={
                "text": str,
                "span1_index": int,
                "span2_index": int,
                "span1_text": str,
                "span2_text": str,
                "idx": int,
            },
            num_labels=2,
        ),
        submission=superglue_file("WSC.jsonl", preprocess.FALSE_TRUE),
        preprocess=wsc.wsc_simple,
        for_training=_wsc_train,
        postprocess=postprocess.wsc_simple,
        metrics=(ACCURACY,),
        ids=("idx",),
        family=_FAMILY,
    )
)

register_task(
    Task(
        name="dpr",
        version=1,
        description=(
            "The noun that a marked pronoun stands for, in words (definite pronoun resolution): T5 "
            "trains on it beside wsc."
        ),
        licence="unknown",
        source=HubData(
            "community-datasets/definite_pronoun_resolution",
            "plain_text",
            counts={"train": 1322, "test": 564},
            columns={"sentence": str, "pronoun": str, "candidates": [str], "label": int},
            labels={"label": range(2)},
        ),
        preprocess=_dpr,
        postprocess=postprocess.unchanged,
        metrics=(ACCURACY,),
        choices=_candidates,
        split="test",
        family=_FAMILY,
    )
)


# ---------------------------------------------------------------------------
# Diagnostics, which have only a test split


def _gender_pair(row: Row) -> list[Features]:
    """Returns an example of AX-g with its pair: rows 2i and 2i + 1 differ in a pronoun's gender."""
    examples = _axg(row)
    for features in examples:
        features["pair"] = features["idx"] // 2
    return examples


_axg = preprocess.glue_task("axg")

_register(
    "axb",
    "A diagnostic for models trained on rte, over many kinds of inference; not part of the average.",
    licence=_MIXED,
    counts=(1104,),
    columns={"sentence1": str, "sentence2": str, "idx": int},
    submission=superglue_file("AX-b.jsonl", TWO_WAY),
    metrics=(MATTHEWS,),
    split="test",
)

_register(
    "axg",
    "A diagnostic for models trained on rte: pairs that differ in the gender of a pronoun. Parity is "
    "the share of pairs with equal answers, 100 for a constant one; not part of the average.",
    licence=_MIXED,
    counts=(356,),
    columns={"premise": str, "hypothesis": str, "idx": int},
    submission=superglue_file("AX-g.jsonl", TWO_WAY),
    preprocess=_gender_pair,
    metrics=(ACCURACY, GENDER_PARITY),
    groups=("pair",),
    split="test",
)
