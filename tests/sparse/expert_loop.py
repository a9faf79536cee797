"""The experts as a loop in which autograd does the work, and random problems for it; an oracle in
float64.
"""

import itertools
from typing import get_args

import torch

from moe.kernels.expert_rows import ExpertRows
from moe.kernels.expert_weights import ExpertWeights
from moe.kernels.hidden_units import ExpertForm
from moe.sparse.config import Activation, SparseConfig
from tests.oracles.layer import ACTIVATIONS

KINDS = list(
    itertools.product(
        get_args(Activation), [True, False], ["none", "additive", "multiplicative", "product"]
    )
)
"""Activation, whether there is a gate, and which bias: `product` for those of both products."""


def expert_rows(expert_of_row, token_of_row, num_experts, num_tokens):
    """Returns rows with random weights for a list of (expert, token), in float64."""
    pairs = sorted(zip(expert_of_row, token_of_row, strict=True))
    token = torch.tensor([token for _, token in pairs], dtype=torch.int64)
    counts = torch.tensor([sum(e == expert for e, _ in pairs) for expert in range(num_experts)])
    of_token = torch.bincount(token, minlength=num_tokens)
    weight = torch.rand(len(pairs), dtype=torch.float64)
    return ExpertRows(
        counts=counts,
        token=token,
        weight=weight,
        by_token=token.argsort(stable=True),
        token_start=of_token.cumsum(0) - of_token,
    )


def problem(config, num_tokens, num_rows, seed=0):
    """Returns the inputs of the engine: tokens, weight of each row, weights and biases of the
    experts; and the rows.

    The last expert has no row; every other has some, in uneven numbers.
    """
    torch.manual_seed(seed)
    E, F_, D = config.num_experts, config.d_ff, config.d_model
    expert = (torch.rand(num_rows).square() * (E - 1)).long().tolist()
    rows = expert_rows(expert, torch.randint(num_tokens, (num_rows,)).tolist(), E, num_tokens)
    shapes = [(num_tokens, D), None, (E, F_ * (2 if config.gated else 1), D), (E, D, F_)]
    if config.expert_bias != "none":
        shapes.append((E, F_))
    if config.product_bias:
        shapes += [shapes[2][:2], (E, D)]
    inputs = [torch.randn(shape, dtype=torch.float64) if shape else rows.weight for shape in shapes]
    return [x.detach().requires_grad_() for x in inputs], rows


def form_of(config, drop_rate=0.0):
    """Returns what the experts of a configuration compute."""
    return ExpertForm(config.activation, config.gated, config.expert_bias, drop_rate)


def run_loop(inputs, rows, config, kept=None, drop_rate=0.0):
    """Returns what the engine must: each expert on its own rows, one after the other."""
    tokens, weight, first, down, *biases = inputs
    output, start = torch.zeros_like(tokens), 0
    for expert, count in enumerate(rows.counts.tolist()):
        here = slice(start, start + count)
        start += count
        b1, b2 = (b[expert] for b in biases) if config.product_bias else (0, 0)
        hidden = tokens[rows.token[here]] @ first[expert].T + b1
        up = None
        if config.gated:
            hidden, up = hidden[:, : config.d_ff], hidden[:, config.d_ff :]
        hidden = ACTIVATIONS[config.activation](hidden)
        hidden = hidden if up is None else hidden * up
        if config.expert_bias == "multiplicative":
            hidden = hidden * biases[0][expert]
        elif config.expert_bias == "additive":
            hidden = hidden + biases[0][expert]
        if kept is not None and kept.numel():
            hidden = hidden * kept[here] / (1 - drop_rate)
        output = output.index_add(
            0, rows.token[here], weight[here, None] * (hidden @ down[expert].T + b2)
        )
    return output


def weights_of(config, stacked):
    """Returns the weights and biases of `problem`."""
    first, down, *biases = stacked
    return ExpertWeights(first, down, *([None] if config.product_bias else []), *(biases or [None]))


def tiny(activation="gelu_pytorch_tanh", gated=True, bias="none", **fields):
    sizes = {"d_model": 3, "d_ff": 5, "num_experts": 4, **fields}
    kind = {"product_bias": True} if bias == "product" else {"expert_bias": bias}
    return SparseConfig(activation=activation, gated=gated, **kind, **sizes)
