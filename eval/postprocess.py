"""From an output, or a target, to the value that metrics compare."""

from collections.abc import Callable, Sequence

from eval.task import Row


def label_index(labels: Sequence[str]) -> Callable[[str, Row, bool], int]:
    """Returns a postprocessor: the number of the label that a text equals to the letter, else -1.

    Source:
        T5 `string_label_to_class_id` (google-research/text-to-text-transfer-transformer at e081111). Differs: no.
    """
    numbers = {label: number for number, label in enumerate(labels)}
    return lambda text, fields, is_target: numbers.get(text, -1)
