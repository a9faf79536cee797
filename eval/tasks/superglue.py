"""SuperGLUE: eight tasks, two diagnostics, and definite pronoun resolution.

T5 trains on the last beside WSC. Prompts, targets and scoring are T5's. Labels of the test splits
are hidden: scores are those of the validation split, as in the paper's Table 10; a test split gives
a file for the leaderboard.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eval.row_schema import ColumnKinds
from eval.scores.metrics import (
    ACCURACY,
    GENDER_PARITY,
    MACRO_F1,
    MATTHEWS,
    MULTIRC_EM,
    MULTIRC_F1A,
    RECORD_EM,
    RECORD_F1,
    Metric,
)
from eval.source import HubData
from eval.submission import MULTIRC_FILE, RECORD_FILE, SubmissionFile, superglue_file
from eval.task import Features, Row, Task, register_task
from eval.text import postprocess, preprocess, wsc
from eval.text.preprocess import HIDDEN_LABEL, TWO_WAY

_FAMILY = "SuperGLUE"
_MIXED = "mixed: see the card of SuperGLUE"
_FALSE_TRUE = ("false", "true")  # as the site writes them


def _data(
    config: str, counts: Mapping[str, int], columns: ColumnKinds, *, num_labels: int = 0
) -> HubData:
    """Returns a config of SuperGLUE; where a split is trained on, the test labels are hidden.

    Args:
        config: Of the repository.
        counts: Rows by split.
        columns: Without the label.
        num_labels: Values of the label; 0 for none.
    """
    labels: Mapping[str, range] = {}
    hidden_values: Mapping[str, Any] = {"answers": []}
    if num_labels:
        columns = {**columns, "label": int}
        labels = {"label": range(num_labels)}
        hidden_values = {"label": HIDDEN_LABEL}
    return HubData(
        "aps/super_glue",
        config,
        counts=counts,
        columns=columns,
        labels=labels,
        hidden=("test",) if "train" in counts else (),
        hidden_values=hidden_values,
    )


def _classification(
    name: str,
    description: str,
    licence: str,
    source: HubData,
    submission: SubmissionFile,
    metrics: tuple[Metric, ...] = (ACCURACY,),
    headline: tuple[Metric, ...] = (),
) -> Task:
    """Returns a classification in the form of GLUE, whose prompt and labels go by its name."""
    labels = preprocess.LABELS[name]
    return Task(
        name=name,
        version=1,
        description=description,
        licence=licence,
        source=source,
        preprocess=preprocess.glue_task(name),
        postprocess=postprocess.label_index(labels),
        metrics=metrics,
        headline=headline,
        choices=labels,
        ids=("idx",),
        submission=submission,
        family=_FAMILY,
    )


# ---------------------------------------------------------------------------
# Classifications

register_task(
    _classification(
        name="boolq",
        description="A yes/no question about a paragraph of Wikipedia, to True or False.",
        licence="CC BY-SA 3.0",
        source=_data(
            "boolq",
            counts={"train": 9427, "validation": 3270, "test": 3245},
            columns={"question": str, "passage": str, "idx": int},
            num_labels=2,
        ),
        submission=superglue_file("BoolQ.jsonl", _FALSE_TRUE),
    )
)

register_task(
    _classification(
        name="cb",
        description=(
            "Whether a text commits its author to the clause in it: entailment, contradiction or "
            "neutral (CommitmentBank). The paper prints accuracy; the leaderboard averages it with "
            "the F1 over all three classes."
        ),
        licence=_MIXED,
        source=_data(
            "cb",
            counts={"train": 250, "validation": 56, "test": 250},
            columns={"premise": str, "hypothesis": str, "idx": int},
            num_labels=3,
        ),
        submission=superglue_file("CB.jsonl", preprocess.LABELS["cb"]),
        metrics=(ACCURACY, MACRO_F1),
        headline=(ACCURACY, MACRO_F1),
    )
)

register_task(
    _classification(
        name="copa",
        description=(
            "Which of two sentences is the cause, or the effect, of a third: choice1 or choice2."
        ),
        licence="BSD-2-Clause",
        source=_data(
            "copa",
            counts={"train": 400, "validation": 100, "test": 500},
            columns={"premise": str, "choice1": str, "choice2": str, "question": str, "idx": int},
            num_labels=2,
        ),
        submission=superglue_file("COPA.jsonl", (0, 1)),
    )
)

register_task(
    _classification(
        name="rte",
        description="Whether a text entails a sentence: entailment or not_entailment.",
        licence=_MIXED,
        source=_data(
            "rte",
            counts={"train": 2490, "validation": 277, "test": 3000},
            columns={"premise": str, "hypothesis": str, "idx": int},
            num_labels=2,
        ),
        submission=superglue_file("RTE.jsonl", TWO_WAY),
    )
)

register_task(
    _classification(
        name="wic",
        description="Whether a word means the same in two sentences: True or False.",
        licence="CC BY-NC 4.0",
        source=_data(
            "wic",
            counts={"train": 5428, "validation": 638, "test": 1400},
            columns={"word": str, "sentence1": str, "sentence2": str, "idx": int},
            num_labels=2,
        ),
        submission=superglue_file("WiC.jsonl", _FALSE_TRUE),
    )
)


# ---------------------------------------------------------------------------
# MultiRC: a question has several answers, each right or wrong

register_task(
    replace(
        _classification(
            name="multirc",
            description=(
                "Whether an answer to a question about a paragraph is right, True or False; a "
                "question has several answers. F1 is over all answers, exact match over questions."
            ),
            licence="research use",
            source=_data(
                "multirc",
                counts={"train": 27243, "validation": 4848, "test": 9693},
                columns={
                    "paragraph": str,
                    "question": str,
                    "answer": str,
                    "idx": {"paragraph": int, "question": int, "answer": int},
                },
                num_labels=2,
            ),
            submission=MULTIRC_FILE,
            metrics=(MULTIRC_F1A, MULTIRC_EM),
            headline=(MULTIRC_F1A, MULTIRC_EM),
        ),
        postprocess=postprocess.multirc,
        ids=("idx/paragraph", "idx/question", "idx/answer"),
        groups=("idx/paragraph", "idx/question"),
    )
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
    """Maps a query to its first answer alone."""
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
            counts={"train": 100730, "validation": 10000, "test": 10000},
            columns={
                "passage": str,
                "query": str,
                "entities": [str],
                "answers": [str],
                "idx": {"passage": int, "query": int},
            },
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
# WSC and definite pronoun resolution: the noun that a pronoun stands for


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
        source=_data(
            "wsc.fixed",
            counts={"train": 554, "validation": 104, "test": 146},
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
# Diagnostics, which have a test split alone


def _gender_pair(row: Row) -> list[Features]:
    """Returns an example of AX-g with its pair: rows 2i and 2i + 1 differ in a pronoun's gender."""
    examples = _axg(row)
    for features in examples:
        features["pair"] = features["idx"] // 2
    return examples


_axg = preprocess.glue_task("axg")

register_task(
    replace(
        _classification(
            name="axb",
            description=(
                "A diagnostic for models trained on rte, over many kinds of inference; not part of "
                "the average."
            ),
            licence=_MIXED,
            source=_data(
                "axb",
                counts={"test": 1104},
                columns={"sentence1": str, "sentence2": str, "idx": int},
                num_labels=2,
            ),
            submission=superglue_file("AX-b.jsonl", TWO_WAY),
            metrics=(MATTHEWS,),
        ),
        split="test",
    )
)

register_task(
    replace(
        _classification(
            name="axg",
            description=(
                "A diagnostic for models trained on rte: pairs that differ in the gender of a "
                "pronoun. Parity is the share of pairs with equal answers, 100 for a constant one; "
                "not part of the average."
            ),
            licence=_MIXED,
            source=_data(
                "axg",
                counts={"test": 356},
                columns={"premise": str, "hypothesis": str, "idx": int},
                num_labels=2,
            ),
            submission=superglue_file("AX-g.jsonl", TWO_WAY),
            metrics=(ACCURACY, GENDER_PARITY),
        ),
        preprocess=_gender_pair,
        groups=("pair",),
        split="test",
    )
)
