"""Packs the weights of a model, which then answers faster on a CPU and can no longer be trained."""

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe.kernels.cpu_matmul import has_onednn
from moe.kernels.packed_weight import PackedWeight
from moe.kernels.torch_private import has_bfloat16, is_plain, pack_matrix
from moe.sparse.experts import PROJECTIONS, Experts

# Numbers of a matrix below which its product with few rows takes longer in oneDNN.
_LEAST_SIZE = 2**16


def pack_weights(model: nn.Module) -> None:
    """Puts weights on a CPU in the order in which oneDNN multiplies, in place, and freezes the model.

    These are the weights, in float32 or bfloat16, of experts and of `torch.nn.Linear` modules; of a
    head tied to the embedding there are then two copies. Results differ by rounding. Saving writes
    the weights as they were; changing one raises an error.

    Args:
        model: Any model; `moe.load(..., pack=True)` packs the one that it returns.
    """
    model.requires_grad_(False)
    num_names = Counter(id(x) for _, x in model.named_parameters(remove_duplicate=False))
    tied: dict[str, Tensor] = {}
    for module_name, module in model.named_modules():
        names: list[str] = []
        if isinstance(module, nn.Linear):
            names = ["weight"]
        elif isinstance(module, Experts) and _multiplies_rows(module):
            names = sorted(PROJECTIONS & module._parameters.keys())
        for name in names:
            weight = module.get_parameter(name)
            if can_pack(weight) and weight.shape[-2:].numel() >= _LEAST_SIZE:
                setattr(module, name, nn.Parameter(pack(weight), requires_grad=False))
                if num_names[id(weight)] > 1:
                    tied[f"{module_name}.{name}"] = weight.detach()
    model.register_state_dict_post_hook(partial(_unpack, tied))


def _multiplies_rows(experts: Experts) -> bool:
    """Returns whether the CPU's kernel runs the experts, which multiplies with packed weights."""
    return experts.config.dispatch == "ragged" and experts.run_elsewhere is None


def can_pack(weight: Tensor) -> bool:
    """Returns whether oneDNN multiplies with a weight <any>[..., O, I] on this machine, and it is plain."""
    if weight.device.type != "cpu" or not is_plain(weight) or not has_onednn():
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and has_bfloat16())


def pack(weight: Tensor) -> PackedWeight:
    """Returns a weight <float32 or bfloat16>[O, I] or [E, O, I], packed."""
    weight = weight.detach()
    matrices = weight if weight.dim() == 3 else weight[None]
    return PackedWeight([pack_matrix(matrix) for matrix in matrices], weight.shape)


def _unpack(tied: dict[str, Tensor], _model: Any, state: dict[str, Tensor], *_: Any) -> None:
    """Unpacks the weights <float>[...] of a state dict, in which tied ones stay tied."""
    for name, weight in state.items():
        if isinstance(weight, PackedWeight):
            state[name] = tied[name] if name in tied else weight.dequantize()
