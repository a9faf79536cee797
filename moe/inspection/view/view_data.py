"""What the routing view shows beside a trace: classes, saturation, ablation, as plain numbers.

Other modules compute them; `routing_view` draws what it is given. A number that is not finite
stands for "not known".
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from moe.checks import check
from moe.errors import ConfigError
from moe.sparse.editing import LayerKey
from moe.tracing.trace import LayerFacts, layer_name


class Estimate(NamedTuple):
    """A value and its interval."""

    value: float
    low: float
    high: float


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
    layers: Mapping[LayerKey, LayerFacts],
    classes: Sequence[LayerClasses],
    saturation: Sequence[SaturationPoint],
    ablation: Sequence[AblationBar],
) -> None:
    """Raises unless the statistics are of layers and experts that there are.

    Args:
        layers: The sparse layers of the trace by name.
        classes: Class tables; at most one for each layer.
        saturation: Points of the curves.
        ablation: Bars.

    Raises:
        ConfigError: When one is not, or has another number of experts than its layer.
    """
    # Every layer is one of the trace.
    given = {"classes": classes, "saturation": saturation, "ablation": ablation}
    for name, values in given.items():
        for value in values:
            _check_layer(name, value.key, layers)

    # Every row has a number for each expert.
    for table in classes:
        num_experts = layers[table.key].num_experts
        for row in table.rows:
            for field in ("shares", "lifts", "p_values"):
                num_values = len(getattr(row, field))
                if num_values != num_experts:
                    raise ConfigError(
                        f"{field} of the class {row.name!r} has {num_values} values; expected {num_experts}, one "
                        f"for each expert of {layer_name(table.key)}."
                    )

    # The page has one table for each layer.
    keys = [table.key for table in classes]
    check(len(set(keys)) == len(keys), "classes", keys, "at most one table for each layer")
    # Every bar is of an expert of its layer.
    for bar in ablation:
        num_experts = layers[bar.key].num_experts
        reason = f"an expert of {layer_name(bar.key)}, from 0 to {num_experts - 1}"
        check(0 <= bar.expert < num_experts, "expert of an ablation", bar.expert, reason)


def _check_layer(name: str, key: LayerKey, known: Collection[LayerKey]) -> None:
    expected = f"a layer of the trace: {', '.join(map(str, known))}"
    check(key in known, f"a layer of {name}", key, expected)
