"""Statistics of a trace as the routing view shows them.

Comes after `specialization`, `routing_entropy`, `saturation` and `ablation_table`, which compute
them; `view` draws them.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from moe.inspection.ablation.ablate import Ablation
from moe.inspection.ablation.ablation_table import expert_effects, top_effects
from moe.inspection.statistics.permutations import LEAST_DOCUMENTS, token_places
from moe.inspection.statistics.routing_entropy import EntropyEstimate, class_entropy
from moe.inspection.statistics.saturation import Snapshot, saturation_curve
from moe.inspection.statistics.specialization import class_table, specialization_test
from moe.inspection.statistics.token_classes import TokenClasses, classify, domain_classes
from moe.inspection.view.view_data import (
    AblationBar,
    ClassRow,
    Estimate,
    LayerClasses,
    SaturationPoint,
)
from moe.sparse.editing import LayerKey
from moe.tracing.probe_file import read_probe_facts, read_probes
from moe.tracing.trace import STACKS, LayerTrace, Trace


def view_classes(
    trace: Trace, tokenizer: PreTrainedTokenizerFast, *, num_permutations: int = 1000, seed: int = 0
) -> list[LayerClasses]:
    """Returns classes by experts of every layer: of tokens, and kinds of text where there are several.

    The decoder's classes are of the tokens that it reads.

    Args:
        trace: Where the tokens went.
        tokenizer: The model's.
        num_permutations: Shuffles that p-values are made of.
        seed: Of the shuffles.

    Raises:
        DataError: When the tokenizer is not the model's or marks no words.
    """
    tables = []
    for stack in STACKS:
        part = trace.stack(stack)
        if not part.layers:
            continue
        groups = [classify(part, tokenizer)]
        # Kinds of text are classes too, where there are several.
        if len(trace.facts.domains) > 1:
            groups.append(domain_classes(trace, stack))

        # All layers of a stack are shuffled alike, so that p-values hold for all of them together.
        p_values: dict[LayerKey, list[list[float]]] = {layer.key: [] for layer in part.layers}
        for classes in groups:
            if trace.document.unique().numel() < LEAST_DOCUMENTS:
                unknown = [math.nan] * max(layer.facts.num_experts for layer in part.layers)
                for layer in part.layers:
                    row = unknown[: layer.facts.num_experts]
                    p_values[layer.key] += [row] * len(classes.names)
                continue
            places = token_places(trace, stack)
            tests = specialization_test(
                part.layers, classes, places, num_permutations=num_permutations, seed=seed
            )
            for test in tests:
                p_values[test.layer] += test.p_value.tolist()

        for layer in part.layers:
            rows: list[ClassRow] = []
            for classes in groups:
                rows += _class_rows(trace, layer, classes, p_values[layer.key][len(rows) :])
            tables.append(LayerClasses(layer.key, rows))
    return tables


def _class_rows(
    trace: Trace, layer: LayerTrace, classes: TokenClasses, p_values: Sequence[Sequence[float]]
) -> list[ClassRow]:
    """Returns the rows of a layer for some classes."""
    table = class_table(layer, classes)
    document = trace.document[trace.stack(layer.facts.stack).example]
    rows = []
    for number, name in enumerate(classes.names):
        entropy = class_entropy(layer, classes.members[number], document)
        rows.append(
            ClassRow(
                name=name,
                num_tokens=int(table.tokens[number]),
                shares=table.share[number].tolist(),
                lifts=table.lift[number].tolist(),
                p_values=p_values[number],
                entropy=_estimate(entropy),
            )
        )
    return rows


def _estimate(entropy: EntropyEstimate) -> Estimate:
    return Estimate(entropy.value, entropy.low, entropy.high)


def view_saturation(folder: Path) -> list[SaturationPoint]:
    """Returns how the choices of a training run came to be those of its last probe.

    Args:
        folder: The folder `probe` of a run.

    Raises:
        DataError: When it has fewer than two probes, or one is damaged.
    """
    facts = read_probe_facts(folder)
    num_experts: dict[LayerKey, int] = {
        (layer.stack, layer.layer): layer.num_experts for layer in facts.layers
    }

    # First choices stand in front.
    snapshots = []
    for probe in read_probes(folder):
        snapshots.append(
            Snapshot(
                step=probe.step,
                inputs_fingerprint=facts.text_fingerprint,
                num_experts=num_experts,
                first={key: choices[:, 0] for key, choices in probe.choices.items()},
                choices=probe.choices,
            )
        )
    points = []
    for point in saturation_curve(snapshots):
        points.append(SaturationPoint(point.layer, point.step, point.first.corrected))
    return points


def ablation_bars(ablation: Ablation) -> list[AblationBar]:
    """Returns the effect of each expert's ablation, the largest first."""
    # What the experts with an effect are for.
    purposes = {}
    num_experts = sum(layer.load.numel() for layer in ablation.layers)
    for top in top_effects(ablation, n=num_experts):
        purposes[top.effect.key, top.effect.expert] = f"for: {top.purpose}"

    # Every expert, with an effect or without.
    bars = []
    for effect in expert_effects(ablation):
        verdict = purposes.get((effect.key, effect.expert), "no effect was shown")
        bars.append(
            AblationBar(
                key=effect.key,
                expert=effect.expert,
                effect=effect.effect.value,
                low=effect.effect.low,
                high=effect.effect.high,
                verdict=verdict,
                edit=ablation.intervention,
            )
        )
    bars.sort(key=lambda bar: bar.effect, reverse=True)
    return bars
