"""The auxiliary losses, counted token by token.

Source: ST-MoE (arXiv:2202.08906) appendix A and eq. 5; choices "all" as in Flaxformer, over
"all_positions" as in Mesh-TensorFlow transformer/moe.py at a32810e. Idea: write f, P and logsumexp²
on the blackboard, then add them up.

`choices` is "first" or "all"; `over` is "real_tokens" or "all_positions".
"""

import torch


def tally(probs, mask, routing, choices, over, group):
    """Returns of one group: choices of each expert [E], summed probabilities [E], and what to
    divide both by.
    """
    num_experts = probs.shape[-1]
    chosen, prob_sum = [0] * num_experts, [0.0] * num_experts
    for s, real in enumerate(mask[group]):
        if real:
            experts = routing.expert_index[group][s]
            for expert in {"first": experts[:1], "all": experts}[choices]:
                chosen[expert] += 1
            prob_sum = [prob_sum[e] + probs[group][s][e] for e in range(num_experts)]
    return (
        chosen,
        prob_sum,
        {"real_tokens": sum(mask[group]), "all_positions": len(mask[group])}[over],
    )


def balance(chosen, prob_sum, count):
    """Returns E * sum_i f_i P_i, where f_i = chosen_i / count and P_i = prob_sum_i / count."""
    return len(chosen) * sum(
        (c / count) * (p / count) for c, p in zip(chosen, prob_sum, strict=True)
    )


def load_balance(probs, mask, routing, choices, over):
    """Returns the balance loss, mean over the groups that hold a real token; over all positions,
    over all groups.
    """
    losses = []
    for g in range(len(mask)):
        if any(mask[g]) or over == "all_positions":
            losses.append(balance(*tally(probs, mask, routing, choices, over, g)))
    return sum(losses) / len(losses) + 0 * probs.sum() if losses else 0 * probs.sum()


def load_balance_of_scope(probs, mask, routing, choices, over):
    """Returns one balance loss of all groups together: sums over groups first, the product after."""
    num_experts = probs.shape[-1]
    chosen, prob_sum, count = [0] * num_experts, [0.0] * num_experts, 0
    for g in range(len(mask)):
        more_chosen, more_prob, more = tally(probs, mask, routing, choices, over, g)
        chosen = [a + b for a, b in zip(chosen, more_chosen, strict=True)]
        prob_sum = [a + b for a, b in zip(prob_sum, more_prob, strict=True)]
        count += more
    return balance(chosen, prob_sum, count) if any(map(any, mask)) else 0 * probs.sum()


def router_z(logits, mask, over):
    """Returns the mean of logsumexp(logits)² over the real tokens, or over all positions with
    whatever they hold.
    """
    squares = []
    for g in range(len(mask)):
        for s in range(len(mask[g])):
            if mask[g][s] or over == "all_positions":
                squares.append(torch.logsumexp(logits[g][s], dim=0) ** 2)
    return sum(squares) / len(squares) if squares else 0 * logits.sum()


def load_balance_of_config(probs, mask, routing, config):
    """Returns the balance loss that a configuration asks for, and how many scopes or positions it
    is a mean over.
    """
    if config.router == "expert_choice":  # experts fill their slots: balanced by construction
        return 0 * probs.sum(), 0
    choices = config.rules.balance_choices if config.num_selected_experts > 1 else "first"
    over = config.rules.balance_over
    if config.balance_scope == "group":
        groups = len(mask) if over == "all_positions" else sum(any(group) for group in mask)
        return load_balance(probs, mask, routing, choices, over), groups
    positions = sum(len(group) if over == "all_positions" else sum(group) for group in mask)
    return load_balance_of_scope(probs, mask, routing, choices, over), positions
