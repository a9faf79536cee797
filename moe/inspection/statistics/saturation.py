"""Router saturation: how early in training a router's choices become its final ones.

Agreement of two sets of choices, and its curve over a sequence of traces of the same tokens.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from moe.errors import DataError
from moe.inspection.statistics.contingency import one_hot_choices
from moe.sparse.editing import LayerKey
from moe.tracing.trace import Trace


class Agreement(NamedTuple):
    """Agreement of two sets of choices for the same tokens.

    Attributes:
        share: Mean over tokens of the experts chosen in both, over those chosen; NaN without tokens.
        chance: Expected share if experts were drawn evenly: K / E.
        corrected: (share - chance) / (1 - chance): 0 by even chance, 1 for the same choices.
        load_chance: Expected share if tokens exchanged their choices: above `chance` when a
            few experts have most of the load, even if choices do not depend on tokens.
        load_corrected: `share` corrected for `load_chance`; for one choice, Cohen's kappa. NaN when
            chance alone gives 1.
    """

    share: float
    chance: float
    corrected: float
    load_chance: float
    load_corrected: float


def choice_agreement(a: Tensor, b: Tensor, num_experts: int) -> Agreement:
    """Returns the agreement of two sets of choices of the same tokens.

    If a token has more choices in one set, the larger number counts; tokens without choices in both
    are left out.

    Args:
        a: <any integer>[N] or [N, K] expert of each choice, -1 for none.
        b: <any integer>[N] or [N, K] expert of each choice in the other set.
        num_experts: E.

    Raises:
        DataError: When the shapes differ, or an expert is out of range.

    Source:
        OLMoE (arXiv:2409.02060) eq. 5.
    """
    # Experts chosen by each token.
    chosen_a = one_hot_choices(a, num_experts)  # [N, E]
    chosen_b = one_hot_choices(b, num_experts)
    if len(chosen_a) != len(chosen_b):
        raise DataError(
            f"The choices cover {len(chosen_a):,} and {len(chosen_b):,} tokens; expected the same tokens. Trace the "
            "same text with both."
        )

    # Experts that a token has in each, in both, and at most.
    num_a = chosen_a.sum(dim=1)  # [N]
    num_b = chosen_b.sum(dim=1)
    most = torch.maximum(num_a, num_b)
    is_counted = most > 0
    most = most[is_counted]
    common = (chosen_a * chosen_b).sum(dim=1)[is_counted]
    share = float((common / most).mean())

    # By chance: evenly, and by the load of both.
    fewest = torch.minimum(num_a, num_b)[is_counted]
    chance = float(fewest.mean()) / num_experts
    load_a = chosen_a[is_counted].mean(dim=0)  # [E]
    load_b = chosen_b[is_counted].mean(dim=0)
    load_chance = float(load_a @ load_b / most.mean())
    return Agreement(
        share=share,
        chance=chance,
        corrected=_corrected(share, chance),
        load_chance=load_chance,
        load_corrected=_corrected(share, load_chance),
    )


def _corrected(share: float, chance: float) -> float:
    return (share - chance) / (1 - chance) if chance < 1 else math.nan


class Snapshot(NamedTuple):
    """The choices of a model at one step, on a fixed text.

    Attributes:
        step: Training step.
        inputs_fingerprint: Identifies the text; see `TraceFacts`.
        num_experts: E of each layer.
        first: <any integer>[N] first choices in each layer, -1 for none.
        choices: <any integer>[N, K] all choices; the first ones alone where no more were kept.
    """

    step: int
    inputs_fingerprint: str
    num_experts: Mapping[LayerKey, int]
    first: Mapping[LayerKey, Tensor]
    choices: Mapping[LayerKey, Tensor]


def snapshot(step: int, trace: Trace) -> Snapshot:
    """Returns the choices <int8 or int16>[N, K] of a trace as the choices of a step."""
    return Snapshot(
        step=step,
        inputs_fingerprint=trace.facts.inputs_fingerprint,
        num_experts={layer.key: layer.facts.num_experts for layer in trace.layers},
        first={layer.key: layer.first for layer in trace.layers},
        choices={layer.key: layer.choices for layer in trace.layers},
    )


class SaturationPoint(NamedTuple):
    """Agreement of one layer's choices at one step with those at the last.

    Attributes:
        step: Training step.
        layer: Stack and number.
        first: Agreement of the first choices with the last step.
        all_choices: Agreement of all choices with the last step.
    """

    step: int
    layer: LayerKey
    first: Agreement
    all_choices: Agreement


def saturation_curve(snapshots: Sequence[Snapshot]) -> list[SaturationPoint]:
    """Returns the agreement of each layer's choices with the last snapshot, step by step.

    Args:
        snapshots: At least two, by rising step, of the same text.

    Raises:
        DataError: When they are fewer, out of order, of other texts, or of other layers.

    Source:
        OLMoE (arXiv:2409.02060) eq. 5; the corrections are ours.
    """
    _check_snapshots(snapshots)
    last = snapshots[-1]
    points = []
    for now in snapshots:
        for key, num_experts in now.num_experts.items():
            first = choice_agreement(now.first[key], last.first[key], num_experts)
            all_choices = choice_agreement(now.choices[key], last.choices[key], num_experts)
            points.append(SaturationPoint(now.step, key, first, all_choices))
    return points


def _check_snapshots(snapshots: Sequence[Snapshot]) -> None:
    """Raises a DataError unless snapshots can be compared with the last one."""
    if len(snapshots) < 2:
        raise DataError(
            f"There are {len(snapshots)} snapshots; expected at least 2: saturation compares each with the last."
        )
    for earlier, now in pairwise(snapshots):
        if now.step <= earlier.step:
            raise DataError(
                f"Step {now.step} comes after step {earlier.step}; expected increasing steps. Sort the snapshots by "
                "step."
            )

    last = snapshots[-1]
    for other in snapshots[:-1]:
        if other.inputs_fingerprint != last.inputs_fingerprint:
            raise DataError(
                f"Step {other.step} has choices on inputs {other.inputs_fingerprint[:12]!r}, step {last.step} on "
                f"{last.inputs_fingerprint[:12]!r}; expected the same inputs. Trace one fixed text at every step."
            )
        if dict(other.num_experts) != dict(last.num_experts):
            raise DataError(
                f"Step {other.step} has the experts {dict(other.num_experts)} by layer, step {last.step} has "
                f"{dict(last.num_experts)}; expected the same. To compare models of different shapes, see "
                "`match_experts`."
            )
