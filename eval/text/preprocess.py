"""From a row of a dataset to T5's `inputs` and `targets`: classification, summaries, translation.

Questions are in questions.py, pronouns in wsc.py. Nothing is lower-cased or stripped.

Source of all of it: T5 `t5/data/preprocessors.py` and `glue_utils.py`
(google-research/text-to-text-transfer-transformer at e081111), without TensorFlow.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from eval.task import Features, Preprocess, Row
from moe.errors import ConfigError, DataError

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

    The diagnostics are asked as the task that they diagnose: `ax` as `mnli`, `axb` and `axg` as
    `rte`.

    Source:
        T5 `get_glue_text_preprocessor` and, for `axb`, `register_super_glue`. Differs: no.
    """
    prompt_name = _PROMPT_NAMES.get(name, name)
    preprocess = glue(prompt_name, LABELS[name], _PROMPT_FIELDS.get(name, ()))
    if name != "axb":
        return preprocess

    # Its columns are not called as those of rte.
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
    """Returns the text of a label; -1 is a hidden one.

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
    """Maps a query to each of its answers; without any, to a hidden target.

    Entities stand in the order of the row. T5's copy of the data has them sorted; that of the hub
    has not.

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
    """Returns the preprocessor of a translation; fields are called by the codes of their languages.

    Args:
        source: Code of a language; after its first two letters it only names the field, as in
            `zh-cn`.
        target: Likewise.

    Raises:
        ConfigError: When a language is not known.

    Source:
        T5 `translate`. Differs: knows 44 languages; T5 asks babel for the English name of any.
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


# ---------------------------------------------------------------------------
# Ranked choices


def rank_classification_formatter(
    row: Row,
    inputs_formats: str | Sequence[str],
    targets_formats: str | Sequence[str],
    *,
    mode: Literal["train", "eval", "fewshot_eval"] = "eval",
    label_field: str = "label",
    weight_field: str | None = None,
    number: int = 0,
) -> list[Features]:
    """Returns an example for each choice, to be ranked by their scores.

    Args:
        row: A row; its label is the number of the right choice, or a list of them.
        inputs_formats: Text with `{field}` or `{field/subfield}`; one a choice, or one for all.
        targets_formats: Likewise; one of the two is a list.
        mode: `train` gives right choices only, `eval` all, `fewshot_eval` all in one example of
            lists.
        label_field: Field of the label.
        weight_field: Field of the example's weight; None for none.
        number: Of the row, for `idx`: (row, choice).

    Raises:
        ConfigError: When the formats are no lists of one length, or there is no such mode.
        DataError: When a field is not text.

    Source:
        T5 `rank_classification` and `rank_classification_formatter`. Differs: no.
    """
    if mode not in ("train", "eval", "fewshot_eval"):
        raise ConfigError(f"There is no mode {mode!r}. Choose from train, eval, fewshot_eval.")
    num_choices = _num_choices(inputs_formats, targets_formats)
    right_choices = np.atleast_1d(row[label_field]).tolist()

    # One example a choice: its text filled in, and whether it is right.
    examples: list[Features] = []
    for choice in range(num_choices):
        features: Features = {
            "idx": [number, choice],
            "inputs": _fill_in(_format_of(inputs_formats, choice), row),
            "targets": _fill_in(_format_of(targets_formats, choice), row),
            "is_correct": choice in right_choices,
        }
        if weight_field is not None:
            features["weight"] = float(row[weight_field])
        examples.append(features)

    if mode == "train":
        return [features for features in examples if features["is_correct"]]
    return [_in_lists(examples)] if mode == "fewshot_eval" else examples


def _num_choices(inputs_formats: str | Sequence[str], targets_formats: str | Sequence[str]) -> int:
    """Returns the length of the formats that are lists."""
    lengths: set[int] = set()
    for formats in (inputs_formats, targets_formats):
        if not isinstance(formats, str):
            lengths.add(len(formats))
    if len(lengths) != 1 or 0 in lengths:
        raise ConfigError(
            f"The formats are {inputs_formats!r} and {targets_formats!r}; expected a list of "
            "formats, one a choice, for at least one of inputs and targets, and equal lengths for "
            "two lists."
        )
    return lengths.pop()


def _in_lists(examples: Sequence[Features]) -> Features:
    """Returns one example whose features are lists over all examples."""
    in_lists: Features = {name: [] for name in examples[0]}
    for features in examples:
        for name, value in features.items():
            in_lists[name].append(value)
    return in_lists


def _format_of(formats: str | Sequence[str], choice: int) -> str:
    return formats if isinstance(formats, str) else formats[choice]


def _fill_in(text: str, row: Row) -> str:
    """Returns a format in which texts of the row replace the braces."""

    def text_of_field(match: re.Match[str]) -> str:
        # Follow the path into the row, one field after the other.
        value: Any = row
        for name in match[1].split("/"):
            if not isinstance(value, Mapping) or name not in value:
                raise DataError(
                    f"{match[0]} in the format {text!r} is no field of the row. It has "
                    f"{', '.join(row)}."
                )
            value = value[name]
        if not isinstance(value, str):
            raise DataError(
                f"{match[0]} in the format {text!r} is {type(value).__name__}; expected text."
            )
        return value

    return re.sub(r"{(\S+?)}", text_of_field, text)
