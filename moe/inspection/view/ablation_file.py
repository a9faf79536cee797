"""An ablation on disk: effects and verdicts as JSON, for the view and for people.

Comes after `ablation_table` and `view_statistics`.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

from moe.errors import DataError
from moe.files import write_text
from moe.inspection.ablation.ablate import Ablation
from moe.inspection.ablation.ablation_table import class_verdicts
from moe.inspection.view.view_data import AblationBar
from moe.inspection.view.view_statistics import ablation_bars
from moe.parsing import read_record, to_json
from moe.sparse.editing import Stack
from moe.tracing.trace import Trace

_ADVICE = "Make it again: `python -m scripts.inspect_router ablate`."


class KeptEffect(NamedTuple):
    """An `AblationBar`; None stands for an end that nothing is known of."""

    stack: Stack
    layer: int
    expert: int
    effect: float
    low: float | None
    high: float | None
    verdict: str


class KeptVerdict(NamedTuple):
    """Whether an expert is for a class; see `ClassVerdict`."""

    stack: Stack
    layer: int
    expert: int
    token_class: str
    num_tokens: int
    effect: float | None
    answer: str


class KeptAblation(NamedTuple):
    """Content of the file.

    Attributes:
        intervention: What was done to each expert.
        loss: Mean loss of the target tokens before, in nats.
        num_targets: Number of target tokens.
        num_documents: Number of documents.
        inputs_fingerprint: Tells the examples from others; see `TraceFacts`.
        model: Folder of the model.
        command: The command that made it.
        effects: Of all experts, the largest first; experts are numbered from 0.
        verdicts: Of all experts and classes.
    """

    intervention: str
    loss: float
    num_targets: int
    num_documents: int
    inputs_fingerprint: str
    model: str
    command: str
    effects: list[KeptEffect]
    verdicts: list[KeptVerdict]

    @property
    def bars(self) -> list[AblationBar]:
        """Returns the effects as the view shows them."""
        bars = []
        for kept in self.effects:
            low = -math.inf if kept.low is None else kept.low
            high = math.inf if kept.high is None else kept.high
            key = (kept.stack, kept.layer)
            bar = AblationBar(
                key, kept.expert, kept.effect, low, high, kept.verdict, self.intervention
            )
            bars.append(bar)
        return bars


def keep_ablation(ablation: Ablation, trace: Trace, command: str = "") -> KeptAblation:
    """Returns what is kept of an ablation on the examples of a trace."""
    effects = []
    for bar in ablation_bars(ablation):
        effects.append(KeptEffect(*bar.key, bar.expert, bar.effect, bar.low, bar.high, bar.verdict))

    verdicts = []
    for verdict in class_verdicts(ablation):
        verdicts.append(
            KeptVerdict(
                *verdict.key,
                verdict.expert,
                verdict.token_class,
                verdict.num_tokens,
                verdict.effect.value,
                verdict.answer,
            )
        )
    return KeptAblation(
        intervention=ablation.intervention,
        loss=ablation.loss,
        num_targets=ablation.num_targets,
        num_documents=ablation.num_documents,
        inputs_fingerprint=trace.facts.inputs_fingerprint,
        model=trace.facts.model,
        command=command,
        effects=effects,
        verdicts=verdicts,
    )


def write_ablation(kept: KeptAblation, path: Path) -> None:
    """Writes an ablation, whole or not at all."""
    # JSON has no infinity: an end that nothing is known of is null.
    write_text(path, json.dumps(to_json(kept), indent=1) + "\n")


def read_ablation(path: Path, trace: Trace) -> KeptAblation:
    """Returns an ablation of the examples of a trace.

    Raises:
        DataError: When the file is none, or is of other examples.
    """
    kept = read_record(path, KeptAblation, advice=_ADVICE)
    if kept.inputs_fingerprint != trace.facts.inputs_fingerprint:
        raise DataError(
            f"{path} is of inputs {kept.inputs_fingerprint[:12]}, the trace of {trace.facts.inputs_fingerprint[:12]}. "
            f"{_ADVICE}"
        )
    return kept
