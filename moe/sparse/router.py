"""The router: tokens to a plan. Comes after groups.py; dispatch.py carries the plan out."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.sparse.capacity import expert_capacity
from moe.sparse.config import Policy, SparseConfig
from moe.sparse.plan import DispatchPlan, assign_slots


class TokenChoiceRouter(nn.Module):
    """Every token chooses its K best experts.

    Everything from the gate's input to the plan is float32 (float64 in a float64 model), whatever the autocast or
    parameter dtype.

    Source:
        ST-MoE (arXiv:2202.08906) §3.4 and appendix G; Mesh-TensorFlow transformer/moe.py at a32810e,
        `_top_n_gating`. Differs: no.
    """

    def __init__(self, config: SparseConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Parameter(torch.empty(config.num_experts, config.d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the gate anew: normal with `router_initializer_std`."""
        nn.init.normal_(self.gate, std=self.config.router_initializer_std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the router logits <float32>[G, S, E] of tokens <any float>[G, S, D]."""
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            return F.linear(tokens.to(dtype), self.gate.to(dtype))

    def assign(self, router_logits: Tensor, token_mask: Tensor, *, drop_tokens: bool = True) -> DispatchPlan:
        """Returns the plan for these logits.

        A place that is lost to the policy or to capacity is not made up for: the other gates stay as they are.

        Args:
            router_logits: <float32>[G, S, E].
            token_mask: <bool>[G, S] real tokens; padding asks for nothing.
            drop_tokens: False gives every expert room for all tokens, whatever the capacity factor.
        """
        config = self.config
        policy = config.second_expert_policy if self.training else config.eval_second_expert_policy
        capacity = self._capacity(token_mask.shape[1]) if drop_tokens else None

        router_probs = router_logits.softmax(dim=-1)
        expert_index = select_experts(router_probs, config.num_selected_experts)
        gates = normalize_gates(router_probs.gather(-1, expert_index))
        wanted = keep_places(gates, policy, config.second_expert_threshold) & token_mask[..., None]
        slot, accepted = assign_slots(expert_index, wanted, config.num_experts, capacity)
        return DispatchPlan(expert_index, slot, accepted, gates * accepted, wanted, token_mask, capacity)

    def _capacity(self, num_tokens: int) -> int | None:
        """Returns the slots of an expert in a group of `num_tokens`; None when nothing is ever dropped."""
        config = self.config
        factor = config.capacity_factor if self.training else config.eval_capacity_factor
        if factor is None:
            return None
        return expert_capacity(num_tokens, config.num_experts, factor, config.min_expert_capacity)


def select_experts(router_probs: Tensor, num_selected_experts: int) -> Tensor:
    """Returns the K most probable experts, best first; of equals the lower index.

    Args:
        router_probs: <float32>[G, S, E].
        num_selected_experts: K.

    Returns:
        <int64>[G, S, K].
    """
    remaining = router_probs.detach()
    chosen = []
    for _ in range(num_selected_experts):
        best = remaining.argmax(dim=-1, keepdim=True)
        remaining = remaining.scatter(-1, best, -1.0)
        chosen.append(best)
    return torch.cat(chosen, dim=-1)


def normalize_gates(gates: Tensor) -> Tensor:
    """Returns gates that sum to 1 over the K places; a single gate stays raw, or the router would get no gradient.

    Args:
        gates: <float32>[G, S, K] router probabilities of the chosen experts.
    """
    if gates.shape[-1] == 1:
        return gates
    return gates / (gates.sum(dim=-1, keepdim=True) + 1e-9)


def keep_places(gates: Tensor, policy: Policy, threshold: float) -> Tensor:
    """Returns which places ask for a slot: the first always, the others by the policy.

    Args:
        gates: <float32>[G, S, K] normalised gates.
        policy: `all`, `none`, `threshold` or `random`; the last draws from torch's generator.
        threshold: Gate above which `threshold` keeps a place, and from which on `random` always does.

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
