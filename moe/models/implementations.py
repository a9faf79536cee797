"""Transformers' names of implementations of attention and experts, and what they are here."""

from collections.abc import Mapping
from typing import Any

from moe.errors import ConfigError, did_you_mean
from moe.sparse.config import Dispatch

_DISPATCH_BY_NAME: dict[str, Dispatch] = {"grouped_mm": "ragged", "batched_mm": "static"}

_WITHOUT_BIAS = ("flash", "flex", "paged", "/")
"""Parts of the names of implementations that cannot add a bias; `/` is in names of the hub."""


def check_attention(name: Any) -> None:
    """Refuses kinds of attention that cannot add T5's bias of positions to the scores.

    Raises:
        ConfigError: With the name.
    """
    if isinstance(name, str) and any(part in name for part in _WITHOUT_BIAS):
        raise ConfigError(
            f"attn_implementation is {name!r}; expected 'sdpa' or 'eager'. Every score of "
            "attention has a trained bias of the distance added, and masks with it: flash "
            "attention and kernels of the hub have no place for them, and flex attention would "
            "need a kernel of its own. On a GPU 'sdpa' takes torch's memory-efficient one."
        )


def implementation_of_dispatch(dispatch: Dispatch) -> str:
    """Returns transformers' name of the products of experts under the setting `dispatch`."""
    names = {value: name for name, value in _DISPATCH_BY_NAME.items()}
    return names[dispatch]


def dispatch_of_experts(implementation: Any, dispatch: Dispatch) -> Dispatch:
    """Returns the setting `dispatch` that an implementation of experts stands for.

    Args:
        implementation: transformers' `experts_implementation`; None and "eager", its word for a
            model that runs its experts itself, stand for the setting as it is.
        dispatch: That setting.

    Raises:
        ConfigError: When there is no such implementation here.
    """
    # transformers also takes one name for each part of a model; this model has one part.
    name = implementation
    if isinstance(implementation, Mapping):
        name = implementation.get("")
    if name is None or name == "eager":
        return dispatch
    if not isinstance(name, str) or name not in _DISPATCH_BY_NAME:
        raise ConfigError(
            f"experts_implementation is {name!r}; expected 'grouped_mm', which is "
            "dispatch='ragged' here, 'batched_mm', which is dispatch='static', or 'eager' for "
            f"what dispatch says.{did_you_mean(str(name), _DISPATCH_BY_NAME)} Experts with a "
            "capacity have no other kernel."
        )
    return _DISPATCH_BY_NAME[name]
