"""Chooses the library for float32 products on a CPU, by the maker of its processor.

torch's builds hold two: a BLAS (MKL on x86), which torch's own operations call, and oneDNN. On an
AMD EPYC oneDNN takes 0.5 to 0.95 of the time of MKL. On an Intel Xeon with AVX-512, MKL takes 10 %
less time for outputs and gradients of inputs and 20 to 45 % less for gradients of weights; but for 3
to 16 tokens oneDNN computes outputs in 0.6 to 0.8 of the time. oneDNN needs 1 ms of preparation for
each number of rows that is new to it: experts round theirs up, see expert_rows.py. In 16 bits
there is one library, which computes an expert's dW = dy^T x from dy^T in columns or from a copy in
rows: with AMX the copy takes 0.5 to 0.9 of the time, copying included. Measured at commit f5fe3075,
which timed both in every process and chose otherwise where noise was larger than the difference.

Results of the two differ by rounding. STMOE_PRODUCTS=blas or onednn fixes the library for
bit-identical results on several machines. A resumed run keeps the choice of its checkpoint.
"""

import functools
import os
import platform
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

import torch

from moe.checks import check

CHOICE_VARIABLE = "STMOE_PRODUCTS"
"""Environment variable with a fixed choice."""

Library = Literal["blas", "onednn"]
ProductKind = Literal[
    "forward", "input_gradient", "weight_gradient", "expert_forward", "expert_input_gradient"
]

_MOST_TOKENS_OF_ONE = 2
_MOST_TOKENS_OF_FEW = 16


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


class _InUse:
    """The choice of this process; None before the first product."""

    choice: ProductChoice | None = None


def is_onednn_chosen(kind: ProductKind, num_tokens: int) -> bool:
    """Returns whether oneDNN does a product.

    Args:
        kind: The product, see `ProductChoice`.
        num_tokens: Rows of its inputs and outputs.

    Raises:
        ConfigError: When the environment variable holds no choice.
    """
    one, few, many = getattr(products_in_use(), kind)
    if num_tokens <= _MOST_TOKENS_OF_ONE:
        return one == "onednn"
    return (few if num_tokens <= _MOST_TOKENS_OF_FEW else many) == "onednn"


def products_in_use() -> ProductChoice:
    """Returns the choice of this process.

    Raises:
        ConfigError: When the environment variable holds no choice.
    """
    if _InUse.choice is None:
        _InUse.choice = choose_products(os.environ.get(CHOICE_VARIABLE), _processor())
    return _InUse.choice


def use_products(choice: ProductChoice | None) -> None:
    """Makes this process use another choice; None chooses by the processor."""
    _InUse.choice = choice


def fixed_choice(library: Library) -> ProductChoice:
    """Returns the choice of one library for every product."""
    everywhere = LibraryByTokens(one=library, few=library, many=library)
    return ProductChoice(everywhere, everywhere, everywhere, everywhere, everywhere)


def choose_products(given: str | None, processor: str) -> ProductChoice:
    """Returns the choice for a processor.

    Args:
        given: Value of the environment variable; None for none.
        processor: Text of /proc/cpuinfo.

    Raises:
        ConfigError: When the value names no library.
    """
    if given:
        check(given in get_args(Library), CHOICE_VARIABLE, given, "blas or onednn")
        return fixed_choice(cast(Library, given))
    if "AuthenticAMD" in processor and torch.backends.mkldnn.is_available():
        return fixed_choice("onednn")

    choice = fixed_choice("blas")
    if "GenuineIntel" in processor and torch.backends.mkldnn.is_available():
        outputs = LibraryByTokens(one="blas", few="onednn", many="blas")
        choice = choice._replace(forward=outputs, expert_forward=outputs)
    return choice._replace(copies_expert_gradient="amx_bf16" in processor)


@functools.cache
def processor_name() -> str:
    """Returns the name of the CPU."""
    for line in _processor().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _processor() -> str:
    """Returns Linux' description of the processors, elsewhere Python's guess."""
    table = Path("/proc/cpuinfo")
    return table.read_text(encoding="utf-8") if table.is_file() else platform.processor()
