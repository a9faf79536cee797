"""The experts as a loop in which autograd does the work, and random problems for it; an oracle in
float64.
"""

import itertools

import torch
import torch.nn.functional as F

from moe.kernels.expert_rows import ExpertRows
from moe.kernels.hidden_units import ExpertForm
from moe.sparse.config import SparseConfig

KINDS = list(
    itertools.product(["gelu", "relu"], [True, False], ["none", "additive", "multiplicative"])
)


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
    """Returns the inputs of the engine: tokens, weight of each row, three weights of the experts;
    and the rows.

    The last expert has no row; every other has some, in uneven numbers.
    """
    torch.manual_seed(seed)
    E, F_, D = config.num_experts, config.d_ff, config.d_model
    expert = (torch.rand(num_rows).square() * (E - 1)).long().tolist()
    rows = expert_rows(expert, torch.randint(num_tokens, (num_rows,)).tolist(), E, num_tokens)
    shapes = [(num_tokens, D), None, (E, F_ * (2 if config.gated else 1), D), (E, D, F_)]
    if config.expert_bias != "none":
        shapes.append((E, F_))
    inputs = [torch.randn(shape, dtype=torch.float64) if shape else rows.weight for shape in shapes]
    return [x.detach().requires_grad_() for x in inputs], rows


def form_of(config, drop_rate=0.0):
    """Returns what the experts of a configuration compute."""
    return ExpertForm(config.activation, config.gated, config.expert_bias, drop_rate)


def run_loop(inputs, rows, config, kept=None, drop_rate=0.0):
    """Returns what the engine must: each expert on its own rows, one after the other."""
    tokens, weight, first, down, *bias = inputs
    output, start = torch.zeros_like(tokens), 0
    for expert, count in enumerate(rows.counts.tolist()):
        here = slice(start, start + count)
        start += count
        hidden = tokens[rows.token[here]] @ first[expert].T
        up = None
        if config.gated:
            hidden, up = hidden[:, : config.d_ff], hidden[:, config.d_ff :]
        hidden = (
            F.gelu(hidden, approximate="tanh")
            if config.activation == "gelu"
            else hidden.clamp(min=0)
        )
        hidden = hidden if up is None else hidden * up
        if bias:
            hidden = (
                hidden * bias[0][expert]
                if config.expert_bias == "multiplicative"
                else hidden + bias[0][expert]
            )
        if kept is not None and kept.numel():
            hidden = hidden * kept[here] / (1 - drop_rate)
        output = output.index_add(
            0, rows.token[here], weight[here, None] * (hidden @ down[expert].T)
        )
    return output


def tiny(activation="gelu", gated=True, expert_bias="none", **fields):
    sizes = {"d_model": 3, "d_ff": 5, "num_experts": 4, **fields}
    return SparseConfig(activation=activation, gated=gated, expert_bias=expert_bias, **sizes)
