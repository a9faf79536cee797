"""Functions of T5 and t5_cbqa that no task of this library needs, as the cases call them.

Sources: T5 `t5/data/preprocessors.py`, `postprocessors.py` and `t5/evaluation/metrics.py`
(google-research/text-to-text-transfer-transformer at e081111), t5_cbqa (google-research).
"""

import math
import re
import string
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe.errors import ConfigError, DataError
from stmoe_eval.scores.metrics import Metric, Values, mean_of, normalize_squad
from stmoe_eval.task import Features, Postprocess, Row
from stmoe_eval.text.preprocess import FALSE_TRUE, label_text
from stmoe_eval.text.questions import pad_punctuation

SPACES = re.compile(r"[\t\n\f\r ]+")  # RE2's \s
_ASCII_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


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


def trivia_qa(row: Row) -> list[Features]:
    """Maps a question to an alias, for each context and each alias that occurs in it.

    Source:
        T5 `trivia_qa`. Differs: an alias is looked for to the letter, where T5 takes it for a
        regular expression; normalised aliases have no punctuation.
    """
    contexts = [
        *row.get("entity_pages", {}).get("wiki_context", ()),
        *row.get("search_results", {}).get("search_context", ()),
    ]
    aliases = list(map(pad_punctuation, row["answer"]["normalized_aliases"]))
    question = pad_punctuation(row["question"])

    examples: list[Features] = []
    for context in map(pad_punctuation, contexts):
        inputs = SPACES.sub(" ", f"question: {question} context: {context}")
        lower_context = context.translate(_ASCII_LOWER)
        for alias in aliases:
            if alias.translate(_ASCII_LOWER) in lower_context:
                examples.append({"inputs": inputs, "targets": alias})
    return examples


def natural_questions_nocontext(
    row: Row,
    *,
    drop_yes_no: bool = False,
    max_tokens: int | None = None,
    max_answers: int | None = None,
) -> list[Features]:
    """Maps a question to all its answers, `answer: A1 answer: A2`; without any gives no example.

    Args:
        row: A row of Natural Questions; `annotations` has a yes_no_answer and short_answers for
            each annotator.
        drop_yes_no: Leaves out answers that are yes or no.
        max_tokens: Leaves out longer short answers; None for none.
        max_answers: Most answers in the target; None for all.

    Source:
        t5_cbqa `natural_questions_nocontext`. Differs: no.
    """
    annotations = row["annotations"]

    # Labels are 1 for yes, 0 for no, and -1 where an annotator gave neither.
    yes_no_labels: list[int] = list(annotations["yes_no_answer"])
    if drop_yes_no:
        yes_no_labels = [-1] * len(yes_no_labels)
    answers: list[str] = []
    for label in yes_no_labels:
        if label > -1:
            answers.append("yes" if label == 1 else "no")

    # The short answers of all annotators in one list, and where those of each begin.
    short_answers: list[str] = []
    row_starts: list[int] = []
    for annotation in _by_annotator(annotations["short_answers"]):
        row_starts.append(len(short_answers))
        short_answers += _short_answers(annotation, max_tokens)

    answers += short_answers
    if not answers:
        return []
    return [
        {
            "inputs": f"nq question: {row['question']['text']}",
            "targets": " ".join(f"answer: {answer}" for answer in answers[:max_answers]),
            "short_answers/values": short_answers,
            "short_answers/row_starts": row_starts,
            "yes_no_answers": yes_no_labels,
        }
    ]


def _by_annotator(short_answers: Any) -> list[Mapping[str, Any]]:
    """Returns the short answers of each annotator, from a list of mappings or a mapping of lists."""
    if not isinstance(short_answers, dict):
        return list(short_answers)

    annotations: list[Mapping[str, Any]] = []
    for values in zip(*short_answers.values(), strict=True):
        annotations.append(dict(zip(short_answers, values, strict=True)))
    return annotations


def _short_answers(annotation: Mapping[str, Any], max_tokens: int | None) -> list[str]:
    """Returns the texts of one annotator's short answers that are no longer than `max_tokens`."""
    texts = list(annotation["text"])
    if not max_tokens:
        return texts

    starts = annotation["start_token"]
    ends = annotation["end_token"]
    short: list[str] = []
    for text, start, end in zip(texts, starts, ends, strict=True):
        if end - start <= max_tokens:
            short.append(text)
    return short


def wsc(row: Row) -> list[Features]:
    """Maps a text with noun and pronoun marked to False or True.

    Asterisks stand around the noun, hashes around the pronoun.

    Source:
        T5 `wsc`, which T5's mixture does not use. Differs: no; words of the row are patterns, as
        there.
    """
    # The noun first, which may stand on either side of the pronoun.
    text = _mark(row["text"], row["span1_text"], row["span1_index"], "*")

    # The two asterisks before the pronoun count as words.
    pronoun_index = row["span2_index"]
    if row["span1_index"] < row["span2_index"]:
        pronoun_index += 2
    text = _mark(text, row["span2_text"], pronoun_index, "#")
    return [
        {
            "inputs": f"wsc text: {text}",
            "targets": label_text(row["label"], FALSE_TRUE),
            "idx": row["idx"],
        }
    ]


def _mark(text: str, span: str, index: int, mark: str) -> str:
    """Returns the text with marks around the span that begins with the word `index`."""
    pattern = rf"^((?:\S+\s){{{index}}})({span})"
    return re.sub(pattern, rf"\g<1>{mark} \2 {mark}", text, flags=re.ASCII)


def span_qa(text: str, fields: Features, is_target: bool) -> str | dict[str, Any]:
    """Returns the text; of a target all answers and the context."""
    if not is_target:
        return text
    return {"answers": list(fields["answers"]), "context": fields["context"]}


def natural_questions(text: str, fields: Features, is_target: bool) -> list[tuple[str, ...]]:
    """Returns the set of answers behind each `answer:`; of a target one set for each annotator.

    The set of an annotator who gave no answer is empty.

    Source:
        t5_cbqa `postprocessors.natural_questions` (google-research/google-research). Differs: no.
    """
    if not is_target:
        return [tuple(map(str.strip, text.split("answer:")[1:]))]

    # Short answers of all annotators stand in one list; a start says where each one's begin.
    values = fields["short_answers/values"]
    starts = fields["short_answers/row_starts"]
    ends = [*starts[1:], len(values)]
    answer_sets: list[tuple[str, ...]] = []
    for yes_no, start, end in zip(fields["yes_no_answers"], starts, ends, strict=True):
        if yes_no > -1:
            answer_sets.append((("no", "yes")[yes_no],))
        else:
            answer_sets.append(tuple(values[start:end]))
    return answer_sets


def rank_classification_target(score: Any, fields: Features, is_target: bool) -> Any:
    """Returns the score of a choice; of a target what the metric has to know of it.

    That is (row, choice), whether it is right, its weight and its length.
    """
    if not is_target:
        return score
    return (
        tuple(fields["idx"]),
        fields["is_correct"],
        fields.get("weight", 1.0),
        len(fields["targets"]),
    )


def without_sentinels(postprocess: Postprocess, num_sentinels: int = 1) -> Postprocess:
    """Returns a postprocessor for models fine-tuned with sentinels: it first removes them.

    They stand at the front of a text.

    Source:
        seqio `experimental.add_task_with_sentinels` (google/seqio at b898b9f). Differs: no.
    """
    prefix = " ".join(f"<extra_id_{number}>" for number in range(num_sentinels))

    def postprocess_rest(text: str, fields: Features, is_target: bool) -> Any:
        if text.startswith(prefix):
            text = text.removeprefix(prefix).strip()
        return postprocess(text, fields, is_target)

    return postprocess_rest


def natural_questions_recall(non_null_threshold: int = 2, normalize: bool = True) -> Metric:
    """Returns the share of questions whose set of answers is one annotator's whole set.

    Args:
        non_null_threshold: Fewest annotators with an answer; questions with fewer do not count.
        normalize: Whether answers are compared as SQuAD's.

    Source:
        t5_cbqa `metrics.natural_questions` (google-research/google-research). Differs: NaN, not an
        error, when no question counts.
    """

    def as_set(answers: Collection[str]) -> frozenset[str]:
        if normalize:
            return frozenset(map(normalize_squad, answers))
        return frozenset(answers)

    def score_question(
        annotators: Sequence[Collection[str]], answer: Sequence[Collection[str]]
    ) -> float:
        accepted = [as_set(answers) for answers in annotators if answers]
        if len(accepted) < non_null_threshold:
            return math.nan
        return 100.0 * (as_set(answer[0]) in accepted)

    def score_examples(targets: Values, answers: Values) -> NDArray[np.float64]:
        return np.asarray(list(map(score_question, targets, answers)), dtype=np.float64)

    return mean_of("recall", score_examples)


class _RankedChoice(NamedTuple):
    """One choice of a row with its score."""

    row: int
    number: int
    score: float
    right: bool
    weight: float


def auc(targets: Values, scores: Sequence[float], weights: Any = None) -> dict[str, float]:
    """Returns the areas in 0..1 under the ROC and the precision-recall curve of scores of class 1."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    return {
        "auc-roc": float(roc_auc_score(targets, scores, sample_weight=weights)),
        "auc-pr": float(average_precision_score(targets, scores, sample_weight=weights)),
    }


def rank_classification(
    targets: Sequence[tuple[Sequence[int], bool, float, int]],
    scores: Sequence[float],
    num_classes: int | None = None,
    normalize_by_target_length: bool = False,
) -> dict[str, float]:
    """Returns metrics of the choices with the best scores, all in 0..100.

    Args:
        targets: Of each choice (row, choice), whether it is right, the weight of its row, and its
            length in tokens.
        scores: Log-probabilities of the choices.
        num_classes: Choices of every row; None when they differ, which leaves accuracy alone.
        normalize_by_target_length: Whether scores are divided by lengths.

    Returns:
        `accuracy`; without rows that have several right choices also `mean_Nclass_f1`, or with two
        classes `f1`, `auc-roc` and `auc-pr` of class 1.

    Raises:
        DataError: When the number of choices is no multiple of `num_classes`.
    """
    if len(targets) != len(scores) or (num_classes and len(targets) % num_classes):
        raise DataError(
            f"There are {len(targets)} choices and {len(scores)} scores; expected as many of both, a multiple of the "
            f"{num_classes or 1} classes."
        )

    # Sorted by row, since choices may come in any order.
    choices = []
    for ((row, number), right, weight, length), score in zip(targets, scores, strict=True):
        if normalize_by_target_length:
            score = score / length
        choices.append(_RankedChoice(row, number, score, right, weight))
    choices.sort(key=attrgetter("row", "number"))

    if num_classes is None:
        return _accuracy_of_ranked(choices)
    values = np.asarray([choice[2:] for choice in choices], dtype=np.float64)
    return _metrics_of_classes(values.reshape(-1, num_classes, 3))  # [N, C, 3]


def _accuracy_of_ranked(choices: Sequence[_RankedChoice]) -> dict[str, float]:
    """Returns the accuracy of the best choice of each row; `choices` are sorted by row."""
    right = []
    weights = []
    for _, row in groupby(choices, key=attrgetter("row")):
        best = max(row, key=attrgetter("score"))
        right.append(best.right)
        weights.append(best.weight)
    return {"accuracy": 100 * float(np.average(right, weights=weights))}


def _metrics_of_classes(choices: NDArray[np.float64]) -> dict[str, float]:
    """Returns the metrics of rows with the same number of choices.

    Args:
        choices: <float64>[N, C, 3] score, rightness and weight of every choice.
    """
    scores = choices[..., 0].astype(np.float32)  # [N, C]
    right = choices[..., 1] == 1  # [N, C]
    weights = choices[:, 0, 2]  # [N]
    num_classes = right.shape[1]

    # The chosen class is the one of the highest score.
    best = scores.argmax(axis=-1)  # [N]
    is_right = right[np.arange(len(right)), best]  # [N]
    metrics = {"accuracy": 100 * float(np.average(is_right, weights=weights))}
    if (right.sum(axis=-1) > 1).any():
        return metrics

    if num_classes > 2:
        one_hot = np.eye(num_classes, dtype=int)[best]  # [N, C]
        f1 = _f1(
            right.astype(int),
            one_hot,
            labels=range(num_classes),
            average="macro",
            sample_weight=weights,
        )
        metrics[f"mean_{num_classes}class_f1"] = 100 * f1
        return metrics

    metrics["f1"] = 100 * _f1(right.argmax(axis=-1), best, sample_weight=weights)

    # Probability of class 1 among the two choices.
    odds = np.exp(scores - scores.max(axis=-1, keepdims=True))  # [N, 2]
    probability = odds[:, 1] / odds.sum(axis=-1)  # [N]
    for name, area in auc(right[:, 1], probability, weights).items():
        metrics[name] = 100 * area
    return metrics


def _f1(targets: Any, answers: Any, **options: Any) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(targets, answers, zero_division=0, **options))
