"""The experts' products on a CPU: whole experts in parallel, one thread each.

One core at a time does gather, product, activation and product of one expert's rows while they are
in its cache. That scales better than splitting each product over all cores, because products of a
few hundred rows are small.

With few rows for an expert, most of a backward pass is the first touch of the gradients' memory,
unless host_memory.py keeps it; torch's THP_MEM_ALLOC_ENABLE=1 halves it with huge pages. OpenMP's
threads spin on the workers' cores for 10 ms after each operation of torch; making them sleep at once
had no measurable benefit, and every later operation of the process, such as a step of decoding, had
to wake them.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe.kernels.cpu_matmul import expert_weight_gradient, multiply, prepares_for_row_counts
from moe.kernels.dropout import draw_kept
from moe.kernels.expert_pieces import Piece, run_pieces, split_rows
from moe.kernels.expert_rows import ExpertRows, round_up_rows
from moe.kernels.expert_weights import ExpertWeights, LowRank, expert_weight
from moe.kernels.first_order import first_order_only
from moe.kernels.hidden_units import GELU_FORMS, ExpertForm, activate
from moe.kernels.stored_weight import StoredWeight

aten = torch.ops.aten

# Bytes in a column of a piece of a forward pass, 512 rows in float32: enough for a product at full
# speed, few enough for the cache.
_BYTES_PER_PIECE = 2048

# Rows of a layer up to which reading weights is all the work: one expert at a time, on all cores.
_SEQUENTIAL_ROWS = 32


class RowValues(NamedTuple):
    """Results of a forward pass for every row, kept for the backward pass; empty where not needed.

    Attributes:
        products: <float>[N, 2F or F] z, what the first product returned.
        gates: <float>[N, F] act(z'), unless the activation is ReLU.
        kept_units: <bool>[N, F] hidden units that dropout kept.
        outputs: <float>[N, D] o, what the second product returned.
    """

    products: Tensor
    gates: Tensor
    kept_units: Tensor
    outputs: Tensor


@torch.compiler.disable()
def fused_feed_forward(
    tokens: Tensor, rows: ExpertRows, weights: ExpertWeights, form: ExpertForm
) -> Tensor:
    """Returns every token's weighted sum of its experts' outputs: gather, experts and sum in one node.

    Results do not depend on the number of threads in the forward pass; in the backward pass only an
    expert with more than its fair share of all rows is summed up in another order. Compiled graphs
    take the same as an operation of torch, see compiled_experts.py.

    Args:
        tokens: <float>[T, D].
        rows: The token of each row, and its weight.
        weights: The experts' weights, in the dtype of the tokens or quantised.
        form: What an expert computes.

    Returns:
        <float>[T, D]; zeros for a token without rows.
    """
    if prepares_for_row_counts(tokens.dtype):
        rows = round_up_rows(rows)
    inputs = (tokens, rows.weight, *weights.tensors())
    needs_graph = any(x is not None and x.requires_grad for x in inputs)
    if torch.is_grad_enabled() and needs_graph:
        return _FusedFeedForward.apply(*inputs, rows, form)

    # A node that keeps nothing would cost a step of decoding as much as its gather and its sum.
    combined, _ = run_forward(
        tokens, rows, weights, form, keep_products=False, seed=_dropout_seed(form)
    )
    return combined


class _FusedFeedForward(torch.autograd.Function):
    """`run_forward` and `run_backward` as one node of the graph of gradients."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, *weights_and_settings: Any) -> Tensor:
        *stacked, rows, form = weights_and_settings
        weights = ExpertWeights.of(stacked)
        combined, values = run_forward(
            tokens, rows, weights, form, keep_products=True, seed=_dropout_seed(form)
        )

        # The outputs are needed for the gradient of the combine weights alone.
        kept_outputs = values.outputs if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(tokens, *values._replace(outputs=kept_outputs), *stacked)
        ctx.rows = rows
        ctx.form = form
        return combined

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        tokens, *saved = ctx.saved_tensors
        values = RowValues(*saved[:4])
        weights = ExpertWeights.of(saved[4:])
        inputs = (grad_outputs[0], tokens, ctx.rows, weights, ctx.form, values)
        return (*run_backward(*inputs, ctx.needs_input_grad[:-2]), None, None)


def _dropout_seed(form: ExpertForm) -> int:
    return int(torch.randint(2**62, ()).item()) if form.dropout_rate else 0


def run_forward(
    tokens: Tensor,
    rows: ExpertRows,
    weights: ExpertWeights,
    form: ExpertForm,
    *,
    keep_products: bool,
    seed: int,
) -> tuple[Tensor, RowValues]:
    """Returns every token's weighted sum of its experts' outputs <float>[T, D], and the
    intermediate results.

    For row n of token t and expert e, with * by element:

        z_n = W1_e x_t                    first product, its halves z' (gate) and z'' when gated
        p_n = act(z'_n) * z''_n           plain hidden units
        h_n = dropout(p_n + B_e), or p_n * B_e in place of the sum
        o_n = W2_e h_n                    second product
        y_t = sum over its rows of w_n o_n

    Adapters add B_e (s * A_e x_t) to z_n and B'_e (s' * A'_e h_n) to o_n, and biases b1_e and b2_e.

    Args:
        tokens: <float>[T, D].
        rows: Which token each row is, and its weight. Rows after those of `counts` are not read.
        weights: The experts' weights, in the dtype of the tokens.
        form: What an expert computes.
        keep_products: Whether a backward pass will need products and gates.
        seed: Of dropout.
    """
    first, down, bias, first_bias, down_bias, first_adapter, down_adapter = weights
    counts = rows.counts.tolist()
    num_rows = sum(counts)
    values = empty_values(tokens, weights, form, rows.token.numel(), keep_products)
    products, gates, kept_units, outputs = values
    hidden_layer = _HiddenLayer(form)

    def run_piece(piece: Piece) -> None:
        # Each piece has its own seed, so the dropped units do not depend on the threads.
        here = slice(piece.start, piece.end)
        expert_bias = None if bias is None else bias[piece.expert]
        if form.dropout_rate:
            shape = kept_units[here].shape
            kept_units[here] = draw_kept(shape, form.dropout_rate, (seed, piece.start))

        # One expert's rows go through both products while they are in the cache.
        x = tokens.index_select(0, rows.token[here])  # [n, D]
        product = products[here] if keep_products else None
        product = _expert_product(x, first, piece.expert, product)  # [n, 2F or F]
        _add_bias(product, first_bias, piece.expert)
        _add_adapter(product, x, first_adapter, piece.expert)
        gate = hidden_layer.activate(product, gates[here] if gates.numel() else None)  # [n, F]
        _, hidden = hidden_layer.units(product, gate, expert_bias, kept_units[here])
        output = _expert_product(hidden, down, piece.expert, outputs[here])  # [n, D]
        _add_bias(output, down_bias, piece.expert)
        _add_adapter(output, hidden, down_adapter, piece.expert)

    pieces = split_rows(counts, _rows_per_piece(tokens), least_pieces=0)
    if num_rows <= _SEQUENTIAL_ROWS:
        for piece in pieces:
            run_piece(piece)
    else:
        run_pieces(run_piece, pieces)

    combined = rows.sum_by_token(outputs[:num_rows], weighted=True)  # [T, D]
    return combined, values


def empty_values(
    tokens: Tensor, weights: ExpertWeights, form: ExpertForm, num_rows: int, keep_products: bool
) -> RowValues:
    """Returns memory for the results of a forward pass for `num_rows` rows."""
    num_saved = num_rows if keep_products else 0
    num_gates = 0 if form.activation == "relu" else num_saved
    num_dropped = num_rows if form.dropout_rate else 0
    d_ff = weights.down.shape[2]
    return RowValues(
        products=tokens.new_empty(num_saved, weights.first.shape[1]),
        gates=tokens.new_empty(num_gates, d_ff),
        kept_units=tokens.new_empty(num_dropped, d_ff, dtype=torch.bool),
        outputs=tokens.new_empty(num_rows, tokens.shape[1]),
    )


def _expert_product(x: Tensor, stacked: Tensor, expert: int, out: Tensor | None) -> Tensor:
    """Returns x W_e^T <float>[n, O]; a stored weight is unpacked where that is faster."""
    if isinstance(stacked, StoredWeight):
        product = stacked.multiply_packed(x, expert)
        if product is not None:
            return product if out is None else out.copy_(product)
    return multiply(x, expert_weight(stacked, expert, x), out=out)


def _add_bias(product: Tensor, bias: Tensor | None, expert: int) -> None:
    """Adds an expert's bias of <float>[E, O] to a product <float>[n, O], if there is one."""
    if bias is not None:
        product += bias[expert]


def _add_adapter(product: Tensor, x: Tensor, adapter: LowRank | None, expert: int) -> None:
    """Adds an adapter's product of <float>[n, I] to a product <float>[n, O], if there is one."""
    if adapter is not None:
        product.addmm_(_low_rank_t(x, adapter, expert).t(), adapter.b[expert])


def _low_rank_t(x: Tensor, adapter: LowRank, expert: int) -> Tensor:
    """Returns u^T <float>[R, n] of u = x A^T * s. The small factor comes first: last takes ten times as long."""
    return torch.mm(adapter.a[expert], x.t()).mul_(adapter.scale[:, None])


def run_backward(
    d_output: Tensor,
    tokens: Tensor,
    rows: ExpertRows,
    weights: ExpertWeights,
    form: ExpertForm,
    values: RowValues,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Returns the gradients of `run_forward`, in whose letters the steps are written.

    Args:
        d_output: <float>[T, D] gradient of its result.
        tokens: Its tokens.
        rows: Its rows.
        weights: Its weights.
        form: What an expert computes.
        values: Its values, with the products.
        needed: Which gradients are requested: of tokens, of the rows' weights, and of the weights in
            the order of their `tensors`.
    """
    products, gates, kept_units, outputs = values
    first, down, bias, _, _, first_adapter, down_adapter = weights
    needs_tokens, needs_weight, *needs_stacked = needed
    hidden_layer = _HiddenLayer(form)
    counts = rows.counts.tolist()
    num_rows = sum(counts)
    row_weight = rows.weight.to(tokens.dtype)[:, None]  # [N, 1]

    # One tensor for each gradient that is needed.
    d_rows = tokens.new_empty(num_rows if needs_tokens else 0, tokens.shape[1])  # dx  [N, D]
    d_weight = torch.zeros_like(rows.weight) if needs_weight else None
    d_stacked: list[_WeightGradient | None] = [None] * len(needs_stacked)
    for index, weight in enumerate(weights.tensors()):
        if weight is not None and needs_stacked[index]:
            d_stacked[index] = _WeightGradient(weight)
    d_first, d_down, d_bias, d_first_bias, d_down_bias, *d_factors = d_stacked

    def run_adapter(
        piece: Piece, adapter: LowRank, d_y: Tensor, x: Tensor, d_x: Tensor | None
    ) -> None:
        d_a, d_b, _ = d_factors[:3] if adapter is first_adapter else d_factors[3:]

        # With u = x A^T * s: dB^T = u^T dy, du = dy B * s, dA = du^T x, and a part of dx is du A.
        if d_b is not None:
            torch.mm(_low_rank_t(x, adapter, piece.expert), d_y, out=d_b.piece_sum(piece))
        d_low_t = torch.mm(adapter.b[piece.expert], d_y.t()).mul_(adapter.scale[:, None])  # [R, n]
        if d_a is not None:
            torch.mm(d_low_t, x, out=d_a.piece_sum(piece))
        if d_x is not None:
            d_x.addmm_(d_low_t.t(), adapter.a[piece.expert])

    def run_piece(piece: Piece) -> None:
        here = slice(piece.start, piece.end)
        token = rows.token[here]
        product = products[here]
        kept = kept_units[here]
        expert_bias = None if bias is None else bias[piece.expert]

        # dw_n = dy_t . o_n and do_n = w_n dy_t.
        d_row = d_output.index_select(0, token)  # [n, D]
        if d_weight is not None:
            d_weight[here] = torch.linalg.vecdot(d_row, outputs[here])
        d_row *= row_weight[here]
        if d_down_bias is not None:
            torch.sum(d_row, dim=0, out=d_down_bias.piece_sum(piece))

        # dW2 = do^T h, with h computed again from the kept products.
        gate = gates[here] if gates.numel() else hidden_layer.gate_half(product)  # [n, F]
        plain, hidden = hidden_layer.units(product, gate, expert_bias, kept)
        if d_down is not None:
            expert_weight_gradient(d_row, hidden, d_down.piece_sum(piece))

        # dh = do W2, and back through dropout, bias and activation to dz.
        down_weight = expert_weight(down, piece.expert, tokens)
        d_hidden = multiply(d_row, down_weight.t(), kind="expert_input_gradient")  # [n, F]
        if down_adapter is not None:
            run_adapter(piece, down_adapter, d_row, hidden, d_hidden)
        d_bias_sum = d_bias.piece_sum(piece) if d_bias is not None else None
        d_hidden = hidden_layer.drop(d_hidden, kept)
        d_plain = hidden_layer.d_plain(d_hidden, plain, expert_bias, d_bias_sum)
        d_product = hidden_layer.d_product(d_plain, product, gate)  # [n, 2F or F]
        if d_first_bias is not None:
            torch.sum(d_product, dim=0, out=d_first_bias.piece_sum(piece))

        # dW1 = dz^T x and dx = dz W1.
        needs_x = d_first is not None or first_adapter is not None
        x = tokens.index_select(0, token) if needs_x else tokens[:0]  # [n, D]
        if d_first is not None:
            expert_weight_gradient(d_product, x, d_first.piece_sum(piece))
        d_x = None
        if needs_tokens:
            first_weight = expert_weight(first, piece.expert, tokens)
            d_x = d_rows[here]
            multiply(d_product, first_weight.t(), kind="expert_input_gradient", out=d_x)
        if first_adapter is not None:
            run_adapter(piece, first_adapter, d_product, x, d_x)

    # As few pieces as keep all cores busy: a weight's gradient is one sum over its rows.
    fair_share = math.ceil(num_rows / torch.get_num_threads())
    most_rows = max(_rows_per_piece(tokens), fair_share)
    run_pieces(run_piece, split_rows(counts, most_rows))
    d_tokens = rows.sum_by_token(d_rows, weighted=False) if needs_tokens else None
    gradients = [d_tokens, d_weight]
    for gradient in d_stacked:
        gradients.append(None if gradient is None else gradient.total())
    return gradients


class _HiddenLayer:
    """Element-wise operations between the two products, forwards and backwards.

    A ReLU is computed in place on the first product, since its gradient needs only the result. Other
    gradients need the input, and to do GELU again would cost more than to keep its result.
    """

    def __init__(self, form: ExpertForm) -> None:
        self.form = form
        self.multiplies_bias = form.bias_kind == "multiplicative"

    def gate_half(self, product: Tensor) -> Tensor:
        """Returns z' <float>[n, F] of z <float>[n, 2F or F]."""
        return product.chunk(2, dim=-1)[0] if self.form.gated else product

    def activate(self, product: Tensor, out: Tensor | None) -> Tensor:
        """Returns act(z') <float>[n, F] of z <float>[n, 2F or F]; all but ReLU may fill `out`."""
        gate = self.gate_half(product)
        activation = self.form.activation
        if activation == "relu":
            return gate.relu_()
        if out is None:
            return activate(gate, activation)
        if activation == "silu":
            return aten.silu.out(gate, out=out)
        return aten.gelu.out(gate, approximate=GELU_FORMS[activation], out=out)

    def units(
        self, product: Tensor, gate: Tensor, bias: Tensor | None, kept: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns p and h <float>[n, F] of z <float>[n, 2F or F] and act(z') <float>[n, F].

        Args:
            product: z.
            gate: act(z').
            bias: <float>[F] B of the expert.
            kept: <bool>[n, F] units that dropout keeps; empty without dropout.
        """
        # p = act(z') * z'', or act(z') alone.
        plain = gate * product.chunk(2, dim=-1)[1] if self.form.gated else gate

        # h: the bias, then dropout.
        hidden = plain
        if bias is not None:
            hidden = plain * bias if self.multiplies_bias else plain + bias
        return plain, self.drop(hidden, kept)

    def drop(self, units: Tensor, kept: Tensor) -> Tensor:
        """Returns <float>[n, F] without the units that dropout drops, and scales the others up."""
        return (units * kept).mul_(1 / (1 - self.form.dropout_rate)) if kept.numel() else units

    def d_plain(
        self, d_hidden: Tensor, plain: Tensor, bias: Tensor | None, d_bias: Tensor | None
    ) -> Tensor:
        """Returns dp <float>[n, F] of dh <float>[n, F] before dropout, and fills dB <float>[F] when it is given."""
        # dB is a sum over the rows.
        if d_bias is not None:
            d_bias_rows = d_hidden * plain if self.multiplies_bias else d_hidden
            torch.sum(d_bias_rows, dim=0, out=d_bias)
        if bias is not None and self.multiplies_bias:
            return d_hidden * bias
        return d_hidden

    def d_product(self, d_plain: Tensor, product: Tensor, gate: Tensor) -> Tensor:
        """Returns dz <float>[n, 2F or F] from dp <float>[n, F], which is overwritten."""
        if not self.form.gated:
            return self._d_activation(d_plain, product, d_plain)

        # p = act(z') * z'', so dz'' = dp * act(z') and dz' = dp * z'' * act'(z').
        d_product = torch.empty_like(product)
        d_gate, d_up = d_product.chunk(2, dim=-1)
        torch.mul(d_plain, gate, out=d_up)
        gate_half, up_half = product.chunk(2, dim=-1)
        self._d_activation(d_plain.mul_(up_half), gate_half, d_gate)
        return d_product

    def _d_activation(self, d_activated: Tensor, gate: Tensor, out: Tensor) -> Tensor:
        activation = self.form.activation
        if activation == "relu":
            return aten.threshold_backward.grad_input(d_activated, gate, 0, grad_input=out)
        if activation == "silu":
            return aten.silu_backward.grad_input(d_activated, gate, grad_input=out)
        kind = GELU_FORMS[activation]
        return aten.gelu_backward.grad_input(d_activated, gate, approximate=kind, grad_input=out)


# ---- gradients of stacked weights ----


class _WeightGradient:
    """Gradient of stacked weights, summed over the pieces of each expert.

    An expert in several pieces is summed in their order, whichever ends first.
    """

    def __init__(self, weights: Tensor) -> None:
        self._first_pieces = torch.empty_like(weights)
        self._further_pieces: dict[tuple[int, int], Tensor] = {}

    def piece_sum(self, piece: Piece) -> Tensor:
        """Returns where the sum <float>[...] over the rows of `piece` belongs."""
        target = self._first_pieces[piece.expert]
        if piece.part:
            target = torch.empty_like(target)
            self._further_pieces[piece.expert, piece.part] = target
        return target

    def total(self) -> Tensor:
        """Returns the gradient <float>[E, ...] once all pieces are done."""
        for expert, part in sorted(self._further_pieces):
            self._first_pieces[expert] += self._further_pieces[expert, part]
        return self._first_pieces


def _rows_per_piece(tokens: Tensor) -> int:
    return _BYTES_PER_PIECE // tokens.element_size()
