"""The experts: E feed-forward networks as stacked weights, run on rows sorted by expert."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.sparse.config import SparseConfig


class Experts(nn.Module):
    """E independent feed-forward networks without biases, GEGLU or plain.

    Parameters are `gate_up_proj` [E, 2F, D] (gate above up) or, when not gated, `up_proj` [E, F, D];
    `down_proj` [E, D, F]; and `bias` [E, F] when there is an expert bias.

    Source:
        ST-MoE (arXiv:2202.08906) §3.1 and appendix C: [(GELU(x W11) * x W12) + B] W2. Differs: no.
    """

    def __init__(self, config: SparseConfig) -> None:
        super().__init__()
        self.config = config
        E, F_, D = config.num_experts, config.d_ff, config.d_model
        if config.gated:
            self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * F_, D))
        else:
            self.up_proj = nn.Parameter(torch.empty(E, F_, D))
        self.down_proj = nn.Parameter(torch.empty(E, D, F_))
        self.bias = nn.Parameter(torch.empty(E, F_)) if config.expert_bias != "none" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every expert anew and independently: truncated normal with variance scale / fan_in."""
        scale = self.config.initializer_scale
        first = self.gate_up_proj if self.config.gated else self.up_proj
        truncated_normal_(first, math.sqrt(scale / self.config.d_model))
        truncated_normal_(self.down_proj, math.sqrt(scale / self.config.d_ff))
        if self.bias is not None:
            nn.init.constant_(self.bias, 1.0 if self.config.expert_bias == "multiplicative" else 0.0)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Returns what each row's expert makes of it.

        Args:
            rows: <any float>[N, D] sorted by expert.
            counts: Rows of each expert, E integers that add up to N; 0 is fine.

        Returns:
            <dtype of the products>[N, D].
        """
        first = self.gate_up_proj if self.config.gated else self.up_proj
        biases = self.bias.unbind() if self.bias is not None else [None] * len(counts)
        parts = zip(rows.split(counts), first.unbind(), self.down_proj.unbind(), biases, strict=True)
        return torch.cat([self._expert(x, w_in, w_out, bias) for x, w_in, w_out, bias in parts])

    def _expert(self, x: Tensor, w_in: Tensor, w_out: Tensor, bias: Tensor | None) -> Tensor:
        """Returns one expert's output <float>[n, D] for its rows <float>[n, D]."""
        hidden = activate(F.linear(x, w_in), self.config)
        if bias is not None:
            hidden = hidden * bias if self.config.expert_bias == "multiplicative" else hidden + bias
        hidden = F.dropout(hidden, self.config.expert_dropout_rate, self.training)
        return F.linear(hidden.to(x.dtype), w_out)


def activate(hidden: Tensor, config: SparseConfig) -> Tensor:
    """Returns the hidden activation <float>[n, F] of <float>[n, 2F] when gated (gate first), else of <float>[n, F]."""
    gate, up = hidden.chunk(2, dim=-1) if config.gated else (hidden, None)
    gate = F.gelu(gate, approximate="tanh") if config.activation == "gelu" else F.relu(gate)
    return gate if up is None else gate * up


def truncated_normal_(tensor: Tensor, std: float) -> Tensor:
    """Fills <float>[...] with normal values cut at two deviations, rescaled so that their deviation is `std`.

    Source:
        flax `variance_scaling(..., "truncated_normal")`, as Flaxformer's ST-MoE configurations use it: the cut
        normal has a deviation of 0.8796.
    """
    std = std / 0.87962566103423978
    return nn.init.trunc_normal_(tensor, std=std, a=-2 * std, b=2 * std)
