"""Measures matrix products on a CPU with each of torch's libraries.

Which one is faster depends on the processor and on the kind of product. On an AMD EPYC oneDNN takes
half the time of MKL. On an Intel Xeon with AVX-512 MKL takes a tenth less for outputs and for
gradients of inputs, and 20 to 45 % less for gradients of weights; but for 4 to 16 tokens oneDNN
computes outputs in 0.6 to 0.8 of the time. oneDNN prepares itself, for 1 ms,
for every number of rows that it has not seen: experts round theirs up, see expert_rows.py.

In 16 bits there is one library, and another choice: oneDNN computes an expert's dW = dy^T x from
dy^T in columns, or from a copy of dy^T in rows. On an Intel Xeon with AMX the copy pays: products
take 0.5 to 0.9 of the time, copying included.
"""

import functools
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from moe.kernels.torch_private import onednn_linear

Library = Literal["blas", "onednn"]
ProductKind = Literal[
    "forward", "input_gradient", "weight_gradient", "expert_forward", "expert_input_gradient"
]

# A layer like those of a base model.
_NUM_INPUTS = 768
_NUM_OUTPUTS = 3072

# Rows of the products that are measured: of decoding one text, of decoding several, of training.
_ROWS_BY_TOKENS = {"one": (1, 2), "few": (4, 8, 16), "many": (64, 256)}
_MOST_TOKENS_OF_ONE = 2
_MOST_TOKENS_OF_FEW = 16
_ROWS_OF_GRADIENT = (272, 1088)  # of an expert in 16 bits
_ROUNDS = 9

# Share of the time of torch's own operation below which another way is worth a change.
_WORTHWHILE = 0.95
# Share of that time above which two rounds decide.
_HOPELESS = 3


class LibraryByTokens(NamedTuple):
    """The library for products of so many tokens.

    Attributes:
        one: 1 or 2, whose products read the weights and do little else.
        few: Up to 16.
        many: More.
    """

    one: Library
    few: Library
    many: Library

    def library(self, num_tokens: int) -> Library:
        """Returns the library for a number of tokens."""
        if num_tokens <= _MOST_TOKENS_OF_ONE:
            return self.one
        return self.few if num_tokens <= _MOST_TOKENS_OF_FEW else self.many


class ProductChoice(NamedTuple):
    """The library of each product of a layer y = x W^T.

    Attributes:
        forward: y.
        input_gradient: dx = dy W.
        weight_gradient: dW = dy^T x.
        expert_forward: y of an expert, which one core computes.
        expert_input_gradient: dx of an expert.
        copies_expert_gradient: Whether dW of an expert in 16 bits is computed from a copy of dy^T.
    """

    forward: LibraryByTokens
    input_gradient: LibraryByTokens
    weight_gradient: LibraryByTokens
    expert_forward: LibraryByTokens
    expert_input_gradient: LibraryByTokens
    copies_expert_gradient: bool = False


class ProductTime(NamedTuple):
    """The median time of products with 768 inputs and 3,072 outputs, whose weights are in no cache.

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


class CopyTime(NamedTuple):
    """The shortest time of an expert's dW = dy^T x in bfloat16.

    Attributes:
        as_it_lies: Milliseconds with dy^T in columns.
        copied: Milliseconds with a copy of it in rows, copying included.
    """

    as_it_lies: float
    copied: float

    @property
    def copy_is_faster(self) -> bool:
        """Whether to copy."""
        return self.copied < _WORTHWHILE * self.as_it_lies


class Measurement(NamedTuple):
    """Results of the measurement, its machine, and the resulting choice.

    Attributes:
        processor: Name of the CPU.
        torch: Release of torch.
        choice: The library of each product.
        times: Times of each product.
        copy_time: Time to copy the gradient of an expert's weights in bfloat16.
    """

    processor: str
    torch: str
    choice: ProductChoice
    times: list[ProductTime]
    copy_time: CopyTime


PRODUCT_KINDS: tuple[ProductKind, ...] = get_args(ProductKind)


def measure_products() -> Measurement:
    """Measures every kind of product, in two to five seconds.

    It runs on one core and counts CPU time, so that a busy machine gives the same results as an
    idle one; and in its own thread, so that modes of the caller that count operations or replace
    tensors do not see it.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="measure-products") as pool:
        times, copy_time = pool.submit(_time_on_one_core).result()

    faster: dict[tuple[str, str], Library] = {}
    for entry in times:
        faster[entry.kind, entry.tokens] = entry.faster

    by_kind: dict[str, LibraryByTokens] = {}
    for kind in PRODUCT_KINDS:
        by_kind[kind] = LibraryByTokens(
            one=faster[kind, "one"], few=faster[kind, "few"], many=faster[kind, "many"]
        )
    choice = ProductChoice(**by_kind, copies_expert_gradient=copy_time.copy_is_faster)
    return Measurement(
        processor=processor_name(),
        torch=str(torch.__version__),
        choice=choice,
        times=times,
        copy_time=copy_time,
    )


@functools.cache
def processor_name() -> str:
    """Returns the name of the CPU."""
    # Linux has a table of its processors; elsewhere Python's guess is used.
    table = Path("/proc/cpuinfo")
    if table.is_file():
        for line in table.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _time_on_one_core() -> tuple[list[ProductTime], CopyTime]:
    """Returns the times of all products, both libraries in turn, and of the copy."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times: list[ProductTime] = []
    try:
        # A weight for each product of each library: 170 MB, of which no cache holds the next.
        weights = torch.ones(2 * _ROUNDS, _NUM_OUTPUTS, _NUM_INPUTS)
        for kind in PRODUCT_KINDS:
            for tokens in LibraryByTokens._fields:
                times.append(_time_product(kind, tokens, weights))
        copy_time = _time_copy()
    finally:
        # The number that threads to come inherit.
        torch.set_num_threads(num_threads)
    return times, copy_time


def _time_product(kind: ProductKind, tokens: str, weights: Tensor) -> ProductTime:
    blas = 0.0
    onednn = 0.0
    for num_rows in _ROWS_BY_TOKENS[tokens]:
        blas_times: list[float] = []
        onednn_times: list[float] = []
        for number in range(_ROUNDS):
            first = weights[2 * number]
            second = weights[2 * number + 1]
            blas_times.append(_milliseconds(_blas_product, *_operands(kind, num_rows, first)))
            onednn_times.append(_milliseconds(onednn_linear, *_operands(kind, num_rows, second)))
        blas += statistics.median(blas_times)
        onednn += statistics.median(onednn_times)
    return ProductTime(kind, tokens, blas, onednn)


def _time_copy() -> CopyTime:
    # Results go to existing memory, as in training that reuses freed memory.
    d_weight = torch.empty(_NUM_OUTPUTS, _NUM_INPUTS, dtype=torch.bfloat16)
    as_it_lies = 0.0
    copied = 0.0
    for num_rows in _ROWS_OF_GRADIENT:
        x = torch.ones(num_rows, _NUM_INPUTS, dtype=torch.bfloat16)
        d_output = torch.ones(num_rows, _NUM_OUTPUTS, dtype=torch.bfloat16)
        rows = torch.empty(_NUM_OUTPUTS, num_rows, dtype=torch.bfloat16)

        strided_times: list[float] = []
        copied_times: list[float] = []
        for _ in range(_ROUNDS):
            strided_times.append(_milliseconds(_multiply_into, d_weight, d_output.t(), x))
            copy_time = _milliseconds(rows.copy_, d_output.t())
            copied_times.append(copy_time + _milliseconds(_multiply_into, d_weight, rows, x))

            # A processor without products in 16 bits takes a minute for all rounds.
            if len(copied_times) == 2 and min(copied_times) > _HOPELESS * min(strided_times):
                return CopyTime(min(strided_times), min(copied_times))
        as_it_lies += min(strided_times)
        copied += min(copied_times)
    return CopyTime(as_it_lies, copied)


def _multiply_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    torch.mm(a, b, out=out)


def _operands(kind: str, num_tokens: int, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a and b <float32> whose product a b^T is of this kind."""
    x = torch.ones(num_tokens, _NUM_INPUTS)
    d_output = torch.ones(num_tokens, _NUM_OUTPUTS)
    if kind.endswith("forward"):
        return x, weight
    if kind.endswith("input_gradient"):
        return d_output, weight.t()
    return d_output.t(), x.t()


def _blas_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b.t())


def _milliseconds(multiply: Callable[..., object], *operands: Tensor) -> float:
    started = time.thread_time()
    multiply(*operands)
    return 1e3 * (time.thread_time() - started)
