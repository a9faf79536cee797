"""What the weights of a saved model need on a disk, in memory and for one token."""

from typing import Any, NamedTuple

import torch

from moe.checkpoint.loading import empty_model
from moe.sparse.editing import sparse_layers
from moe.sparse.experts import PROJECTIONS

_GROUP_SIZE = 32  # of 4 bits, as by default in `stmoe quantize`


class CheckpointNeeds(NamedTuple):
    """Bytes of a model.

    Attributes:
        experts: All experts.
        experts_of_token: The experts of one token in all layers.
        rest: Everything else.
    """

    experts: int
    experts_of_token: int
    rest: int


def checkpoint_needs(
    config: Any, dtype: torch.dtype = torch.float32, *, bits: int | None = None
) -> CheckpointNeeds:
    """Returns what a model of ours or a host needs.

    Args:
        config: Its configuration.
        dtype: Dtype of the weights, and of the scales of quantized ones.
        bits: 8 or 4 for quantized experts; None for floats.
    """
    if getattr(config, "expert_quantization", None) is not None:
        config = config.replaced(expert_quantization=None)
    model = empty_model(config).to(dtype)
    model.tie_weights()
    experts = 0
    experts_of_token = 0
    rest = sum(weight.nbytes for weight in model.parameters())
    for layer in sparse_layers(model).values():
        for name, weight in layer.experts.named_parameters():
            one = weight[0]
            rest -= layer.config.num_experts * one.nbytes
            size = one.nbytes
            if bits is not None and name in PROJECTIONS:
                # 8 bits have a scale for each output, and 4 bits a scale and a zero for each group.
                num_scales = len(one) if bits == 8 else 2 * one.numel() // _GROUP_SIZE
                size = one.numel() * bits // 8 + num_scales * dtype.itemsize
            experts += layer.config.num_experts * size
            experts_of_token += layer.config.num_selected_experts * size
    return CheckpointNeeds(experts, experts_of_token, rest)
