"""From the answers to one task to its `TaskResult`: scores, classes, worst answers, lengths of the
inputs, and notes on what keeps the scores from being compared with published ones.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe.checks import shown
from moe.data.tokenizer import prompt_ids, text_ids, written
from stmoe_eval.answers.predict import MODES, Predicted, RouterSummary
from stmoe_eval.answers.predictions_file import Stack
from stmoe_eval.baselines.classifiers import BaselineData, baseline_outputs, has_baselines
from stmoe_eval.pairs import find_task
from stmoe_eval.reports.formatting import shorten
from stmoe_eval.reports.published import published_scores
from stmoe_eval.reports.records import (
    AverageScore,
    ClassCount,
    DataInfo,
    InputLengths,
    MetricScore,
    ModelInfo,
    SystemResult,
    TaskResult,
    WorstAnswer,
)
from stmoe_eval.scores.calibration import Calibration, calibration_of_choices
from stmoe_eval.scores.intervals import score_answers, score_metrics, task_seed, with_interval
from stmoe_eval.scores.metrics import Values, exact_matches, unwrap_values
from stmoe_eval.scores.superglue import SUPERGLUE, superglue_average
from stmoe_eval.submission import Submission
from stmoe_eval.task import TASKS, Example, Task
from stmoe_eval.text.preprocess import HIDDEN_TARGET

_WORST_ANSWERS = 10
_KEPT_CHARACTERS = 1000
_FULL_MARKS = 100.0 - 1e-9

HeadlineDraws = dict[tuple[str, str, str], NDArray[np.float64]]
"""By system, mode and task, <float64>[R] bootstrap draws of the task's headline score."""


class TaskExamples(NamedTuple):
    """The examples of a task in an evaluation.

    Attributes:
        task: The task.
        split: The evaluated split.
        limit: Largest number of examples, where it left some out; else None.
        data: Where the rows come from.
        num_rows: Number of rows that were read.
        num_expected: Number of rows that the published split has; None when it is not fixed.
        num_available: Number of examples that the rows give.
        examples: The evaluated examples.
        baselines: Training data of the baselines; None for no baselines.
        num_hidden: Number of those whose label is hidden; nothing is scored unless it is 0.
    """

    task: Task
    split: str
    limit: int | None
    data: DataInfo
    num_rows: int
    num_expected: int | None
    num_available: int
    examples: list[Example]
    baselines: BaselineData | None = None
    num_hidden: int = 0


class ScoredSystem(NamedTuple):
    """One system's answers to a task, scored.

    Attributes:
        result: Results of the report.
        draws: By metric, <float64>[R] bootstrap draws of its score.
        example_scores: <float64>[N] how well each example was answered.
    """

    result: SystemResult
    draws: dict[str, NDArray[np.float64]]
    example_scores: NDArray[np.float64]


def summarize_task(
    asked: TaskExamples,
    answers: Mapping[tuple[str, str], Predicted],
    tokenizer: Any,
    models: Mapping[str, ModelInfo],
    digest: str,
    submissions: Mapping[tuple[str, str], Submission | None],
) -> tuple[TaskResult, HeadlineDraws]:
    """Returns the results of a task, and the bootstrap draws for averages over tasks.

    Args:
        asked: The examples.
        answers: By system and mode; the first one gives the classes and the worst answers.
        tokenizer: Tokenizer of the first system, which defines lengths.
        models: The evaluated checkpoints by name.
        digest: Identifies the examples.
        submissions: By system and mode, the file for the benchmark's site.
    """
    task = asked.task
    examples = asked.examples
    is_scored = asked.num_hidden == 0

    # Scores of each model in each mode; hidden labels leave counts alone.
    systems: list[ScoredSystem] = []
    draws: HeadlineDraws = {}
    for (name, mode), predicted in answers.items():
        submission = submissions.get((name, mode))
        system_examples = (task, examples, predicted.outputs, name, mode)
        if is_scored:
            calibration = ranked_calibration(task, examples, predicted)
            scored = score_system(
                *system_examples, router=predicted.router, calibration=calibration
            )
            draws[name, mode, task.name] = task.headline_score(scored.draws)
        else:
            scored = count_system(*system_examples, predicted.router)
        systems.append(scored._replace(result=replace(scored.result, submission=submission)))
    first_outputs = next(iter(answers.values())).outputs
    first_scores = systems[0].example_scores

    # Baselines are listed with the models if training rows are available offline.
    if is_scored and asked.baselines is not None:
        for name, outputs in baseline_outputs(task, asked.baselines, examples).items():
            scored = score_system(task, examples, outputs, name, "baseline")
            result = replace(scored.result, fitted_to=asked.baselines.fitted_to)
            systems.append(scored._replace(result=result))

    published = []
    for metric in task.metrics if is_scored else ():
        published += published_scores(task.name, metric.name, task.variant_of)

    signatures = {}
    for metric in task.metrics:
        if metric.signature is not None:
            signatures[metric.name] = metric.signature()

    result = TaskResult(
        task=task.name,
        version=task.version,
        description=task.description,
        licence=task.licence,
        prompt_source=task.prompt_source,
        variant_of=task.variant_of,
        split=asked.split,
        limit=asked.limit,
        data=asked.data,
        num_rows=asked.num_rows,
        num_expected=asked.num_expected,
        num_available=asked.num_available,
        num_examples=len(examples),
        num_groups=len({example.group for example in examples}),
        num_hidden=asked.num_hidden,
        decoding=task.decoding,
        digest=digest,
        systems=[scored.result for scored in systems],
        inputs=input_lengths(examples, tokenizer, task.inputs_length),
        published=published,
        by_class=class_counts(task, examples, first_outputs),
        worst=worst_answers(examples, first_outputs, first_scores),
        signatures=signatures,
    )
    notes = comparability_notes(result, models)
    if has_baselines(task) and asked.baselines is None and result.data.folder:
        notes.append(f"No baselines: {result.data.folder} has no rows of the split 'train'.")
    notes += _notes_on_unknown_targets(examples, tokenizer)
    return replace(result, notes=notes), draws


def score_system(
    task: Task,
    examples: Sequence[Example],
    outputs: Sequence[str],
    name: str,
    mode: str,
    router: Mapping[Stack, RouterSummary] | None = None,
    calibration: Calibration | None = None,
) -> ScoredSystem:
    """Returns one system's answers to a task, scored by every metric of the task.

    Args:
        task: Gives the metrics.
        examples: N examples.
        outputs: N answers.
        name: Name of the system.
        mode: How it answered.
        router: Statistics of its routers; None for a dense model.
        calibration: Calibration of its ranked choices; None for generated answers.
    """
    scored = score_answers(task.metrics, *task.values(examples, outputs))
    groups = [example.group for example in examples]
    scores, draws = score_metrics(scored, groups, task_seed(task.name))
    metric_scores = [MetricScore(metric=metric, **vars(score)) for metric, score in scores.items()]

    counted = count_system(task, examples, outputs, name, mode, router).result
    result = replace(counted, scores=metric_scores, calibration=calibration)
    return ScoredSystem(result, draws, scored.headline_scores)


def count_system(
    task: Task,
    examples: Sequence[Example],
    outputs: Sequence[str],
    name: str,
    mode: str,
    router: Mapping[Stack, RouterSummary] | None = None,
) -> ScoredSystem:
    """Returns one system's answers counted, without a score; arguments as of `score_system`."""
    values = task.values(examples, outputs)
    result = SystemResult(
        name=name,
        mode=mode,
        scores=[],
        num_examples=len(outputs),
        num_unparsable=count_unparsable(values.targets, values.answers),
        num_empty=sum(not output.strip() for output in outputs),
        router=router,
    )
    return ScoredSystem(result, {}, np.empty(0))


def ranked_calibration(
    task: Task, examples: Sequence[Example], predicted: Predicted
) -> Calibration | None:
    """Returns the calibration of ranked answers; None for generated answers, and if examples have
    several right choices or none.
    """
    choices: list[Mapping[str, float]] = []
    right: list[list[str]] = []
    for example, prediction in zip(examples, predicted.predictions, strict=True):
        if prediction.scores is None:
            return None

        # An answer is right if its value equals the target's.
        texts = list(prediction.scores)
        values = [task.postprocess(text, example.fields, False) for text in texts]
        target = task.postprocess(example.targets, example.fields, True)
        matches = exact_matches(unwrap_values([target] * len(texts)), unwrap_values(values))
        right.append([text for text, match in zip(texts, matches, strict=True) if match])
        choices.append(prediction.scores)
    return calibration_of_choices(choices, right)


def count_unparsable(targets: Values, answers: Values) -> int | None:
    """Returns how many post-processed answers are -1, which means that no valid answer was found.

    None if the targets are texts, since every answer is then valid.
    """
    if not all(isinstance(target, int) for target in unwrap_values(targets)):
        return None
    return sum(answer == -1 for answer in unwrap_values(answers))


# ---------------------------------------------------------------------------
# Classes, worst answers, lengths


def class_counts(
    task: Task, examples: Sequence[Example], outputs: Sequence[str]
) -> list[ClassCount]:
    """Returns for each class its examples, the right answers, and how often it was answered.

    Empty unless the task is a classification.
    """
    if not task.is_classification:
        return []

    # An answer is the choice that the vocabulary writes like it.
    choices = {written(choice): choice for choice in examples[0].choices}
    outputs = [choices.get(written(output), output) for output in outputs]

    num_examples: Counter[str] = Counter()
    num_right: Counter[str] = Counter()
    for example, output in zip(examples, outputs, strict=True):
        if example.targets != HIDDEN_TARGET:
            num_examples[example.targets] += 1
            num_right[example.targets] += output == example.targets
    num_answered = Counter(outputs)

    counts = []
    for target in sorted({*num_examples, *examples[0].choices}):
        if num_examples[target] or num_answered[target]:
            counts.append(
                ClassCount(
                    target=target,
                    right=num_right[target],
                    total=num_examples[target],
                    answered=num_answered[target],
                )
            )
    return counts


def worst_answers(
    examples: Sequence[Example], outputs: Sequence[str], scores: NDArray[np.float64]
) -> list[WorstAnswer]:
    """Returns the examples with the lowest scores, except those with full marks.

    If more examples have the lowest score than are shown, the shown ones are evenly spaced among
    them.

    Args:
        examples: N examples.
        outputs: N answers.
        scores: <float64>[N] how well each example was answered; [0] where nothing is scored.
    """
    ascending = np.argsort(scores, kind="stable")
    shown = [int(row) for row in ascending if scores[row] < _FULL_MARKS]

    lowest = [row for row in shown if scores[row] <= scores[shown[0]]]
    if len(lowest) > _WORST_ANSWERS:
        shown = [lowest[i * len(lowest) // _WORST_ANSWERS] for i in range(_WORST_ANSWERS)]

    answers = []
    for row in shown[:_WORST_ANSWERS]:
        answers.append(
            WorstAnswer(
                id=examples[row].id,
                inputs=shorten(examples[row].inputs, _KEPT_CHARACTERS),
                target=shorten(examples[row].targets, _KEPT_CHARACTERS),
                output=shorten(outputs[row], _KEPT_CHARACTERS),
                score=float(scores[row]),
            )
        )
    return answers


def input_lengths(examples: Sequence[Example], tokenizer: Any, limit: int) -> InputLengths:
    """Returns the lengths of the inputs in tokens, end token included.

    Args:
        examples: Examples whose inputs are counted.
        tokenizer: Tokenizer of the model.
        limit: Tokens that the model sees of an input; the tokenizer's own limit may be lower.
    """
    limit = min(limit, tokenizer.model_max_length)
    texts = [example.inputs for example in examples]
    lengths = np.asarray([len(ids) for ids in prompt_ids(tokenizer, texts)])

    return InputLengths(
        mean=float(lengths.mean()),
        median=float(np.median(lengths)),
        longest=int(lengths.max()),
        limit=limit,
        num_cut=int((lengths > limit).sum()),
    )


# ---------------------------------------------------------------------------
# What is not comparable


def comparability_notes(result: TaskResult, models: Mapping[str, ModelInfo]) -> list[str]:
    """Returns sentences on what keeps the scores of a task from being compared with published ones.

    Args:
        result: The result of the task.
        models: The evaluated checkpoints; one that was chosen on the evaluated split is named.
    """
    notes = _submission_notes(result)

    # The rows are not the published split, or only a part of it.
    if result.data.folder:
        notes.append(
            f"Rows are from {result.data.folder}, not from the hub: not comparable with published scores."
        )
    if result.num_expected is not None and result.num_rows != result.num_expected:
        notes.append(
            f"{result.num_rows:,} rows of {result.num_expected:,} that the published split has: not comparable with "
            "published scores."
        )
    if result.limit is not None:
        notes.append(
            f"--limit {result.limit:,}: {result.num_examples:,} of {result.num_available:,} examples, whole groups "
            "evenly taken: not comparable with published scores."
        )

    # The same rows with a different prompt.
    if result.prompt_source != "T5" and result.published:
        notes.append(
            f"The prompt is of {result.prompt_source}; published results may stand on another one."
        )
    if result.inputs.num_cut:
        notes.append(
            f"{result.inputs.num_cut:,} inputs were cut to {result.inputs.limit:,} tokens."
        )

    # A model that was selected on these examples.
    for name, model in models.items():
        chosen_by = model.chosen_by
        if chosen_by and result.split == "validation" and result.task in chosen_by.tasks:
            notes.append(
                f"The checkpoint of `{name}` is the best of its run on this same split: its scores are optimistic. "
                "The paper reports such peaks too."
            )
    return notes


def _notes_on_unknown_targets(examples: Sequence[Example], tokenizer: Any) -> list[str]:
    """Returns a note on targets that a vocabulary cannot write, if there are any."""
    targets = [example.targets for example in examples if example.targets != HIDDEN_TARGET]
    unknown = [tokenizer.unk_token_id in ids for ids in text_ids(tokenizer, targets, markers=True)]
    if not any(unknown):
        return []
    return [
        f"{sum(unknown):,} targets have characters that the vocabulary lacks, the first is "
        f"{shown(targets[unknown.index(True)])}: no generated answer can be equal to them."
    ]


def _submission_notes(result: TaskResult) -> list[str]:
    """Returns notes on hidden labels, and on the files for the benchmark's site."""
    notes = []
    if result.num_hidden:
        notes.append(
            f"The labels of {result.num_hidden:,} of {result.num_examples:,} examples are hidden: answers are "
            "predicted, not scored."
        )

    for system in result.systems:
        submission = system.submission
        if submission is None:
            continue
        note = f"{system.name} by {system.mode}, for the benchmark's site: `{submission.file}`."
        if submission.num_replaced:
            note += f" {submission.num_replaced:,} answers are not labels; `{submission.fallback}` replaces them."
        notes.append(note)

    # A file that was not written is named too.
    is_submitted = any(system.submission for system in result.systems)
    form = find_task(result.task).submission if result.num_hidden else None
    if form is not None and not is_submitted:
        reason = "two rows have one idx"
        if result.limit is not None:
            reason = "--limit left out examples"
        notes.append(f"There is no `{form.name}` for the site of {form.site}: {reason}.")
    return notes


# ---------------------------------------------------------------------------
# Averages over tasks


def superglue_averages(tasks: Iterable[TaskResult], draws: HeadlineDraws) -> list[AverageScore]:
    """Returns the SuperGLUE average of every system and mode that answered all of its tasks.

    Args:
        tasks: Results of tasks.
        draws: Bootstrap draws of their headline scores.
    """
    # Each system's headline scores by task, in the order of the report.
    by_system: dict[tuple[str, str], dict[str, NDArray[np.float64]]] = {}
    for result in tasks:
        for system in result.systems:
            if system.scores and system.mode in MODES and result.task in SUPERGLUE:
                values = {score.metric: score.value for score in system.scores}
                scores = by_system.setdefault((system.name, system.mode), {})
                scores[result.task] = TASKS.get(result.task).headline_score(values)

    averages = []
    for (name, mode), scores in by_system.items():
        if not scores.keys() >= set(SUPERGLUE):
            continue

        # The draws of different tasks are independent; their means are draws of the average. A task
        # of one group has no draws: the average then has no interval either.
        task_draws = {task: draws[name, mode, task] for task in SUPERGLUE}
        average_draws = np.empty(0)
        if all(len(values) for values in task_draws.values()):
            average_draws = superglue_average(task_draws)

        # A task without spread adds none to the average.
        certain = [
            task for task in SUPERGLUE if len(task_draws[task]) and not np.ptp(task_draws[task])
        ]
        note = ""
        if certain:
            note = (
                f"the draws of {', '.join(certain)} show no spread, so the interval is too narrow"
            )
        value = float(superglue_average(scores))
        average = with_interval(value, average_draws, note=note)
        averages.append(AverageScore(average="superglue", name=name, mode=mode, **vars(average)))
    return averages
