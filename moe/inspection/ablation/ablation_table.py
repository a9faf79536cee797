"""What an ablation has shown: effects with intervals, and whether an expert is for a class.

Comes after `ablation`; `ablation_text` prints it. All intervals of a column hold together: each is
as wide as Bonferroni asks for the number of rows, so that in 95 % of all tables none is wrong.
"""

import math
from typing import Literal, NamedTuple

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from moe.checks import check_integer, check_number
from moe.inspection.ablation.ablate import Ablation, LayerAblation
from moe.inspection.statistics.document_intervals import (
    Estimates,
    TokenSums,
    difference_of_means,
    mean_over_tokens,
)
from moe.sparse.editing import LayerKey

Answer = Literal["yes", "no", "not shown"]

CONFIDENCE = 0.95
MARGIN = 0.01
"""Nats for each token: an advantage on a class that is too small to call an expert `for` it."""

NOTHING_SHOWN = "nothing was shown"


class Interval(NamedTuple):
    """An estimate in nats for each target token, with both ends of its interval.

    The value is NaN where there is no token; the ends are infinite where no spread is known.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "-"
        if math.isinf(self.low):
            return f"{self.value:+.4f}"
        return f"{self.value:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


class ExpertEffect(NamedTuple):
    """What ablating one expert does to the loss.

    Attributes:
        key: Name of the layer.
        expert: Number of the expert, from 0.
        load: Its accepted choices.
        effect: Change of the mean loss of all target tokens.
        where_chosen: The same of the tokens that it works on; see `LayerAblation`.
        elsewhere: The same of all other tokens, which feel it by attention alone.
        over_random: `effect` less that of as many random choices.
        peer: The expert of nearest load.
        over_peer: `effect` less that of the peer.
        estimate: First-order estimate of dropping the expert.
    """

    key: LayerKey
    expert: int
    load: int
    effect: Interval
    where_chosen: Interval
    elsewhere: Interval
    over_random: Interval
    peer: int
    over_peer: Interval
    estimate: float


class ClassVerdict(NamedTuple):
    """Whether an expert is for a class.

    Attributes:
        key: Name of the layer.
        expert: Number of the expert, from 0.
        token_class: Name of the class.
        num_tokens: Target tokens of the class.
        num_documents: Documents that hold one.
        effect: Change of the mean loss of the class when the expert is ablated.
        over_others: `effect` less the change on all other target tokens.
        over_random: `effect` less the change by as many random choices, on the same tokens.
        over_peer: `effect` less the change by the expert of nearest load, on the same tokens.
        answer: See `class_verdicts`.
    """

    key: LayerKey
    expert: int
    token_class: str
    num_tokens: int
    num_documents: int
    effect: Interval
    over_others: Interval
    over_random: Interval
    over_peer: Interval
    answer: Answer


class TopEffect(NamedTuple):
    """An expert with a large effect, and the classes that it was shown to be for."""

    effect: ExpertEffect
    classes: tuple[str, ...]

    @property
    def purpose(self) -> str:
        """Returns the classes as text, or that nothing was shown."""
        return ", ".join(self.classes) or NOTHING_SHOWN


class RankCorrelation(NamedTuple):
    """Spearman's correlation, over the experts of a layer, of the effect with a cheap score.

    Attributes:
        key: Name of the layer.
        load: With the load; NaN where all experts are alike.
        estimate: With the first-order estimate, likewise.
    """

    key: LayerKey
    load: float
    estimate: float


# ---------------------------------------------------------------------------
# Effects of experts


def expert_effects(ablation: Ablation, *, confidence: float = CONFIDENCE) -> list[ExpertEffect]:
    """Returns the effect of every expert of every layer.

    Args:
        ablation: From `ablate_experts`.
        confidence: Probability that all intervals of one kind hold.
    """
    check_number("confidence", confidence, above=0, below=1)
    num_experts = sum(layer.load.numel() for layer in ablation.layers)
    level = 1 - (1 - confidence) / num_experts

    effects = []
    for layer in ablation.layers:
        # Sums over all tokens, and over those where the expert was not chosen.
        change = layer.change[:, 0]  # [E, G]
        num_tokens = layer.num_tokens[0]  # [G]
        elsewhere = TokenSums(change - layer.chosen_change, num_tokens - layer.chosen_tokens)
        chosen = TokenSums(layer.chosen_change, layer.chosen_tokens)
        over_random = TokenSums(change - layer.random_change[:, 0], num_tokens)
        over_peer = TokenSums(change - change[layer.peer], num_tokens)

        columns = [TokenSums(change, num_tokens), chosen, elsewhere, over_random, over_peer]
        intervals = [_intervals(mean_over_tokens(sums), level) for sums in columns]
        for expert in range(len(change)):
            effects.append(
                ExpertEffect(
                    key=layer.key,
                    expert=expert,
                    load=int(layer.load[expert]),
                    effect=intervals[0][expert],
                    where_chosen=intervals[1][expert],
                    elsewhere=intervals[2][expert],
                    over_random=intervals[3][expert],
                    peer=int(layer.peer[expert]),
                    over_peer=intervals[4][expert],
                    estimate=float(layer.estimate[expert]),
                )
            )
    return effects


def rank_correlations(ablation: Ablation) -> list[RankCorrelation]:
    """Returns how well load and first-order estimate tell which experts have a large effect."""
    correlations = []
    for layer in ablation.layers:
        effect = layer.change[:, 0].sum(dim=-1)  # [E]
        of_load = _spearman(effect, layer.load)
        of_estimate = _spearman(effect, layer.estimate)
        correlations.append(RankCorrelation(layer.key, of_load, of_estimate))
    return correlations


def top_effects(
    ablation: Ablation, n: int = 5, *, margin: float = MARGIN, confidence: float = CONFIDENCE
) -> list[TopEffect]:
    """Returns the experts whose ablation costs most, and the classes that they are for.

    Only experts whose interval of the effect lies above 0: the list is empty where nothing was
    shown. Arguments as in `class_verdicts`.
    """
    check_integer("n", n, least=1)
    effects = expert_effects(ablation, confidence=confidence)
    shown = [effect for effect in effects if effect.effect.low > 0]
    shown.sort(key=lambda effect: effect.effect.value, reverse=True)

    # The classes with a yes.
    classes: dict[tuple[LayerKey, int], list[str]] = {}
    for verdict in class_verdicts(ablation, margin=margin, confidence=confidence):
        if verdict.answer == "yes":
            classes.setdefault((verdict.key, verdict.expert), []).append(verdict.token_class)

    top = []
    for effect in shown[:n]:
        top.append(TopEffect(effect, tuple(classes.get((effect.key, effect.expert), ()))))
    return top


# ---------------------------------------------------------------------------
# Is this expert for that class?


def class_verdicts(
    ablation: Ablation, *, margin: float = MARGIN, confidence: float = CONFIDENCE
) -> list[ClassVerdict]:
    """Returns for every expert of every layer, and every class, whether the expert is for it.

    - `no`: the change of loss on the class is less than `margin` above that on all other tokens,
      or above that by as many random choices. This is the upper half of an equivalence test.
    - `yes`: otherwise, if the change on the class is above 0, above that on all other tokens, and
      above that by as many random choices.
    - `not shown`: all else.

    Each comparison is by its interval over documents (`document_intervals`), two-sided and of the
    confidence 1 - (1 - confidence) / cells, where cells are all experts of all layers times their
    classes (Bonferroni). So the probability that any `yes` of the table is wrong is at most
    1 - confidence, and the same of any `no` where the changes of documents are not very skewed:
    where they were, with a margin of 0, a wrong `no` stood in up to 26 % of simulated tables.

    Args:
        ablation: From `ablate_experts`.
        margin: Advantage in nats for each token below which an expert is not for a class. A larger
            one gives more `no`.
        confidence: Probability that no `yes` is wrong.

    Raises:
        ConfigError: When the margin is negative, or the confidence not between 0 and 1.
    """
    check_number("margin", margin, least=0)
    check_number("confidence", confidence, above=0, below=1)
    num_cells = 0
    for layer in ablation.layers:
        num_cells += layer.load.numel() * (len(layer.sets) - 1)
    level = 1 - (1 - confidence) / max(1, num_cells)

    verdicts: list[ClassVerdict] = []
    for layer in ablation.layers:
        if len(layer.sets) > 1:
            verdicts += _verdicts_of_layer(layer, margin, level)
    return verdicts


def _verdicts_of_layer(layer: LayerAblation, margin: float, level: float) -> list[ClassVerdict]:
    """Returns the verdicts of a layer by intervals of a level."""
    # Sums over the tokens of each class, and over all others.
    change = layer.change[:, 1:]  # [E, C, G]
    num_tokens = layer.num_tokens[1:]  # [C, G]
    of_class = TokenSums(change, num_tokens)
    of_others = TokenSums(layer.change[:, :1] - change, layer.num_tokens[:1] - num_tokens)
    over_random = TokenSums(change - layer.random_change[:, 1:], num_tokens)
    over_peer = TokenSums(change - change[layer.peer], num_tokens)

    effects = _intervals(mean_over_tokens(of_class), level)
    over_others = _intervals(difference_of_means(of_class, of_others), level)
    over_randoms = _intervals(mean_over_tokens(over_random), level)
    over_peers = _intervals(mean_over_tokens(over_peer), level)

    verdicts = []
    num_experts, num_classes, _ = change.shape
    for expert in range(num_experts):
        for number in range(num_classes):
            cell = expert * num_classes + number
            answer = _answer(effects[cell], over_others[cell], over_randoms[cell], margin)
            verdicts.append(
                ClassVerdict(
                    key=layer.key,
                    expert=expert,
                    token_class=layer.sets[number + 1],
                    num_tokens=int(num_tokens[number].sum()),
                    num_documents=int((num_tokens[number] > 0).sum()),
                    effect=effects[cell],
                    over_others=over_others[cell],
                    over_random=over_randoms[cell],
                    over_peer=over_peers[cell],
                    answer=answer,
                )
            )
    return verdicts


def _answer(
    effect: Interval, over_others: Interval, over_random: Interval, margin: float
) -> Answer:
    """Returns the answer of `class_verdicts`."""
    if min(over_others.high, over_random.high) < margin:
        return "no"
    if min(effect.low, over_others.low, over_random.low) > 0:
        return "yes"
    return "not shown"


# ---------------------------------------------------------------------------
# Numbers


def _intervals(estimates: Estimates, level: float) -> list[Interval]:
    """Returns the estimates <float64>[...] with their intervals, in their order."""
    low, high = estimates.interval(level)
    columns = (estimates.value, low, high)
    rows = torch.stack([column.flatten() for column in columns], dim=-1)
    return [Interval(*row) for row in rows.tolist()]


def _spearman(a: Tensor, b: Tensor) -> float:
    """Returns the correlation of the ranks of <any>[E] and <any>[E]; NaN where one is constant."""
    ranks = np.stack([rankdata(a), rankdata(b)])  # [2, E]
    if (ranks.std(axis=1) == 0).any():
        return math.nan
    return float(np.corrcoef(ranks)[0, 1])
