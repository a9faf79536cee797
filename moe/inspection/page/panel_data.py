"""What the routing view shows beside a trace: classes, saturation, ablation, as plain numbers.

Other modules compute them; `routing_view` draws what it is given. A number that is not finite
means "not known".
"""

from collections.abc import Sequence
from typing import NamedTuple

from moe.checks import check
from moe.inspection.statistics.document_intervals import Estimate
from moe.sparse.editing import LayerKey
from moe.tracing.trace import Trace, layer_name


class ClassRow(NamedTuple):
    """Where the tokens of one class go in one layer.

    Attributes:
        name: Name of the class, e.g. `punctuation`.
        num_tokens: Tokens of the class.
        shares: E shares of the class's tokens; their sum is 1.
        lifts: E ratios of these shares to the experts' shares of all tokens; 1 is no preference.
        p_values: E p-values of the lifts, corrected for the number of cells.
        entropy: Entropy of the shares in nats; None for no column of it.
    """

    name: str
    num_tokens: int
    shares: Sequence[float]
    lifts: Sequence[float]
    p_values: Sequence[float]
    entropy: Estimate | None = None


class LayerClasses(NamedTuple):
    """Class by expert, in one layer."""

    key: LayerKey
    rows: Sequence[ClassRow]


class SaturationPoint(NamedTuple):
    """How far a layer's choices were the last checkpoint's, at one step.

    Attributes:
        key: The layer.
        step: Training step of the checkpoint.
        value: 1 where all choices are the same, 0 where as many are as by chance.
    """

    key: LayerKey
    step: int
    value: float


class AblationBar(NamedTuple):
    """What an expert's ablation does to the loss.

    Attributes:
        key: The layer.
        expert: Number of the expert, from 0.
        effect: Change of the loss in nats per token; above 0 the model needs the expert.
        low: Lower end of its interval.
        high: Upper end of its interval.
        verdict: What was shown, in words.
        edit: What was done to the expert, e.g. `drop`.
    """

    key: LayerKey
    expert: int
    effect: float
    low: float
    high: float
    verdict: str
    edit: str = ""


def check_statistics(
    trace: Trace,
    classes: Sequence[LayerClasses],
    saturation: Sequence[SaturationPoint],
    ablation: Sequence[AblationBar],
) -> None:
    """Raises a ConfigError unless the statistics are of layers and experts of the trace.

    Args:
        trace: What the page shows.
        classes: Class tables; at most one for each layer.
        saturation: Points of the curves.
        ablation: Bars.
    """
    num_experts = {layer.key: layer.facts.num_experts for layer in trace.layers}
    expected = f"a layer of the trace: {', '.join(map(str, num_experts))}"
    for name, values in {
        "classes": classes,
        "saturation": saturation,
        "ablation": ablation,
    }.items():
        for value in values:
            check(value.key in num_experts, f"a layer of {name}", value.key, expected)

    # The page has one table for each layer, with a number for each expert.
    keys = [table.key for table in classes]
    check(len(set(keys)) == len(keys), "classes", keys, "at most one table for each layer")
    for table in classes:
        expected = (
            f"{num_experts[table.key]} values, one for each expert of {layer_name(table.key)}"
        )
        for row in table.rows:
            for name in ("shares", "lifts", "p_values"):
                values = getattr(row, name)
                fits = len(values) == num_experts[table.key]
                check(fits, f"{name} of the class {row.name!r}", list(values), expected)

    for bar in ablation:
        largest = num_experts[bar.key] - 1
        expected = f"an expert of {layer_name(bar.key)}, from 0 to {largest}"
        check(0 <= bar.expert <= largest, "expert of an ablation", bar.expert, expected)
