"""A mode in which every operation fails for which a host would wait for a GPU.

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
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "argwhere",
    "bincount",
    "equal",
    "histc",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "nonzero_numpy",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
COPIES = {"_to_copy", "copy", "copy_"}


class WaitsError(AssertionError):
    """A host would wait for the device here."""


class NoSynchronisation(TorchDispatchMode):
    """Refuses operations of `WAITING`, indices of bools, and copies between host and device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if name in WAITING and kwargs.get("output_size") is None:
            raise WaitsError(f"{function} waits for the device")

        if name in INDEXING:
            for index in tensors_of(args[1]):
                if index.dtype in (torch.bool, torch.uint8):
                    raise WaitsError(f"{function} counts the True of its index")

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
