"""Counts the kernels that operations launch on a GPU; tests/on_fake_gpu.py runs a layer under it.

Views, allocations and numbers of the host launch none, the operations of `KERNELS` several, as
torch's sources for CUDA have it, and all others one. The count is within a tenth of a measured one: at
commit 26addfce it is 160 for the step of which an H200 launched 169 kernels, and 97 of 105 without
losses and statistics.
"""

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import moe
from tests.synchronisation import tensors_of

NO_KERNEL = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty"}
KERNELS = {
    "_grouped_mm": 2,
    "cumsum": 2,
    "index_add": 2,
    "logsumexp": 9,
    "masked_fill": 2,
    "scatter": 2,
    "select_backward": 2,
    "slice_backward": 2,
    "sort": 8,
}
"""Kernels of operations that launch several: those that copy first, and the passes of a sort."""

_FOLDER = Path(moe.__file__).parent


class Launches(TorchDispatchMode):
    """Counts kernels by pass, line of the library or node of autograd, and operation."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.kernels: Counter[tuple[str, str]] = Counter()
        self._device = device

    def table(self) -> str:
        """Returns a line for each place and operation, and the sum."""
        lines = [f"{count:4} {place:72} {name}" for (place, name), count in self.kernels.items()]
        return "\n".join([*lines, f"{self.kernels.total():4} kernels\n"])

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        on_host = all(x.device.type != self._device for x in tensors_of((args, result)))
        if on_host or function.namespace == "prim" or function.is_view or name in NO_KERNEL:
            return result

        # A sum in another dtype converts its input first.
        converts = name == "sum" and result.dtype != args[0].dtype
        self.kernels[_place(), name] += KERNELS.get(name, 1) + converts
        return result


def _place() -> str:
    """Returns the line of the library, and in the backward pass the node of autograd."""
    node: Any = torch._C._current_autograd_node()
    places = [] if node is None else [node.name()]
    for frame in reversed(traceback.extract_stack()):
        if _FOLDER in Path(frame.filename).parents:
            places.append(f"{Path(frame.filename).relative_to(_FOLDER)}:{frame.lineno}")
            break
    return " ".join(places)
