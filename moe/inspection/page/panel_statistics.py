"""Statistics of a trace as the routing view shows them.

Comes after `specialization`, `routing_entropy`, `saturation` and `ablation_table`, which compute
them; `routing_view` draws them.
"""

import math
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from moe.inspection.ablation.ablate import Ablation
from moe.inspection.ablation.ablation_table import expert_effects, top_effects
from moe.inspection.page.panel_data import AblationBar, ClassRow, LayerClasses, SaturationPoint
from moe.inspection.statistics.document_intervals import Estimate
from moe.inspection.statistics.permutations import LEAST_DOCUMENTS, token_places
from moe.inspection.statistics.routing_entropy import class_entropy
from moe.inspection.statistics.saturation import Snapshot, saturation_curve
from moe.inspection.statistics.specialization import class_table, specialization_test
from moe.inspection.statistics.token_classes import classify, domain_classes
from moe.sparse.editing import LayerKey
from moe.tracing.probe_file import read_probe_facts, read_probes
from moe.tracing.trace import STACKS, Trace


def view_classes(
    trace: Trace, tokenizer: PreTrainedTokenizerFast, *, num_permutations: int = 1000, seed: int = 0
) -> list[LayerClasses]:
    """Returns classes by experts of every layer: of tokens, and kinds of text where there are several.

    The decoder's classes are of the tokens that it reads.

    Args:
        trace: Where the tokens went.
        tokenizer: The model's.
        num_permutations: Number of shuffles behind each p-value.
        seed: Seed of the shuffles.

    Raises:
        DataError: When the tokenizer is not the model's or marks no words.
    """
    has_p_values = trace.document.unique().numel() >= LEAST_DOCUMENTS
    tables = []
    for stack in STACKS:
        part = trace.stack(stack)
        if not part.layers:
            continue
        document = trace.document[part.example]
        groups = [classify(part, tokenizer)]
        if len(trace.facts.domains) > 1:
            groups.append(domain_classes(trace, stack))

        rows: dict[LayerKey, list[ClassRow]] = {layer.key: [] for layer in part.layers}
        for classes in groups:
            # All layers of a stack are shuffled alike, so that p-values hold for all of them together.
            p_values: dict[LayerKey, list[list[float]]] = {}
            if has_p_values:
                places = token_places(trace, stack)
                tests = specialization_test(
                    part.layers, classes, places, num_permutations=num_permutations, seed=seed
                )
                p_values = {test.layer: test.p_value.tolist() for test in tests}

            for layer in part.layers:
                table = class_table(layer, classes)
                unknown = [[math.nan] * layer.facts.num_experts] * len(classes.names)
                p_values_of_layer = p_values.get(layer.key, unknown)
                for number, name in enumerate(classes.names):
                    entropy = class_entropy(layer, classes.members[number], document)
                    rows[layer.key].append(
                        ClassRow(
                            name=name,
                            num_tokens=int(table.tokens[number]),
                            shares=table.share[number].tolist(),
                            lifts=table.lift[number].tolist(),
                            p_values=p_values_of_layer[number],
                            entropy=Estimate(entropy.value, entropy.low, entropy.high),
                        )
                    )
        tables += [LayerClasses(key, of_layer) for key, of_layer in rows.items()]
    return tables


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

    # The first column of a probe's choices is the first choice.
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
    effects = expert_effects(ablation)
    purposes = {}
    for top in top_effects(ablation, n=len(effects)):
        purposes[top.effect.key, top.effect.expert] = f"for: {top.purpose}"

    # Every expert, whether an effect was shown or not.
    bars = []
    for effect in effects:
        verdict = purposes.get((effect.key, effect.expert), "no effect was shown")
        bars.append(
            AblationBar(
                effect.key,
                effect.expert,
                *effect.effect,
                verdict=verdict,
                edit=ablation.intervention,
            )
        )
    bars.sort(key=lambda bar: bar.effect, reverse=True)
    return bars
