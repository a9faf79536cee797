"""Chooses the library for float32 products on a CPU, measured once per machine.

torch's builds hold two: a BLAS (MKL on x86), which torch's own operations call, and oneDNN. Which
is faster depends on the processor and on the kind of product, see product_measurement.py. The
measurement takes two seconds when a process first needs it, and is kept in the user's cache folder
by processor and release of torch.

Results of the two differ by rounding. For bit-identical results on several machines, fix the choice
with the environment variable STMOE_PRODUCTS: `blas`, `onednn`, or a file that `python -m
scripts.benchmark products --json FILE` wrote. A resumed run keeps the choice of its checkpoint. In
16 bits torch's own operations end in oneDNN too; chosen is how an expert's gradients are given to
it.
"""

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import cast, get_args

import torch

from moe.errors import ConfigError, DataError
from moe.files import cache_folder, whole_file, write_text
from moe.kernels.product_measurement import (
    PRODUCT_KINDS,
    Library,
    LibraryByTokens,
    Measurement,
    ProductChoice,
    ProductKind,
    measure_products,
    processor_name,
)
from moe.parsing import read_record, to_json

CHOICE_VARIABLE = "STMOE_PRODUCTS"
"""Environment variable with a fixed choice."""


class _InUse:
    """The choice of this process; None before the first product."""

    def __init__(self) -> None:
        self.choice: ProductChoice | None = None
        self.lock = threading.Lock()


_IN_USE = _InUse()


def is_onednn_chosen(kind: ProductKind, num_tokens: int) -> bool:
    """Returns whether oneDNN does a product.

    Args:
        kind: The product, see `ProductChoice`.
        num_tokens: Rows of its inputs and outputs.

    Raises:
        ConfigError: When the environment variable holds no choice.
    """
    by_tokens: LibraryByTokens = getattr(products_in_use(), kind)
    return by_tokens.library(num_tokens) == "onednn"


def copies_expert_gradient() -> bool:
    """Returns whether an expert's dW = dy^T x in 16 bits is computed from a copy of dy^T.

    Raises:
        ConfigError: When the environment variable holds no choice.
    """
    return products_in_use().copies_expert_gradient


def products_in_use() -> ProductChoice:
    """Returns the choice of this process: as given, as saved, or measured now.

    Raises:
        ConfigError: When the environment variable holds no choice.
    """
    if _IN_USE.choice is None:
        with _IN_USE.lock:
            _IN_USE.choice = _IN_USE.choice or _choose()
    return _IN_USE.choice


def use_products(choice: ProductChoice | None) -> None:
    """Makes this process use another choice; None chooses automatically."""
    with _IN_USE.lock:
        _IN_USE.choice = choice


def fixed_choice(library: Library) -> ProductChoice:
    """Returns the choice of one library for every product."""
    everywhere = LibraryByTokens(one=library, few=library, many=library)
    by_kind = dict.fromkeys(PRODUCT_KINDS, everywhere)
    return ProductChoice(**by_kind, copies_expert_gradient=False)


def cache_file() -> Path:
    """Returns the path of this machine's measurement."""
    parts = [processor_name(), str(torch.__version__), *Measurement._fields]
    key = "|".join([*parts, *LibraryByTokens._fields])
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return cache_folder() / f"products-{digest}.json"


def save_measurement(measurement: Measurement, path: Path) -> None:
    """Writes a measurement as JSON, whole or not at all."""
    write_text(path, _as_text(measurement))


def _choose() -> ProductChoice:
    given = os.environ.get(CHOICE_VARIABLE)
    if given:
        return _read_given(given)
    if not torch.backends.mkldnn.is_available():
        return fixed_choice("blas")
    return _saved_or_measured()


def _read_given(given: str) -> ProductChoice:
    """Returns the choice that the environment variable names."""
    if given in get_args(Library):
        return fixed_choice(cast(Library, given))
    advice = (
        f"The environment variable {CHOICE_VARIABLE} takes blas, onednn, or a file of "
        "`python -m scripts.benchmark products --json FILE`."
    )
    return read_record(Path(given), Measurement, advice=advice, error=ConfigError).choice


def _saved_or_measured() -> ProductChoice:
    """Returns the cached choice; else measures, and caches the result for the next process."""
    path = cache_file()
    saved = _read_saved(path)
    if saved is not None:
        return saved.choice

    try:
        # If several processes start together, one measures and the others wait, so that all agree.
        with whole_file(path) as partial:
            measurement = _read_saved(path) or measure_products()
            partial.write_text(_as_text(measurement), encoding="utf-8")
    except OSError:  # a home that cannot be written to
        measurement = measure_products()
    return measurement.choice


def _read_saved(path: Path) -> Measurement | None:
    """Returns the measurement in a file; None when there is none, or it is damaged."""
    if not path.is_file():
        return None
    try:
        return read_record(path, Measurement)
    except DataError:
        return None


def _as_text(measurement: Measurement) -> str:
    return json.dumps(to_json(measurement), indent=1) + "\n"
