"""How long products of a CPU take with each of torch's libraries.

Which one is faster depends on the processor and on the kind of product. On an AMD EPYC oneDNN takes
half the time of MKL. On an Intel Xeon with AVX-512 MKL takes a tenth less for outputs and for
gradients of inputs, and 20 to 45 % less for gradients of weights; and oneDNN prepares itself, for
1 ms, for every number of rows that it has not seen, as experts bring them.
"""

import functools
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from moe.kernels.torch_private import onednn_linear

Library = Literal["blas", "onednn"]
ProductKind = Literal[
    "forward", "input_gradient", "weight_gradient", "expert_forward", "expert_input_gradient"
]

FEW_TOKENS = 64
"""Tokens up to which a product has few."""

_NUM_INPUTS = 512
_NUM_OUTPUTS = 1024
_ROUNDS = 9

# Share of the time of torch's own operation below which another library is worth a change.
_WORTHWHILE = 0.9


class LibraryByTokens(NamedTuple):
    """The library for products of up to 64 tokens, and of more."""

    few: Library
    many: Library


class ProductChoice(NamedTuple):
    """The library of each product of a layer y = x W^T.

    Attributes:
        forward: y.
        input_gradient: dx = dy W.
        weight_gradient: dW = dy^T x.
        expert_forward: y of an expert: many rows are another number of them in every call.
        expert_input_gradient: dx of an expert.
    """

    forward: LibraryByTokens
    input_gradient: LibraryByTokens
    weight_gradient: LibraryByTokens
    expert_forward: LibraryByTokens
    expert_input_gradient: LibraryByTokens


class ProductTime(NamedTuple):
    """The shortest time of a product with 512 inputs and 1,024 outputs.

    Attributes:
        kind: Field of `ProductChoice`.
        tokens: Field of `LibraryByTokens`.
        blas: Milliseconds of torch's own operation.
        onednn: Milliseconds of oneDNN.
    """

    kind: ProductKind
    tokens: str
    blas: float
    onednn: float

    @property
    def faster(self) -> Library:
        """The library to use."""
        return "onednn" if self.onednn < _WORTHWHILE * self.blas else "blas"


class Measurement(NamedTuple):
    """What was measured where, and the choice that follows.

    Attributes:
        processor: Name of the CPU.
        torch: Release of torch.
        choice: The library of each product.
        times: Of each product.
    """

    processor: str
    torch: str
    choice: ProductChoice
    times: list[ProductTime]


def measure_products() -> Measurement:
    """Measures every kind of product, in a third of a second or so.

    It happens on one core, whose clock stands still while other processes have it, so that a busy
    machine measures what an idle one does; and in a thread of its own, which no mode of the caller
    reaches: what counts operations or replaces tensors sees nothing of it.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="measure-products") as pool:
        times = pool.submit(_time_on_one_core).result()

    faster: dict[tuple[str, str], Library] = {}
    for entry in times:
        faster[entry.kind, entry.tokens] = entry.faster

    by_kind: list[LibraryByTokens] = []
    for kind in ProductChoice._fields:
        by_kind.append(LibraryByTokens(faster[kind, "few"], faster[kind, "many"]))
    return Measurement(processor_name(), str(torch.__version__), ProductChoice(*by_kind), times)


@functools.cache
def processor_name() -> str:
    """Returns the name of the CPU."""
    # Linux has a table of its processors; elsewhere Python's guess must do.
    table = Path("/proc/cpuinfo")
    if table.is_file():
        for line in table.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _time_on_one_core() -> list[ProductTime]:
    """Returns the times of all products, both libraries in turn."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times: list[ProductTime] = []
    try:
        for kind in ProductChoice._fields:
            for tokens in LibraryByTokens._fields:
                times.append(_time_product(cast(ProductKind, kind), tokens))
    finally:
        # The number that threads to come inherit.
        torch.set_num_threads(num_threads)
    return times


def _time_product(kind: ProductKind, tokens: str) -> ProductTime:
    num_rows = FEW_TOKENS // 2 if tokens == "few" else 4 * FEW_TOKENS
    blas: list[float] = []
    onednn: list[float] = []
    for number in range(_ROUNDS):
        # An expert with many rows brings a number that oneDNN has not seen.
        is_new = kind.startswith("expert") and tokens == "many"
        a, b = _operands(kind, num_rows + number if is_new else num_rows)
        blas.append(_milliseconds(_blas_product, a, b))
        onednn.append(_milliseconds(onednn_linear, a, b))
    return ProductTime(kind, tokens, min(blas), min(onednn))


def _operands(kind: str, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Returns a and b <float32> whose product a b^T is of this kind."""
    x = torch.ones(num_tokens, _NUM_INPUTS)
    d_output = torch.ones(num_tokens, _NUM_OUTPUTS)
    weight = torch.ones(_NUM_OUTPUTS, _NUM_INPUTS)
    if kind.endswith("forward"):
        return x, weight
    if kind.endswith("input_gradient"):
        return d_output, weight.t()
    return d_output.t(), x.t()


def _blas_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b.t())


def _milliseconds(multiply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> float:
    started = time.thread_time()
    multiply(a, b)
    return 1e3 * (time.thread_time() - started)
