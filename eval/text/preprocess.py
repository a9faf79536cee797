"""From a row of a dataset to T5's `inputs` and `targets`: GLUE and SuperGLUE, summaries,
translation, ranked choices.

Questions are in questions.py, pronouns in wsc.py. Nothing is lower-cased or stripped. Source of all
of it: T5 `t5/data/preprocessors.py` and `glue_utils.py`
(google-research/text-to-text-transfer-transformer at e081111), without TensorFlow.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from eval.task import Row
from moe import ConfigError, DataError

Preprocess = Callable[[Row], list[dict[str, Any]]]

HIDDEN = "<unk>"
"""The target of a row whose label is hidden."""

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
"""Labels of the tasks of GLUE and SuperGLUE, in the order of their numbers. Those of CB are not those of MNLI."""

_PROMPT_NAMES = {
    "mnli_matched": "mnli",
    "mnli_mismatched": "mnli",
    "ax": "mnli",
    "axb": "rte",
    "axg": "rte",
}
_FIELDS = {
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


def glue(
    name: str, labels: Sequence[str], fields: Sequence[str] = (), id_field: str | None = "idx"
) -> Preprocess:
    """Returns T5's preprocessor of a classification: `name field: value field: value` to the text
    of the label.

    Args:
        name: What the prompt begins with. `multirc` also loses its HTML, and gives its three
            numbers.
        labels: Texts in the order of the label's numbers.
        fields: Fields of the row in the order of the prompt; () for all but label and idx, in
            alphabetical order.
        id_field: A field to keep as `idx`; None for none.

    Source:
        T5 `glue`. Differs: no.
    """

    def preprocess(row: Row) -> list[dict[str, Any]]:
        names = fields or sorted(set(row) - {"label", "idx"})
        inputs = " ".join([name, *(f"{field}: {row[field]}" for field in names)])
        made: dict[str, Any] = {"inputs": inputs, "targets": label_text(row["label"], labels)}
        if name == "multirc":
            made["inputs"] = re.sub("</?b>", "", inputs.replace("<br>", " "))
            made |= {
                f"idx/{part}": row["idx"][part] for part in ("paragraph", "question", "answer")
            }
        elif id_field is not None:
            made["idx"] = row[id_field]
        return [made]

    return preprocess


def glue_task(name: str) -> Preprocess:
    """Returns T5's preprocessor of a task of GLUE or SuperGLUE by its name in LABELS.

    The diagnostics are asked as the task that they diagnose: `ax` as `mnli`, `axb` and `axg` as
    `rte`.

    Source:
        T5 `get_glue_text_preprocessor` and, for `axb`, `register_super_glue`. Differs: no.
    """
    preprocess = glue(_PROMPT_NAMES.get(name, name), LABELS[name], _FIELDS.get(name, ()))
    if name != "axb":
        return preprocess
    return lambda row: preprocess(
        {
            "premise": row["sentence1"],
            "hypothesis": row["sentence2"],
            "label": row["label"],
            "idx": row["idx"],
        }
    )


multirc = glue_task("multirc")


def label_text(label: int, labels: Sequence[str]) -> str:
    """Returns the text of a label; -1 is a hidden one.

    Raises:
        DataError: When there is no such label.
    """
    if label == -1:
        return HIDDEN
    if not 0 <= label < len(labels):
        raise DataError(
            f"A row has label {label}; expected 0 to {len(labels) - 1} for {', '.join(labels)}, or -1 for a hidden one."
        )
    return labels[label]


def stsb(row: Row) -> list[dict[str, Any]]:
    """Returns the similarity of two sentences as text, rounded to the nearest 0.2 (half to even, in
    float32).

    Source:
        T5 `stsb`. Differs: no.
    """
    fifths = np.round(np.float32(row["label"]) * np.float32(5))
    inputs = f"stsb sentence1: {row['sentence1']} sentence2: {row['sentence2']}"
    return [{"inputs": inputs, "targets": f"{fifths / np.float32(5):.1f}", "idx": row["idx"]}]


def record(row: Row) -> list[dict[str, Any]]:
    """Returns one example an answer, each with all answers; one with a hidden target when there is
    none.

    Entities stand in the order of the row. T5's copy of the data has them sorted; that of the hub
    has not.

    Source:
        T5 `record`. Differs: no.
    """
    passage = re.sub(r"([.?!\"'])\n@highlight\n", r"\1 ", row["passage"]).replace(
        "\n@highlight\n", ". "
    )
    entities, answers = ", ".join(row["entities"]), list(row["answers"])
    inputs = f"record query: {row['query']} entities: {entities} passage: {passage}"
    ids = {"idx/passage": row["idx"]["passage"], "idx/query": row["idx"]["query"]}
    return [
        {**ids, "inputs": inputs, "targets": target, "answers": answers}
        for target in answers or [HIDDEN]
    ]


def summarize(text: str, summary: str) -> Preprocess:
    """Returns the preprocessor that has the field `text` summarized to the field `summary`.

    Source:
        T5 `summarize`. Differs: no.
    """
    return lambda row: [{"inputs": f"summarize: {row[text]}", "targets": row[summary]}]


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
    names = []
    for code in (source, target):
        if code[:2] not in _LANGUAGES:
            raise ConfigError(
                f"There is no language {code[:2]!r}. Choose from {', '.join(_LANGUAGES)}."
            )
        names.append(_LANGUAGES[code[:2]])
    prompt = f"translate {names[0]} to {names[1]}: "
    return lambda row: [{"inputs": prompt + row[source], "targets": row[target]}]


def rank_classification_formatter(
    row: Row,
    inputs_formats: str | Sequence[str],
    targets_formats: str | Sequence[str],
    *,
    mode: Literal["train", "eval", "fewshot_eval"] = "eval",
    label_field: str = "label",
    weight_field: str | None = None,
    number: int = 0,
) -> list[dict[str, Any]]:
    """Returns an example a choice, to be ranked by their scores.

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
    inputs, targets = _as_many([inputs_formats, targets_formats])
    labels = np.atleast_1d(row[label_field]).tolist()
    made: list[dict[str, Any]] = [
        {
            "idx": [number, choice],
            "inputs": _fill_in(inputs[choice], row),
            "targets": _fill_in(targets[choice], row),
            "is_correct": choice in labels,
        }
        for choice in range(len(inputs))
    ]
    if weight_field is not None:
        for example in made:
            example["weight"] = float(row[weight_field])
    if mode == "fewshot_eval":
        return [{name: [example[name] for example in made] for name in made[0]}]
    return [example for example in made if mode == "eval" or example["is_correct"]]


def _as_many(formats: list[str | Sequence[str]]) -> list[Sequence[str]]:
    """Returns both formats as lists of one length."""
    lengths = {len(given) for given in formats if not isinstance(given, str)}
    if len(lengths) != 1 or 0 in lengths:
        raise ConfigError(
            f"The formats are {formats[0]!r} and {formats[1]!r}; expected a list of formats, one a choice, for at "
            "least one of inputs and targets, and equal lengths for two lists."
        )
    (length,) = lengths
    return [[given] * length if isinstance(given, str) else given for given in formats]


def _fill_in(text: str, row: Row) -> str:
    """Returns a format with the texts of the row in place of its braces."""

    def value(match: re.Match[str]) -> str:
        found: Any = row
        for name in match[1].split("/"):
            if not isinstance(found, Mapping) or name not in found:
                raise DataError(
                    f"{match[0]} in the format {text!r} is no field of the row. It has {', '.join(row)}."
                )
            found = found[name]
        if not isinstance(found, str):
            raise DataError(
                f"{match[0]} in the format {text!r} is {type(found).__name__}; expected text."
            )
        return found

    return re.sub(r"{(\S+?)}", value, text)
