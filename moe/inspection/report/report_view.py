"""What templates/router_report.html shows, as records of texts.

`moe.inspection.report.report` builds them; the template arranges them.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """A large value with a sentence below it."""

    value: str
    text: str


@dataclass(frozen=True)
class SourceView:
    """From what the page was made, and by what.

    Attributes:
        model: Folder of the model.
        fingerprint: Tells its files from those of others.
        recipe: Path of the recipe of its run; None when none is known.
        recipe_text: Content of the recipe.
        corpus: Folder of the corpus.
        text: How much text its held-out part has.
        batches: How many batches were traced, and how much of the text they cover.
        masks: How they were masked.
        loss: The model's loss on them, beside that of a unigram model.
        made_with: Versions and device.
        command: The command that makes the page.
    """

    model: str
    fingerprint: str
    recipe: str | None
    recipe_text: str
    corpus: str
    text: str
    batches: str
    masks: str
    loss: str
    made_with: str
    command: str


@dataclass(frozen=True)
class TokenView:
    """A token of an expert.

    Attributes:
        name: The token.
        counts: Its counts in a few characters.
        tooltip: The same in a sentence.
        percent: Part of its box that is filled.
    """

    name: str
    counts: str
    tooltip: str
    percent: int


@dataclass(frozen=True)
class ExpertView:
    """The tokens of one expert.

    Attributes:
        number: Number of the expert, from 1.
        share: Share of all tokens whose first choice it is.
        received: Tokens that it receives most.
        preferred: Tokens that it prefers, by lift.
    """

    number: int
    share: str
    received: Sequence[TokenView]
    preferred: Sequence[TokenView]


@dataclass(frozen=True)
class LayerView:
    """The experts of one sparse layer."""

    title: str
    experts: Sequence[ExpertView]


@dataclass(frozen=True)
class RunView:
    """The training of one run.

    Attributes:
        title: Name of the run.
        path: Its metrics.jsonl.
        sentences: Its last measurements.
        curves: SVG of its curves; None when it has none.
    """

    title: str
    path: str
    sentences: Sequence[str]
    curves: str | None


@dataclass(frozen=True)
class TaskView:
    """The scores of one task.

    Attributes:
        name: Name of the task.
        description: What it is, and of how many examples.
        rows: System, mode, metric, score and interval of each score.
        comparisons: How the first system differs from the others.
    """

    name: str
    description: str
    rows: Sequence[Sequence[str]]
    comparisons: Sequence[str]


@dataclass(frozen=True)
class EvaluationView:
    """An evaluation.

    Attributes:
        path: Its report.json.
        models: Which models were evaluated, and with what.
        tasks: Scores by task.
        failures: Tasks that could not be evaluated.
    """

    path: str
    models: Sequence[str]
    tasks: Sequence[TaskView]
    failures: Sequence[str]


@dataclass(frozen=True)
class RouterReportView:
    """The whole page.

    Attributes:
        sizes: What the model is.
        cards: Its most important numbers.
        source: From what the page was made.
        load_map: SVG of the load of every expert.
        health_header: Header of the table of routers.
        health_rows: A row for each sparse layer.
        load_sentences: Load and entropy of each layer in words.
        sentinel_rows: Over how many experts sentinels and text are spread, for each layer.
        layers: Tokens by expert.
        min_occurrences: Occurrences below which no expert is said to prefer a token.
        runs: How it was trained.
        accuracy_curves: SVG of the runs' accuracies; None for fewer than two.
        evaluation: How well it answers; None for no evaluation.
        corpus_table: Counts and licences of the corpus.
    """

    sizes: str
    cards: Sequence[Card]
    source: SourceView
    load_map: str
    health_header: Sequence[str]
    health_rows: Sequence[Sequence[str]]
    load_sentences: Sequence[str]
    sentinel_rows: Sequence[Sequence[str]]
    layers: Sequence[LayerView]
    min_occurrences: int
    runs: Sequence[RunView]
    accuracy_curves: str | None
    evaluation: EvaluationView | None
    corpus_table: str
