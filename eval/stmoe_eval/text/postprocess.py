"""From an output, or a target, to the value that metrics compare.

Source of all of it: T5 `t5/data/postprocessors.py`
(google-research/text-to-text-transfer-transformer at e081111) unless another is named.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from stmoe_eval.task import Features

_DETERMINERS = re.compile(
    "(a|an|few|her|his|each|every|many|much|my|our|some|that|the|their|these|this|those|which|whose|your)"
)


def unchanged(text: str, fields: Features, is_target: bool) -> str:
    """Returns the text, for tasks such as summaries."""
    return text


def lower_text(text: str, fields: Features, is_target: bool) -> str:
    """Returns the text in lower case."""
    return text.lower()


def label_index(labels: Sequence[str], default: int = -1) -> Callable[[str, Features, bool], int]:
    """Returns a postprocessor: the number of the label that equals the text, else `default`.

    If labels are equal, the first counts.

    Source:
        T5 `string_label_to_class_id`. Differs: no.
    """
    numbers: dict[str, int] = {}
    for number, label in enumerate(labels):
        numbers.setdefault(label, number)

    def postprocess(text: str, fields: Features, is_target: bool) -> int:
        return numbers.get(text, default)

    return postprocess


def string_to_float(default: float = -1.0) -> Callable[[str, Features, bool], float]:
    """Returns a postprocessor: the number that a text says, else `default`."""

    def postprocess(text: str, fields: Features, is_target: bool) -> float:
        try:
            return float(text)
        except ValueError:
            return default

    return postprocess


_true_or_false = label_index(("False", "True"))


def multirc(text: str, fields: Features, is_target: bool) -> dict[str, Any]:
    """Returns the label as `value`; of a target also its question as `group`.

    Source:
        T5 `multirc`. Differs: the group is the paragraph's number and the question's when the row
        has both, as in the leaderboard's scorer; T5 takes the question's alone.
    """
    value: dict[str, Any] = {"value": _true_or_false(text, fields, is_target)}
    if not is_target:
        return value

    question = fields["idx/question"]
    if "idx/paragraph" in fields:
        value["group"] = (fields["idx/paragraph"], question)
    else:
        value["group"] = question
    return value


def record(text: str, fields: Features, is_target: bool) -> dict[str, Any]:
    """Returns a prediction's text as `value`, or all answers of a target with its query as `group`."""
    if not is_target:
        return {"value": text}
    return {"value": list(fields["answers"]), "group": (fields["idx/passage"], fields["idx/query"])}


def wsc_simple(text: str, fields: Features, is_target: bool) -> int:
    """Returns whether the text names the candidate referent; of a target the label.

    It is 1 if it does, 0 if not, and -1 if the text is empty. Case and determiners are ignored. The
    words of one must be among those of the other, and both or neither have an apostrophe.
    """
    if is_target:
        return fields["label"]

    # "his father's", for instance, agrees with "the father's" but not with "the father".
    answer = _without_determiners(text)
    referent = _without_determiners(fields["targets"])
    if not answer:
        return -1
    if ("'" in answer) != ("'" in referent):
        return 0
    answer_words = set(answer.split(" "))
    referent_words = set(referent.split(" "))
    return int(answer_words <= referent_words or referent_words <= answer_words)


def _without_determiners(text: str) -> str:
    """Returns the text in lower case without determiners."""
    words = text.strip().lower().split(" ")
    return " ".join(word for word in words if not _DETERMINERS.fullmatch(word))


def qa(text: str, fields: Features, is_target: bool) -> str | list[str]:
    """Returns a prediction's text, or all answers of a target."""
    return list(fields["answers"]) if is_target else text
