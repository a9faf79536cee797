"""Every router, one token at a time: who asks which expert, in which order, and who still finds a
slot.

Source: ST-MoE (arXiv:2202.08906) appendices D and G, Mesh-TensorFlow transformer/moe.py at a32810e;
other papers are named at their router. Idea: an expert is a counter that closes after `capacity`
tokens; tokens come one by one.

probs <float64>[G, S, E] carry the gradient, while decisions read plain numbers. mask is a nested
list [G][S], True for real tokens; padding has experts but asks for nothing. capacity None is room
for all.
"""

import math
from dataclasses import dataclass

import torch


@dataclass
class Routing:
    """Nested lists by [group][token][choice]."""

    expert_index: list  # int, of padding too
    requested: list  # bool: asked for a slot
    accepted: list  # bool: got one
    slot: list  # int; None where not accepted
    weight: list  # torch scalar; the float 0.0 where not accepted


def capacity_of(num_tokens, num_experts, factor, least, rounding="floor"):
    """Returns Mesh-TensorFlow's capacity in floating point, fairseq's when rounding is "ceil", or
    Flaxformer's when it is "round".
    """
    share = num_tokens * factor / num_experts
    if rounding == "round":
        return max(round(round(share, 9)), least)
    slots = math.ceil(share - 1e-9) if rounding == "ceil" else math.floor(share + 1e-9)
    return max(min(num_tokens, slots), least)


# ---- the steps that routers share ----


def best_first(scores, count):
    """Returns the indices of the `count` highest numbers, best first; of equals the lower index."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def nobody_served(expert_index):
    """Returns a routing in which nobody has asked for anything yet."""

    def everywhere(value):
        return [[[value for _ in choices] for choices in group] for group in expert_index]

    return Routing(
        expert_index, everywhere(False), everywhere(False), everywhere(None), everywhere(0.0)
    )


def ask(routing, used, capacity, group, token, choice, weight):
    """A token asks the expert of one of its choices for a slot; `used` [E] counts the group's filled
    slots.
    """
    expert = routing.expert_index[group][token][choice]
    routing.requested[group][token][choice] = True
    if capacity is None or used[expert] < capacity:
        routing.accepted[group][token][choice] = True
        routing.slot[group][token][choice] = used[expert]
        routing.weight[group][token][choice] = weight
        used[expert] += 1


def gates_of(probs, experts, normalize):
    """Returns the gates of one token's chosen experts."""
    gates = [probs[e] for e in experts]
    if normalize and len(experts) > 1:
        total = sum(gates)
        gates = [gate / (total + 1e-9) for gate in gates]
    return gates


def choice_keeps(choice, gate, policy, threshold):
    """Returns whether a choice asks for a slot: the first always, the others by the policy."""
    if choice == 0 or policy == "all":
        return True
    return {"none": False, "threshold": gate > threshold}[policy]


def serve_choice_by_choice(
    probs, mask, capacity, expert_index, order, policy, threshold, normalize
):
    """Serves choice 0 of all tokens, then choice 1 of all, and so on; order [G] lists each group's
    tokens in turn.
    """
    routing = nobody_served(expert_index)
    for g in range(len(mask)):
        used = [0] * probs.shape[-1]
        gates = [
            gates_of(p, experts, normalize)
            for p, experts in zip(probs[g], expert_index[g], strict=True)
        ]
        for choice in range(len(gates[0])):
            for s in order[g]:
                if mask[g][s] and choice_keeps(choice, gates[s][choice].item(), policy, threshold):
                    ask(routing, used, capacity, g, s, choice, gates[s][choice])
    return routing


def output_weights(routing, normalize_accepted, factor):
    """Changes the weights of a routing: relative to their sum over a token's accepted choices if
    there are several choices, and times `factor`.
    """
    for g, group in enumerate(routing.weight):
        for s, weights in enumerate(group):
            total = sum(weights)
            if not normalize_accepted or len(weights) == 1 or not any(routing.accepted[g][s]):
                total = 1.0
            group[s] = [factor * weight / total for weight in weights]
    return routing


# ---- tokens choose experts ----


def token_choice(probs, mask, capacity, num_selected, policy, threshold, normalize):
    """Every token chooses its best experts; tokens are served in the order of the sequence."""
    expert_index = [
        [best_first(token.tolist(), num_selected) for token in group] for group in probs
    ]
    order = [range(len(group)) for group in mask]
    return serve_choice_by_choice(
        probs, mask, capacity, expert_index, order, policy, threshold, normalize
    )


def switch(probs, mask, capacity):
    """One expert a token, weighed by its raw probability. Source: Switch Transformers
    (arXiv:2101.03961).
    """
    return token_choice(probs, mask, capacity, 1, policy="all", threshold=0.0, normalize=False)


def batch_prioritized(probs, mask, capacity, num_selected, policy, threshold, normalize):
    """Token choice, but inside each choice the surest tokens are served first. Source: V-MoE
    (arXiv:2106.05974).
    """
    expert_index = [
        [best_first(token.tolist(), num_selected) for token in group] for group in probs
    ]
    order = []
    for tokens, group_mask in zip(probs, mask, strict=True):
        sureness = [
            max(p.tolist()) if real else -1.0 for p, real in zip(tokens, group_mask, strict=True)
        ]
        order.append(best_first(sureness, len(sureness)))
    return serve_choice_by_choice(
        probs, mask, capacity, expert_index, order, policy, threshold, normalize
    )


def bias_balanced(probs, mask, capacity, bias, num_selected, normalize):
    """Chosen by probability plus bias [E], weighed without it. Source: loss-free balancing
    (arXiv:2408.15664).
    """
    expert_index = [
        [
            best_first([token[e].item() + bias[e] for e in range(len(bias))], num_selected)
            for token in group
        ]
        for group in probs
    ]
    order = [range(len(group)) for group in mask]
    return serve_choice_by_choice(probs, mask, capacity, expert_index, order, "all", 0.0, normalize)


def no_token_left_behind(probs, mask, capacity, num_candidates):
    """Who finds a counter closed goes to the next candidate. Source: Switch Transformers
    (arXiv:2101.03961).
    """
    routing = nobody_served(
        [[best_first(token.tolist(), num_candidates) for token in group] for group in probs]
    )
    for g, experts_of in enumerate(routing.expert_index):
        used = [0] * probs.shape[-1]
        for turn in range(num_candidates):
            for s, experts in enumerate(experts_of):
                if mask[g][s] and not any(routing.accepted[g][s]):
                    ask(routing, used, capacity, g, s, turn, probs[g][s][experts[turn]])
    return routing


def hash_by_token(token_ids, mask, capacity, num_experts, seed, hash_fn):
    """The token's id decides, token_ids [G][S]; nothing is learned. Source: Hash Layers
    (arXiv:2106.04426).
    """
    routing = nobody_served(
        [[[hash_fn(int(token), num_experts, seed)] for token in group] for group in token_ids]
    )
    for g, group in enumerate(mask):
        used = [0] * num_experts
        for s, real in enumerate(group):
            if real:
                ask(routing, used, capacity, g, s, 0, torch.ones((), dtype=torch.float64))
    return routing


def hash_by_murmur(token_ids, num_experts, seed):
    """Returns the expert of one id, or of a tensor of ids: the 32-bit finaliser of MurmurHash3, cut
    to 31 bits.
    """
    if isinstance(token_ids, torch.Tensor):
        experts = [
            hash_by_murmur(token, num_experts, seed) for token in token_ids.flatten().tolist()
        ]
        return torch.tensor(experts).reshape(token_ids.shape)
    low = 2**31
    mixed = (2 * token_ids + 1 + seed * 0x9E3779B1 % low) % low
    mixed = (mixed ^ mixed // 2**16) * 0x45D9F3B % low
    mixed = (mixed ^ mixed // 2**16) * 0x119DE1F3 % low
    return (mixed ^ mixed // 2**15) % num_experts


# ---- experts choose tokens ----


def experts_take(scores, mask, capacity):
    """Every expert takes the real tokens that score highest, scores [G][S][E]; choice e of a token
    is expert e.
    """
    num_experts = len(scores[0][0])
    routing = nobody_served([[list(range(num_experts)) for _ in group] for group in mask])
    for g, group in enumerate(mask):
        real = [s for s in range(len(group)) if group[s]]
        used = [0] * num_experts
        for e in range(num_experts):
            room = len(real) if capacity is None else min(capacity, len(real))
            for rank in best_first([scores[g][s][e].item() for s in real], room):
                ask(routing, used, capacity, g, real[rank], e, scores[g][real[rank]][e])
    return routing


def expert_choice_over_experts(probs, mask, capacity):
    """Experts take their best tokens by probability. Source: Expert Choice (arXiv:2202.09368)."""
    return experts_take(probs, mask, capacity)


def expert_choice_over_tokens(logits, mask, capacity):
    """Experts compare tokens by a softmax over them; who is taken twice is weighed half. Source:
    Mesh-TensorFlow.
    """
    scores = [[[None for _ in token] for token in group] for group in logits]
    for g, group in enumerate(mask):
        real = [s for s in range(len(group)) if group[s]]
        for e in range(logits.shape[-1] if real else 0):
            share = torch.stack([logits[g][s][e] for s in real]).softmax(dim=0)
            for rank, s in enumerate(real):
                scores[g][s][e] = share[rank]
    routing = experts_take(scores, mask, capacity)
    for g in range(len(mask)):
        for weights, accepted in zip(routing.weight[g], routing.accepted[g], strict=True):
            for e in range(len(weights)):
                if accepted[e]:
                    weights[e] = weights[e] / sum(accepted)
    return routing
