"""What works on rows around the grouped products of a GPU: torch's operations, or Triton's kernels.

Tokens are copied to rows, the first product becomes hidden units, and a token's rows are summed up.
Triton has one kernel for each of these in each pass, which keeps nothing but its inputs; torch has
several operations, which keep what lies between, unless torch.compile joins them. Which is faster
on a GPU nobody has measured yet, so torch's are the default.
`python -m scripts.benchmark gpu` measures both.

The environment variable STMOE_ROW_OPERATORS chooses: `torch` or `triton`. It is a choice of a
machine, so no configuration and no checkpoint holds it. Results of the two differ by rounding, and
dropout drops other units.
"""

import os
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from torch import Tensor

from moe.checks import check_choice
from moe.errors import ConfigError
from moe.kernels.expert_rows import ChoiceRows, combine_choices, gather_choices
from moe.kernels.hidden_units import ExpertForm, hidden_rows

OPERATORS_VARIABLE = "STMOE_ROW_OPERATORS"
"""Environment variable with the choice."""

_DEFAULT = "torch"

TokenOperator: TypeAlias = Callable[[Tensor, ChoiceRows], Tensor]
HiddenOperator: TypeAlias = Callable[[Tensor, Tensor | None, Tensor, ExpertForm], Tensor]


class RowOperators(NamedTuple):
    """One library's operators; all are differentiable.

    Attributes:
        gather: As `gather_choices`.
        hidden: As `hidden_rows`.
        combine: As `combine_choices`.
    """

    gather: TokenOperator
    hidden: HiddenOperator
    combine: TokenOperator


class _InUse:
    """The choice of this process; None for that of the environment."""

    def __init__(self) -> None:
        self.name: str | None = None


_IN_USE = _InUse()


def use_row_operators(name: str | None) -> None:
    """Makes this process use other operators; None for what the environment says.

    Args:
        name: `torch` or `triton`.

    Raises:
        ConfigError: When there are no such operators.
    """
    if name is not None:
        check_choice("name of the row operators", name, _LIBRARIES)
    _IN_USE.name = name


def row_operators(x: Tensor) -> RowOperators:
    """Returns the operators that are chosen.

    Args:
        x: <any>[...] where they are to work.

    Raises:
        ConfigError: When the choice is unknown, or does not work there.
    """
    return _LIBRARIES[_chosen()](x)


def is_torch_chosen() -> bool:
    """Returns whether those of torch are chosen, and so a CPU's kernel where there is one."""
    return _chosen() == _DEFAULT


def _chosen() -> str:
    if _IN_USE.name is not None:
        return _IN_USE.name

    name = os.environ.get(OPERATORS_VARIABLE) or _DEFAULT
    check_choice(f"the environment variable {OPERATORS_VARIABLE}", name, _LIBRARIES)
    return name


def _torch_operators(x: Tensor) -> RowOperators:
    return RowOperators(gather_choices, hidden_rows, combine_choices)


def _triton_operators(x: Tensor) -> RowOperators:
    # Imported when it is chosen: not every machine has Triton.
    try:
        from moe.kernels.triton_hidden import triton_hidden
        from moe.kernels.triton_launch import IS_INTERPRETED
        from moe.kernels.triton_rows import triton_combine, triton_gather
    except ImportError as error:
        raise ConfigError(
            f"The row operators of Triton are chosen, and Triton cannot be imported ({error}). "
            f"Install it (pip install triton; Linux only), or set {OPERATORS_VARIABLE} to torch."
        ) from error

    if x.device.type != "cuda" and not IS_INTERPRETED:
        raise ConfigError(
            f"The row operators of Triton are chosen, and the layer runs on {x.device}; expected "
            f"a GPU (cuda). Move it there, or set {OPERATORS_VARIABLE} to torch. For tests "
            "Triton's interpreter runs them anywhere, slowly: set TRITON_INTERPRET to 1 before "
            "the process starts."
        )
    return RowOperators(triton_gather, triton_hidden, triton_combine)


_LIBRARIES: dict[str, Callable[[Tensor], RowOperators]] = {
    "torch": _torch_operators,
    "triton": _triton_operators,
}
