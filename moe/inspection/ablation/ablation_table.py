"""Results of an ablation: effects with intervals, and whether an expert serves a class of tokens.

Comes after `ablate`. The intervals of a column hold simultaneously: they are Bonferroni-corrected
for the number of rows, so that 95 % of all tables contain no wrong interval.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from moe.estimates import Estimate, TokenSums, difference_of_means, mean_over_tokens
from moe.inspection.ablation.ablate import Ablation, LayerAblation
from moe.inspection.tables import format_table
from moe.sparse.editing import LayerKey
from moe.tracing.trace import layer_name

Answer = Literal["yes", "no", "not shown"]

CONFIDENCE = 0.95
MARGIN = 0.01
"""Nats for each token: an advantage on a class that is too small to call an expert `for` it."""

NOTHING_SHOWN = "nothing was shown"


class ExpertEffect(NamedTuple):
    """Effect of ablating one expert on the loss.

    Attributes:
        key: Name of the layer.
        expert: Number of the expert, from 0.
        load: Its accepted choices.
        effect: Change of the mean loss of all target tokens.
        where_chosen: Change for the tokens that it processes; see `LayerAblation`.
        elsewhere: Change for all other tokens, which it affects through attention only.
        over_random: `effect` minus the effect of as many random choices.
        peer: The expert with the nearest load.
        over_peer: `effect` minus the effect of the peer.
    """

    key: LayerKey
    expert: int
    load: int
    effect: Estimate
    where_chosen: Estimate
    elsewhere: Estimate
    over_random: Estimate
    peer: int
    over_peer: Estimate


class ClassVerdict(NamedTuple):
    """Whether an expert is for a class.

    Attributes:
        key: Name of the layer.
        expert: Number of the expert, from 0.
        token_class: Name of the class.
        num_tokens: Target tokens of the class.
        num_documents: Documents that hold one.
        effect: Change of the mean loss of the class when the expert is ablated.
        over_others: `effect` minus the change on all other target tokens.
        over_random: `effect` minus the change by as many random choices, on the same tokens.
        over_peer: `effect` minus the change by the expert of nearest load, on the same tokens.
        answer: See `class_verdicts`.
    """

    key: LayerKey
    expert: int
    token_class: str
    num_tokens: int
    num_documents: int
    effect: Estimate
    over_others: Estimate
    over_random: Estimate
    over_peer: Estimate
    answer: Answer


# ---------------------------------------------------------------------------
# Effects of experts


def expert_effects(ablation: Ablation) -> list[ExpertEffect]:
    """Returns the effect of every expert of every layer."""
    num_experts = sum(layer.load.numel() for layer in ablation.layers)
    level = 1 - (1 - CONFIDENCE) / num_experts

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
        intervals = [mean_over_tokens(sums, level) for sums in columns]
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
                )
            )
    return effects


def shown_purposes(ablation: Ablation) -> dict[tuple[LayerKey, int], str]:
    """Returns the classes that experts were shown to serve, as text, by layer and expert.

    Only experts whose interval of the effect is above 0, those with the largest effect first.
    """
    classes: dict[tuple[LayerKey, int], list[str]] = {}
    for verdict in class_verdicts(ablation):
        if verdict.answer == "yes":
            classes.setdefault((verdict.key, verdict.expert), []).append(verdict.token_class)

    shown = [effect for effect in expert_effects(ablation) if effect.effect.low > 0]
    shown.sort(key=lambda effect: effect.effect.value, reverse=True)
    experts = [(effect.key, effect.expert) for effect in shown]
    return {expert: ", ".join(classes.get(expert, ())) or NOTHING_SHOWN for expert in experts}


# ---------------------------------------------------------------------------
# Is this expert for that class?


def class_verdicts(ablation: Ablation, *, margin: float = MARGIN) -> list[ClassVerdict]:
    """Returns for every expert of every layer, and every class, whether the expert is for it.

    - `no`: the loss on the class rises by less than `margin` more than on all other tokens, or than
      when as many random choices are ablated. This is the upper half of an equivalence test.
    - `yes`: otherwise, if the loss rises on the class, more than on all other tokens, and more than
      when as many random choices are ablated.
    - `not shown`: otherwise.

    Each comparison uses a two-sided interval over documents (`moe.estimates`) with
    confidence 1 - 0.05 / cells, where cells are all experts of all layers times their
    classes (Bonferroni). So the probability that any `yes` of the table is wrong is at most
    5 %; the same holds for `no` unless the changes of documents are very skewed: with
    skewed changes and a margin of 0, up to 26 % of simulated tables contained a wrong `no`.

    Args:
        ablation: From `ablate_experts`.
        margin: Advantage in nats for each token below which an expert is not for a class. A larger
            one gives more `no`.
    """
    num_cells = sum(layer.load.numel() * (len(layer.sets) - 1) for layer in ablation.layers)
    level = 1 - (1 - CONFIDENCE) / max(1, num_cells)

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

    effects = mean_over_tokens(of_class, level)
    over_others = difference_of_means(of_class, of_others, level)
    over_randoms = mean_over_tokens(over_random, level)
    over_peers = mean_over_tokens(over_peer, level)

    verdicts = []
    num_experts, num_classes, _ = change.shape
    for expert in range(num_experts):
        for number in range(num_classes):
            cell = expert * num_classes + number
            comparisons = (over_others[cell], over_randoms[cell])
            answer: Answer = "not shown"
            if min(estimate.high for estimate in comparisons) < margin:
                answer = "no"
            elif min(estimate.low for estimate in (effects[cell], *comparisons)) > 0:
                answer = "yes"
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


# ---------------------------------------------------------------------------
# As text

EFFECT_HEADER = [
    "sparse layer",
    "expert",
    "load",
    "change of loss",
    "where it was chosen",
    "elsewhere",
    "more than at random",
    "more than expert",
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


ANSWER_HEADER = [
    "sparse layer",
    "right answers",
    "lost by one expert: mean (smallest, largest)",
    "lost by exactly one (%)",
    "lost by none (%)",
]


def ablation_text(ablation: Ablation) -> str:
    """Returns effects, classes that experts were shown to serve, largest effects, and lost answers."""
    shown = [verdict for verdict in class_verdicts(ablation) if verdict.answer == "yes"]
    verdicts = "No expert was shown to be for a class of tokens."
    if shown:
        verdicts = verdict_table(shown)
    texts = [effect_table(ablation), verdicts, top_effects_text(ablation)]
    if ablation.recalled.any():
        texts.append(answer_table(ablation))
    return "\n\n".join(texts)


def effect_table(ablation: Ablation) -> str:
    """Returns the effects of all experts as text."""
    rows = []
    for effect in expert_effects(ablation):
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
            ]
        )

    return format_table(EFFECT_HEADER, rows)


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


def top_effects_text(ablation: Ablation, n: int = 5) -> str:
    """Returns a line for each of the n experts with the largest effects, or that nothing was shown."""
    effects = {(effect.key, effect.expert): effect.effect for effect in expert_effects(ablation)}
    lines = []
    for expert, purpose in list(shown_purposes(ablation).items())[:n]:
        key, number = expert
        name = f"{layer_name(key)}, expert {number + 1}"
        lines.append(f"{name}: {effects[expert]} nats a token; for: {purpose}")
    return "\n".join(lines) or NOTHING_SHOWN


def answer_table(ablation: Ablation) -> str:
    """Returns as text how many whole targets each layer loses without one of its experts.

    Args:
        ablation: Of examples of which some are right.
    """
    num_recalled = int(ablation.recalled.sum())
    rows = []
    for layer in ablation.layers:
        by_expert = layer.lost.sum(dim=1)  # [E]
        times_lost = layer.lost.sum(dim=0)[ablation.recalled]
        mean = f"{by_expert.float().mean():.0f}"
        rows.append(
            [
                layer_name(layer.key),
                f"{num_recalled:,} of {len(ablation.recalled):,}",
                f"{mean} ({by_expert.min()}, {by_expert.max()})",
                f"{100 * float((times_lost == 1).float().mean()):.1f}",
                f"{100 * float((times_lost == 0).float().mean()):.1f}",
            ]
        )
    return format_table(ANSWER_HEADER, rows)
