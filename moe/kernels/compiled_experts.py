"""The experts on a CPU as one torch operator, for compiled graphs.

A compiler cannot trace cpu_experts.py, which starts threads and counts rows. As an operation
whose shapes follow from those of its inputs it breaks no graph. There may therefore be more rows
than tokens were sent to experts: rows after the last expert's are never read.
"""

from typing import Any

import torch
from torch import Tensor

from moe.kernels.cpu_experts import RowValues, empty_values, run_backward, run_forward
from moe.kernels.expert_rows import ExpertRows
from moe.kernels.expert_weights import ExpertWeights
from moe.kernels.hidden_units import ExpertForm

# `inputs` are tokens, weights of rows, and weights of experts; `indices` the other fields of rows.
_FORM = "str activation, bool gated, str bias_kind, float dropout_rate"
_FORWARD = (
    f"(Tensor[] inputs, Tensor[] indices, Tensor seed, {_FORM}, bool keep_products) -> Tensor[]"
)
_BACKWARD = f"(Tensor d_output, Tensor[] inputs, Tensor[] indices, Tensor[] values, {_FORM}, bool[] needed) -> Tensor[]"


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
    # Drawn in the graph, so that activation checkpointing drops the same units again.
    seed = torch.zeros((), dtype=torch.int64)
    if form.dropout_rate:
        seed = torch.randint(2**62, ())

    # An operation takes tensors only: an empty one is a weight that the experts do not have.
    inputs = [tokens, rows.weight]
    for weight in weights.tensors():
        inputs.append(tokens.new_empty(0) if weight is None else weight)
    indices = [rows.counts, rows.token, rows.by_token, rows.token_start]
    needs_graph = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    combined, *_ = _fused_experts(inputs, indices, seed, *form, needs_graph)
    return combined


# ---- forward ----


@torch.library.custom_op("moe::fused_experts", mutates_args=(), device_types="cpu", schema=_FORWARD)
def _fused_experts(
    inputs: list[Tensor], indices: list[Tensor], seed: Tensor, *settings: Any
) -> list[Tensor]:
    """Returns the combined outputs <float>[T, D], and the fields of `RowValues`."""
    *form, keep_products = settings
    tokens, rows, weights = _records(inputs, indices)
    combined, values = run_forward(
        tokens, rows, weights, ExpertForm(*form), keep_products=keep_products, seed=int(seed)
    )
    return [combined, *values]


@_fused_experts.register_fake
def _fake_forward(
    inputs: list[Tensor], indices: list[Tensor], seed: Tensor, *settings: Any
) -> list[Tensor]:
    """Returns tensors of the shapes of `_fused_experts`."""
    *form, keep_products = settings
    tokens, rows, weights = _records(inputs, indices)
    num_rows = rows.token.shape[0]
    values = empty_values(tokens, weights, ExpertForm(*form), num_rows, keep_products)
    return [tokens.new_empty(tokens.shape), *values]


# ---- backward ----


@torch.library.custom_op(
    "moe::fused_experts_backward", mutates_args=(), device_types="cpu", schema=_BACKWARD
)
def _fused_experts_backward(
    d_output: Tensor,
    inputs: list[Tensor],
    indices: list[Tensor],
    values: list[Tensor],
    *settings: Any,
) -> list[Tensor]:
    """Returns the gradients of the inputs; empty ones that are not needed."""
    *form, needed = settings
    records = _records(inputs, indices)
    gradients = run_backward(d_output, *records, ExpertForm(*form), RowValues(*values), needed)

    # An operation returns tensors only: as many as there are inputs with gradients.
    results = []
    for tensor, gradient in zip(inputs, gradients, strict=True):
        results.append(tensor.new_empty(0) if gradient is None else gradient)
    return results


@_fused_experts_backward.register_fake
def _fake_backward(d_output: Tensor, inputs: list[Tensor], *others: Any) -> list[Tensor]:
    """Returns tensors of the shapes of `_fused_experts_backward`."""
    *_, needed = others
    gradients = []
    for is_needed, tensor in zip(needed, inputs, strict=True):
        gradients.append(tensor.new_empty(tensor.shape if is_needed else 0))
    return gradients


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Keeps what the gradients of `_fused_experts` need."""
    tensors, indices, _, *form, _ = inputs
    _, *values, outputs = output
    ctx.mark_non_differentiable(*values, outputs)
    ctx.set_materialize_grads(False)
    ctx.form = form

    # The outputs are needed for the gradient of the combine weights alone.
    kept_outputs = outputs if ctx.needs_input_grad[1] else outputs.new_empty(0)
    ctx.save_for_backward(*values, kept_outputs, *indices, *tensors)


def _backward(ctx: Any, d_outputs: list[Tensor]) -> tuple[Any, ...]:
    """Returns the gradients of the inputs of `_fused_experts`, None for those not needed."""
    saved = list(ctx.saved_tensors)
    values = saved[:4]
    indices = saved[4:8]
    inputs = saved[8:]
    needed, *_ = ctx.needs_input_grad
    computed = _fused_experts_backward(d_outputs[0], inputs, indices, values, *ctx.form, needed)

    # Autograd expects None for gradients that it did not request.
    gradients: list[Tensor | None] = []
    for is_needed, gradient in zip(needed, computed, strict=True):
        gradients.append(gradient if is_needed else None)

    # And for the indices, the seed, the form and keep_products.
    return gradients, [None] * len(indices), *(None,) * 6


_fused_experts.register_autograd(_backward, setup_context=_save_for_backward)


# ---- shared ----


def _records(
    inputs: list[Tensor], indices: list[Tensor]
) -> tuple[Tensor, ExpertRows, ExpertWeights]:
    """Returns tokens, rows and weights; empty tensors are weights that the experts do not have."""
    tokens, row_weight, *weights = inputs
    counts, token, by_token, token_start = indices
    stacked: list[Any] = []
    for weight in weights:
        stacked.append(weight if weight.numel() else None)
    rows = ExpertRows(counts, token, row_weight, by_token, token_start)
    return tokens, rows, ExpertWeights.of(stacked)
