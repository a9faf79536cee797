"""A weight of int8 with one scale for each output, as torchao's are; for where that is not installed."""

from typing import ClassVar

import torch
from torch import Tensor


class Int8Weight(Tensor):
    """Stands for qdata * scale; knows detaching, picking one of a stack, products and itself unpacked.

    Attributes:
        unpacked: Shape of everything that was unpacked, in its order.
    """

    unpacked: ClassVar[list[tuple[int, ...]]] = []

    @staticmethod
    def __new__(cls, qdata, scale):
        return Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=scale.dtype)

    def __init__(self, qdata, scale):
        self.qdata = qdata
        self.scale = scale

    @classmethod
    def of(cls, weight):
        scale = weight.detach().abs().amax(-1, keepdim=True) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    def dequantize(self):
        self.unpacked.append(tuple(self.shape))
        return self.qdata.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        weight, *others = args
        aten = torch.ops.aten
        if operation is aten.select.int:
            return cls(weight.qdata.select(*others), weight.scale.select(*others))
        if operation in (aten.detach.default, aten.alias.default):
            return cls(weight.qdata, weight.scale)
        if operation in (aten.t.default, aten.mm.default, aten.view.default):
            plain = [x.dequantize() if isinstance(x, cls) else x for x in args]
            return operation(*plain)
        raise NotImplementedError(operation)  # as torchao does for most


class PackedInt8Weight(Int8Weight):
    """One whose experts cannot be had one by one."""

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten.select.int:
            raise NotImplementedError("aten.select.int")
        return super().__torch_dispatch__(operation, types, args, kwargs)
