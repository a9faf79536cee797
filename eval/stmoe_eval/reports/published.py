"""Published results with table and split, shown next to ours.

Source: ST-MoE (arXiv:2202.08906) tables 10 and 12; Switch Transformer (arXiv:2101.03961) table 5,
whose SQuAD and closed-book numbers are exact matches and whose XSum is ROUGE-2. All are of models
fine-tuned on the task.
"""

from collections.abc import Iterator

from stmoe_eval.reports.records import PublishedScore

SYSTEMS = (
    "ST-MoE-32B",
    "previous best",
    "ST-MoE-L",
    "Dense-L",
    "Switch-Large",
    "T5-Large",
    "Switch-Base",
    "T5-Base",
)
"""Whose results there are; `previous best` is the best fine-tuned model before ST-MoE-32B."""

# task, metric here, metric as printed, Dense-L, ST-MoE-L; all on validation.
_TABLE_10 = (
    ("squad_v2", "f1", "F1", 94.0, 94.5),
    ("squad_v2", "em", "acc", 87.6, 88.1),
    ("superglue", "average", "avg", 85.1, 87.4),
    ("boolq", "accuracy", "acc", 87.1, 88.6),
    ("copa", "accuracy", "acc", 83.0, 91.0),
    ("rte", "accuracy", "acc", 91.0, 92.1),
    ("wic", "accuracy", "acc", 70.4, 74.0),
    ("multirc", "f1", "F1", 83.9, 86.0),
    ("wsc", "accuracy", "acc", 95.2, 93.3),
    ("record", "em", "acc", 85.7, 88.9),
    ("cb", "accuracy", "acc", 100.0, 98.2),
    ("xsum", "rouge2", "R-2", 19.9, 21.8),
    ("cnn_dailymail", "rouge2", "R-2", 20.3, 20.7),
    ("winogrande_xl", "accuracy", "acc", 75.4, 81.7),
    ("anli_r3", "accuracy", "acc", 54.3, 57.3),
    ("arc_easy", "accuracy", "acc", 63.5, 75.4),
    ("arc_challenge", "accuracy", "acc", 50.2, 56.9),
    ("trivia_qa", "em", "acc", 28.1, 33.8),
    ("natural_questions", "em", "acc", 27.2, 29.5),
    ("web_questions", "em", "acc", 30.5, 33.2),
)

# task, metric here, metric as printed, split, previous best fine-tuned, ST-MoE-32B.
_TABLE_12 = (
    ("squad_v2", "f1", "F1", "validation", 96.2, 96.3),
    ("squad_v2", "em", "acc", "validation", 91.3, 90.8),
    ("superglue", "average", "avg", "test", 90.9, 91.2),
    # Printed next to 91.2; of two, the last is shown.
    ("superglue", "average", "avg", "validation", None, 93.2),
    ("boolq", "accuracy", "acc", "test", 92.0, 92.4),
    ("copa", "accuracy", "acc", "test", 98.2, 99.2),
    ("rte", "accuracy", "acc", "test", 94.1, 93.5),
    ("wic", "accuracy", "acc", "test", 77.9, 77.7),
    ("multirc", "f1", "F1", "test", 88.6, 89.6),
    ("wsc", "accuracy", "acc", "test", 97.3, 96.6),
    ("record", "em", "acc", "test", 96.4, 95.1),
    ("cb", "accuracy", "acc", "test", 99.2, 98.0),
    ("xsum", "rouge2", "R-2", "test", 24.6, 27.1),
    ("cnn_dailymail", "rouge2", "R-2", "test", 21.6, 21.7),
    ("winogrande_xl", "accuracy", "acc", "validation", None, 96.1),
    ("anli_r3", "accuracy", "acc", "test", 53.4, 74.7),
    ("arc_easy", "accuracy", "acc", "test", 92.7, 95.2),
    ("arc_challenge", "accuracy", "acc", "test", 81.4, 86.5),
    ("trivia_qa", "em", "em", "validation", 61.6, 62.3),
    ("natural_questions", "em", "em", "test", 41.5, 41.9),
    ("web_questions", "em", "em", "test", 42.8, 47.4),
)

# task, metric here, metric as printed, T5-Base, Switch-Base, T5-Large, Switch-Large; all on
# validation.
_SWITCH_TABLE_5 = (
    ("squad", "em", "EM", 85.5, 87.2, 88.1, 88.6),
    ("superglue", "average", "avg", 75.1, 79.5, 82.7, 84.7),
    ("winogrande_xl", "accuracy", "acc", 66.6, 73.3, 79.1, 83.0),
    ("xsum", "rouge2", "R-2", 18.7, 20.3, 20.9, 22.3),
    ("anli_r3", "accuracy", "acc", 51.8, 54.0, 56.6, 58.6),
    ("arc_easy", "accuracy", "acc", 56.7, 61.3, 68.8, 66.0),
    ("arc_challenge", "accuracy", "acc", 35.5, 32.8, 35.5, 35.5),
    ("web_questions", "em", "EM", 26.6, 27.4, 27.7, 31.3),
    ("natural_questions", "em", "EM", 25.8, 26.8, 27.6, 29.5),
    ("trivia_qa", "em", "EM", 24.5, 30.7, 29.5, 36.9),
)


def published_scores(task: str, metric: str, variant_of: str | None = None) -> list[PublishedScore]:
    """Returns the published results of a task's metric, in the order of SYSTEMS.

    Args:
        task: Name of the task.
        metric: Our name for the metric.
        variant_of: Task whose published results are used for a variant that has none.
    """
    if (task, metric) in _PUBLISHED:
        return _PUBLISHED[task, metric]
    return _PUBLISHED.get((variant_of or "", metric), [])


def _read_tables() -> Iterator[tuple[str, PublishedScore]]:
    """Yields the task and the result for every number in the tables."""
    source = "ST-MoE, table 10"
    for task, metric, printed, dense, sparse in _TABLE_10:
        for system, value in (("Dense-L", dense), ("ST-MoE-L", sparse)):
            yield task, PublishedScore(metric, system, value, printed, "validation", source)

    source = "ST-MoE, table 12"
    for task, metric, printed, split, previous, largest in _TABLE_12:
        for system, value in (("previous best", previous), ("ST-MoE-32B", largest)):
            if value is not None:
                yield task, PublishedScore(metric, system, value, printed, split, source)

    source = "Switch Transformer, table 5"
    systems = ("T5-Base", "Switch-Base", "T5-Large", "Switch-Large")
    for task, metric, printed, *values in _SWITCH_TABLE_5:
        for system, value in zip(systems, values, strict=True):
            yield task, PublishedScore(metric, system, value, printed, "validation", source)


def _by_task_and_metric() -> dict[tuple[str, str], list[PublishedScore]]:
    results: dict[tuple[str, str], list[PublishedScore]] = {}
    for task, score in _read_tables():
        results.setdefault((task, score.own_metric), []).append(score)
    for scores in results.values():
        scores.sort(key=lambda score: SYSTEMS.index(score.system))
    return results


_PUBLISHED = _by_task_and_metric()
