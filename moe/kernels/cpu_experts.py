"""The experts' products on a CPU: whole experts in parallel, one thread each.

One core at a time does gather, product, activation and product of one expert's rows while they are
in its cache. That scales better than splitting each product over all cores, because products of a
few hundred rows are small.

With few rows for an expert, most of a backward pass is the first touch of the gradients' memory;
huge pages halve it there. With many rows they won 10 % at best, and lost as much on a virtual
machine that gives free memory to its host. OpenMP's threads spin on the workers' cores for 10 ms
after each operation of torch; to make them sleep at once won nothing that could be measured, and
every later operation of the process, such as a step of decoding, had to wake them.
"""

import contextlib
import functools
import math
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.kernels.cpu_matmul import multiply
from moe.sparse.config import SparseConfig
from moe.sparse.dispatch import ExpertRows

_FEW_ROWS = 64  # rows of an expert, on average, below which the memory of its gradient costs more than the products
_IN_TURN = 32  # rows of a layer up to which reading weights is all the work: one expert at a time, on all cores
_HUGE_PAGE = 2**21  # bytes
_CHUNK = 512  # rows in one piece of the forward pass: enough for a full-speed product, few enough for the cache


class Piece(NamedTuple):
    """Rows `start` to `end` of one expert; `part` counts the pieces of that expert."""

    expert: int
    part: int
    start: int
    end: int


@torch.compiler.disable()
def parallel_feed_forward(
    tokens: Tensor,
    rows: ExpertRows,
    first: Tensor,
    down: Tensor,
    bias: Tensor | None,
    config: SparseConfig,
    drop_rate: float,
) -> Tensor:
    """Returns every token's weighted sum of what its experts make of it.

    Results do not depend on the number of threads in the forward pass; in the backward pass only an
    expert with more than its fair share of all rows is summed up in another order.

    Args:
        tokens: <float>[T, D].
        rows: Which token goes where.
        first: <float>[E, 2F or F, D] weights.
        down: <float>[E, D, F] weights.
        bias: <float>[E, F].
        config: Activation and kind of bias.
        drop_rate: Expert dropout.

    Returns:
        <float>[T, D].
    """
    learns = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (tokens, rows.weight, first, down, bias)
    )
    return _ParallelFeedForward.apply(
        tokens, rows.weight, first, down, bias, rows, config, drop_rate, learns
    )


class _ParallelFeedForward(torch.autograd.Function):
    """Gather, experts and weighted sum in one node: only what the products return is kept for the
    backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weight: Tensor,
        first: Tensor,
        down: Tensor,
        bias: Tensor | None,
        rows: ExpertRows,
        config: SparseConfig,
        drop_rate: float,
        learns: bool,
    ) -> Tensor:
        counts, num_rows = rows.counts.tolist(), rows.token.numel()
        expert = _Expert(config, drop_rate)
        products = tokens.new_empty(num_rows if learns else 0, first.shape[1])
        gates = tokens.new_empty(num_rows if learns and expert.gelu else 0, down.shape[2])
        kept = torch.empty(num_rows if drop_rate else 0, down.shape[2], dtype=torch.bool)
        outputs = tokens.new_empty(num_rows, down.shape[1])
        seed = int(torch.randint(2**62, ()).item()) if drop_rate else 0

        def run(piece: Piece) -> None:
            here = slice(piece.start, piece.end)
            x = tokens.index_select(0, rows.token[here])
            if drop_rate:
                kept[here].bernoulli_(
                    1 - drop_rate, generator=torch.Generator().manual_seed(seed + piece.start)
                )
            product = multiply(x, first[piece.expert], out=products[here] if learns else None)
            gate = expert.activate(product, gates[here] if gates.numel() else None)
            hidden = expert.hidden(product, gate, _of(bias, piece.expert), kept[here]).hidden
            multiply(hidden, down[piece.expert], out=outputs[here])

        pieces = [piece for piece in cut_rows(counts, _CHUNK) if piece.end > piece.start]
        if num_rows <= _IN_TURN:
            for piece in pieces:
                run(piece)
        else:
            run_pieces(run, pieces)
        ctx.save_for_backward(
            tokens,
            weight,
            first,
            down,
            bias,
            products,
            gates,
            kept,
            outputs if ctx.needs_input_grad[1] else None,
        )
        ctx.rows, ctx.counts, ctx.expert = rows, counts, expert
        return sum_by_token(outputs, rows, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # its decorator takes the names away
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        d_output = grad_outputs[0]
        tokens, weight, first, down, bias, products, gates, kept, outputs = ctx.saved_tensors
        rows, expert = ctx.rows, ctx.expert
        d_rows = tokens.new_empty(
            products.shape[0] if ctx.needs_input_grad[0] else 0, tokens.shape[1]
        )
        d_weight = None if outputs is None else torch.empty_like(weight)
        d_first, d_down, d_bias = (
            _ExpertSums(x, products.shape[0]) if needed else None
            for x, needed in zip((first, down, bias), ctx.needs_input_grad[2:5], strict=True)
        )
        row_weight = weight.to(tokens.dtype)[:, None]

        def run(piece: Piece) -> None:
            here = slice(piece.start, piece.end)
            token, product, expert_bias = rows.token[here], products[here], _of(bias, piece.expert)
            dy = d_output.index_select(0, token)
            if outputs is not None and d_weight is not None:
                d_weight[here] = torch.linalg.vecdot(dy, outputs[here])
            dy *= row_weight[here]
            gate = gates[here] if gates.numel() else expert.gate(product)
            parts = expert.hidden(product, gate, expert_bias, kept[here])
            if d_down:
                torch.mm(dy.t(), parts.hidden, out=d_down.of(piece))
            d_hidden = multiply(dy, down[piece.expert].t())
            d_plain = expert.d_plain(
                d_hidden, parts, expert_bias, kept[here], d_bias.of(piece) if d_bias else None
            )
            d_product = expert.d_product(d_plain, product, gate)
            if d_first:
                torch.mm(d_product.t(), tokens.index_select(0, token), out=d_first.of(piece))
            if ctx.needs_input_grad[0]:
                multiply(d_product, first[piece.expert].t(), out=d_rows[here])

        share = math.ceil(products.shape[0] / torch.get_num_threads())
        run_pieces(run, cut_rows(ctx.counts, max(_CHUNK, share)))
        d_tokens = sum_by_token(d_rows, rows, None) if ctx.needs_input_grad[0] else None
        return (
            d_tokens,
            d_weight,
            *(x.total() if x else None for x in (d_first, d_down, d_bias)),
            *[None] * 4,
        )


class _Hidden(NamedTuple):
    """The steps from the first product to the second.

    Attributes:
        plain: <float>[n, F] hidden activation before bias and dropout.
        hidden: <float>[n, F] what the second product takes.
    """

    plain: Tensor
    hidden: Tensor


class _Expert:
    """The elementwise half of an expert, forwards and backwards.

    A ReLU is done in place of the first product, since its gradient needs no more than that. GELU's
    gradient needs its input, and to do it again would cost more than to keep its result.
    """

    def __init__(self, config: SparseConfig, drop_rate: float) -> None:
        self.gated, self.gelu = config.gated, config.activation == "gelu"
        self.multiplicative, self.keep_scale = (
            config.expert_bias == "multiplicative",
            1 / (1 - drop_rate),
        )

    def gate(self, product: Tensor) -> Tensor:
        """Returns the gate's part <float>[n, F] of a first product <float>[n, 2F or F]."""
        return product.chunk(2, dim=-1)[0] if self.gated else product

    def activate(self, product: Tensor, out: Tensor | None) -> Tensor:
        """Returns the activated gate <float>[n, F] of a first product <float>[n, 2F or F]; GELU may
        fill `out`.
        """
        gate = self.gate(product)
        if not self.gelu:
            return gate.relu_()
        if out is None:
            return F.gelu(gate, approximate="tanh")
        return torch.ops.aten.gelu.out(gate, approximate="tanh", out=out)

    def hidden(self, product: Tensor, gate: Tensor, bias: Tensor | None, kept: Tensor) -> _Hidden:
        """Returns the steps from first product and activated gate <float>[n, F]; `kept` is empty
        without dropout.
        """
        plain = gate * product.chunk(2, dim=-1)[1] if self.gated else gate
        hidden = plain
        if bias is not None:
            hidden = plain * bias if self.multiplicative else plain + bias
        if kept.numel():
            hidden = hidden * kept * self.keep_scale
        return _Hidden(plain, hidden)

    def d_plain(
        self,
        d_hidden: Tensor,
        parts: _Hidden,
        bias: Tensor | None,
        kept: Tensor,
        d_bias: Tensor | None,
    ) -> Tensor:
        """Returns the gradient <float>[n, F] before dropout and bias; fills that of the bias
        <float>[F].
        """
        if kept.numel():
            d_hidden = d_hidden * kept * self.keep_scale
        if d_bias is not None:
            torch.sum(
                d_hidden * parts.plain if self.multiplicative else d_hidden, dim=0, out=d_bias
            )
        return d_hidden * bias if bias is not None and self.multiplicative else d_hidden

    def d_product(self, d_plain: Tensor, product: Tensor, gate: Tensor) -> Tensor:
        """Returns the gradient <float>[n, 2F or F] of the first product; overwrites `d_plain`."""
        if not self.gated:
            return self._d_gate(d_plain, product, d_plain)
        d_product = torch.empty_like(product)
        d_gate, d_up = d_product.chunk(2, dim=-1)
        torch.mul(d_plain, gate, out=d_up)
        self._d_gate(d_plain.mul_(product.chunk(2, dim=-1)[1]), self.gate(product), d_gate)
        return d_product

    def _d_gate(self, d_activated: Tensor, gate: Tensor, out: Tensor) -> Tensor:
        """Returns `out`, filled with the gradient <float>[n, F] of the activation's input."""
        if self.gelu:
            return torch.ops.aten.gelu_backward.grad_input(
                d_activated, gate, approximate="tanh", grad_input=out
            )
        return torch.ops.aten.threshold_backward.grad_input(d_activated, gate, 0, grad_input=out)


class _ExpertSums:
    """Gradient of stacked weights; an expert in several pieces is summed in their order, whoever
    ends first.
    """

    def __init__(self, weights: Tensor, num_rows: int) -> None:
        few_rows = num_rows < _FEW_ROWS * weights.shape[0]
        self._first_pieces = in_huge_pages(weights) if few_rows else torch.empty_like(weights)
        self._further_pieces: dict[tuple[int, int], Tensor] = {}

    def of(self, piece: Piece) -> Tensor:
        """Returns where the sum <float>[...] over the rows of `piece` belongs."""
        target = self._first_pieces[piece.expert]
        if piece.part:
            target = self._further_pieces[piece.expert, piece.part] = torch.empty_like(target)
        return target

    def total(self) -> Tensor:
        """Returns the gradient <float>[E, ...] once all pieces are done."""
        for expert, part in sorted(self._further_pieces):
            self._first_pieces[expert] += self._further_pieces[expert, part]
        return self._first_pieces


def in_huge_pages(like: Tensor) -> Tensor:
    """Returns uninitialised memory of shape and dtype of <float>[...], in huge pages where the
    system has them.
    """
    num_bytes = like.numel() * like.element_size()
    if num_bytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty_like(like)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


def _of(bias: Tensor | None, expert: int) -> Tensor | None:
    """Returns one expert's bias <float>[F]."""
    return None if bias is None else bias[expert]


def sum_by_token(outputs: Tensor, rows: ExpertRows, weight: Tensor | None) -> Tensor:
    """Returns each token's sum <float>[T, D] over its rows <float>[N, D], weighted by <float>[N]."""
    if not outputs.shape[0]:
        return outputs.new_zeros(rows.token_start.numel(), outputs.shape[1])
    if weight is not None:
        weight = weight.to(outputs.dtype).index_select(0, rows.by_token)
    return F.embedding_bag(
        rows.by_token, outputs, rows.token_start, mode="sum", per_sample_weights=weight
    )


def cut_rows(counts: list[int], most: int) -> list[Piece]:
    """Returns each expert's rows in even pieces of at most `most`, largest first; an expert without
    rows has one.

    Args:
        counts: Rows of each expert.
        most: Rows in a piece.
    """
    pieces, start = [], 0
    for expert, count in enumerate(counts):
        parts = max(1, math.ceil(count / most))
        borders = [start + count * part // parts for part in range(parts + 1)]
        pieces += [Piece(expert, part, *borders[part : part + 2]) for part in range(parts)]
        start += count
    return sorted(pieces, key=lambda piece: piece.start - piece.end)


def run_pieces(run: Callable[[Piece], None], pieces: Iterable[Piece]) -> None:
    """Runs all pieces, as many at once as torch has threads, each of them on one core.

    After an error or Ctrl-C no piece begins any more, and none is running when it is raised.
    """
    waiting, lock = deque(pieces), threading.Lock()

    def take() -> Piece | None:
        with lock:
            return waiting.popleft() if waiting else None

    def stop() -> None:
        with lock:
            waiting.clear()

    def work() -> None:
        try:
            while (piece := take()) is not None:
                run(piece)
        except BaseException:
            stop()
            raise

    threads = torch.get_num_threads()
    if threads == 1:
        with torch.autocast("cpu", enabled=False):
            work()
        return
    pool, jobs = _thread_pool(threads), []
    if (
        torch.is_inference_mode_enabled()
    ):  # the mode belongs to a thread, and its tensors change within it only
        work = torch.inference_mode()(work)
    try:
        for _ in range(threads):
            jobs.append(pool.submit(work))
        for job in jobs:
            job.result()
    except BaseException:
        stop()
        wait(jobs)
        raise
    finally:  # an error, its frame and the jobs would hold each other, and with them the workers
        job = None
        jobs.clear()


@functools.lru_cache(
    maxsize=4
)  # the workers of a number of threads that is no longer asked for end
def _thread_pool(threads: int) -> ThreadPoolExecutor:
    """Returns the workers for so many threads: each runs torch on one core and builds no graph."""
    started = threading.Barrier(threads)

    def prepare() -> None:
        torch.get_num_threads()  # a thread's first question sets it to the process's number: let that be over
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="experts", initializer=prepare)
    try:
        for ready in [pool.submit(started.wait) for _ in range(threads)]:
            ready.result()
    except (
        BaseException
    ):  # the system gives no more threads: who waits for them would keep the process from ending
        started.abort()
        raise
    finally:
        torch.set_num_threads(
            threads
        )  # the workers' setting is also what threads to come would inherit
    return pool


if hasattr(os, "register_at_fork"):  # threads do not survive a fork
    os.register_at_fork(after_in_child=_thread_pool.cache_clear)
