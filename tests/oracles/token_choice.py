"""Two slow and obvious token-choice layers: a loop over tokens, and the dense einsum with [G, S, E, C] masks.

The loop follows ST-MoE's rules word for word in plain Python; the einsum is how Mesh-TensorFlow computes the same.
"""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F


@dataclass
class LoopResult:
    """What the loop finds; nested lists by group, token and place."""

    expert_index: list = field(default_factory=list)
    accepted: list = field(default_factory=list)
    slot: list = field(default_factory=list)
    output: torch.Tensor | None = None
    load_balance_loss: torch.Tensor | None = None
    router_z_loss: torch.Tensor | None = None
    dropped_tokens: int = 0


def run_expert(layer, expert, token):
    """Returns one expert's output for one token [D]."""
    experts, config = layer.experts, layer.config
    if config.gated:
        gate, up = (experts.gate_up_proj[expert] @ token).split(config.d_ff)
        hidden = (F.gelu(gate, approximate="tanh") if config.activation == "gelu" else F.relu(gate)) * up
    else:
        hidden = experts.up_proj[expert] @ token
        hidden = F.gelu(hidden, approximate="tanh") if config.activation == "gelu" else F.relu(hidden)
    if config.expert_bias == "additive":
        hidden = hidden + experts.bias[expert]
    elif config.expert_bias == "multiplicative":
        hidden = hidden * experts.bias[expert]
    return experts.down_proj[expert] @ hidden


def loop_over_tokens(layer, groups, mask, capacity, policy):
    """Routes `groups` [G, S, D] with `mask` [G, S] token by token; `policy` is all, none or threshold."""
    config, result = layer.config, LoopResult()
    num_experts, places = config.num_experts, config.num_selected_experts
    outputs, balance, z = [], [], []
    for tokens, real in zip(groups, mask.tolist(), strict=True):
        probs = [torch.softmax(layer.router.gate @ token, dim=0) for token in tokens]
        chosen = [sorted(range(num_experts), key=lambda e, p=p: (-p[e].item(), e))[:places] for p in probs]
        gates = []
        for p, experts in zip(probs, chosen, strict=True):
            raw = [p[e] for e in experts]
            gates.append(raw if places == 1 else [g / (sum(raw) + 1e-9) for g in raw])
        used = [0] * num_experts
        accepted = [[False] * places for _ in tokens]
        slots = [[None] * places for _ in tokens]
        for place in range(places):
            for s in range(len(tokens)):
                keep = place == 0 or policy == "all"
                keep = keep or (policy == "threshold" and gates[s][place].item() > config.second_expert_threshold)
                if real[s] and keep and used[chosen[s][place]] < capacity:
                    slots[s][place] = used[chosen[s][place]]
                    used[chosen[s][place]] += 1
                    accepted[s][place] = True
        for s, token in enumerate(tokens):
            y = torch.zeros_like(token)
            for place in range(places):
                if accepted[s][place]:
                    y = y + gates[s][place] * run_expert(layer, chosen[s][place], token)
            outputs.append(y)
            result.dropped_tokens += int(real[s] and not any(accepted[s]))
        real_tokens = [s for s in range(len(tokens)) if real[s]]
        if real_tokens:
            n = len(real_tokens)
            share = [sum(chosen[s][0] == e for s in real_tokens) / n for e in range(num_experts)]
            mean = [sum(probs[s][e] for s in real_tokens) / n for e in range(num_experts)]
            balance.append(num_experts * sum(f * p for f, p in zip(share, mean, strict=True)))
            z += [torch.logsumexp(layer.router.gate @ tokens[s], dim=0) ** 2 for s in real_tokens]
        result.expert_index.append(chosen)
        result.accepted.append(accepted)
        result.slot.append(slots)
    result.output = torch.stack(outputs).reshape(groups.shape)
    zero = groups.new_zeros(())
    result.load_balance_loss = sum(balance) / len(balance) if balance else zero
    result.router_z_loss = sum(z) / len(z) if z else zero
    return result


def dense_einsum(layer, groups, plan):
    """Returns the output [G, S, D] by one-hot dispatch and combine masks [G, S, E, C] of a plan."""
    config = layer.config
    capacity = plan.capacity if plan.capacity is not None else groups.shape[1]
    expert = F.one_hot(plan.expert_index, config.num_experts)
    slot = F.one_hot(plan.slot.clamp(max=max(capacity - 1, 0)), max(capacity, 1))
    places = torch.einsum("gske,gskc,gsk->gsec", expert.double(), slot.double(), plan.accepted.double())
    combine = torch.einsum("gske,gskc,gsk->gsec", expert.double(), slot.double(), plan.combine_weight)
    buffers = torch.einsum("gsec,gsd->gecd", places, groups)
    outputs = torch.stack(
        [
            torch.stack([torch.stack([run_expert(layer, e, row) for row in rows]) for e, rows in enumerate(group)])
            for group in buffers
        ]
    )
    return torch.einsum("gsec,gecd->gsd", combine, outputs)


def capacity_of(num_tokens, num_experts, factor, least):
    """Returns Mesh-TensorFlow's capacity in floating point."""
    return max(min(num_tokens, math.floor(num_tokens * factor / num_experts + 1e-9)), least)
