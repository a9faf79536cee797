"""The sparse layer, one token at a time: a loop over accepted choices, and the dense einsum with [G,
S, E, C] masks.

Source: ST-MoE (arXiv:2202.08906) §3.1 and appendix C for an expert; Mesh-TensorFlow
transformer/moe.py at a32810e for the einsum. Idea: the loop is the sum that the paper writes; the
einsum says the same with one-hot masks.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from tests.oracles import losses, routing
from tests.oracles.stats import statistics

ACTIVATIONS = {
    "gelu_pytorch_tanh": lambda x: (
        x * (1 + (0.7978845608028654 * (x + 0.044715 * x**3)).tanh()) / 2
    ),
    "gelu": lambda x: x * (1 + (x / 2**0.5).erf()) / 2,
    "silu": lambda x: x / (1 + (-x).exp()),
    "relu": lambda x: x.clamp(min=0),
}
"""The formulas of the activations <float>[...]."""


@dataclass
class Answer:
    """What a sparse layer should return; groups [G, S, D] are its tokens."""

    groups: torch.Tensor
    output: torch.Tensor  # [G, S, D]
    logits: torch.Tensor  # [G, S, E]
    routing: routing.Routing
    load_balance_loss: torch.Tensor
    router_z_loss: torch.Tensor
    counted: dict  # the fields of RouterStats


def answer(layer, x, mask=None, token_ids=None, words=None, drop_tokens=True):
    """Returns what the layer, read as a table of weights and settings, makes of x [B, L, D]."""
    config, (batch, length, width) = layer.config, x.shape
    most = length if config.rules.capacity_scope == "sequence" else config.group_size
    fitting = [n for n in range(1, batch + 1) if batch % n == 0 and (n == 1 or n * length <= most)]
    shape = (batch // max(fitting), max(fitting) * length)
    groups = x.reshape(*shape, width)
    mask = (
        [[True] * shape[1] for _ in range(shape[0])]
        if mask is None
        else mask.reshape(shape).tolist()
    )
    if config.router == "hash":
        logits = hash_logits(layer, token_ids.reshape(shape))
    else:
        logits = gate_logits(
            layer, groups, mask, None if words is None else words.reshape(*shape, width)
        )
    probs = logits.softmax(dim=-1)

    factor = config.capacity_factor if layer.training else config.eval_capacity_factor
    capacity = None
    if config.expert_capacity is not None and drop_tokens:
        capacity = min(config.expert_capacity, shape[1])
    elif factor is not None and drop_tokens:
        least, rounding = config.min_expert_capacity, config.rules.capacity_rounding
        capacity = routing.capacity_of(shape[1], config.num_experts, factor, least, rounding)
    found = route(layer, logits, probs, mask, token_ids, capacity)

    balance, balance_count = losses.load_balance_of_config(probs, mask, found, config)
    z = losses.router_z(logits, mask, config.rules.router_z_loss_over)
    z_count = (
        sum(map(sum, mask))
        if config.rules.router_z_loss_over == "real_tokens"
        else shape[0] * shape[1]
    )
    counted = statistics(probs, mask, found, config.num_experts, capacity) | {
        "load_balance_sum": balance.item() * balance_count,
        "load_balance_count": balance_count,
        "router_z_sum": z.item() * z_count,
        "router_z_count": z_count,
    }
    output = combine_by_loop(layer, groups, found) + shared_output(layer, groups, mask)
    return Answer(groups, output, logits, found, balance, z, counted)


# ---- from tokens to a routing ----


def gate_logits(layer, groups, mask, words):
    """Returns the logits [G, S, E] of tokens [G, S, D]; padding is seen as zeros, whatever it
    holds.
    """
    mode, gate, logits = layer.config.router_input, layer.router.gate, []
    for g, tokens in enumerate(groups):
        for s, token in enumerate(tokens):
            seen = token
            if mode != "hidden":
                word = words[g, s].detach() if mode.endswith("stop_gradient") else words[g, s]
                seen = token + word if mode.startswith("add") else torch.cat([token, word])
            logits.append(gate @ (seen if mask[g][s] else torch.zeros_like(seen)))
    return torch.stack(logits).reshape(*groups.shape[:2], -1)


def hash_logits(layer, token_ids):
    """Returns logits [G, S, E] that are certain of the expert of each id [G, S]: e^-10000 is 0 in
    float64.
    """
    experts = routing.hash_by_murmur(token_ids, layer.config.num_experts, layer.router.options.seed)
    return 10_000 * (F.one_hot(experts, layer.config.num_experts).double() - 1)


def route(layer, logits, probs, mask, token_ids, capacity):
    """Returns the routing by the layer's router under its options."""
    config, options = layer.config, layer.router.options
    choices, name = config.num_selected_experts, config.router
    if name in ("token_choice", "batch_prioritized"):
        mode = "" if layer.training else "eval_"
        policy = getattr(options, mode + "second_expert_policy")
        threshold = getattr(options, mode + "second_expert_threshold")
        router = {
            "token_choice": routing.token_choice,
            "batch_prioritized": routing.batch_prioritized,
        }[name]
        gates = options.normalize_gates
        found = router(probs, mask, capacity, choices, policy, threshold, gates)
        assert not (layer.training and options.token_dropout), "drawn, so no oracle knows it"
        return routing.output_weights(found, options.normalize_accepted, 1 - options.token_dropout)
    if name == "switch":
        return routing.switch(probs, mask, capacity)
    if name == "bias_balanced":
        bias = [steps * options.update_rate for steps in layer.router.load_steps.tolist()]
        scores = 1 / (1 + (-logits).exp()) if options.score == "sigmoid" else probs
        return routing.bias_balanced(scores, mask, capacity, bias, choices, options.normalize_gates)
    if name == "no_token_left_behind":
        return routing.no_token_left_behind(probs, mask, capacity, options.num_candidates)
    if name == "hash":
        ids = token_ids.reshape(probs.shape[:2])
        return routing.hash_by_token(
            ids, mask, capacity, config.num_experts, options.seed, routing.hash_by_murmur
        )
    if options.softmax_over == "tokens":
        return routing.expert_choice_over_tokens(logits, mask, capacity)
    return routing.expert_choice_over_experts(probs, mask, capacity)


# ---- from a routing or a plan to the output ----


def run_expert(layer, expert, token):
    """Returns one expert's output for one token [D]."""
    experts, config = layer.experts, layer.config
    has_biases = config.product_bias
    zero = torch.zeros(config.num_experts, 1, dtype=token.dtype)
    if config.gated:
        b1, b2 = (experts.gate_up_proj_bias, experts.down_proj_bias) if has_biases else (zero, zero)
        gate, up = (experts.gate_up_proj[expert] @ token + b1[expert]).split(config.d_ff)
        hidden = ACTIVATIONS[config.activation](gate) * up
    else:
        b1, b2 = (experts.up_proj_bias, experts.down_proj_bias) if has_biases else (zero, zero)
        hidden = ACTIVATIONS[config.activation](experts.up_proj[expert] @ token + b1[expert])
    if config.expert_bias == "additive":
        hidden = hidden + experts.bias[expert]
    elif config.expert_bias == "multiplicative":
        hidden = hidden * experts.bias[expert]
    return experts.down_proj[expert] @ hidden + b2[expert]


def shared_output(layer, groups, mask):
    """Returns what shared experts add to groups [G, S, D]: the output of one wide expert for each
    real token, with weight 1.
    """
    outputs = torch.zeros_like(groups)
    if layer.config.num_shared_experts:
        wide = SimpleNamespace(experts=layer.shared_experts, config=layer.shared_experts.config)
        for g, tokens in enumerate(groups):
            for s, token in enumerate(tokens):
                if mask[g][s]:
                    outputs[g, s] = run_expert(wide, 0, token)
    return outputs


def combine_by_loop(layer, groups, routing):
    """Returns the output [G, S, D] of groups [G, S, D]: the weighed outputs of each token's
    accepted choices.
    """
    outputs = []
    for g, tokens in enumerate(groups):
        for s, token in enumerate(tokens):
            y = torch.zeros_like(token)
            for choice, expert in enumerate(routing.expert_index[g][s]):
                if routing.accepted[g][s][choice]:
                    y = y + routing.weight[g][s][choice] * run_expert(layer, expert, token)
            outputs.append(y)
    return torch.stack(outputs).reshape(groups.shape)


def dense_einsum(layer, groups, plan):
    """Returns the output [G, S, D] by one-hot dispatch and combine masks [G, S, E, C] of a plan.

    Capacity 0 keeps one slot that nobody is in, as one-hot masks need a column. Slots of refused
    choices may hold
    anything: they are clamped into the mask and multiplied by accepted = 0.
    """
    capacity = plan.capacity if plan.capacity is not None else groups.shape[1]
    columns = max(capacity, 1)
    expert = F.one_hot(plan.expert_index, layer.config.num_experts).double()
    slot = F.one_hot(plan.slot.clamp(0, columns - 1), columns).double()
    accepted = plan.accepted.double()
    dispatch = torch.einsum("gske,gskc,gsk->gsec", expert, slot, accepted)
    combine = torch.einsum("gske,gskc,gsk->gsec", expert, slot, accepted * plan.combine_weight)
    buffers = torch.einsum("gsec,gsd->gecd", dispatch, groups)
    outputs = torch.stack(
        [
            torch.stack(
                [
                    torch.stack([run_expert(layer, e, row) for row in rows])
                    for e, rows in enumerate(group)
                ]
            )
            for group in buffers
        ]
    )
    return torch.einsum("gsec,gecd->gsd", combine, outputs)
