"""An ablation as plain text: effects of experts, verdicts, the largest effects.

Comes after `ablation_table`.
"""

from collections.abc import Iterable

from moe.inspection.ablation.ablate import Ablation
from moe.inspection.ablation.ablation_table import (
    CONFIDENCE,
    NOTHING_SHOWN,
    ClassVerdict,
    TopEffect,
    expert_effects,
    rank_correlations,
)
from moe.inspection.tables import format_table
from moe.tracing.trace import layer_name

EFFECT_HEADER = [
    "sparse layer",
    "expert",
    "load",
    "change of loss",
    "where it was chosen",
    "elsewhere",
    "more than at random",
    "more than expert",
    "first order",
]

VERDICT_HEADER = [
    "sparse layer",
    "expert",
    "class",
    "tokens",
    "documents",
    "change of loss",
    "more than on others",
    "more than at random",
    "more than its peer",
    "for it?",
]


def effect_table(ablation: Ablation, *, confidence: float = CONFIDENCE) -> str:
    """Returns the effects of all experts as text, and the rank correlations of each layer."""
    rows = []
    for effect in expert_effects(ablation, confidence=confidence):
        rows.append(
            [
                layer_name(effect.key),
                str(effect.expert + 1),
                str(effect.load),
                str(effect.effect),
                str(effect.where_chosen),
                str(effect.elsewhere),
                str(effect.over_random),
                f"{effect.peer + 1}: {effect.over_peer}",
                f"{effect.estimate:+.4f}",
            ]
        )

    correlations = []
    for correlation in rank_correlations(ablation):
        name = layer_name(correlation.key)
        scores = [f"{correlation.load:+.2f}", f"{correlation.estimate:+.2f}"]
        correlations.append([name, *scores])
    header = ["sparse layer", "effect with load", "effect with first order"]
    return f"{format_table(EFFECT_HEADER, rows)}\n\n{format_table(header, correlations)}"


def verdict_table(verdicts: Iterable[ClassVerdict]) -> str:
    """Returns verdicts as text."""
    rows = []
    for verdict in verdicts:
        rows.append(
            [
                layer_name(verdict.key),
                str(verdict.expert + 1),
                verdict.token_class,
                str(verdict.num_tokens),
                str(verdict.num_documents),
                str(verdict.effect),
                str(verdict.over_others),
                str(verdict.over_random),
                str(verdict.over_peer),
                verdict.answer,
            ]
        )
    return format_table(VERDICT_HEADER, rows)


def top_effects_text(top: Iterable[TopEffect]) -> str:
    """Returns a line for each expert, or that nothing was shown."""
    lines = []
    for expert in top:
        effect = expert.effect
        name = f"{layer_name(effect.key)}, expert {effect.expert + 1}"
        lines.append(f"{name}: {effect.effect} nats a token; for: {expert.purpose}")
    return "\n".join(lines) or NOTHING_SHOWN
