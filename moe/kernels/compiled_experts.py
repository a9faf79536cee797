"""The experts on a CPU as one torch operator, for compiled graphs.

A compiler cannot trace cpu_experts.py, which starts threads and counts rows. As an operation
whose shapes follow from those of its inputs it breaks no graph. There may therefore be more rows
than tokens were sent to experts: rows after the last expert's are never read.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.kernels.cpu_experts import BackwardInputs, RowValues, run_backward, run_forward
from moe.kernels.expert_rows import ExpertRows, used_rows
from moe.kernels.expert_weights import ExpertWeights
from moe.kernels.hidden_units import ExpertForm

# For seed, form and flags.
_NO_GRADIENTS = (None,) * 7


def compiled_feed_forward(
    tokens: Tensor, rows: ExpertRows, weights: ExpertWeights, form: ExpertForm
) -> Tensor:
    """Same as `fused_feed_forward`, bit for bit, for compiled graphs.

    Args:
        tokens: <float>[T, D].
        rows: The token of each row; at least as many as `counts` adds up to.
        weights: The experts' weights, in the dtype of the tokens.
        form: What an expert computes.

    Returns:
        <float>[T, D]; zeros for a token without rows.
    """
    inputs = (tokens, rows.weight, *weights.tensors())
    needs_graph = any(x is not None and x.requires_grad for x in inputs)

    # Drawn in the graph, so that activation checkpointing drops the same units again.
    seed = torch.zeros((), dtype=torch.int64)
    if form.dropout_rate:
        seed = torch.randint(2**62, ())

    # An operation takes tensors only: an empty one is a weight that the experts do not have.
    stacked: list[Tensor] = []
    for weight in weights.tensors():
        stacked.append(tokens.new_empty(0) if weight is None else weight)
    combined, *_ = _fused_experts(
        tokens,
        rows.weight,
        stacked,
        [rows.counts, rows.token, rows.by_token, rows.token_start],
        seed,
        *form,
        torch.is_grad_enabled() and needs_graph,
        rows.weight.requires_grad,
    )
    return combined


# ---- forward ----


@torch.library.custom_op("moe::fused_experts", mutates_args=(), device_types="cpu")
def _fused_experts(
    tokens: Tensor,
    row_weight: Tensor,
    weights: list[Tensor],
    row_indices: list[Tensor],
    seed: Tensor,
    activation: str,
    gated: bool,
    bias_kind: str,
    dropout_rate: float,
    keep_products: bool,
    keep_outputs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the combined outputs <float>[T, D], and the fields of `RowValues`."""
    combined, values = run_forward(
        tokens,
        _rows_of_experts(row_indices, row_weight),
        _stacked_weights(weights),
        ExpertForm(activation, gated, bias_kind, dropout_rate),
        keep_products=keep_products,
        seed=int(seed),
        num_buffered=row_weight.numel(),
    )

    # The outputs are needed for the gradient of the combine weights alone.
    outputs = values.outputs if keep_outputs else values.outputs.new_empty(0, tokens.shape[1])
    return combined, values.products, values.gates, values.kept_units, outputs


@_fused_experts.register_fake
def _fake_forward(
    tokens: Tensor,
    row_weight: Tensor,
    weights: list[Tensor],
    row_indices: list[Tensor],
    seed: Tensor,
    activation: str,
    gated: bool,
    bias_kind: str,
    dropout_rate: float,
    keep_products: bool,
    keep_outputs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns tensors of the shapes of `_fused_experts`."""
    first, down = weights[:2]
    d_ff = down.shape[2]
    num_rows = row_weight.shape[0]
    num_saved = num_rows if keep_products else 0
    num_gates = num_saved if activation != "relu" else 0
    num_dropped = num_rows if dropout_rate else 0
    return (
        tokens.new_empty(tokens.shape),
        tokens.new_empty(num_saved, first.shape[1]),
        tokens.new_empty(num_gates, d_ff),
        tokens.new_empty(num_dropped, d_ff, dtype=torch.bool),
        tokens.new_empty(num_rows if keep_outputs else 0, tokens.shape[1]),
    )


# ---- backward ----


@torch.library.custom_op("moe::fused_experts_backward", mutates_args=(), device_types="cpu")
def _fused_experts_backward(
    d_output: Tensor,
    tokens: Tensor,
    row_weight: Tensor,
    weights: list[Tensor],
    row_indices: list[Tensor],
    values: list[Tensor],
    activation: str,
    gated: bool,
    bias_kind: str,
    dropout_rate: float,
    needed: list[bool],
) -> list[Tensor]:
    """Returns the gradients of tokens, row weights and weights; empty ones that are not needed."""
    rows = _rows_of_experts(row_indices, row_weight)
    inputs = BackwardInputs(
        d_output,
        tokens,
        rows,
        _stacked_weights(weights),
        ExpertForm(activation, gated, bias_kind, dropout_rate),
        RowValues(*values),
    )
    gradients = run_backward(inputs, needed)

    # The weight of an unused row has the gradient 0.
    if gradients[1] is not None:
        gradients[1] = F.pad(gradients[1], (0, row_weight.numel() - rows.weight.numel()))

    # An operation returns tensors only: as many as there are inputs with gradients.
    results = []
    inputs = (tokens, row_weight, *weights)
    for tensor, gradient in zip(inputs, gradients, strict=True):
        results.append(tensor.new_empty(0) if gradient is None else gradient)
    return results


@_fused_experts_backward.register_fake
def _fake_backward(
    d_output: Tensor,
    tokens: Tensor,
    row_weight: Tensor,
    weights: list[Tensor],
    row_indices: list[Tensor],
    values: list[Tensor],
    activation: str,
    gated: bool,
    bias_kind: str,
    dropout_rate: float,
    needed: list[bool],
) -> list[Tensor]:
    """Returns tensors of the shapes of `_fused_experts_backward`."""
    gradients = []
    for is_needed, tensor in zip(needed, (tokens, row_weight, *weights), strict=True):
        gradients.append(tensor.new_empty(tensor.shape if is_needed else 0))
    return gradients


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keeps what the gradients of `_fused_experts` need."""
    tokens, row_weight, weights, row_indices, _, *form, _, _ = inputs
    _, *values = output
    ctx.mark_non_differentiable(*values)
    ctx.set_materialize_grads(False)
    ctx.form = form
    ctx.save_for_backward(tokens, row_weight, *values, *row_indices, *weights)


def _backward(ctx: Any, d_output: Tensor, *d_values: None) -> tuple[Any, ...]:
    """Returns the gradients of the inputs of `_fused_experts`, None for those not needed."""
    tokens, row_weight, *others = ctx.saved_tensors
    values = others[:4]
    row_indices = others[4:8]
    weights = others[8:]

    needs_tokens, needs_row_weight, needs_weights, *_ = ctx.needs_input_grad
    needed = [needs_tokens, needs_row_weight, *needs_weights]
    computed = _fused_experts_backward(
        d_output, tokens, row_weight, weights, row_indices, values, *ctx.form, needed
    )

    # Autograd expects None for gradients that it did not request.
    gradients: list[Tensor | None] = []
    for is_needed, gradient in zip(needed, computed, strict=True):
        gradients.append(gradient if is_needed else None)
    d_tokens, d_row_weight, *d_weights = gradients
    d_row_indices = [None for _ in row_indices]
    return d_tokens, d_row_weight, d_weights, d_row_indices, *_NO_GRADIENTS


_fused_experts.register_autograd(_backward, setup_context=_save_for_backward)


# ---- shared ----


def _rows_of_experts(row_indices: list[Tensor], weight: Tensor) -> ExpertRows:
    """Returns the rows that experts read, of counts, tokens, order and starts of all, and their weights."""
    counts, token, by_token, token_start = row_indices
    return used_rows(ExpertRows(counts, token, weight, by_token, token_start))


def _stacked_weights(weights: list[Tensor]) -> ExpertWeights:
    """Returns the weights, of which empty tensors are none."""
    stacked: list[Any] = []
    for weight in weights:
        stacked.append(weight if weight.numel() else None)
    return ExpertWeights.of(stacked)
