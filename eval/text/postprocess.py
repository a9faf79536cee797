"""From an output, or a target, to the value that metrics compare.

Source of all of it: T5 `t5/data/postprocessors.py`
(google-research/text-to-text-transfer-transformer at e081111) unless another is named.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from eval.task import Row

Postprocess = Callable[[str, Row, bool], Any]

_DETERMINERS = re.compile(
    "(a|an|few|her|his|each|every|many|much|my|our|some|that|the|their|these|this|those|which|whose|your)"
)


def label_index(labels: Sequence[str], default: int = -1) -> Callable[[str, Row, bool], int]:
    """Returns a postprocessor: the number of the label that a text equals to the letter, else
    `default`.

    Source:
        T5 `string_label_to_class_id`. Differs: no.
    """
    numbers = {label: number for number, label in reversed(list(enumerate(labels)))}
    return lambda text, fields, is_target: numbers.get(text, default)


def unchanged(text: str, fields: Row, is_target: bool) -> str:
    """Returns the text, for tasks such as summaries."""
    return text


def lower_text(text: str, fields: Row, is_target: bool) -> str:
    """Returns the text in lower case."""
    return text.lower()


def string_to_float(default: float = -1.0) -> Callable[[str, Row, bool], float]:
    """Returns a postprocessor: the number that a text says, else `default`."""

    def postprocess(text: str, fields: Row, is_target: bool) -> float:
        try:
            return float(text)
        except ValueError:
            return default

    return postprocess


_true_or_false = label_index(("False", "True"))


def multirc(text: str, fields: Row, is_target: bool) -> dict[str, Any]:
    """Returns the label as `value`; of a target also its question as `group`.

    Source:
        T5 `multirc`. Differs: a question is told by the numbers of its paragraph and its own when
        the row has both, as in the leaderboard's scorer; T5 takes its own alone.
    """
    value = {"value": _true_or_false(text, fields, is_target)}
    if not is_target:
        return value
    question = fields["idx/question"]
    return value | {
        "group": (fields["idx/paragraph"], question) if "idx/paragraph" in fields else question
    }


def record(text: str, fields: Row, is_target: bool) -> dict[str, Any]:
    """Returns the text as `value`; of a target all answers, and its query as `group`."""
    if not is_target:
        return {"value": text}
    return {"value": list(fields["answers"]), "group": (fields["idx/passage"], fields["idx/query"])}


def qa(text: str, fields: Row, is_target: bool) -> str | list[str]:
    """Returns the text; of a target all answers."""
    return list(fields["answers"]) if is_target else text


def span_qa(text: str, fields: Row, is_target: bool) -> str | dict[str, Any]:
    """Returns the text; of a target all answers and the context."""
    return {"answers": list(fields["answers"]), "context": fields["context"]} if is_target else text


def wsc_simple(text: str, fields: Row, is_target: bool) -> int:
    """Returns 1 when the text names the candidate referent, 0 when not, -1 when it is empty; of a
    target the label.

    Case and determiners do not count. The words of one must be among those of the other, and both
    or neither have an apostrophe.
    """
    if is_target:
        return fields["label"]
    answer, referent = _without_determiners(text), _without_determiners(fields["targets"])
    if not answer:
        return -1
    if ("'" in answer) != ("'" in referent):
        return 0
    answer_words, referent_words = set(answer.split(" ")), set(referent.split(" "))
    return int(answer_words <= referent_words or referent_words <= answer_words)


def rank_classification(score: Any, fields: Row, is_target: bool) -> Any:
    """Returns the score of a choice; of a target its (row, choice), whether it is right, its weight
    and its length.
    """
    if not is_target:
        return score
    return (
        tuple(fields["idx"]),
        fields["is_correct"],
        fields.get("weight", 1.0),
        len(fields["targets"]),
    )


def natural_questions(text: str, fields: Row, is_target: bool) -> list[tuple[str, ...]]:
    """Returns the set of answers behind each `answer:`; of a target one set an annotator, empty for
    no answer.

    Source:
        t5_cbqa `postprocessors.natural_questions` (google-research/google-research). Differs: no.
    """
    if not is_target:
        return [tuple(answer.strip() for answer in text.split("answer:")[1:])]
    starts, values = fields["short_answers/row_starts"], fields["short_answers/values"]
    ends = [*starts[1:], len(values)]
    groups = []
    for label, start, end in zip(fields["yes_no_answers"], starts, ends, strict=True):
        groups.append((("no", "yes")[label],) if label > -1 else tuple(values[start:end]))
    return groups


def without_sentinels(postprocess: Postprocess, num_sentinels: int = 1) -> Postprocess:
    """Returns a postprocessor for models fine-tuned with sentinels: first it takes them from the
    front of a text.

    Source:
        seqio `experimental.add_task_with_sentinels` (google/seqio at b898b9f). Differs: no.
    """
    prefix = " ".join(f"<extra_id_{number}>" for number in range(num_sentinels))

    def stripped(text: str, fields: Row, is_target: bool) -> Any:
        text = text[len(prefix) :].strip() if text.startswith(prefix) else text
        return postprocess(text, fields, is_target)

    return stripped


def _without_determiners(text: str) -> str:
    """Returns the text in lower case without determiners."""
    return " ".join(
        word for word in text.strip().lower().split(" ") if not _DETERMINERS.fullmatch(word)
    )
