"""Weights in oneDNN's order, for inference on a CPU.

oneDNN multiplies with weights in blocks, and makes them of weights in rows within every product.
With weights of 3072 x 768 that were packed once, 1, 8 and 1,024 rows take 0.15, 0.21 and 9.9 ms in
float32 on an AMD EPYC with two threads, instead of 0.21, 0.39 and 11.0; in bfloat16 0.08, 0.12 and
4.9 ms instead of 0.24, 0.27 and 5.7.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.kernels.cpu_matmul import multiply_by_onednn
from moe.kernels.stored_weight import ALIASES, StoredWeight
from moe.kernels.torch_private import onednn_linear, without_torch_function


class PackedWeight(StoredWeight):
    """A weight <float32 or bfloat16>[O, I], or [E, O, I] of experts.

    `F.linear` and the experts on a CPU multiply with it.

    Attributes:
        matrices: <dtype>[O, I] in oneDNN's order, for each expert, or one.
    """

    refusal = "a packed weight, which is for inference. Load the model again to change or train it."
    matrices: list[Tensor]

    @staticmethod
    def __new__(cls, matrices: list[Tensor], shape: torch.Size) -> "PackedWeight":
        """Returns the weight of packed matrices."""
        weight = Tensor._make_wrapper_subclass(cls, shape, dtype=matrices[0].dtype)
        weight.matrices = matrices
        return weight

    def dequantize(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the numbers <dtype>[..., O, I] that were packed."""
        return torch.stack([matrix.to_dense() for matrix in self.matrices]).view(self.shape)

    def multiply_packed(self, x: Tensor, expert: int) -> Tensor | None:
        """Returns x W_e^T <dtype>[N, O]; None where x has another dtype."""
        return onednn_linear(x, self.matrices[expert]) if x.dtype == self.dtype else None

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Returns the result of `F.linear` from packed numbers, unless it needs a gradient."""
        # As `Module.to` does.
        if function == Tensor.data.__set__ and not isinstance(args[1], cls):  # pyright: ignore[reportAttributeAccessIssue]
            raise RuntimeError(f"Conversion would change {cls.refusal}")
        if function is F.linear and not kwargs and not torch.is_autocast_enabled("cpu"):
            x, weight, bias = args if len(args) == 3 else (*args, None)
            needs_graph = x.requires_grad and torch.is_grad_enabled()
            if x.dtype == weight.dtype and x.dim() > 1 and not needs_graph:
                y = multiply_by_onednn(x.flatten(0, -2), weight.matrices[0])
                y = y.unflatten(0, x.shape[:-1])
                return y if bias is None else y + bias
        with without_torch_function():
            return function(*args, **(kwargs or {}))

    def __getitem__(self, index: Any) -> Any:
        """Returns the numbers of an expert of stacked weights, or any others."""
        if self.dim() == 3 and isinstance(index, int):
            return self.matrices[index].to_dense()
        return super().__getitem__(index)

    def __deepcopy__(self, memo: Any) -> "PackedWeight":
        """Returns itself, as nothing can change it."""
        return self

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Returns an alias, or runs an operation of torch on the numbers in rows."""
        if operation in ALIASES:
            return PackedWeight(args[0].matrices, args[0].shape)
        return super().__torch_dispatch__(operation, types, args, kwargs)
