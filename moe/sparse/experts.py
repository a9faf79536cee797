"""The experts: E feed-forward networks as stacked weights, with the products in the fastest form
the device has.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from moe.distributed.sharding import local_shard
from moe.kernels.cpu_experts import parallel_feed_forward
from moe.sparse.config import SparseConfig
from moe.sparse.dispatch import ExpertRows


class Experts(nn.Module):
    """E independent feed-forward networks without biases, GEGLU or plain.

    Parameters are `gate_up_proj` [E, 2F, D] (gate above up) or, when not gated, `up_proj` [E, F,
    D]; `down_proj` [E, D, F]; and `bias` [E, F] when there is an expert bias.

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

    @property
    def first_proj(self) -> nn.Parameter:
        """The weights of the first product, [E, 2F or F, D]."""
        return self.gate_up_proj if self.config.gated else self.up_proj

    def reset_parameters(self) -> None:
        """Draws every expert anew and independently: truncated normal with variance scale / fan_in."""
        scale = self.config.initializer_scale
        truncated_normal_(self.first_proj, math.sqrt(scale / self.config.d_model))
        truncated_normal_(self.down_proj, math.sqrt(scale / self.config.d_ff))
        if self.bias is not None:
            nn.init.constant_(
                self.bias, 1.0 if self.config.expert_bias == "multiplicative" else 0.0
            )

    def forward(self, tokens: Tensor, rows: ExpertRows | None = None) -> Tensor:
        """Returns every token's weighted sum of what its experts make of it; zeros where there is
        none.

        Args:
            tokens: <any float>[T, D].
            rows: Which token goes where; see `sort_rows`. None when `tokens` are slots already,
                <any float>[E, N, D]: see `forward_slots`.

        Returns:
            <dtype of the products>[T, D], or [E, N, D] for slots.
        """
        if rows is None:
            return self.forward_slots(tokens)
        tokens, first, down, bias = self._in_product_dtype(tokens)
        if tokens.device.type == "cpu":
            drop_rate = self.config.expert_dropout_rate if self.training else 0.0
            return parallel_feed_forward(tokens, rows, first, down, bias, self.config, drop_rate)
        outputs = self.run_sorted(
            tokens.index_select(0, rows.token), rows.counts, first, down, bias
        )
        outputs = outputs * rows.weight[:, None].to(outputs.dtype)
        return torch.zeros_like(tokens).index_add(0, rows.token, outputs)

    def forward_slots(self, buffers: Tensor) -> Tensor:
        """Returns what each expert makes of its slots <dtype of the products>[E, N, D].

        The weights stand on the left of their products, so that their gradients come in the layout
        of the weights.

        Args:
            buffers: <any float>[E, N, D].
        """
        buffers, first, down, bias = self._in_product_dtype(buffers)
        with torch.autocast(buffers.device.type, enabled=False):
            hidden = torch.bmm(first, rearrange(buffers, "e n d -> e d n"))
            hidden = self._hidden(hidden, None if bias is None else bias[..., None], dim=1)
            return rearrange(torch.bmm(down, hidden), "e d n -> e n d").contiguous()

    def run_sorted(
        self, x: Tensor, counts: Tensor, first: Tensor, down: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Returns the experts' outputs <float>[N, D] for rows <float>[N, D] sorted by expert, by
        grouped products.

        Args:
            x: Rows.
            counts: <int64>[E] rows of each expert.
            first: <float>[E, 2F or F, D] weights.
            down: <float>[E, D, F] weights.
            bias: <float>[E, F].
        """
        with torch.autocast(x.device.type, enabled=False):
            if bias is not None:
                bias = bias.repeat_interleave(counts, dim=0, output_size=x.shape[0])
            return grouped_linear(
                self._hidden(grouped_linear(x, first, counts), bias), down, counts
            )

    def _hidden(self, hidden: Tensor, bias: Tensor | None, dim: int = -1) -> Tensor:
        """Returns the hidden activation <float>[..., F] of the first product <float>[..., 2F or F];
        `dim` is theirs.
        """
        hidden = activate(hidden, self.config, dim)
        if bias is not None:
            hidden = hidden * bias if self.config.expert_bias == "multiplicative" else hidden + bias
        return F.dropout(hidden, self.config.expert_dropout_rate, self.training)

    def product_dtype(self) -> torch.dtype:
        """Returns the dtype of the products: that of the model, or of autocast where it is on."""
        device = self.down_proj.device.type
        autocast = device != "meta" and torch.is_autocast_enabled(
            device
        )  # meta: weights that wait on a disk
        return torch.get_autocast_dtype(device) if autocast else self.down_proj.dtype

    def _in_product_dtype(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Returns input and this rank's weights in the dtype of the products; gate and up of F lie
        side by side.
        """
        dtype = self.product_dtype()
        first = _dequantized(local_shard(self.first_proj))
        if first.dim() == 4:  # packed for a mesh: [E, 2, F, D]
            first = first.flatten(1, 2)
        bias = None if self.bias is None else local_shard(self.bias).to(dtype)
        down = _dequantized(local_shard(self.down_proj))
        return x.to(dtype), first.to(dtype), down.to(dtype), bias


def _dequantized(weight: Tensor) -> Tensor:
    """Returns the numbers that a weight of torchao stands for, and any other weight as it is."""
    return weight.dequantize() if hasattr(weight, "qdata") else weight


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Returns x W_e^T <float>[N, O] for rows <float>[N, I] sorted by expert.

    One grouped product where torch has it: bfloat16, float16 and float32 with rows of a multiple of
    16 bytes; else one product for each expert.

    Args:
        x: Rows.
        weight: <float>[E, O, I].
        counts: <int64>[E] rows of each expert.
    """
    aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    if x.dtype != torch.float64 and aligned:
        return _GroupedLinear.apply(x, weight, counts.cumsum(0).to(torch.int32))
    parts = zip(x.split(counts.tolist()), weight.unbind(), strict=True)
    return torch.cat([F.linear(part, w) for part, w in parts])


class _GroupedLinear(torch.autograd.Function):
    """`F.grouped_mm` whose backward accepts gradients of any strides, which torch's own refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        return F.grouped_mm(x, rearrange(weight, "e o i -> e i o"), offs=offsets)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # its decorator takes the names away
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        x, weight, offsets = ctx.saved_tensors
        if not x.shape[0]:
            return torch.zeros_like(x), torch.zeros_like(weight), None
        gradient = grad_outputs[0].contiguous()
        dx = F.grouped_mm(gradient, weight, offs=offsets)
        return dx, F.grouped_mm(rearrange(gradient, "n o -> o n"), x, offs=offsets), None


def activate(hidden: Tensor, config: SparseConfig, dim: int = -1) -> Tensor:
    """Returns the hidden activation <float>[..., F] of <float>[..., 2F] when gated (gate first),
    else of [..., F].

    Args:
        hidden: The first product.
        config: Activation, and whether it is gated.
        dim: Which dimension holds the 2F or F numbers.
    """
    gate, up = hidden.chunk(2, dim=dim) if config.gated else (hidden, None)
    gate = F.gelu(gate, approximate="tanh") if config.activation == "gelu" else F.relu(gate)
    return gate if up is None else gate * up


def truncated_normal_(tensor: Tensor, std: float) -> Tensor:
    """Fills <float>[...] with normal values cut at two deviations, rescaled so that their deviation
    is `std`.

    Source:
        flax `variance_scaling(..., "truncated_normal")`, as Flaxformer's ST-MoE configurations use
        it: the cut normal has a deviation of 0.8796.
    """
    std = std / 0.87962566103423978
    return nn.init.trunc_normal_(tensor, std=std, a=-2 * std, b=2 * std)
