"""Stacked weights of experts in 8 or 4 bits, which every operation of torch sees dequantized.

torchao's tensors do not cover stacked weights in 4 bits. The products of cpu_experts.py unpack one
expert at a time, or none where torch multiplies packed numbers faster.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe.kernels.stored_weight import ALIASES, StoredWeight
from moe.kernels.torch_private import pack_int4, packed_int4_linear, packed_int8_linear

_MOST_PACKED_ROWS = 16
# Rows up to which a product of packed numbers beats unpacking, in bfloat16. Milliseconds of 768
# inputs and 3072 outputs on an AMD EPYC with AVX512-BF16, one thread:
#
#     rows     floats     8 bits, unpacked     packed     4 bits, packed
#     1        0.32       0.66                 0.14       0.07
#     8        0.31       0.78                 0.28       0.23
#     16       0.42       0.83                 0.53       0.45
#     32       0.58       0.96                 0.99       0.93
#
# In float32 torch's products of packed numbers are 2 to 100 times slower than those of floats.

_INPUTS_OF_BLOCK = 32
_OUTPUTS_OF_BLOCK = 64
_PACKED_GROUPS = (32, 64, 128, 256)
_ALIGNMENT = 16
# Whole blocks of torch's products: that of 8 bits reads 16 inputs at once, and crashes at the end of
# memory with others, and at addresses that are no multiple of 16, which mapped files have.

FIXED = (
    "Quantized experts do not train. Train adapters beside them (moe.lora_config), or dequantize the "
    "model first: stmoe convert --from MODEL --to FOLDER."
)
"""Advice of messages about weights that would change."""


class Quantization(NamedTuple):
    """How weights are quantized.

    Attributes:
        bits: 8 (symmetric, one scale per output) or 4 (asymmetric, one scale per group).
        group_size: Neighbouring inputs that share a scale in 4 bits; None in 8.
    """

    bits: int
    group_size: int | None = None


class QuantizedWeight(StoredWeight):
    """A weight <dtype of the scales>[..., O, I] stored in 8 or 4 bits, without gradient.

    Detaching, copying, converting, and choosing an expert keep it quantized.

    Attributes:
        qdata: <int8>[..., O, I] codes of 8 bits, or <uint8>[..., O, I / 2] with two codes of 4 bits
            in a byte, the first in the low half.
        scale: <float>[..., O, I / g] s, with g = I in 8 bits.
        zero: <float>[..., O, I / g] z in 4 bits; None in 8.
        packed_experts: Copies for products of few rows in 4 bits, by the number of the expert; None
            for a weight that stays in its file, whose copies would fill the memory.
    """

    refusal = f"a quantized weight. {FIXED}"
    qdata: Tensor
    scale: Tensor
    zero: Tensor | None
    packed_experts: dict[int, tuple[Tensor, Tensor]] | None

    @staticmethod
    def __new__(cls, qdata: Tensor, scale: Tensor, zero: Tensor | None = None) -> "QuantizedWeight":
        """Returns the weight of codes, scales, and zeros in 4 bits."""
        codes_per_byte = 1 if zero is None else 2
        shape = (*qdata.shape[:-1], codes_per_byte * qdata.shape[-1])
        weight = Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype, device=qdata.device)
        weight.qdata = qdata
        weight.scale = scale
        weight.zero = zero
        weight.packed_experts = {}
        return weight

    def parts(self) -> dict[str, Tensor]:
        """Returns the tensors that are stored, by name: `q`, `scale`, and `zero` in 4 bits."""
        parts = {"q": self.qdata, "scale": self.scale}
        return parts if self.zero is None else {**parts, "zero": self.zero}

    def dequantize(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the numbers <dtype of the scales>[..., O, I]: s q, or s (q - 8) + z in 4 bits."""
        if self.zero is None:
            return self.qdata.to(self.dtype).mul_(self.scale)

        codes = _unpack(self.qdata).sub_(8)  # [..., O, I]
        groups = codes.to(self.dtype).unflatten(-1, (self.scale.shape[-1], -1))  # [..., O, I/g, g]
        groups = groups.mul_(self.scale[..., None]).add_(self.zero[..., None])
        return groups.flatten(-2)

    def multiply_packed(self, x: Tensor, expert: int) -> Tensor | None:
        """Returns x W_e^T <bfloat16>[N, O] without unpacking W_e; None where that is slower.

        In 4 bits the first product of an expert makes a copy of its numbers in torch's order.

        Args:
            x: <float>[N, I].
            expert: Number e of the expert.
        """
        is_fast = x.dtype == self.dtype == torch.bfloat16 and x.shape[0] <= _MOST_PACKED_ROWS
        if not is_fast or x.device.type != "cpu" or x.shape[1] % _INPUTS_OF_BLOCK:
            return None
        if self.zero is None:
            codes = self.qdata[expert]
            if codes.data_ptr() % _ALIGNMENT:
                codes = codes.clone()
            return packed_int8_linear(x, codes, self.scale[expert, :, 0])

        group_size = x.shape[1] // self.scale.shape[-1]
        is_whole = group_size in _PACKED_GROUPS and self.shape[1] % _OUTPUTS_OF_BLOCK == 0
        if not is_whole or self.packed_experts is None:
            return None
        if expert not in self.packed_experts:
            scales = torch.stack([self.scale[expert].t(), self.zero[expert].t()], dim=-1)
            packed = pack_int4(_unpack(self.qdata[expert]).int())
            self.packed_experts[expert] = (packed, scales)  # [O, I/2], [I/g, O, 2]
        packed, scales = self.packed_experts[expert]
        return packed_int4_linear(x, packed, group_size, scales)

    def __getitem__(self, index: Any) -> Any:
        """Returns an expert of stacked weights, quantized; anything else dequantized."""
        if self.dim() == 3 and isinstance(index, int):
            # As an operation of torch it would be a view, which inference mode refuses.
            return QuantizedWeight(*[part[index] for part in self.parts().values()])
        return super().__getitem__(index)

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operation of torch on the parts, or on the dequantized numbers."""
        if operation in _ON_PARTS:
            return _on_parts(operation, args[0], args[1:], kwargs or {})
        if operation is torch.ops.aten.copy_.default and all(isinstance(x, cls) for x in args[:2]):
            for name, part in args[0].parts().items():
                part.copy_(args[1].parts()[name])
            if args[0].packed_experts:
                args[0].packed_experts.clear()
            return args[0]
        return super().__torch_dispatch__(operation, types, args, kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Returns the attributes that hold tensors, for torch."""
        return ["qdata", "scale"] if self.zero is None else ["qdata", "scale", "zero"], None

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Tensor], *_: Any) -> "QuantizedWeight":
        """Returns the weight of those tensors, for torch."""
        return QuantizedWeight(**tensors)


_ON_PARTS = ALIASES | {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}


def _on_parts(
    operation: Any, weight: QuantizedWeight, others: Any, kwargs: dict[str, Any]
) -> QuantizedWeight:
    """Returns the weight of the results for each part; a new dtype is that of scales alone."""
    of_codes = {name: value for name, value in kwargs.items() if name != "dtype"}
    codes, *scales = weight.parts().values()
    scales = [operation(scale, *others, **kwargs) for scale in scales]
    result = QuantizedWeight(operation(codes, *others, **of_codes), *scales)
    if operation in ALIASES:
        result.packed_experts = weight.packed_experts
    return result


def quantize(weight: Tensor, quantization: Quantization) -> QuantizedWeight:
    """Returns a weight in 8 or 4 bits, rounded to nearest; the experts are quantized one by one.

    8 bits: s = max |w| / 127 over the inputs of an output, and q = round(w / s). 4 bits: s = (max w -
    min w) / 15 over a group of inputs, z = min w + 8 s, and q = round((w - z) / s) + 8.

    Args:
        weight: <float>[E, O, I] or [O, I]; I is a multiple of the group's size, which is even.
        quantization: The bits.

    Source:
        The conventions of torch's `_weight_int8pack_mm` and `_weight_int4pack_mm_for_cpu`. Differs:
        the order of the numbers of 4 bits is that of ONNX Runtime.
    """
    if weight.dim() == 3:
        experts = [quantize(expert, quantization).parts() for expert in weight]
        stacked = {name: torch.stack([parts[name] for parts in experts]) for name in experts[0]}
        return QuantizedWeight(stacked.pop("q"), **stacked)

    # Codes follow from the scales as they are stored, in the dtype of the weight.
    wide = weight.detach().float()
    if quantization.bits == 8:
        scale = (wide.abs().amax(dim=-1, keepdim=True) / 127).to(weight.dtype)  # [O, 1]
        codes = (wide / _nonzero(scale)).round_().clamp_(-127, 127)
        return QuantizedWeight(codes.to(torch.int8), scale)

    groups = wide.unflatten(-1, (-1, quantization.group_size or 1))  # [O, I/g, g]
    least, largest = groups.aminmax(dim=-1)  # [O, I/g]
    scale = ((largest - least) / 15).to(weight.dtype)
    zero = (least + 8 * scale.float()).to(weight.dtype)
    codes = (groups - zero[..., None].float()) / _nonzero(scale)[..., None]
    codes = codes.round_().add_(8).clamp_(0, 15).to(torch.uint8).flatten(-2)  # [O, I]
    return QuantizedWeight(codes[..., 0::2] | (codes[..., 1::2] << 4), scale, zero)


def _unpack(pairs: Tensor) -> Tensor:
    """Returns the codes <int8>[..., I] of 4 bits in bytes <uint8>[..., I / 2]."""
    # The two codes of a byte become the two bytes of a 16-bit number, low byte first.
    wide = pairs.to(torch.int16)
    return ((wide << 4) | wide).bitwise_and_(0x0F0F).view(torch.int8)


def _nonzero(scale: Tensor) -> Tensor:
    """Returns the scales in float32, and 1 for the scale of equal numbers, whose code is then 0 or 8."""
    return torch.where(scale == 0, 1.0, scale.float())
