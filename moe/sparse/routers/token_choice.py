"""Token choice: every token chooses its K best experts. The router of ST-MoE."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from moe.checks import check_number
from moe.sparse.config import SparseConfig
from moe.sparse.plan import DispatchPlan, RouterScores
from moe.sparse.router import Router
from moe.sparse.router_options import ROUTERS

Policy = Literal["all", "none", "threshold", "random"]


@dataclass(frozen=True)
class TokenChoiceOptions:
    """Options of token choice.

    Attributes:
        second_expert_policy: Whether choices 2..K are requested in training: `all`, `none`,
            `threshold` (iff the gate is above the threshold) or `random` (with probability
            gate / threshold).
        eval_second_expert_policy: The same outside training. The reference draws there too;
            `threshold` is its deterministic counterpart, so that one input always has one output.
        second_expert_threshold: Gate (normalised if enabled) above which `threshold` and `random`
            always request a choice in training.
        eval_second_expert_threshold: The same outside training.
        normalize_gates: Whether the K gates are divided by their sum; a single gate stays raw, or
            the router would get no gradient from the task.
        normalize_accepted: Whether the gates are divided by the sum of the accepted ones. A token
            with one accepted expert gives it weight 1.
        token_dropout: Probability in training that a token's output is zero, which is not made up
            for; outside training the output is multiplied by its complement.
    """

    second_expert_policy: Policy = "random"
    eval_second_expert_policy: Policy = "threshold"
    second_expert_threshold: float = 0.2
    eval_second_expert_threshold: float = 0.2
    normalize_gates: bool = True
    normalize_accepted: bool = False
    token_dropout: float = 0.0

    def check(self, config: SparseConfig) -> None:
        """Raises a ConfigError when a value is out of range."""
        for name in ("second_expert_threshold", "eval_second_expert_threshold"):
            reason = "policy 'all' always uses every choice"
            check_number(name, getattr(self, name), above=0, reason=reason)
        check_number("token_dropout", self.token_dropout, least=0, below=1)


@ROUTERS.register("token_choice")
class TokenChoiceRouter(Router):
    """Every token chooses its K best experts; see `TokenChoiceOptions`.

    A choice that is dropped by the policy or by capacity is not compensated, unless
    `normalize_accepted` is set: the other gates stay unchanged.

    Source:
        ST-MoE (arXiv:2202.08906) §3.4 and appendix G; Mesh-TensorFlow transformer/moe.py at
        a32810e, `_top_n_gating`; token dropout: NLLB (arXiv:2207.04672) §6.2, expert output
        masking. Differs: eval_second_expert_policy, see there.
    """

    Options: ClassVar[type[TokenChoiceOptions]] = TokenChoiceOptions
    knows_prefixes: ClassVar[bool] = True

    def assign(
        self, scores: RouterScores, token_mask: Tensor, *, drop_tokens: bool = True
    ) -> DispatchPlan:
        """Returns the plan for scores <float32>[G, S, E]; see `Router.assign`."""
        # The K best experts of each token, and the gate of each.
        num_selected = self.config.num_selected_experts
        expert_index = select_experts(self.preference(scores), num_selected)  # [G, S, K]
        gates = self.gates(scores, expert_index)  # [G, S, K]

        # Appendix G: whether the second expert is worth its slot. Padding requests nothing.
        policy, threshold = self._second_expert_policy()
        requested = keep_choices(gates, token_mask, policy, threshold)  # [G, S, K]

        # Capacity: first choices before second ones, in the order of the sequence.
        plan = self.plan_choices(
            expert_index,
            gates,
            requested,
            token_mask,
            drop_tokens=drop_tokens,
            priority=self.priority(scores, token_mask),
        )
        return plan._replace(combine_weight=self._output_weight(plan.combine_weight))

    def combine_weight(self, scores: RouterScores, plan: DispatchPlan) -> Tensor:
        """Returns the weights <float32>[G, S, K] of a plan's choices; see `Router.combine_weight`."""
        return self._output_weight(super().combine_weight(scores, plan))

    def _output_weight(self, gates: Tensor) -> Tensor:
        """Returns the weights <float32>[G, S, K] of gates of that shape, 0 where not accepted."""
        options = self.options
        weight = gates
        if options.normalize_accepted and gates.shape[-1] > 1:
            total = gates.sum(dim=-1, keepdim=True)
            weight = gates / total.clamp(min=torch.finfo(gates.dtype).eps)

        # Unscaled in training, as in fairseq.
        if options.token_dropout and self.training:
            weight = weight * (torch.rand_like(weight[..., :1]) >= options.token_dropout)
        elif options.token_dropout:
            weight = weight * (1 - options.token_dropout)
        return weight

    def gates(self, scores: RouterScores, expert_index: Tensor) -> Tensor:
        """Returns the probabilities <float32>[G, S, K], normalised where the options say so."""
        gates = super().gates(scores, expert_index)
        return normalize_gates(gates) if self.options.normalize_gates else gates

    def _second_expert_policy(self) -> tuple[Policy, float]:
        """Returns policy and threshold of training or of evaluation."""
        options = self.options
        if self.training:
            return options.second_expert_policy, options.second_expert_threshold
        return options.eval_second_expert_policy, options.eval_second_expert_threshold

    def preference(self, scores: RouterScores) -> Tensor:
        """Returns the scores <float32>[G, S, E] of which each token chooses the K largest."""
        return scores.probs

    def priority(self, scores: RouterScores, token_mask: Tensor) -> Tensor | None:
        """Returns which tokens are served first among equal choices.

        Returns:
            <float32>[G, S], the larger the earlier; None for the order of the sequence.
        """
        return None


def select_experts(scores: Tensor, num_selected_experts: int) -> Tensor:
    """Returns the K experts of highest score, best first; ties go to the lower index.

    Args:
        scores: <float32>[G, S, E].
        num_selected_experts: Experts to select, K.

    Returns:
        <int64>[G, S, K].
    """
    remaining = scores.detach()
    selected: list[Tensor] = []
    for choice in range(num_selected_experts):
        # The expert of the choice before cannot be selected again.
        if choice > 0:
            remaining = remaining.scatter(-1, selected[-1], float("-inf"))
        selected.append(remaining.argmax(dim=-1, keepdim=True))  # [G, S, 1]
    return selected[0] if num_selected_experts == 1 else torch.cat(selected, dim=-1)  # [G, S, K]


def normalize_gates(gates: Tensor) -> Tensor:
    """Returns gates that sum to 1 over the K choices; a single gate stays raw.

    Args:
        gates: <float32>[G, S, K] router probabilities of the chosen experts.

    Returns:
        <float32>[G, S, K].
    """
    if gates.shape[-1] == 1:
        return gates
    return gates / (gates.sum(dim=-1, keepdim=True) + 1e-9)


def keep_choices(gates: Tensor, token_mask: Tensor, policy: Policy, threshold: float) -> Tensor:
    """Returns which choices of real tokens ask for a slot: the first always, the others by the policy.

    Args:
        gates: <float32>[G, S, K] gates.
        token_mask: <bool>[G, S] real tokens.
        policy: `all`, `none`, `threshold` or `random`; the last draws from torch's generator.
        threshold: Gate above which `threshold` keeps a choice, and from which on `random` always
            does.

    Returns:
        <bool>[G, S, K].

    Source:
        ST-MoE (arXiv:2202.08906) appendix G: probability min(1, gate / threshold).
    """
    is_real = token_mask[..., None].expand_as(gates)
    if policy == "all" or gates.shape[-1] == 1:
        return is_real

    if policy == "none":
        keep = torch.zeros_like(gates, dtype=torch.bool)
    elif policy == "threshold":
        keep = gates > threshold
    else:
        # A uniform number is below gate / threshold with probability min(1, gate / threshold).
        keep = torch.rand_like(gates) < gates / threshold

    keep[..., 0] = True
    return keep & is_real
