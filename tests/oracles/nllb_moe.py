"""NLLB-MoE in evaluation, as its authors compute it: padding included, one token and expert at a
time.

Source: NLLB (arXiv:2207.04672) §6; fairseq, branch nllb: modules/transformer_layer.py,
moe/top2gate.py, moe/moe_layer.py. Weights have the names of the hub, `config` is its config.json.
"""

import math

import torch


def logits(weights, config, source, target):
    """Returns the logits [B, T, V] in float64 for the ids source [B, L] and target [B, T]."""
    weights = {name: weight.double() for name, weight in weights.items()}
    memory = stack(weights, config, "encoder", source, None, None)
    hidden = stack(weights, config, "decoder", target, memory, source)
    return hidden @ weights["shared.weight"].T


def stack(weights, config, name, ids, memory, memory_ids):
    """Returns the last hidden states [B, L, D] of the encoder or the decoder."""
    width, pad, heads = config["d_model"], config["pad_token_id"], config[f"{name}_attention_heads"]
    real = ids != pad
    x = math.sqrt(width) * weights["shared.weight"][ids] + positions(real, pad, width)
    before = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool)
    before = before.tril() if name == "decoder" else before
    for number in range(config[f"{name}_layers"]):
        part = f"{name}.layers.{number}"
        h = norm(weights, f"{part}.self_attn_layer_norm", x)
        x = x + attention(weights, f"{part}.self_attn", heads, h, h, real[:, None, :] & before)
        if memory is not None:
            h = norm(weights, f"{part}.cross_attention_layer_norm", x)
            seen = (memory_ids != pad)[:, None, :].expand(-1, ids.shape[1], -1)
            x = x + attention(weights, f"{part}.cross_attention", heads, h, memory, seen)
        h = norm(weights, f"{part}.ff_layer_norm", x)
        if (number + 1) % config[f"{name}_sparse_step"]:
            x = x + feed_forward(weights, f"{part}.ffn", h)
        else:
            y = sparse(weights, f"{part}.ffn", config, h.flatten(0, 1), real.flatten().tolist())
            x = x + y.unflatten(0, ids.shape)
    return norm(weights, f"{name}.layer_norm", x)


def positions(real, pad, width):
    """Returns sines, then cosines [B, L, D]; the first real token is at pad + 1, padding has none.

    fairseq computes them in float32.
    """
    frequency = torch.exp(torch.arange(width // 2).float() * -(math.log(10000) / (width // 2 - 1)))
    angle = (pad + real.cumsum(1)).float()[..., None] * frequency
    return (torch.cat([angle.sin(), angle.cos()], dim=-1) * real[..., None]).double()


def linear(weights, name, x):
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def norm(weights, name, x):
    return torch.nn.functional.layer_norm(
        x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps=1e-5
    )


def feed_forward(weights, name, x):
    return linear(weights, f"{name}.fc2", linear(weights, f"{name}.fc1", x).relu())


def attention(weights, name, heads, x, memory, seen):
    """Attention of x [B, T, D] to those of memory [B, L, D] that are seen [B, T, L]."""
    q, k, v = (
        linear(weights, f"{name}.{letter}_proj", states).unflatten(-1, (heads, -1))
        for letter, states in (("q", x), ("k", memory), ("v", memory))
    )
    scores = torch.einsum("bthd,blhd->bhtl", q, k) / math.sqrt(q.shape[-1])
    share = scores.masked_fill(~seen[:, None], -1e30).softmax(-1)
    return linear(weights, f"{name}.out_proj", torch.einsum("bhtl,blhd->bthd", share, v).flatten(2))


def sparse(weights, name, config, x, real):
    """A sparse layer over all tokens [T, D] of a batch; `real` [T] is False for padding."""
    probs = (x @ weights[f"{name}.router.classifier.weight"].T).softmax(-1)
    chosen = probs.topk(2).indices.tolist()  # of each token
    order = range(len(x))
    if config["batch_prioritized_routing"]:
        order = probs.amax(-1).argsort(descending=True, stable=True).tolist()

    # All first choices queue before any second one.
    capacity = math.ceil(config["moe_eval_capacity_token_fraction"] * len(x))
    queue = [0] * probs.shape[-1]
    kept = [[] for _ in x]
    for choice in (0, 1):
        for t in order:
            expert = chosen[t][choice]
            if real[t] and queue[expert] < capacity:
                kept[t].append(expert)
            queue[expert] += real[t]

    # Gates are relative to the experts that are left, or to both.
    y = torch.zeros_like(x)
    for t, experts in enumerate(kept):
        both = config["normalize_router_prob_before_dropping"]
        total = probs[t][chosen[t] if both else experts].sum()
        for expert in experts:
            gate = (1 - config["moe_token_dropout"]) * probs[t, expert] / total
            y[t] += gate * feed_forward(weights, f"{name}.experts.expert_{expert}", x[t])
    return y
