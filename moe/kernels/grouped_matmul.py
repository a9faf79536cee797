"""Products of rows with the weights of their experts, all experts in one call.

Rows stand sorted by expert, as many of each as there are: nothing is padded. The path of devices
other than a CPU, which has cpu_experts.py.
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Returns x W_e^T for rows sorted by expert.

    One grouped product where torch has it: bfloat16, float16 and float32 with rows of a multiple of
    16 bytes; else one product for each expert.

    Args:
        x: <float>[N, I] rows.
        weight: <float>[E, O, I].
        counts: <int64>[E] rows of each expert.

    Returns:
        <float>[N, O].
    """
    # One call for all experts, where the device can read the rows in whole words.
    row_bytes = [size * x.element_size() for size in weight.shape[1:]]
    is_aligned = all(num_bytes % 16 == 0 for num_bytes in row_bytes)
    if x.dtype != torch.float64 and is_aligned:
        ends = counts.cumsum(0).to(torch.int32)
        return _GroupedLinear.apply(x, weight, ends)

    # Else one product after the other; this waits for the counts.
    rows_by_expert = x.split(counts.tolist())
    products = [
        F.linear(rows, expert_weight)
        for rows, expert_weight in zip(rows_by_expert, weight.unbind(), strict=True)
    ]
    return torch.cat(products)


class _GroupedLinear(torch.autograd.Function):
    """`F.grouped_mm` whose backward accepts gradients of any strides, which torch's own refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return F.grouped_mm(x, rearrange(weight, "e o i -> e i o"), offs=ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # by the decorator
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        x, weight, ends = ctx.saved_tensors
        if not x.shape[0]:
            return torch.zeros_like(x), torch.zeros_like(weight), None

        # y = x W^T, so dx = dy W and dW = dy^T x, both within each expert.
        d_product = grad_outputs[0].contiguous()
        d_x = F.grouped_mm(d_product, weight, offs=ends)
        d_weight = F.grouped_mm(rearrange(d_product, "n o -> o n"), x, offs=ends)
        return d_x, d_weight, None
