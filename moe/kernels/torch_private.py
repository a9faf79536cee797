"""Every private name of torch that the library uses, each behind one small function.

A private name may change in any release of torch. Each function documents its purpose and torch's
alternative, if anything; tests/kernels/test_torch_private.py shows what breaks without the name.
`python -m scripts.versions` runs these tests with the newest torch.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import checkpoint
from torch.utils.flop_counter import register_flop_formula

StridedShard = _StridedShard
"""Placement of a dimension that two mesh axes shard in reverse order, as FSDP over tensor parallel."""


# ---- what runs around an operation ----


def is_in_functorch() -> bool:
    """Returns whether a transform of torch.func (grad, vmap, ...) is on; there is no public name."""
    return torch._C._functorch.maybe_current_level() is not None  # pyright: ignore[reportAttributeAccessIssue]


def is_exporting() -> bool:
    """Returns whether torch.export traces.

    `torch.compiler.is_exporting` is also true in a graph of torch.compile with torch 2.11, whose
    compiler takes it for a constant.
    """
    return torch.compiler._is_exporting_flag


def is_plain(*tensors: Tensor) -> bool:
    """Returns whether an operation of our own may take these tensors.

    Compilers, transforms and tensor subclasses (shards, wrappers) support only operations
    that they know.
    """
    if torch.compiler.is_compiling() or is_in_functorch():
        return False
    return all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)


def is_shape_only(x: Tensor) -> bool:
    """Returns whether nothing may depend on the values of <any>[...].

    It is in a graph that is being compiled, on the meta device, or fake; there is no public name of
    the class of fake tensors.
    """
    return torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor)


def autocast_disabled(device_type: str) -> AbstractContextManager[Any]:
    """Returns a context without autocast; torch has none of either kind on the meta device."""
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)


def is_in_checkpoint() -> bool:
    """Returns whether non-reentrant activation checkpointing will run what runs now a second time."""
    # The checkpoint installs hooks on saved tensors, and the innermost pair can be looked at.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
    return hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__name__


# ---- operations ----


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each tensor to another of its shape, on an accelerator by one kernel."""
    torch._foreach_copy_(list(targets), list(sources))  # pyright: ignore[reportPrivateImportUsage]


def assert_on_device(condition: Tensor, message: str) -> None:
    """Makes the device stop with `message` unless a condition holds, without waiting for it.

    Args:
        condition: <bool>[] on an accelerator.
        message: Text of the error.
    """
    torch.ops.aten._assert_async.msg(condition, message)


def onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x W^T by oneDNN, the operation that torch.compile uses.

    `torch.mkldnn_linear` and its kin take tensors of oneDNN's own layout only.

    Args:
        x: <float32 or bfloat16>[N, I].
        weight: <dtype of x>[O, I], packed or not.

    Returns:
        <dtype of x>[N, O].
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def has_bfloat16() -> bool:
    """Returns whether oneDNN multiplies in bfloat16 on this processor."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack_matrix(weight: Tensor) -> Tensor:
    """Returns a weight <float32 or bfloat16>[O, I] in the order in which oneDNN multiplies.

    `to_mkldnn` keeps its rows. The order that oneDNN prefers for a single row in float32 is slower
    for any number of rows; it has one order for all others.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight, 64)


def without_torch_function() -> AbstractContextManager[Any]:
    """Returns a context in which subclasses of tensors do not replace functions of torch."""
    return torch._C.DisableTorchFunctionSubclass()


def packed_int8_linear(x: Tensor, qdata: Tensor, scale: Tensor) -> Tensor:
    """Returns x (s q)^T without the float weights; torch has no public product of int8 weights.

    Args:
        x: <bfloat16>[N, I]; I must be a multiple of 16, which torch does not check.
        qdata: <int8>[O, I] q.
        scale: <bfloat16>[O] s.

    Returns:
        <bfloat16>[N, O].
    """
    return torch.ops.aten._weight_int8pack_mm(x, qdata, scale)


def pack_int4(codes: Tensor) -> Tensor:
    """Returns codes of 4 bits in the order of `packed_int4_linear`, which differs by processor.

    Args:
        codes: <int32>[O, I] numbers from 0 to 15; O a multiple of 64.

    Returns:
        <uint8>[O, I / 2].
    """
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)


def packed_int4_linear(x: Tensor, packed: Tensor, group_size: int, scales: Tensor) -> Tensor:
    """Returns x W^T of weights of 4 bits without the float weights.

    Args:
        x: <bfloat16>[N, I].
        packed: <uint8>[O, I / 2], see `pack_int4`.
        group_size: Inputs that share a scale: 32, 64, 128 or 256.
        scales: <bfloat16>[I / g, O, 2] scale and zero of W = s (q - 8) + z.

    Returns:
        <bfloat16>[N, O].
    """
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group_size, scales)


if torch.backends.mkldnn.is_available():

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def _count_flops(x: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
        return 2 * x.numel() * weight[0]


# ---- trees of records ----


def map_tensors(kind: type[Tensor], function: Callable[[Any], Tensor], tree: Any) -> Any:
    """Returns nested tuples, lists and dicts with a function applied to each tensor of a kind."""
    return pytree.tree_map_only(kind, function, tree)


def register_named_tuple(record: type[Any]) -> None:
    """Makes a NamedTuple known by its name, so that torch.export can save programs that use it."""
    name = f"{record.__module__}.{record.__qualname__}"
    pytree._register_namedtuple(record, serialized_type_name=name)


def register_tree_node(
    kind: type[Any],
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Any, Any], Any],
) -> None:
    """Makes a container known by its name to torch's trees.

    `torch.utils._pytree` is private as a module; the C++ trees are not used by torch.export.

    Args:
        kind: Class of the container.
        flatten: Returns its parts, and everything else needed to rebuild it.
        unflatten: Builds it from both.
    """
    name = f"{kind.__module__}.{kind.__qualname__}"
    pytree.register_pytree_node(kind, flatten, unflatten, serialized_type_name=name)


# ---- meshes and process groups ----


def flatten_mesh_axes(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Returns a mesh that flattens all axes of `mesh` into one axis, called `name`."""
    return mesh._flatten(name)


def split_mesh_axis(mesh: DeviceMesh, sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """Returns the mesh of several axes into which the one axis of `mesh` is split.

    Args:
        mesh: A mesh of one axis.
        sizes: Sizes of the new axes; their product is the size of the old one.
        names: Names of the new axes.
    """
    return mesh._unflatten(0, tuple(sizes), tuple(names))


def join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Returns the mesh with the axes of all `meshes`, which are parts of one mesh."""
    return DeviceMesh._concatenate(list(meshes))


def default_store() -> Any:
    """Returns the key-value store, a `torch.distributed.Store`, of the default process group."""
    return distributed_c10d._get_default_store()
