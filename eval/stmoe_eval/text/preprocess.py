"""From a row of a dataset to T5's `inputs` and `targets`: classification, summaries, translation.

Questions are in questions.py, pronouns in wsc.py. Nothing is lower-cased or stripped.

Source of all of it: T5 `t5/data/preprocessors.py` and `glue_utils.py`
(google-research/text-to-text-transfer-transformer at e081111), without TensorFlow.
"""

import re
from collections.abc import Sequence

import numpy as np

from stmoe_eval.task import Features, Preprocess, Row

HIDDEN_TARGET = "<unk>"
"""The target of a row whose label is hidden."""

HIDDEN_LABEL = -1
"""The label of such a row."""

FALSE_TRUE = ("False", "True")
TWO_WAY = ("entailment", "not_entailment")
THREE_WAY = ("entailment", "neutral", "contradiction")

LABELS: dict[str, tuple[str, ...]] = {
    "cola": ("unacceptable", "acceptable"),
    "sst2": ("negative", "positive"),
    "mrpc": ("not_equivalent", "equivalent"),
    "qqp": ("not_duplicate", "duplicate"),
    "mnli": THREE_WAY,
    "mnli_matched": THREE_WAY,
    "mnli_mismatched": THREE_WAY,
    "ax": THREE_WAY,
    "qnli": TWO_WAY,
    "rte": TWO_WAY,
    "wnli": ("not_entailment", "entailment"),
    "boolq": FALSE_TRUE,
    "cb": ("entailment", "contradiction", "neutral"),
    "copa": ("choice1", "choice2"),
    "multirc": FALSE_TRUE,
    "wic": FALSE_TRUE,
    "axb": TWO_WAY,
    "axg": TWO_WAY,
}
"""Labels of GLUE and SuperGLUE in the order of their numbers; those of CB are not those of MNLI."""

_PROMPT_NAMES = {
    "mnli_matched": "mnli",
    "mnli_mismatched": "mnli",
    "ax": "mnli",
    "axb": "rte",
    "axg": "rte",
}
_PROMPT_FIELDS = {
    "multirc": ("question", "answer", "paragraph"),
    "wic": ("sentence1", "sentence2", "word"),
}

_LANGUAGES = {"de": "German", "en": "English", "fr": "French", "ro": "Romanian"}


# ---------------------------------------------------------------------------
# Classification


def glue(
    name: str, labels: Sequence[str], fields: Sequence[str] = (), id_field: str | None = "idx"
) -> Preprocess:
    """Returns T5's preprocessor of a classification.

    The inputs are `name field: value field: value`, the target is the text of the label.

    Args:
        name: What the prompt begins with. `multirc` also loses its HTML, and keeps its three
            numbers.
        labels: Texts in the order of the label's numbers.
        fields: Fields of the row in the order of the prompt; () for all but label and idx, in
            alphabetical order.
        id_field: A field to keep as `idx`; None for none.

    Source:
        T5 `glue`. Differs: no.
    """

    def preprocess(row: Row) -> list[Features]:
        inputs = name
        for field in fields or sorted(set(row) - {"label", "idx"}):
            inputs += f" {field}: {row[field]}"
        features: Features = {"inputs": inputs, "targets": label_text(row["label"], labels)}

        # The one task with HTML in its texts, and with three numbers instead of one.
        if name == "multirc":
            features["inputs"] = re.sub("</?b>", "", inputs.replace("<br>", " "))
            for part in ("paragraph", "question", "answer"):
                features[f"idx/{part}"] = row["idx"][part]
        elif id_field is not None:
            features["idx"] = row[id_field]
        return [features]

    return preprocess


def glue_task(name: str) -> Preprocess:
    """Returns T5's preprocessor of a task of GLUE or SuperGLUE by its name in LABELS.

    The diagnostics use the prompt of the task that they diagnose: `ax` as `mnli`, `axb` and `axg`
    as `rte`.

    Source:
        T5 `get_glue_text_preprocessor` and, for `axb`, `register_super_glue`. Differs: no.
    """
    prompt_name = _PROMPT_NAMES.get(name, name)
    preprocess = glue(prompt_name, LABELS[name], _PROMPT_FIELDS.get(name, ()))
    if name != "axb":
        return preprocess

    # Its columns have different names from those of rte.
    def preprocess_axb(row: Row) -> list[Features]:
        return preprocess(
            {
                "premise": row["sentence1"],
                "hypothesis": row["sentence2"],
                "label": row["label"],
                "idx": row["idx"],
            }
        )

    return preprocess_axb


multirc = glue_task("multirc")


def label_text(label: int, labels: Sequence[str]) -> str:
    """Returns the text of a label; -1 means that the label is hidden."""
    return HIDDEN_TARGET if label == HIDDEN_LABEL else labels[label]


def stsb(row: Row) -> list[Features]:
    """Maps two sentences to their similarity as text, rounded to the nearest 0.2.

    Rounding is half to even, in float32.

    Source:
        T5 `stsb`. Differs: no.
    """
    fifths = np.round(np.float32(row["label"]) * np.float32(5))
    similarity = fifths / np.float32(5)
    inputs = f"stsb sentence1: {row['sentence1']} sentence2: {row['sentence2']}"
    return [{"inputs": inputs, "targets": f"{similarity:.1f}", "idx": row["idx"]}]


def record(row: Row) -> list[Features]:
    """Maps a query to each of its answers, or to a hidden target if it has none.

    Entities keep the order of the row. T5's copy of the data sorts them; the hub's does not.

    Source:
        T5 `record`. Differs: no.
    """
    # The highlights of the news text follow as sentences.
    passage = re.sub(r"([.?!\"'])\n@highlight\n", r"\1 ", row["passage"])
    passage = passage.replace("\n@highlight\n", ". ")
    entities = ", ".join(row["entities"])
    inputs = f"record query: {row['query']} entities: {entities} passage: {passage}"

    # Every example has all answers, which its postprocessor needs.
    answers = list(row["answers"])
    examples: list[Features] = []
    for target in answers or [HIDDEN_TARGET]:
        examples.append(
            {
                "idx/passage": row["idx"]["passage"],
                "idx/query": row["idx"]["query"],
                "inputs": inputs,
                "targets": target,
                "answers": answers,
            }
        )
    return examples


# ---------------------------------------------------------------------------
# Summaries and translation


def summarize(text_field: str, summary_field: str) -> Preprocess:
    """Returns the preprocessor that maps a text to its summary, given their fields.

    Source:
        T5 `summarize`. Differs: no.
    """

    def preprocess(row: Row) -> list[Features]:
        return [{"inputs": f"summarize: {row[text_field]}", "targets": row[summary_field]}]

    return preprocess


def translate(source: str, target: str) -> Preprocess:
    """Returns the preprocessor of a translation, given the codes of two languages, which name fields.

    Source:
        T5 `translate`. Differs: knows T5's four languages; T5 asks babel for the name of any.
    """
    prompt = f"translate {_LANGUAGES[source]} to {_LANGUAGES[target]}: "

    def preprocess(row: Row) -> list[Features]:
        return [{"inputs": prompt + row[source], "targets": row[target]}]

    return preprocess
