"""What can be set on a sparse layer. Read first; the token's journey starts in groups.py."""

from dataclasses import dataclass
from typing import Literal, get_args

from moe.errors import ConfigError

Policy = Literal["all", "none", "threshold", "random"]
Activation = Literal["gelu", "relu"]
ExpertBias = Literal["none", "additive", "multiplicative"]


@dataclass(frozen=True)
class SparseConfig:
    """Settings of one sparse feed-forward layer; the defaults are the ST-MoE paper's.

    Attributes:
        d_model: Width of a token, D.
        d_ff: Hidden width of one expert, F.
        num_experts: Experts in the layer, E.
        num_selected_experts: Experts that a token may use, K. 1 keeps the raw gate (Switch), more renormalise
            the K gates to a sum of 1.
        capacity_factor: Slots of an expert relative to an even share of the group, in training. Larger drops
            fewer tokens and costs memory; None drops none.
        eval_capacity_factor: The same outside training.
        min_expert_capacity: Fewest slots of an expert in a group; matters for small groups.
        group_size: Most tokens that are routed together; a group is a whole number of sequences.
        second_expert_policy: Whether places 2..K are used in training: `all`, `none`, `threshold` (iff the gate
            is above the threshold) or `random` (with probability gate / threshold).
        eval_second_expert_policy: The same outside training. The reference draws there too; `threshold` is its
            deterministic counterpart, so that one input always has one output.
        second_expert_threshold: Gate at which `threshold` and `random` use a place for certain.
        activation: Non-linearity of the experts; `gelu` is the tanh approximation.
        gated: Whether an expert is a gated linear unit (GEGLU with `gelu`).
        expert_bias: A vector [F] for each expert on its hidden activation; the paper gains by `multiplicative`.
        expert_dropout_rate: Dropout on the hidden activation of the experts.
        initializer_scale: s of the truncated normal with variance s / fan_in.
        router_initializer_std: Standard deviation of the gate's normal initialisation.

    Source:
        ST-MoE (arXiv:2202.08906) §3, §6.2, appendices C and G; mesh_tensorflow/transformer/moe.py at a32810e.
        Differs: eval_second_expert_policy, see there.
    """

    d_model: int
    d_ff: int
    num_experts: int
    num_selected_experts: int = 2
    capacity_factor: float | None = 1.25
    eval_capacity_factor: float | None = 2.0
    min_expert_capacity: int = 4
    group_size: int = 4096
    second_expert_policy: Policy = "random"
    eval_second_expert_policy: Policy = "threshold"
    second_expert_threshold: float = 0.2
    activation: Activation = "gelu"
    gated: bool = True
    expert_bias: ExpertBias = "none"
    expert_dropout_rate: float = 0.0
    initializer_scale: float = 0.1
    router_initializer_std: float = 0.02

    def __post_init__(self) -> None:
        """Checks every value once, at the door.

        Raises:
            ConfigError: When a value is out of range or contradicts another.
        """
        for name in ("d_model", "d_ff", "num_experts", "num_selected_experts", "group_size"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "an integer of at least 1")
        _require(self.min_expert_capacity >= 0, "min_expert_capacity", self.min_expert_capacity, "0 or more")
        for name in ("capacity_factor", "eval_capacity_factor"):
            value = getattr(self, name)
            _require(value is None or value > 0, name, value, "a number above 0, or None to drop no token")
        for name, choices in (
            ("second_expert_policy", Policy),
            ("eval_second_expert_policy", Policy),
            ("activation", Activation),
            ("expert_bias", ExpertBias),
        ):
            value = getattr(self, name)
            _require(value in get_args(choices), name, value, f"one of {', '.join(get_args(choices))}")
        _require(
            self.second_expert_threshold > 0,
            "second_expert_threshold",
            self.second_expert_threshold,
            "a number above 0; use policy 'all' to always use every place",
        )
        _require(
            0 <= self.expert_dropout_rate < 1,
            "expert_dropout_rate",
            self.expert_dropout_rate,
            "0 <= rate < 1",
        )
        _require(self.initializer_scale > 0, "initializer_scale", self.initializer_scale, "a number above 0")
        _require(
            self.router_initializer_std >= 0,
            "router_initializer_std",
            self.router_initializer_std,
            "0 or more",
        )
        if self.num_selected_experts > self.num_experts:
            raise ConfigError(
                f"num_selected_experts is {self.num_selected_experts}, but there are only {self.num_experts} "
                f"experts. Set num_selected_experts to at most {self.num_experts}, or raise num_experts."
            )


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    """Raises a ConfigError that names the field, its value and what was expected, unless `holds`."""
    if not holds:
        raise ConfigError(f"{name} is {value!r}; expected {expected}.")
