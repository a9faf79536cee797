"""From a row of a dataset to T5's `inputs` and `targets`: classification, summaries, translation.

Questions are in questions.py, pronouns in wsc.py. Nothing is lower-cased or stripped.

Source of all of it: T5 `t5/data/preprocessors.py` and `glue_utils.py`
(google-research/text-to-text-transfer-transformer at e081111), without TensorFlow.
"""

import re
from collections.abc import Sequence

import numpy as np

from moe.errors import ConfigError, DataError
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

_LANGUAGES = {
    "ar": "Arabic",
    "bn": "Bangla",
    "cs": "Czech",
    "da": "Danish",
    "de": "German",
    "el": "Greek",
    "en": "English",
    "es": "Spanish",
    "et": "Estonian",
    "fa": "Persian",
    "fi": "Finnish",
    "fr": "French",
    "gu": "Gujarati",
    "ha": "Hausa",
    "he": "Hebrew",
    "hi": "Hindi",
    "hr": "Croatian",
    "hu": "Hungarian",
    "id": "Indonesian",
    "is": "Icelandic",
    "it": "Italian",
    "ja": "Japanese",
    "kk": "Kazakh",
    "ko": "Korean",
    "lt": "Lithuanian",
    "lv": "Latvian",
    "nl": "Dutch",
    "no": "Norwegian",
    "pl": "Polish",
    "ps": "Pashto",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "sk": "Slovak",
    "sl": "Slovenian",
    "sv": "Swedish",
    "sw": "Swahili",
    "ta": "Tamil",
    "th": "Thai",
    "tr": "Turkish",
    "uk": "Ukrainian",
    "ur": "Urdu",
    "vi": "Vietnamese",
    "zh": "Chinese",
}


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
    """Returns the text of a label; -1 means that the label is hidden.

    Raises:
        DataError: When there is no such label.
    """
    if label == HIDDEN_LABEL:
        return HIDDEN_TARGET
    if not 0 <= label < len(labels):
        raise DataError(
            f"A row has label {label}; expected 0 to {len(labels) - 1} for {', '.join(labels)}, "
            "or -1 for a hidden one."
        )
    return labels[label]


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
    """Returns the preprocessor of a translation; fields are named after the language codes.

    Args:
        source: Code of a language; after its first two letters it only names the field, as in
            `zh-cn`.
        target: Likewise.

    Raises:
        ConfigError: When a language is not known.

    Source:
        T5 `translate`. Differs: knows 44 languages; T5 uses babel to get the English name of any
        language.
    """
    prompt = f"translate {_language_name(source)} to {_language_name(target)}: "

    def preprocess(row: Row) -> list[Features]:
        return [{"inputs": prompt + row[source], "targets": row[target]}]

    return preprocess


def _language_name(code: str) -> str:
    language = code[:2]
    if language not in _LANGUAGES:
        raise ConfigError(
            f"There is no language {language!r}. Choose from {', '.join(_LANGUAGES)}."
        )
    return _LANGUAGES[language]
