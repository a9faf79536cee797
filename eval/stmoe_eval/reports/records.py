"""Records of the results of an evaluation and of a comparison.

`stmoe_eval.run` and `stmoe_eval.commands.compare` build them; report.json, report.md, report.html,
card.md, compare.json and compare.md are views of them. `read_report` reads report.json back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from stmoe_eval.answers.cost import Cost, Timing
from stmoe_eval.answers.inference import AS_SAVED, Inference, identity
from stmoe_eval.answers.likelihood import Scoring
from stmoe_eval.answers.predict import RouterSummary
from stmoe_eval.answers.predictions_file import Stack
from stmoe_eval.baselines.data import BaselineSettings
from stmoe_eval.reports.overlap import SplitOverlap
from stmoe_eval.scores.calibration import Calibration
from stmoe_eval.scores.intervals import Score
from stmoe_eval.scores.pairing import MetricComparison
from stmoe_eval.submission import Submission
from stmoe_eval.task import Decoding

# ---------------------------------------------------------------------------
# Scores


@dataclass(frozen=True, kw_only=True)
class MetricScore(Score):
    """One metric of one system on one task."""

    metric: str


@dataclass(frozen=True, kw_only=True)
class AverageScore(Score):
    """The average of one system over the tasks of a benchmark.

    Attributes:
        average: Name of the benchmark.
        name: Name of the system.
        mode: How the system answered.
    """

    average: str
    name: str
    mode: str


@dataclass(frozen=True)
class PublishedScore:
    """A published result.

    Attributes:
        own_metric: Our name for the metric.
        system: The published system, one of `stmoe_eval.reports.published.SYSTEMS`.
        value: The score, in 0..100.
        metric: The metric's name in the paper.
        split: `validation` or `test`.
        source: Paper and table.
    """

    own_metric: str
    system: str
    value: float
    metric: str
    split: str
    source: str


# ---------------------------------------------------------------------------
# One task


@dataclass(frozen=True)
class DataInfo:
    """Origin of the rows of a task.

    Attributes:
        folder: Folder of the user's own rows; None for rows from the hub or from Python.
        repository: Dataset on the hub.
        config: Configuration of the dataset.
        split: Split under the dataset's own name.
        revision: Branch or commit on the hub.
        origin: Origin of the rows if it is neither a folder nor the hub.
    """

    folder: str | None
    repository: str | None
    config: str | None
    split: str
    revision: str | None
    origin: str | None = field(default=None, metadata={"optional": True})


@dataclass(frozen=True)
class SystemResult:
    """Scores of one system on a task in one mode.

    Attributes:
        name: Name of the model or of the baseline.
        mode: `generate`, `rank` or `baseline`.
        scores: One for each metric of the task; empty where labels are hidden.
        num_examples: Number of examples that were answered.
        num_unparsable: Number of answers that could not be parsed; None where values are texts.
        num_empty: Number of empty answers.
        router: Statistics of the routers, by stack; None for a dense model and for a baseline.
        fitted_to: Training data of a baseline, from the training split and other text; None for a
            model.
        submission: The file of a test split for the benchmark's site; None for none.
        cost: Tokens and operations of an example; None for a baseline.
        calibration: Calibration of the confidence; None if answers were generated, or an example
            does not have exactly one right choice.
    """

    name: str
    mode: str
    scores: Sequence[MetricScore]
    num_examples: int
    num_unparsable: int | None
    num_empty: int
    router: Mapping[Stack, RouterSummary] | None
    fitted_to: str | None = field(default=None, metadata={"optional": True})
    submission: Submission | None = field(default=None, metadata={"optional": True})
    cost: Cost | None = field(default=None, metadata={"optional": True})
    calibration: Calibration | None = field(default=None, metadata={"optional": True})


@dataclass(frozen=True)
class InputLengths:
    """Lengths of a task's inputs in tokens, end token included.

    Attributes:
        mean: Mean length.
        median: Median length.
        longest: Largest length.
        limit: Maximum number of tokens of an input.
        num_cut: Number of inputs that are longer than the limit.
    """

    mean: float
    median: float
    longest: int
    limit: int
    num_cut: int


@dataclass(frozen=True)
class ClassCount:
    """Counts of a class as target, as answer, and as both."""

    target: str
    right: int
    total: int
    answered: int


@dataclass(frozen=True)
class WorstAnswer:
    """An example with one of the lowest scores."""

    id: str
    inputs: str
    target: str
    output: str
    score: float


@dataclass(frozen=True)
class CleanScores:
    """Scores of one system on the examples that share no text with its training data."""

    name: str
    mode: str
    scores: Sequence[MetricScore]


@dataclass(frozen=True)
class Contamination:
    """Overlap between the examples of a task and a training text.

    Attributes:
        corpus: Folder of the corpus.
        overlaps: Overlaps by size of n-grams; the smallest size first.
        num_clean: Number of examples without a shared n-gram of the smallest size.
        clean_scores: Scores of the models on those; empty when there is none.
    """

    corpus: str
    overlaps: Sequence[SplitOverlap]
    num_clean: int
    clean_scores: Sequence[CleanScores]


@dataclass(frozen=True)
class TaskResult:
    """Results of one task.

    Attributes:
        task: Name of the task.
        version: Version of the task.
        description: One sentence about the task.
        licence: Licence of the data.
        prompt_source: Origin of the prompt.
        variant_of: The task of which this is a variant prompt.
        split: The evaluated split.
        limit: `--limit`, if it left examples out.
        data: Origin of the rows.
        num_rows: Number of rows that were read.
        num_expected: Number of rows that the published split has; None if it is not fixed.
        num_available: Number of examples that the rows give.
        num_examples: Number of examples that were evaluated.
        num_groups: Number of their groups.
        decoding: How answers were generated.
        digest: Identifies the examples.
        systems: Scores of models, then of baselines.
        inputs: Lengths of the inputs, in tokens of the first model.
        published: Published results of the same metrics.
        by_class: Counts of a classification, of the first model and mode; else empty.
        worst: Worst answers of the first model and mode.
        notes: Parts that are not scored, and reasons why scores are not comparable with published
            ones.
        contamination: Overlap of the examples with a corpus; None when none is given.
        num_hidden: Number of evaluated examples whose label is hidden.
        signatures: Library, version and settings of each metric that another library computes.
    """

    task: str
    version: int
    description: str
    licence: str
    prompt_source: str
    variant_of: str | None
    split: str
    limit: int | None
    data: DataInfo
    num_rows: int
    num_expected: int | None
    num_available: int
    num_examples: int
    num_groups: int
    decoding: Decoding
    digest: str
    systems: Sequence[SystemResult]
    inputs: InputLengths
    published: Sequence[PublishedScore] = ()
    by_class: Sequence[ClassCount] = ()
    worst: Sequence[WorstAnswer] = ()
    notes: Sequence[str] = ()
    contamination: Contamination | None = field(default=None, metadata={"optional": True})
    num_hidden: int = 0
    signatures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FailedTask:
    """A task that could not be evaluated, and why."""

    task: str
    message: str


# ---------------------------------------------------------------------------
# A whole evaluation


@dataclass(frozen=True)
class Selection:
    """How fine-tuning selected the best checkpoint.

    Attributes:
        rule: Rule of the comparison.
        tasks: Tasks whose dev splits were scored.
        step: Number of updates.
        mean: Mean dev score.
    """

    rule: str
    tasks: Sequence[str]
    step: int | None = field(default=None, metadata={"optional": True})
    mean: float | None = field(default=None, metadata={"optional": True})


@dataclass(frozen=True)
class ModelInfo:
    """An evaluated checkpoint.

    Attributes:
        folder: Folder that it was loaded from.
        fingerprint: Identifies the checkpoint's files.
        class_name: Class of the model.
        parameters: Number of parameters.
        active_parameters: Number of parameters that one token uses.
        chosen_by: How it was selected as the best of its run; None when it was not.
        last_of_run: Whether it is the last checkpoint of its run.
        dtype: Precision that it was evaluated in.
        capacity: Limit on the tokens of an expert; None for a dense model.
        inference: Settings that override the checkpoint's own; None where all were.
    """

    folder: str
    fingerprint: str
    class_name: Annotated[str, Field(validation_alias="class")] = field(metadata={"json": "class"})
    parameters: int
    active_parameters: int
    chosen_by: Selection | None
    last_of_run: bool
    dtype: str = "float32"
    capacity: str | None = None
    inference: Inference | None = field(default=None, metadata={"optional": True})

    @property
    def identity(self) -> str:
        """Identity of a system's answers: the model and the settings."""
        return identity(self.fingerprint, self.inference or AS_SAVED)


@dataclass(frozen=True)
class RunSettings:
    """The arguments of `stmoe_eval.run.evaluate`; None for the default."""

    tasks: Sequence[str]
    modes: Sequence[str] | None
    split: str | None
    limit: int | None
    data: str | None
    revision: str | None
    scoring: Scoring
    ranks: int
    ep: int
    tp: int
    baselines: BaselineSettings = field(default_factory=BaselineSettings)
    contamination: str | None = field(default=None, metadata={"optional": True})
    inference: Inference = AS_SAVED


@dataclass(frozen=True)
class Report:
    """A whole evaluation.

    Attributes:
        command: The command line.
        settings: Its arguments.
        versions: Versions of Python and of the libraries that compute the numbers.
        device: Name of the device.
        models: By name; the report is about the first.
        tasks: Results of the tasks that were evaluated.
        averages: Averages over benchmarks of which all tasks were evaluated.
        failed: Tasks that could not be evaluated.
        timings: Speed of the systems; not in report.json, which is identical in every run.
    """

    command: str
    settings: RunSettings
    versions: Mapping[str, str]
    device: str
    models: Mapping[str, ModelInfo]
    tasks: Sequence[TaskResult] = ()
    averages: Sequence[AverageScore] = ()
    failed: Sequence[FailedTask] = ()
    timings: Sequence[Timing] = field(default=(), metadata={"elsewhere": True})

    def speed(self, task: str, system: SystemResult) -> float | None:
        """Returns the tokens per second of a model on a task; None if unknown."""
        model = self.models.get(system.name)
        if model is None:
            return None
        key = (task, system.name, system.mode, model.identity)
        for timing in self.timings:
            if timing[:4] == key:
                return timing.tokens_per_second
        return None


# ---------------------------------------------------------------------------
# A comparison of two evaluations


@dataclass(frozen=True)
class ComparedModel:
    """One side of a comparison: a model of a run."""

    name: str
    folder: str


@dataclass(frozen=True)
class ExampleDifference:
    """An example on which the two systems score differently; `a` and `b` are their answers."""

    id: str
    inputs: str
    targets: str
    a: str
    b: str
    score_a: float
    score_b: float


@dataclass(frozen=True)
class TaskComparison:
    """One task in one mode.

    Attributes:
        task: Name of the task.
        mode: How both systems answered.
        version: Version of the task.
        split: The evaluated split.
        num_examples: Number of examples.
        num_groups: Number of their groups.
        metrics: One for each metric of the task.
        num_outputs_differ: Number of examples with different answers.
        num_scores_differ: Number of examples with different scores.
        examples: Examples with different scores, the largest difference first.
    """

    task: str
    mode: str
    version: int
    split: str
    num_examples: int
    num_groups: int
    metrics: Sequence[MetricComparison]
    num_outputs_differ: int
    num_scores_differ: int
    examples: Sequence[ExampleDifference]


@dataclass(frozen=True)
class Comparison:
    """Two runs on the same examples; `left_out` lists what only one of them has."""

    a: ComparedModel
    b: ComparedModel
    tasks: Sequence[TaskComparison]
    left_out: Sequence[str]
