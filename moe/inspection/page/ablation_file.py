"""An ablation on disk: effects and verdicts as JSON, for the view and for people.

Comes after `ablation_table` and `panel_statistics`.
"""

import json
import math
from pathlib import Path

from pydantic import BaseModel

from moe.errors import DataError
from moe.files import write_text
from moe.inspection.ablation.ablate import Ablation
from moe.inspection.ablation.ablation_table import class_verdicts
from moe.inspection.page.panel_data import AblationBar
from moe.inspection.page.panel_statistics import ablation_bars
from moe.parsing import read_record, to_json
from moe.sparse.editing import Stack
from moe.tracing.trace import Trace

_ADVICE = "Make it again: `stmoe inspect ablate`."


class _Effect(BaseModel, frozen=True):
    """An `AblationBar`; None for an end of its interval that is not known."""

    stack: Stack
    layer: int
    expert: int
    effect: float
    low: float | None
    high: float | None
    verdict: str


class _Ablation(BaseModel, frozen=True):
    """What the view shows of the file; its other fields are for people."""

    intervention: str
    inputs_fingerprint: str
    effects: list[_Effect]


def write_ablation(ablation: Ablation, trace: Trace, path: Path, command: str = "") -> None:
    """Writes an ablation on the examples of a trace, whole or not at all; experts count from 0."""
    effects = []
    for bar in ablation_bars(ablation):
        stack, layer = bar.key
        fields = bar._asdict()
        del fields["key"], fields["edit"]
        effects.append({"stack": stack, "layer": layer, **fields})

    verdicts = []
    for verdict in class_verdicts(ablation):
        stack, layer = verdict.key
        fields = verdict._asdict()
        kept = {name: fields[name] for name in ("expert", "token_class", "num_tokens")}
        answer = {"effect": verdict.effect.value, "answer": verdict.answer}
        verdicts.append({"stack": stack, "layer": layer, **kept, **answer})

    # JSON has no infinity: an end that is not known is null.
    content = {
        "intervention": ablation.intervention,
        "loss": ablation.loss,
        "num_targets": ablation.num_targets,
        "num_documents": ablation.num_documents,
        "inputs_fingerprint": trace.facts.inputs_fingerprint,
        "model": trace.facts.model,
        "command": command,
        "effects": effects,
        "verdicts": verdicts,
    }
    write_text(path, json.dumps(to_json(content), indent=1) + "\n")


def read_ablation(path: Path, trace: Trace) -> list[AblationBar]:
    """Returns the effects of an ablation of the examples of a trace.

    Raises:
        DataError: When the file is not an ablation, or is of other examples.
    """
    content = read_record(path, _Ablation, advice=_ADVICE)
    if content.inputs_fingerprint != trace.facts.inputs_fingerprint:
        raise DataError(
            f"{path} is of inputs {content.inputs_fingerprint[:12]}, the trace of "
            f"{trace.facts.inputs_fingerprint[:12]}. {_ADVICE}"
        )
    bars = []
    for effect in content.effects:
        bars.append(
            AblationBar(
                key=(effect.stack, effect.layer),
                expert=effect.expert,
                effect=effect.effect,
                low=-math.inf if effect.low is None else effect.low,
                high=math.inf if effect.high is None else effect.high,
                verdict=effect.verdict,
                edit=content.intervention,
            )
        )
    return bars
