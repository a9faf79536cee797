"""What a routing did, counted choice by choice, and the numbers that people read.

Source: this project's own definitions, written out here and in moe/sparse/stats.py. Idea: tally
marks; every value is a plain int or float.
"""

import math


def statistics(probs, mask, routing, num_experts, capacity):
    """Returns sums and counts over the real tokens of all groups; probs [G, S, E], mask [G][S]."""
    num_choices = len(routing.expert_index[0][0])
    count = {
        "expert_load": [0] * num_experts,
        "accepted_load": [0] * num_experts,
        "num_tokens": 0,
        "num_positions": 0,
        "dropped_tokens": 0,
        "dropped_by_choice": [0] * num_choices,
        "second_expert_tokens": 0,
        "num_slots": 0,
        "entropy_sum": 0.0,
        "confidence_sum": 0.0,
    }
    for g in range(len(mask)):
        for s in range(len(mask[g])):
            count["num_positions"] += 1
            if mask[g][s]:
                count_token(count, routing, g, s)
                count["entropy_sum"] += entropy_of(probs[g][s].tolist())
    filled = sum(count["accepted_load"])
    count["num_slots"] = filled if capacity is None else len(mask) * num_experts * capacity
    return count


def count_token(count, routing, g, s):
    """Adds one real token to the tally."""
    count["num_tokens"] += 1
    for choice, expert in enumerate(routing.expert_index[g][s]):
        requested, accepted = routing.requested[g][s][choice], routing.accepted[g][s][choice]
        if requested:
            count["expert_load"][expert] += 1
        if accepted:
            count["accepted_load"][expert] += 1
            count["confidence_sum"] += routing.weight[g][s][choice].item()
        if requested and not accepted:
            count["dropped_by_choice"][choice] += 1
    if sum(routing.accepted[g][s]) == 0:
        count["dropped_tokens"] += 1
    if sum(routing.accepted[g][s]) >= 2:
        count["second_expert_tokens"] += 1


def entropy_of(probs):
    """Returns the entropy of a list of probabilities in nats."""
    return -sum(p * math.log(p) for p in probs if p > 0)


def summary(count):
    """Returns the numbers that people read; a share of nothing is 0."""

    def share(part, whole):
        return part / whole if whole else 0.0

    load = count["expert_load"]
    mean = sum(load) / len(load)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in load) / len(load))
    return {
        **{
            f"fraction_dropped_choice_{choice + 1}": share(refused, count["num_tokens"])
            for choice, refused in enumerate(count["dropped_by_choice"])
        },
        "expert_usage": share(sum(count["accepted_load"]), count["num_slots"]),
        "fraction_dropped": share(count["dropped_tokens"], count["num_tokens"]),
        "fraction_padding": share(
            count["num_positions"] - count["num_tokens"], count["num_positions"]
        ),
        "entropy": share(count["entropy_sum"], count["num_tokens"]),
        "confidence": share(count["confidence_sum"], sum(count["accepted_load"])),
        "second_expert_rate": share(count["second_expert_tokens"], count["num_tokens"]),
        "load_cv": share(deviation, mean),
        "max_over_mean": share(max(load), mean),
        "dead_experts": sum(x == 0 for x in load),
    }
