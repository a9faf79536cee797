"""Weights that are stored in another form than numbers in rows; any operation of torch gets those."""

from typing import Any

import torch
from torch import Tensor

from moe.kernels.torch_private import map_tensors

ALIASES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
"""Operations that return another tensor of the same numbers."""


class StoredWeight(Tensor):
    """Base of weights <float>[..., O, I] without gradient, in a form that few products read.

    All other operations get the numbers of `dequantize`, and those that would change them raise an
    error.

    Attributes:
        refusal: End of that error: what the weight is, and what to do instead.
    """

    refusal: str

    def multiply_packed(self, x: Tensor, expert: int) -> Tensor | None:
        """Returns x W_e^T <dtype of x>[N, O] from the stored form; None if plain numbers are faster.

        Args:
            x: <float>[N, I].
            expert: Number e of the expert.
        """
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operation of torch on plain numbers."""
        # An operation on lists, as of optimizers, may change all tensors of its first list.
        changed = args[0] if isinstance(args[0], list | tuple) else args[:1]
        if operation._schema.is_mutable and any(isinstance(x, cls) for x in changed):
            raise RuntimeError(f"{operation} would change {cls.refusal}")
        plain_args, plain_kwargs = map_tensors(cls, cls.dequantize, (args, kwargs or {}))
        return operation(*plain_args, **plain_kwargs)
