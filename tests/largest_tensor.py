"""The largest tensor that a computation makes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe.kernels.expert_weights import is_quantized


class LargestFloats(TorchDispatchMode):
    """Records how many numbers the largest float tensor on the CPU has that any operation returns.

    Args:
        parameters: Parameters whose views do not count.
    """

    def __init__(self, parameters=()):
        super().__init__()
        plain = [p for p in parameters if not is_quantized(p)]
        self.known = {p.untyped_storage().data_ptr() for p in plain}
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        is_plain = type(result) is torch.Tensor and result.device.type == "cpu"
        is_float = is_plain and result.is_floating_point()
        if is_float and result.untyped_storage().data_ptr() not in self.known:
            self.numel = max(self.numel, result.numel())
        return result
