"""Token choice: every token chooses its K best experts. The router of ST-MoE."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from moe.checks import check_number
from moe.sparse.config import SparseConfig
from moe.sparse.plan import DispatchPlan, assign_slots
from moe.sparse.router import ROUTERS, Router
from moe.sparse.scores import RouterScores

Policy = Literal["all", "none", "threshold", "random"]


@dataclass(frozen=True)
class TokenChoiceOptions:
    """Options of token choice.

    Attributes:
        second_expert_policy: Whether places 2..K are used in training: `all`, `none`, `threshold`
            (iff the gate is above the threshold) or `random` (with probability gate / threshold).
        eval_second_expert_policy: The same outside training. The reference draws there too;
            `threshold` is its deterministic counterpart, so that one input always has one output.
        second_expert_threshold: Gate at which `threshold` and `random` use a place for certain, in
            training.
        eval_second_expert_threshold: The same outside training.
        normalize_gates: Whether the K gates are divided by their sum; a single gate stays raw, or
            the router would get no gradient from the task.
    """

    second_expert_policy: Policy = "random"
    eval_second_expert_policy: Policy = "threshold"
    second_expert_threshold: float = 0.2
    eval_second_expert_threshold: float = 0.2
    normalize_gates: bool = True

    def check(self, config: SparseConfig) -> None:
        """Raises a ConfigError when a value is out of range."""
        for name in ("second_expert_threshold", "eval_second_expert_threshold"):
            check_number(
                name, getattr(self, name), above=0, reason="policy 'all' always uses every place"
            )


@ROUTERS.register("token_choice")
class TokenChoiceRouter(Router):
    """Every token chooses its K best experts; see `TokenChoiceOptions`.

    A place that is lost to the policy or to capacity is not made up for: the other gates stay as
    they are.

    Source:
        ST-MoE (arXiv:2202.08906) §3.4 and appendix G; Mesh-TensorFlow transformer/moe.py at
        a32810e, `_top_n_gating`. Differs: eval_second_expert_policy, see there.
    """

    Options: ClassVar[type[TokenChoiceOptions]] = TokenChoiceOptions

    def assign(
        self, scores: RouterScores, token_mask: Tensor, *, drop_tokens: bool = True
    ) -> DispatchPlan:
        """Returns the plan for these scores; see `Router.assign`."""
        config, options = self.config, self.options
        policy = (
            options.second_expert_policy if self.training else options.eval_second_expert_policy
        )
        threshold = (
            options.second_expert_threshold
            if self.training
            else options.eval_second_expert_threshold
        )
        capacity = self.capacity(token_mask.shape[1], drop_tokens)

        expert_index = select_experts(scores.probs, config.num_selected_experts)
        gates = scores.probs.gather(-1, expert_index)
        if options.normalize_gates:
            gates = normalize_gates(gates)
        wanted = keep_places(gates, policy, threshold) & token_mask[..., None]
        slot, accepted = assign_slots(
            expert_index, wanted, config.num_experts, capacity, self.priority(scores, token_mask)
        )
        return DispatchPlan(
            expert_index, slot, accepted, gates * accepted, wanted, token_mask, capacity
        )

    def priority(self, scores: RouterScores, token_mask: Tensor) -> Tensor | None:
        """Returns who is served first within a place, <float32>[G, S]; None for the order of the
        sequence.
        """
        return None


def select_experts(scores: Tensor, num_selected_experts: int) -> Tensor:
    """Returns the K experts of highest score, best first; of equals the lower index.

    Args:
        scores: <float32>[G, S, E].
        num_selected_experts: K.

    Returns:
        <int64>[G, S, K].
    """
    remaining, chosen = scores.detach(), []
    for place in range(num_selected_experts):
        if place:
            remaining = remaining.scatter(-1, chosen[-1], float("-inf"))
        chosen.append(remaining.argmax(dim=-1, keepdim=True))
    return torch.cat(chosen, dim=-1)


def normalize_gates(gates: Tensor) -> Tensor:
    """Returns gates that sum to 1 over the K places; a single gate stays raw.

    Args:
        gates: <float32>[G, S, K] router probabilities of the chosen experts.
    """
    if gates.shape[-1] == 1:
        return gates
    return gates / (gates.sum(dim=-1, keepdim=True) + 1e-9)


def keep_places(gates: Tensor, policy: Policy, threshold: float) -> Tensor:
    """Returns which places ask for a slot: the first always, the others by the policy.

    Args:
        gates: <float32>[G, S, K] gates.
        policy: `all`, `none`, `threshold` or `random`; the last draws from torch's generator.
        threshold: Gate above which `threshold` keeps a place, and from which on `random` always
            does.

    Returns:
        <bool>[G, S, K].

    Source:
        ST-MoE (arXiv:2202.08906) appendix G: probability min(1, gate / threshold).
    """
    if policy == "all" or gates.shape[-1] == 1:
        return torch.ones_like(gates, dtype=torch.bool)
    if policy == "none":
        keep = torch.zeros_like(gates, dtype=torch.bool)
    elif policy == "threshold":
        keep = gates > threshold
    else:
        keep = torch.rand_like(gates) < gates / threshold
    first = torch.arange(gates.shape[-1], device=gates.device) == 0
    return keep | first
