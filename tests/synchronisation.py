"""A mode in which every operation fails for which a host would wait for a GPU, or that a CUDA graph
cannot capture.

It sees operations below autograd, so forward and backward alike; tests/on_fake_gpu.py runs layers
and models under it, on tensors that no CPU has.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Their results, or the shapes of these, must be known on the host.
WAITING = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.cudagraph_unsafe,
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
COPIES = {"_to_copy", "copy", "copy_"}


class WaitsError(AssertionError):
    """A host would wait for the device here."""


class NoSynchronisation(TorchDispatchMode):
    """Refuses operations with a tag of `WAITING`, indices of bools, and copies between host and device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if name in INDEXING:  # tagged in any case, since an index may be of bools
            for index in tensors_of(args[1]):
                if index.dtype in (torch.bool, torch.uint8):
                    raise WaitsError(f"{function} counts the True of its index")
        elif WAITING & {*function.tags} and kwargs.get("output_size") is None:
            raise WaitsError(f"{function} waits for the device")

        result = function(*args, **kwargs)
        devices = {tensor.device.type for tensor in tensors_of((args, result))}
        if name in COPIES and len(devices) > 1:
            raise WaitsError(f"{function} copies between {' and '.join(sorted(devices))}")
        return result


def tensors_of(tree: object) -> Iterator[Tensor]:
    """Yields the tensors in arguments or results of an operation."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
