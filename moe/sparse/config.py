"""The settings of a sparse layer, checked when they are built.

Read first; the computation starts in groups.py. A configuration validates its own numbers here; its
router's requirements are in router_options.py.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from moe.checks import check, check_field_types, check_integer, check_number, shown
from moe.errors import ConfigError, did_you_mean
from moe.sparse.router_options import ROUTER_REQUIREMENTS, check_router, option_names

Activation = Literal["gelu", "relu"]
ExpertBias = Literal["none", "additive", "multiplicative"]
Rounding = Literal["floor", "round"]
RouterInput = Literal["hidden", "concat", "concat_stop_gradient", "add", "add_stop_gradient"]
Choices = Literal["first", "all"]
Positions = Literal["real_tokens", "all_positions"]
BalanceScope = Literal["group", "micro_batch", "ranks", "global"]
Dispatch = Literal["ragged", "static"]
CapacityScope = Literal["group", "sequence"]

_LARGEST_SIZE = 2**24
_MOST_TOKENS = 2**63 - 1
_LARGEST_SCALE = 1e6


C = TypeVar("C")


def _suggest_settings(config_class: type[C]) -> type[C]:
    """Makes the constructor of a dataclass suggest the nearest name for an unknown keyword.

    `__new__` would work too, but it would hide the signature of the constructor.
    """
    known = [setting.name for setting in fields(config_class)]  # pyright: ignore[reportArgumentType]
    dataclass_init = config_class.__init__

    @functools.wraps(dataclass_init)
    def init(self: Any, *args: Any, **settings: Any) -> None:
        for name in settings:
            if name not in known:
                raise ConfigError(
                    f"SparseConfig has no setting {name!r}.{did_you_mean(name, known)} "
                    f"Known: {', '.join(known)}."
                )
        dataclass_init(self, *args, **settings)

    config_class.__init__ = init
    return config_class


@_suggest_settings
@dataclass(frozen=True)
class SparseConfig:
    """Settings of one sparse feed-forward layer; the defaults are the ST-MoE paper's.

    `SparseConfig.after("mesh_tensorflow", ...)` and `after("flaxformer", ...)` set everything in
    which the two reference implementations differ.

    Attributes:
        d_model: Width of a token, D.
        d_ff: Hidden width of one expert, F.
        num_experts: Experts in the layer, E.
        num_selected_experts: Experts that a token may use, K; routers that choose one expert
            require 1.
        router: Name in ROUTERS of the rule that assigns tokens to experts.
        router_options: Settings of that router alone, by name; see the `Options` of its file in
            moe/sparse/routers.
        router_input: Input of the gate: the `hidden` state, alone or with the token's word
            embedding concatenated (`concat`) or added (`add`); `..._stop_gradient` sends no
            gradient into the embedding.
        decoder: Whether the layer is in a decoder, where tokens must not depend on later ones.
        capacity_factor: Slots of an expert relative to an even share of the group, in training.
            Larger drops fewer tokens and costs memory; None drops none.
        eval_capacity_factor: The same outside training.
        min_expert_capacity: Minimum number of slots of an expert in a group; matters for small
            groups.
        capacity_rounding: `floor`, and never more slots than tokens (Mesh-TensorFlow), or `round`
            (Flaxformer).
        expert_capacity: Slots of an expert in a group of any size, in training and evaluation;
            replaces both factors, the minimum and the rounding. None leaves it to them.
        capacity_scope: Whether tokens are routed together, and compete for slots, in a `group` of
            sequences, or each `sequence` is its own group, regardless of `group_size`
            (transformers' Switch).
        group_size: Maximum number of tokens that are routed together; a group is a whole number of
            sequences, and a longer sequence is its own group.
        balance_choices: Whether the balance loss counts the `first` choice of a token (the loss is
            1 at perfect balance) or `all` K (then K).
        balance_over: Positions in the shares of the balance loss: `real_tokens`, so that padding
            changes nothing, or `all_positions` of the group (Mesh-TensorFlow). The loss is a mean
            over groups: over those that hold a real token, or with `all_positions` over all, so
            that groups of padding lower it.
        balance_scope: Tokens over which the shares are taken: one `group` (paper), a `micro_batch`
            (one call), the tokens of the `ranks` that share one copy of the model (all but
            `dp_replicate` in a mesh), or the `global` batch; for the last two see `balance_totals`.
        router_z_loss_over: Positions in the mean of the z-loss: `real_tokens`, or `all_positions`
            (Flaxformer).
        dispatch: `ragged` moves exactly the accepted rows; `static` has fixed slots for each
            expert, so that shapes never change and the host never waits for the device: for
            compiled graphs and equal-sized exchanges.
        activation: Non-linearity of the experts; `gelu` is the tanh approximation.
        gated: Whether an expert is a gated linear unit (GEGLU with `gelu`).
        expert_bias: A vector [F] for each expert on its hidden activation; the paper gains by
            `multiplicative`.
        expert_dropout_rate: Dropout on the hidden activation of the experts.
        initializer_scale: s of the truncated normal with variance s / fan_in.
        router_initializer_std: Standard deviation of the gate's normal initialisation (Flaxformer);
            None draws it like the experts (Mesh-TensorFlow).
        expert_quantization: How the experts' weights are held and saved: `{"bits": 8}`, or `{"bits":
            4, "group_size": 32}` where so many neighbouring inputs share a scale; None for floats.
            Quantized experts do not train; adapters beside them do.

    Source:
        ST-MoE (arXiv:2202.08906) §3, §6.2, appendices C and G; mesh_tensorflow/transformer/moe.py
        at a32810e; google/flaxformer at 399ea3a8. Differs: what a field says.
    """

    d_model: int
    d_ff: int
    num_experts: int
    num_selected_experts: int = 2
    router: str = "token_choice"
    router_options: Mapping[str, Any] = field(default_factory=dict)
    router_input: RouterInput = "hidden"
    decoder: bool = False
    capacity_factor: float | None = 1.25
    eval_capacity_factor: float | None = 2.0
    min_expert_capacity: int = 4
    capacity_rounding: Rounding = "floor"
    expert_capacity: int | None = None
    capacity_scope: CapacityScope = "group"
    group_size: int = 4096
    balance_choices: Choices = "first"
    balance_over: Positions = "real_tokens"
    balance_scope: BalanceScope = "group"
    router_z_loss_over: Positions = "real_tokens"
    dispatch: Dispatch = "ragged"
    activation: Activation = "gelu"
    gated: bool = True
    expert_bias: ExpertBias = "none"
    expert_dropout_rate: float = 0.0
    initializer_scale: float = 0.1
    router_initializer_std: float | None = 0.02
    expert_quantization: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        """Checks every value once, when the configuration is built.

        Raises:
            ConfigError: When a value is out of range or contradicts another.
        """
        check_field_types(self)

        # Bounds beyond any machine: larger values are typing errors.
        for name in ("d_model", "d_ff", "num_experts", "num_selected_experts"):
            check_integer(name, getattr(self, name), least=1, most=_LARGEST_SIZE)
        check_integer("group_size", self.group_size, least=1, most=_MOST_TOKENS)
        check(
            self.num_selected_experts <= self.num_experts,
            "num_selected_experts",
            self.num_selected_experts,
            f"at most num_experts, {self.num_experts}",
        )

        # Slots of an expert. A fixed number and a factor that drops nothing contradict each other.
        check_integer("min_expert_capacity", self.min_expert_capacity, least=0, most=2**31)
        no_drops = "None to drop no token"
        for name in ("capacity_factor", "eval_capacity_factor"):
            factor = getattr(self, name)
            check_number(name, factor, above=0, most=_LARGEST_SCALE, optional=no_drops)
        follow = "None to follow the capacity factors"
        check_integer(
            "expert_capacity", self.expert_capacity, least=1, most=_MOST_TOKENS, optional=follow
        )
        if self.expert_capacity is not None and None in (
            self.capacity_factor,
            self.eval_capacity_factor,
        ):
            raise ConfigError(
                f"expert_capacity is {self.expert_capacity} and a capacity factor is None, which drops no token. Set "
                "expert_capacity to None, or set both factors to a number, which is then ignored."
            )

        # Dropout and initialisation. A rate of 1 would drop all hidden units.
        check_number("expert_dropout_rate", self.expert_dropout_rate, least=0, below=1)
        check_number("initializer_scale", self.initializer_scale, above=0, most=_LARGEST_SCALE)
        check_number(
            "router_initializer_std",
            self.router_initializer_std,
            least=0,
            most=_LARGEST_SCALE,
            optional="None to draw it like the experts",
        )

        if self.expert_quantization is not None:
            _check_quantization(self.expert_quantization, self.d_model, self.d_ff)

        # A copy, since the caller may change the mapping later.
        expected = "a mapping of the router's option names"
        check(
            isinstance(self.router_options, Mapping),
            "router_options",
            self.router_options,
            expected,
        )
        object.__setattr__(self, "router_options", dict(self.router_options))
        check_router(self)

    @classmethod
    def after(cls, reference: str, **overrides: Any) -> "SparseConfig":
        """Returns a configuration that routes as a reference implementation does.

        Args:
            reference: A name in REFERENCES: `mesh_tensorflow` or `flaxformer`.
            overrides: Fields of this class, which override the reference's.

        Raises:
            ConfigError: When there is no such reference, or a value is out of range.
        """
        # The caller's settings override the reference's.
        settings = reference_fields(reference, overrides.get("router", cls.router))
        return cls(**{**settings, **overrides})


def _check_quantization(quantization: Mapping[str, int], d_model: int, d_ff: int) -> None:
    """Raises a ConfigError unless the experts' weights can be quantized so."""
    name = "expert_quantization"
    is_known = isinstance(quantization, Mapping) and set(quantization) in (
        {"bits"},
        {"bits", "group_size"},
    )
    expected = '{"bits": 8}, or {"bits": 4, "group_size": 32}'
    check(is_known, name, quantization, expected)
    check(
        (quantization["bits"], len(quantization)) in ((8, 1), (4, 2)), name, quantization, expected
    )
    if quantization["bits"] == 4:
        group_size = quantization["group_size"]
        check_integer(f"{name} group_size", group_size, least=2)
        widths = f"an even divisor of d_model, {d_model}, and of d_ff, {d_ff}"
        is_divisor = group_size % 2 == d_model % group_size == d_ff % group_size == 0
        check(is_divisor, f"{name} group_size", group_size, widths)


# In Flaxformer padding is routed like any token by default; to reproduce this, give its layers no
# token mask. In Mesh-TensorFlow padding is not routed, but its groups count: the balance loss is
# `reduce_mean` over all of them.
REFERENCES: Mapping[str, Mapping[str, Any]] = {
    "mesh_tensorflow": {
        "router_options": {
            "second_expert_policy": "random",
            "eval_second_expert_policy": "random",
            "softmax_over": "tokens",
        },
        "capacity_rounding": "floor",
        "balance_choices": "first",
        "balance_over": "all_positions",
        "router_z_loss_over": "real_tokens",
        "router_initializer_std": None,
    },
    "flaxformer": {
        "router_options": {
            "normalize_gates": False,
            "second_expert_policy": "all",
            "eval_second_expert_policy": "all",
            "softmax_over": "experts",
        },
        "capacity_rounding": "round",
        "balance_choices": "all",
        "balance_over": "real_tokens",
        "router_z_loss_over": "all_positions",
        "router_initializer_std": 0.02,
    },
}


def reference_fields(reference: str, router: str = SparseConfig.router) -> dict[str, Any]:
    """Returns the fields of SparseConfig that reproduce the routing of `reference`.

    Args:
        reference: A name in REFERENCES.
        router: A name in ROUTERS; it gets the reference's options that it supports.

    Raises:
        ConfigError: When there is no such reference or router.

    Source:
        mesh_tensorflow/transformer/moe.py at a32810e; google/flaxformer at 399ea3a8,
        `architectures/moe/routing.py`.
    """
    if not isinstance(reference, str) or reference not in REFERENCES:
        raise ConfigError(
            f"There is no reference implementation called {shown(reference)}.{did_you_mean(reference, REFERENCES)} "
            f"Known: {', '.join(sorted(REFERENCES))}."
        )

    # Options of the reference that the router has.
    known = option_names(ROUTER_REQUIREMENTS.get(router))
    options: dict[str, Any] = {}
    for name, value in REFERENCES[reference]["router_options"].items():
        if name in known:
            options[name] = value
    return {**REFERENCES[reference], "router_options": options}
