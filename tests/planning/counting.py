"""Counts what a real run allocates and sends: collectives are hooked, tensors are added up."""

import inspect
import math
import sys

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from moe.planning.traffic import AXES

COLLECTIVES = (
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_reduce",
    "all_to_all_single",
)
"""Those that torch's FSDP2 and this library call; older torch knows the first and third by the next name."""


class SentBytes:
    """Context in which collectives are counted: `found[what, ranks of the group]` are bytes that
    this rank sends.
    """

    def __init__(self):
        self.found = {}
        self._kept = {}

    def __enter__(self):
        for name in COLLECTIVES:
            function = getattr(dist, name, None)
            if function is not None:
                self._kept[name] = function
                setattr(dist, name, self._hooked(name, function))
        return self

    def __exit__(self, *_):
        for name, function in self._kept.items():
            setattr(dist, name, function)

    def _hooked(self, name, function):
        signature = inspect.signature(function)

        def hooked(*arguments, **options):
            given = list(signature.bind(*arguments, **options).arguments.items())
            tensors = [value for _, value in given if isinstance(value, torch.Tensor)]
            group = dict(given).get("group") or dist.group.WORLD
            what, amount = self._measure(name, tensors, dict(given), group)
            key = what, tuple(sorted(dist.get_process_group_ranks(group)))
            self.found[key] = self.found.get(key, 0.0) + amount
            return function(*arguments, **options)

        return hooked

    def _measure(self, name, tensors, given, group):
        """Returns what a collective is for and what this rank sends in it."""
        size = dist.get_world_size(group)
        if name.startswith("all_gather"):
            return "parameter gathers", tensors[1].nbytes * (size - 1)
        if name.startswith("reduce_scatter"):
            return "gradient reduce-scatter", tensors[0].nbytes * (size - 1)
        if name == "all_reduce":
            return _caller(), 2 * tensors[0].nbytes * (size - 1) / size
        rows = tensors[1]
        splits, own = given.get("input_split_sizes"), dist.get_rank(group)
        stays = rows.nbytes / size if splits is None else splits[own] * rows[:1].nbytes
        what = "counts of rows" if rows.dtype == torch.int64 else "rows to experts and back"
        return what, rows.nbytes - stays


def _caller():
    """Returns what an all-reduce is for, by who asks for it."""
    frame = sys._getframe(3)
    for _ in range(5):
        if frame.f_code.co_filename.endswith("_fsdp_collectives.py"):
            return "gradient all-reduce"
        if frame.f_code.co_filename.endswith("optim/sharded_parameters.py"):
            return "optimizer sums"
        if frame.f_code.co_filename.endswith(
            "distributed/collectives.py"
        ) and frame.f_code.co_name in ("forward", "backward"):
            return "tensor-parallel sums"
        frame = frame.f_back
    return "statistics"


def planned_bytes(transfers, mesh):
    """Returns a plan's transfers in the form of `SentBytes.found`; `mesh` is that of this rank."""
    found = {}
    for transfer in transfers:
        key = transfer.what, ranks_on(transfer.axis, mesh)
        found[key] = found.get(key, 0.0) + transfer.num_bytes
    return found


def ranks_on(axis, mesh):
    """Returns the ranks of this rank's group on an axis of a plan."""
    if axis in ("ep inside a node", "ep across nodes"):
        return tuple(
            dist.get_process_group_ranks(
                mesh.ep.intra_node if "inside" in axis else mesh.ep.inter_node
            )
        )
    names = ("dp_replicate", "dp_shard", "ep", "tp")
    sizes = [getattr(mesh.config, name) for name in names]
    own, all_ranks = dist.get_rank(), torch.arange(math.prod(sizes)).reshape(sizes)
    coordinate = [int(index) for index in (all_ranks == own).nonzero()[0]]
    index = tuple(
        slice(None) if name in AXES[axis] else at
        for name, at in zip(names, coordinate, strict=True)
    )
    return tuple(sorted(all_ranks[index].flatten().tolist()))


def local_bytes(tensors):
    """Returns the bytes of this rank's parts."""
    parts = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(part.numel() * part.element_size() for part in parts)


class SavedBytes:
    """Context in which the storages that autograd keeps are counted once each, but for those of
    parameters.

    A copy of a whole parameter in another dtype, as autocast makes it, goes to `copies`.
    """

    def __init__(self, model):
        self.activations = self.copies = 0
        self._model, self._seen = model, []
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self):
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception):
        self._hooks.__exit__(*exception)

    def _pack(self, tensor):
        storage, at = tensor.untyped_storage(), tensor.untyped_storage().data_ptr()
        if at in self._seen:
            return tensor
        weights = [p.to_local() if isinstance(p, DTensor) else p for p in self._model.parameters()]
        if any(weight.untyped_storage().data_ptr() == at for weight in weights):
            return tensor
        self._seen.append(at)
        sizes = [weight.numel() for weight in weights if weight.ndim > 1]
        if tensor.dtype == torch.bfloat16 and tensor.numel() in sizes:
            self.copies += storage.nbytes()
        else:
            self.activations += storage.nbytes()
        return tensor
