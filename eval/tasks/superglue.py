"""SuperGLUE: eight tasks, two diagnostics, and definite pronoun resolution, which T5 trains on
beside WSC.

Prompts, targets and scoring are T5's. Labels of the test splits are hidden: scores are those of the
validation split, as in the paper's Table 10; a submission to the leaderboard is made of the
predictions of the test split.
"""

from collections.abc import Mapping, Sequence
from typing import Any

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
from eval.task import TASKS, Row, Task
from eval.text.postprocess import label_index, multirc, record, unchanged, wsc_simple
from eval.text.preprocess import LABELS, glue_task
from eval.text.preprocess import record as preprocess_record
from eval.text.wsc import definite_pronoun_resolution_simple
from eval.text.wsc import wsc_simple as preprocess_wsc

REPOSITORY = "aps/super_glue"
_MIXED = "mixed: see the card of SuperGLUE"


def _data(
    config: str,
    counts: Sequence[int],
    columns: Mapping[str, Any],
    num_labels: int = 0,
    repository: str = REPOSITORY,
) -> HubData:
    """Returns a config of SuperGLUE: counts of train, validation and test, or of test alone."""
    splits = ("train", "validation", "test")[-len(counts) :]
    return HubData(
        repository,
        config,
        counts=dict(zip(splits, counts, strict=True)),
        columns={**columns, **({"label": int} if num_labels else {})},
        labels={"label": range(num_labels)} if num_labels else {},
        hidden=("test",) if len(counts) == 3 else (),
    )


def _add(
    name: str,
    description: str,
    licence: str,
    source: HubData,
    metrics: tuple[Metric, ...],
    **fields: Any,
) -> None:
    """Adds a task; unless `fields` say otherwise it is a classification in the form of GLUE."""
    defaults: dict[str, Any] = {"name": name, "version": 1, "family": "SuperGLUE", "ids": ("idx",)}
    if name in LABELS:
        defaults["preprocess"] = glue_task(name)
        defaults["postprocess"] = label_index(LABELS[name])
        defaults["choices"] = LABELS[name]
    about = {"description": description, "licence": licence, "source": source, "metrics": metrics}
    TASKS.add(name, Task(**{**defaults, **about, **fields}))


def _record(row: Row) -> list[dict[str, Any]]:
    """Returns an example an answer; entities are sorted, as in the copy of the data that T5 used."""
    entities = sorted(set(row["entities"]))
    made = preprocess_record({**row, "entities": entities})
    return [
        fields | {"idx/answer": number, "entities": entities} for number, fields in enumerate(made)
    ]


def _pair(row: Row) -> list[dict[str, Any]]:
    """Returns an example of AX-g with the number of its pair: rows 2i and 2i + 1 differ in a
    pronoun's gender.
    """
    return [fields | {"pair": fields["idx"] // 2} for fields in glue_task("axg")(row)]


def _referent(row: Row) -> list[dict[str, Any]]:
    """Returns an example of definite pronoun resolution with its candidates."""
    return [
        fields | {"candidates": row["candidates"]}
        for fields in definite_pronoun_resolution_simple(row)
    ]


_WSC_COLUMNS = {
    "text": str,
    "span1_index": int,
    "span2_index": int,
    "span1_text": str,
    "span2_text": str,
    "idx": int,
}
_MULTIRC_COLUMNS = {
    "paragraph": str,
    "question": str,
    "answer": str,
    "idx": {"paragraph": int, "question": int, "answer": int},
}
_RECORD_COLUMNS = {
    "passage": str,
    "query": str,
    "entities": [str],
    "answers": [str],
    "idx": {"passage": int, "query": int},
}

_add(
    "boolq",
    "A yes/no question about a paragraph of Wikipedia, to True or False.",
    "CC BY-SA 3.0",
    _data("boolq", (9427, 3270, 3245), {"question": str, "passage": str, "idx": int}, 2),
    (ACCURACY,),
)
_add(
    "cb",
    "Whether a text commits its author to the clause in it: entailment, contradiction or neutral (CommitmentBank). "
    "The paper prints accuracy; the leaderboard averages it with the F1 over all three classes.",
    _MIXED,
    _data("cb", (250, 56, 250), {"premise": str, "hypothesis": str, "idx": int}, 3),
    (ACCURACY, MACRO_F1),
    headline=(ACCURACY, MACRO_F1),
)
_add(
    "copa",
    "Which of two sentences is the cause, or the effect, of a third: choice1 or choice2.",
    "BSD-2-Clause",
    _data(
        "copa",
        (400, 100, 500),
        {"premise": str, "choice1": str, "choice2": str, "question": str, "idx": int},
        2,
    ),
    (ACCURACY,),
)
_add(
    "multirc",
    "Whether an answer to a question about a paragraph is right, True or False; a question has several answers. F1 is "
    "over all answers, exact match over questions.",
    "research use",
    _data("multirc", (27243, 4848, 9693), _MULTIRC_COLUMNS, 2),
    (MULTIRC_F1A, MULTIRC_EM),
    headline=(MULTIRC_F1A, MULTIRC_EM),
    postprocess=multirc,
    ids=("idx/paragraph", "idx/question", "idx/answer"),
    groups=("idx/paragraph", "idx/question"),
)
_add(
    "record",
    "The entity of a news text that fills the gap in a query; every answer of the query counts as right. Training has "
    "an example for each of them, 138,854 in all.",
    "Apache-2.0; texts of CNN and Daily Mail",
    _data("record", (100730, 10000, 10000), _RECORD_COLUMNS),
    (RECORD_EM, RECORD_F1),
    headline=(RECORD_EM, RECORD_F1),
    preprocess=lambda row: _record(row)[:1],
    for_training=_record,
    postprocess=record,
    choices=lambda fields: tuple(fields["entities"]),
    ids=("idx/passage", "idx/query", "idx/answer"),
    groups=("idx/passage", "idx/query"),
)
_add(
    "rte",
    "Whether a text entails a sentence: entailment or not_entailment.",
    _MIXED,
    _data("rte", (2490, 277, 3000), {"premise": str, "hypothesis": str, "idx": int}, 2),
    (ACCURACY,),
)
_add(
    "wic",
    "Whether a word means the same in two sentences: True or False.",
    "CC BY-NC 4.0",
    _data(
        "wic", (5428, 638, 1400), {"word": str, "sentence1": str, "sentence2": str, "idx": int}, 2
    ),
    (ACCURACY,),
)
_add(
    "wsc",
    "The noun that a marked pronoun stands for, in words; it is right when its words agree with the candidate of a row "
    "of label 1, or disagree in a row of label 0. Training has the 259 rows of label 1.",
    "CC BY 4.0",
    _data("wsc.fixed", (554, 104, 146), _WSC_COLUMNS, 2),
    (ACCURACY,),
    preprocess=preprocess_wsc,
    for_training=lambda row: preprocess_wsc(row, correct_referent_only=True),
    postprocess=wsc_simple,
    choices=(),
)
_add(
    "axb",
    "A diagnostic for models trained on rte, over many kinds of inference; not part of the average.",
    _MIXED,
    _data("axb", (1104,), {"sentence1": str, "sentence2": str, "idx": int}, 2),
    (MATTHEWS,),
    split="test",
)
_add(
    "axg",
    "A diagnostic for models trained on rte: pairs that differ in the gender of a pronoun. Parity is the share of "
    "pairs with equal answers, 100 for a constant one; not part of the average.",
    _MIXED,
    _data("axg", (356,), {"premise": str, "hypothesis": str, "idx": int}, 2),
    (ACCURACY, GENDER_PARITY),
    preprocess=_pair,
    groups=("pair",),
    split="test",
)
_add(
    "dpr",
    "The noun that a marked pronoun stands for, in words (definite pronoun resolution): T5 trains on it beside wsc.",
    "unknown",
    HubData(
        "community-datasets/definite_pronoun_resolution",
        "plain_text",
        counts={"train": 1322, "test": 564},
        columns={"sentence": str, "pronoun": str, "candidates": [str], "label": int},
        labels={"label": range(2)},
    ),
    (ACCURACY,),
    preprocess=_referent,
    postprocess=unchanged,
    choices=lambda fields: tuple(fields["candidates"]),
    ids=(),
    split="test",
)
