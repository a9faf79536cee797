"""The router: scores of every expert for every token, and the resulting plan.

Comes after groups.py; dispatch.py carries the plan out. The common parts of all routers are here;
each router is a file in moe/sparse/routers/. Read token_choice.py first, the router of ST-MoE.
"""

import math
from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from moe.errors import DataError, NonFiniteError
from moe.kernels.torch_private import assert_on_device, autocast_disabled, is_in_functorch
from moe.sparse.capacity import slots_of_expert
from moe.sparse.config import SparseConfig
from moe.sparse.examples import prefix_scores
from moe.sparse.experts import truncated_normal_
from moe.sparse.inputs import can_read_values
from moe.sparse.losses import RouterLosses, router_losses
from moe.sparse.plan import DispatchPlan, RouterScores, assign_slots, router_scores
from moe.sparse.router_options import NoOptions
from moe.sparse.stats import RouterStats


class RouterInputs(NamedTuple):
    """Inputs of a router.

    Attributes:
        tokens: <any float>[G, S, D] hidden states.
        token_mask: <bool>[G, S] real tokens; None when all are.
        token_ids: <int64>[G, S] vocabulary ids; None when the caller has none.
        word_embeddings: <any float>[G, S, D] embeddings of those ids; None when the caller has
            none.
        prefix_numbers: <int64>[G, S] prefix of the token's example, counted from 1, or 0; None when
            no example has one.
        starts: <bool>[G, S] first tokens of examples; None unless the router needs them.
    """

    tokens: Tensor
    token_mask: Tensor | None = None
    token_ids: Tensor | None = None
    word_embeddings: Tensor | None = None
    prefix_numbers: Tensor | None = None
    starts: Tensor | None = None


class Router(nn.Module):
    """Base of the routers: a float32 gate, and a rule that makes a plan of its scores.

    Everything from the gate's input to the plan is float32 (float64 in a float64 model), regardless
    of autocast and of the parameters' dtype. A router is a subclass with `assign`, registered in
    ROUTERS.

    Attributes:
        Options: Frozen dataclass of the settings of this router alone; `check(config)` of it is
            optional.
        causal: Whether a token's choice never depends on later tokens; if not, the router cannot be
            used in a decoder. Capacity can still cost a token a choice after its first through
            later tokens; see `assign_slots`.
        single: Whether a token has one expert, so that `num_selected_experts` must be 1.
        experts_choose: Whether experts choose their tokens: the experts of a token then depend on
            the other tokens of its group, for any capacity.
        needs_token_ids: Whether the router reads the ids of the tokens.
        needs_starts: Whether the router reads in training where examples start.
        knows_prefixes: Whether experts may belong to a prefix: an expert of probability 0 is then
            never preferred to another.
    """

    Options: ClassVar[type[Any]] = NoOptions
    causal: ClassVar[bool] = True
    single: ClassVar[bool] = False
    experts_choose: ClassVar[bool] = False
    needs_token_ids: ClassVar[bool] = False
    needs_starts: ClassVar[bool] = False
    knows_prefixes: ClassVar[bool] = False

    def __init__(self, config: SparseConfig) -> None:
        super().__init__()
        self.config = config
        self.options = self.Options(**config.router_options)

        # A router without parameters, such as `hash`, has no gate.
        if self.num_parameters(config):
            self.gate = nn.Parameter(torch.empty(config.num_experts, self.gate_width(config)))
        self.reset_parameters()

    @staticmethod
    def gate_width(config: SparseConfig) -> int:
        """Returns the width of the gate's input: D or 2D."""
        return config.d_model * (2 if config.router_input.startswith("concat") else 1)

    @classmethod
    def num_parameters(cls, config: SparseConfig) -> int:
        """Returns the router's number of parameters, before anything is built."""
        return config.num_experts * cls.gate_width(config)

    @classmethod
    def num_choices(cls, config: SparseConfig) -> int:
        """Returns the most experts that a token may reach, K."""
        return config.num_selected_experts

    def reset_parameters(self) -> None:
        """Re-initializes the gate: normal, or truncated normal with variance scale / fan_in.

        `router_initializer_std` says which, or the convention.
        """
        if not self.num_parameters(self.config):
            return

        # Flaxformer's normal, or the truncated normal of Mesh-TensorFlow.
        std = self.config.router_initializer_std
        if std is None:
            std = self.config.rules.router_initializer_std
        if std is not None:
            nn.init.normal_(self.gate, std=std)
        else:
            fan_in = self.gate.shape[1]
            truncated_normal_(self.gate, math.sqrt(self.config.initializer_scale / fan_in))

    def forward(self, inputs: RouterInputs) -> RouterScores:
        """Returns the scores of every expert for every token.

        Scores of padding are computed from zero logits, without a gradient.

        Raises:
            NonFiniteError: When the scores of a real token are not finite.
            DataError: When a needed input is missing.
        """
        # Selective precision: the router computes in float32 at least, regardless of its
        # surroundings.
        dtype = torch.promote_types(inputs.tokens.dtype, torch.float32)
        with autocast_disabled(inputs.tokens.device.type):
            gate_input = self.gate_input(inputs)  # [G, S, D or 2D]

            # Padding must not reach the gate: it may hold NaN, and it has no scores.
            if inputs.token_mask is not None:
                gate_input = gate_input.where(inputs.token_mask[..., None], 0)

            gate_input = self.perturb(gate_input.to(dtype))
            gate = self.gate.to(dtype)
            if counts := self.config.prefix_experts:
                parts = gate.split([self.config.num_base_experts, *counts])
                logits = [gate_logits(gate_input, part) for part in parts]
                scores = prefix_scores(logits, inputs.prefix_numbers)
            else:
                scores = router_scores(gate_logits(gate_input, gate))  # [G, S, E]
        _refuse_not_finite(scores.logits)
        return scores

    def gate_input(self, inputs: RouterInputs) -> Tensor:
        """Returns the gate's inputs: hidden states, optionally with word embeddings.

        Returns:
            <any float>[G, S, D or 2D].

        Raises:
            DataError: When word embeddings are required but not given.

        Source:
            ST-MoE (arXiv:2202.08906) appendix C: neutral after long training; the hidden state
            alone is the default.
        """
        # The default: the hidden state alone.
        mode = self.config.router_input
        tokens = inputs.tokens
        if mode == "hidden":
            return tokens

        # The token's word embedding, in addition to its hidden state.
        words = inputs.word_embeddings
        if words is None:
            raise DataError(
                f"router_input is {mode!r}, but the layer got no word embeddings. Pass word_embeddings [B, L, D] "
                "beside the tokens, or set router_input to 'hidden'."
            )
        if mode.endswith("stop_gradient"):
            words = words.detach()

        if mode.startswith("add"):
            return tokens + words  # [G, S, D]
        return torch.cat([tokens, words.to(tokens.dtype)], dim=-1)  # [G, S, 2D]

    def perturb(self, gate_input: Tensor) -> Tensor:
        """Returns the gate's input with the noise that the router adds to it; by default none.

        Args:
            gate_input: <float32>[G, S, D or 2D].

        Returns:
            <float32>[G, S, D or 2D].
        """
        return gate_input

    @abstractmethod
    def assign(
        self, scores: RouterScores, token_mask: Tensor, *, drop_tokens: bool = True
    ) -> DispatchPlan:
        """Returns the plan for these scores.

        Args:
            scores: <float32>[G, S, E] of each kind.
            token_mask: <bool>[G, S] real tokens; padding requests nothing.
            drop_tokens: False gives every expert capacity for all tokens, regardless of the
                capacity factor.
        """

    def gates(self, scores: RouterScores, expert_index: Tensor) -> Tensor:
        """Returns the weight of each choice, if it is accepted; by default its probability.

        Args:
            scores: <float32>[G, S, E] of each kind.
            expert_index: <int64>[G, S, K] expert of each choice.

        Returns:
            <float32>[G, S, K].
        """
        return scores.probs.gather(-1, expert_index)

    def combine_weight(self, scores: RouterScores, plan: DispatchPlan) -> Tensor:
        """Returns the weights <float32>[G, S, K] of a plan's choices, 0 where not accepted.

        For a plan made by `assign`, they are its own weights; for another plan, this router's
        weights for its choices.
        """
        return self.gates(scores, plan.expert_index) * plan.accepted

    def losses(self, scores: RouterScores, plan: DispatchPlan) -> RouterLosses:
        """Returns the auxiliary losses of a plan."""
        return router_losses(scores, plan, self.config)

    @torch.no_grad()
    def update(self, stats: RouterStats) -> None:
        """Learns from the load of a whole update; called once after the optimizer's step.

        Most routers do not.
        """

    def capacity(self, num_tokens: int, drop_tokens: bool) -> int | None:
        """Returns the slots of an expert in a group of `num_tokens`; None for room for all."""
        if not drop_tokens:
            return None
        return slots_of_expert(self.config, num_tokens, training=self.training)

    def plan_choices(
        self,
        expert_index: Tensor,
        gates: Tensor,
        requested: Tensor,
        token_mask: Tensor,
        *,
        drop_tokens: bool,
        priority: Tensor | None = None,
    ) -> DispatchPlan:
        """Returns the plan in which choices queue for the slots of their experts.

        Args:
            expert_index: <int64>[G, S, K] expert of each choice.
            gates: <float32>[G, S, K] weight of each choice, should it be accepted.
            requested: <bool>[G, S, K] choices that request a slot; never for padding.
            token_mask: <bool>[G, S] real tokens.
            drop_tokens: False gives every choice a slot.
            priority: <float32>[G, S] who is served first; see `assign_slots`.
        """
        capacity = self.capacity(token_mask.shape[1], drop_tokens)
        slot, accepted = assign_slots(
            expert_index, requested, self.config.num_experts, capacity, priority
        )
        return DispatchPlan(
            expert_index=expert_index,
            slot=slot,
            accepted=accepted,
            combine_weight=gates * accepted,
            requested=requested,
            token_mask=token_mask,
            capacity=capacity,
        )


def gate_logits(gate_input: Tensor, gate: Tensor) -> Tensor:
    """Returns the logits of every expert for every token.

    The gate is the left factor, since libraries compute this several times faster.

    Args:
        gate_input: <float32>[G, S, D or 2D].
        gate: <float32>[E, D or 2D].

    Returns:
        <float32>[G, S, E].
    """
    logits = gate @ gate_input.flatten(0, 1).t()  # [E, G * S]
    logits = logits.unflatten(1, gate_input.shape[:2])  # [E, G, S]
    return logits.permute(1, 2, 0).contiguous()


def _refuse_not_finite(logits: Tensor) -> None:
    """Raises a NonFiniteError when <float>[G, S, E] holds NaN or infinity.

    On an accelerator the error appears later, since the host does not wait for it.
    """
    is_abstract = torch.compiler.is_compiling() or is_in_functorch() or logits.is_meta
    if is_abstract or not logits.numel():
        return

    message = (
        "The router's logits are not finite: its input or its weights hold NaN or infinity. Look for the first layer "
        "whose output is not finite; lower the learning rate, or use bfloat16 instead of float16."
    )
    # Largest less least is below infinity only if all are finite, and takes one pass.
    least, largest = logits.aminmax()
    spread = largest - least
    if logits.device.type != "cpu":
        assert_on_device(spread < math.inf, message)
    elif can_read_values(logits) and not math.isfinite(spread.item()):
        raise NonFiniteError(message)
