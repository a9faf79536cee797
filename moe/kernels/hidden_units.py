"""Hidden units: what an expert computes between its two products, element by element.

Here by torch's operations; a CPU's kernel does it piece by piece (cpu_experts.py).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.kernels.dropout import dropout


class ExpertForm(NamedTuple):
    """Computation of an expert between its two products.

    Attributes:
        activation: Name of transformers; see `activate`.
        gated: Whether the first product holds a gate above what it is multiplied with.
        bias_kind: `none`, `additive` or `multiplicative`: what the bias does to the hidden units.
        dropout_rate: Share of the hidden units that is set to zero; 0 outside training.
    """

    activation: str
    gated: bool
    bias_kind: str
    dropout_rate: float


GELU_FORMS = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}
"""The GELUs by name, with torch's name of their approximation."""


def activate(x: Tensor, activation: str) -> Tensor:
    """Returns the activation of <float>[...]: `gelu_pytorch_tanh`, `gelu` (exact), `silu` or `relu`."""
    if activation in GELU_FORMS:
        return F.gelu(x, approximate=GELU_FORMS[activation])
    return F.silu(x) if activation == "silu" else F.relu(x)


def hidden_units(product: Tensor, bias: Tensor | None, form: ExpertForm, dim: int = -1) -> Tensor:
    """Returns the hidden units of a first product: activation, gate, bias, dropout.

    Args:
        product: <float>[..., 2F or F, ...], gate first.
        bias: <float>[..., F, ...] of the hidden units; None for none.
        form: What an expert computes.
        dim: Dimension that holds the 2F or F numbers.

    Returns:
        <float>[..., F, ...].
    """
    # A gated unit multiplies the activated gate with a second half, which has no activation.
    up = None
    gate = product
    if form.gated:
        gate, up = product.chunk(2, dim=dim)

    hidden = activate(gate, form.activation)
    if up is not None:
        hidden = hidden * up

    if bias is not None:
        is_factor = form.bias_kind == "multiplicative"
        hidden = hidden * bias if is_factor else hidden + bias
    return dropout(hidden, form.dropout_rate)


def hidden_rows(product: Tensor, bias: Tensor | None, ends: Tensor, form: ExpertForm) -> Tensor:
    """Returns the hidden units of rows sorted by expert.

    Args:
        product: <float>[N, 2F or F] the first product, gate first.
        bias: <float>[E, F] of each expert's hidden units; None for none.
        ends: <int32>[E] where the rows of each expert end. Results and gradients of later rows are
            undefined.
        form: What an expert computes.

    Returns:
        <float>[N, F].
    """
    if bias is not None:
        bias = bias_of_rows(bias, ends, product.shape[0])  # [N, F]
    return hidden_units(product, bias, form)


def add_bias(product: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Returns a product <float>[N, O] of rows sorted by expert, plus their experts' bias <float>[E, O]."""
    return product if bias is None else product + bias_of_rows(bias, ends, product.shape[0])


def bias_of_rows(bias: Tensor, ends: Tensor, num_rows: int) -> Tensor:
    """Returns a copy of its expert's bias <float>[E, O] for each row: <float>[num_rows, O].

    Rows after those of all experts get a row of zeros, whose gradient is undefined.
    """
    bias = F.pad(bias, (0, 0, 0, 1))  # [E + 1, O]
    return bias.index_select(0, expert_of_rows(ends, num_rows))


def expert_of_rows(ends: Tensor, num_rows: int) -> Tensor:
    """Returns the expert <int64>[num_rows] of each row; E for rows after those of all experts.

    Args:
        ends: <int32>[E] where the rows of each expert end.
        num_rows: At least the last of them.
    """
    row = torch.arange(num_rows, dtype=ends.dtype, device=ends.device)
    return torch.searchsorted(ends, row, right=True)
