"""Subsets of the parameters that train, as the paper compares them, and how large they are."""

from collections import Counter
from typing import NamedTuple

from moe.errors import ConfigError, did_you_mean
from moe.models.parallelize import rule_names
from moe.models.pretrained import STMoEPreTrainedModel

_KIND_OF_RULE = {
    "embedding": "embedding",
    "head": "head",
    "norm": "norms",
    "position bias": "attention",
    "attention in": "attention",
    "attention out": "attention",
    "router": "router",
    "experts in": "experts",
    "experts out": "experts",
    "expert bias": "experts",
    "feed-forward in": "ffn",
    "feed-forward out": "ffn",
}
_ALL = frozenset(_KIND_OF_RULE.values())

SUBSETS = {
    "all": _ALL,
    "non_moe": _ALL - {"router", "experts"},
    "moe": frozenset({"router", "experts"}),
    "attention": frozenset({"attention"}),
    "ffn": frozenset({"ffn"}),
    "router_frozen": _ALL - {"router"},
}
"""Kinds of parameters that train, by the name of the subset."""


class Selection(NamedTuple):
    """How many parameters train; its text is a small table.

    Attributes:
        subset: Name of the subset.
        trainable: Parameters that train, by kind.
        total: All parameters, by kind: embedding, head, norms, attention, router, experts, ffn.
    """

    subset: str
    trainable: dict[str, int]
    total: dict[str, int]

    @property
    def num_trainable(self) -> int:
        """How many train in all."""
        return sum(self.trainable.values())

    @property
    def num_total(self) -> int:
        """How many there are."""
        return sum(self.total.values())

    def __str__(self) -> str:
        share = self.num_trainable / self.num_total
        lines = [
            f"{self.subset}: {self.num_trainable:,} of {self.num_total:,} parameters train "
            f"({share:.1%})"
        ]

        # One line for each kind, with the numbers aligned.
        width = len(f"{max(self.total.values()):,}")
        for kind, count in self.total.items():
            state = "trains" if self.trainable[kind] else "frozen"
            lines.append(f"  {kind:<9} {count:>{width},}  {state}")
        return "\n".join(lines)


def select_parameters(model: STMoEPreTrainedModel, subset: str) -> Selection:
    """Lets one subset of the parameters train, freezes the others, and returns their numbers.

    Call it before the optimizer is made. The model may lie on a mesh. The subsets, and what the
    paper found on SuperGLUE with each:

    - `all`: every parameter.
    - `non_moe`: everything but routers and experts; about as good as all, with less memory.
    - `moe`: routers and experts; much worse.
    - `attention`: projections and position biases of self-attention and encoder-decoder attention.
    - `ffn`: the dense feed-forward layers, those beside sparse ones too; slightly better than all.
    - `router_frozen`: everything but routers (not in the paper).

    Norms, embedding and head train with `all`, `non_moe` and `router_frozen` only, the norm before
    a sparse layer too.

    Args:
        model: Any model of this library, without adapters.
        subset: One of the names above.

    Raises:
        ConfigError: When there is no such subset, or the model has nothing that it would train or
            freeze.

    Source:
        ST-MoE (arXiv:2202.08906) §4.2 and figure 5. Differs: the paper does not say where norms,
        embeddings and position biases belong.
    """
    check_subset(subset)
    if not isinstance(model, STMoEPreTrainedModel):
        raise ConfigError(
            f"select_parameters got a {type(model).__name__}; expected a model of this "
            "library. Adapters choose by themselves what trains: give the model before they "
            "are attached."
        )

    # The sharding rules cover every parameter, and name its kind.
    kinds = {name: _KIND_OF_RULE[rule] for name, rule in rule_names(model).items()}
    chosen = SUBSETS[subset]
    present = set(kinds.values())
    if not chosen & present:
        raise ConfigError(
            f"The subset {subset!r} holds {' and '.join(sorted(chosen))}, and this model has "
            "none. Choose another."
        )
    if subset != "all" and present <= chosen:
        raise ConfigError(
            f"The subset {subset!r} freezes {' and '.join(sorted(_ALL - chosen))}, and this "
            "model has none. Choose 'all'."
        )

    # Count while freezing.
    total = Counter[str]()
    trainable = Counter[str]()
    for name, parameter in model.named_parameters():
        kind = kinds[name]
        trains = kind in chosen
        parameter.requires_grad_(trains)
        total[kind] += parameter.numel()
        trainable[kind] += parameter.numel() if trains else 0
    return Selection(subset, dict(trainable), dict(total))


def check_subset(subset: str) -> None:
    """Raises when there is no such subset.

    Raises:
        ConfigError: With the closest name and all of them.
    """
    if subset not in SUBSETS:
        raise ConfigError(
            "There is no subset of parameters called "
            f"{subset!r}.{did_you_mean(subset, SUBSETS)} Known: {', '.join(SUBSETS)}."
        )
