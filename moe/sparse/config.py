"""The settings of a sparse layer, checked when they are built.

Read first; the computation starts in groups.py. A configuration validates its own numbers here; its
router's requirements are in router_options.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from moe.checks import check, check_field_types, check_integer, check_number, is_kind, shown
from moe.errors import ConfigError
from moe.sparse.router_options import ROUTERS, check_router, option_names

Activation = Literal["gelu_pytorch_tanh", "gelu", "relu", "silu"]
ExpertBias = Literal["none", "additive", "multiplicative"]
RouterInput = Literal["hidden", "concat", "concat_stop_gradient", "add", "add_stop_gradient"]
BalanceScope = Literal["group", "micro_batch", "ranks", "global"]
Dispatch = Literal["ragged", "static"]
Convention = Literal["ours", "mesh_tensorflow", "flaxformer", "switch", "fairseq"]


@dataclass(frozen=True)
class Rules:
    """What the reference implementations do differently; see CONVENTIONS.

    Attributes:
        capacity_rounding: `floor` or `ceil`, and never more slots than tokens, or `round`.
        capacity_scope: Whether tokens are routed together, and compete for slots, in a `group` of
            sequences, or each `sequence` is its own group, regardless of `group_size`.
        balance_choices: Whether the balance loss counts the `first` choice of a token (the loss is
            1 at perfect balance) or `all` K (then K).
        balance_over: Positions in the shares of the balance loss: `real_tokens`, so that padding
            changes nothing, or `all_positions` of the group. The loss is a mean over groups: over
            those that hold a real token, or with `all_positions` over all, so that groups of
            padding lower it.
        router_z_loss_over: Positions in the mean of the z-loss: `real_tokens`, or `all_positions`.
        router_loss_reduction: Whether a model's router losses are the `sum` over sparse layers or
            their `mean` over those of encoder and decoder together.
        router_initializer_std: Standard deviation of a gate's normal initialisation; None draws it
            like the experts.
        router_options: Options of a router that has them, unless they are given.
    """

    capacity_rounding: Literal["floor", "ceil", "round"] = "floor"
    capacity_scope: Literal["group", "sequence"] = "group"
    balance_choices: Literal["first", "all"] = "first"
    balance_over: Literal["real_tokens", "all_positions"] = "real_tokens"
    router_z_loss_over: Literal["real_tokens", "all_positions"] = "real_tokens"
    router_loss_reduction: Literal["sum", "mean"] = "sum"
    router_initializer_std: float | None = 0.02
    router_options: Mapping[str, Any] = field(default_factory=dict)


# In Flaxformer padding is routed like any token by default; to reproduce this, give its layers no
# token mask. In Mesh-TensorFlow padding is not routed, but its groups count: the balance loss is
# `reduce_mean` over all of them.
CONVENTIONS: Mapping[Convention, Rules] = {
    "ours": Rules(),
    "mesh_tensorflow": Rules(
        balance_over="all_positions",
        router_initializer_std=None,
        router_options={
            "second_expert_policy": "random",
            "eval_second_expert_policy": "random",
            "softmax_over": "tokens",
        },
    ),
    "flaxformer": Rules(
        capacity_rounding="round",
        balance_choices="all",
        router_z_loss_over="all_positions",
        router_loss_reduction="mean",
        router_options={
            "normalize_gates": False,
            "second_expert_policy": "all",
            "eval_second_expert_policy": "all",
            "softmax_over": "experts",
        },
    ),
    "switch": Rules(capacity_scope="sequence", router_loss_reduction="mean"),
    "fairseq": Rules(
        capacity_rounding="ceil",
        router_options={
            "normalize_gates": False,
            "normalize_accepted": True,
            "second_expert_policy": "all",
            "eval_second_expert_policy": "all",
        },
    ),
}
"""The routing of each reference implementation.

Source:
    mesh_tensorflow/transformer/moe.py at a32810e; google/flaxformer at 399ea3a8,
    `architectures/moe/routing.py`; transformers 5.23.0 `SwitchTransformers`; fairseq's branch
    `nllb`, `modules/moe/top2gate.py`.
"""

_EARLIER_FIELDS = (
    "capacity_rounding",
    "capacity_scope",
    "balance_choices",
    "balance_over",
    "router_z_loss_over",
    "router_loss_reduction",
)


def take_convention(settings: dict[str, Any]) -> Convention | None:
    """Removes the fields that `convention` replaced from settings of an earlier version.

    Returns:
        The convention that they describe; None when there are none.

    Raises:
        ConfigError: When they are of no convention.
    """
    earlier = {name: settings.pop(name) for name in _EARLIER_FIELDS if name in settings}
    if not earlier:
        return None
    described = {name: earlier.get(name, getattr(Rules(), name)) for name in _EARLIER_FIELDS}
    for convention, rules in CONVENTIONS.items():
        if all(getattr(rules, name) == value for name, value in described.items()):
            return convention
    values = ", ".join(f"{name} {shown(value)}" for name, value in earlier.items())
    raise ConfigError(
        f"The settings {values} are those of no convention; expected convention, one of {', '.join(CONVENTIONS)}. "
        "Models with other combinations load up to commit b2961961 alone."
    )


def earlier_options(router: str, convention: Convention) -> dict[str, Any]:
    """Returns our defaults of the options that a convention sets, which earlier files leave out."""
    defaults = ROUTERS.get(router).Options()
    options = CONVENTIONS[convention].router_options
    return {name: getattr(defaults, name) for name in options if hasattr(defaults, name)}


@dataclass(frozen=True)
class SparseConfig:
    """Settings of one sparse feed-forward layer; the defaults are the ST-MoE paper's.

    Attributes:
        d_model: Width of a token, D.
        d_ff: Hidden width of one expert, F.
        num_experts: Experts in the layer, E.
        num_selected_experts: Experts that a token may use, K; routers that choose one expert
            require 1.
        num_shared_experts: Experts beside those, which every real token uses with a weight of 1. They are
            not routed, and stay floats where the others are quantized.
        prefix_experts: How many experts each prefix has; see `STMoEConfig.prefix_experts`. They are
            the last ones of the layer, in order.
        router: Name in ROUTERS of the rule that assigns tokens to experts.
        router_options: Settings of that router alone, by name; see the `Options` of its file in
            moe/sparse/routers.
        router_input: Input of the gate: the `hidden` state, alone or with the token's word
            embedding concatenated (`concat`) or added (`add`); `..._stop_gradient` sends no
            gradient into the embedding.
        decoder: Whether the layer is in a decoder, where tokens must not depend on later ones.
        convention: Whose rules hold where the reference implementations differ: `ours`,
            `mesh_tensorflow`, `flaxformer`, `switch` of transformers, or `fairseq` of NLLB-MoE; see
            `Rules`.
        capacity_factor: Slots of an expert relative to an even share of the group among the base
            experts, in training. Larger drops fewer tokens and costs memory; None drops none.
        eval_capacity_factor: The same outside training.
        min_expert_capacity: Minimum number of slots of an expert in a group; matters for small
            groups.
        expert_capacity: Slots of an expert in a group of any size, in training and evaluation;
            replaces both factors, the minimum and the rounding. None leaves it to them.
        group_size: Maximum number of tokens that are routed together; a group is a whole number of
            sequences, and a longer sequence is its own group.
        balance_scope: Tokens over which the shares are taken: one `group` (paper), a `micro_batch`
            (one call), the tokens of the `ranks` that share one copy of the model (all but
            `dp_replicate` in a mesh), or the `global` batch; for the last two see `balance_totals`.
        dispatch: `ragged` moves exactly the accepted rows; `static` has fixed slots for each
            expert, so that shapes never change and the host never waits for the device: for
            compiled graphs and equal-sized exchanges.
        activation: Non-linearity of the experts, by its name in transformers: `gelu_pytorch_tanh`
            (the paper's), `gelu` (exact), `silu` or `relu`.
        gated: Whether an expert is a gated linear unit (GEGLU with a GELU, SwiGLU with `silu`).
        product_bias: Whether both products of an expert have a bias: W2 act(W1 x + b1) + b2.
        expert_bias: A vector [F] for each expert on its hidden activation; the paper gains by
            `multiplicative`.
        expert_dropout_rate: Dropout on the hidden activation of the experts.
        initializer_scale: s of the truncated normal with variance s / fan_in.
        router_initializer_std: Standard deviation of the gate's normal initialisation; None for that
            of the convention.
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
    num_shared_experts: int = 0
    prefix_experts: Sequence[int] = ()
    router: str = "token_choice"
    router_options: Mapping[str, Any] = field(default_factory=dict)
    router_input: RouterInput = "hidden"
    decoder: bool = False
    convention: Convention = "ours"
    capacity_factor: float | None = 1.25
    eval_capacity_factor: float | None = 2.0
    min_expert_capacity: int = 4
    expert_capacity: int | None = None
    group_size: int = 4096
    balance_scope: BalanceScope = "group"
    dispatch: Dispatch = "ragged"
    activation: Activation = "gelu_pytorch_tanh"
    gated: bool = True
    product_bias: bool = False
    expert_bias: ExpertBias = "none"
    expert_dropout_rate: float = 0.0
    initializer_scale: float = 0.1
    router_initializer_std: float | None = None
    expert_quantization: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        """Checks every value once, when the configuration is built.

        Raises:
            ConfigError: When a value is out of range or contradicts another.
        """
        check_field_types(self)
        for name in ("d_model", "d_ff", "num_experts", "num_selected_experts", "group_size"):
            check_integer(name, getattr(self, name), least=1)
        check_integer("num_shared_experts", self.num_shared_experts, least=0)
        expected = f"at most num_experts, {self.num_experts}"
        is_enough = self.num_selected_experts <= self.num_experts
        check(is_enough, "num_selected_experts", self.num_selected_experts, expected)
        counts = self.prefix_experts
        most = self.num_experts - self.num_selected_experts
        are_counts = isinstance(counts, Sequence) and all(is_kind(n, int) and n > 0 for n in counts)
        expected = f"numbers of experts, at most {most} together, so that other texts have {self.num_selected_experts}"
        check(are_counts and sum(counts) <= most, "prefix_experts", counts, expected)

        # Slots of an expert.
        check_integer("min_expert_capacity", self.min_expert_capacity, least=0)
        no_drops = "None to drop no token"
        for name in ("capacity_factor", "eval_capacity_factor"):
            check_number(name, getattr(self, name), above=0, optional=no_drops)
        follow = "None to follow the capacity factors"
        check_integer("expert_capacity", self.expert_capacity, least=1, optional=follow)

        # Dropout and initialisation. A rate of 1 would drop all hidden units.
        check_number("expert_dropout_rate", self.expert_dropout_rate, least=0, below=1)
        check_number("initializer_scale", self.initializer_scale, above=0)
        std = "None for that of the convention"
        check_number("router_initializer_std", self.router_initializer_std, least=0, optional=std)
        if self.expert_quantization is not None:
            _check_quantization(self.expert_quantization, self.d_model, self.d_ff)

        # The convention's options of the router, unless they are given.
        options = self.router_options
        check(isinstance(options, Mapping), "router_options", options, "a mapping of option names")
        known = option_names(ROUTERS.get(self.router))
        conventional = {
            name: value for name, value in self.rules.router_options.items() if name in known
        }
        object.__setattr__(self, "router_options", {**conventional, **options})
        check_router(self)

    @property
    def num_base_experts(self) -> int:
        """Experts that no prefix has: all texts may use them."""
        return self.num_experts - sum(self.prefix_experts)

    @property
    def rules(self) -> Rules:
        """The rules of the convention."""
        return CONVENTIONS[self.convention]

    def as_shared_experts(self) -> "SparseConfig":
        """Returns the settings of the shared experts: one expert, as wide as all of them."""
        return replace(
            self,
            d_ff=self.num_shared_experts * self.d_ff,
            num_experts=1,
            num_selected_experts=1,
            num_shared_experts=0,
            prefix_experts=(),
            router="token_choice",
            router_options={},
            expert_quantization=None,
        )


def _check_quantization(quantization: Any, d_model: int, d_ff: int) -> None:
    """Raises a ConfigError unless the experts' weights can be quantized so."""
    is_known = quantization == {"bits": 8}
    group_size: Any = None
    if isinstance(quantization, Mapping):
        group_size = quantization.get("group_size")
    if is_kind(group_size, int) and group_size > 1:
        divides = group_size % 2 == d_model % group_size == d_ff % group_size == 0
        is_known = divides and quantization == {"bits": 4, "group_size": group_size}
    expected = (
        '{"bits": 8}, or {"bits": 4, "group_size": 32} with an even divisor of '
        f"d_model, {d_model}, and of d_ff, {d_ff}"
    )
    check(is_known, "expert_quantization", quantization, expected)
