"""Quantised models: the warning that a quantiser left the experts as they were."""

import warnings

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe.kernels.expert_weights import is_quantized
from moe.models.blocks import Block
from moe.sparse.experts import Experts


def warn_of_plain_experts(model: PreTrainedModel) -> None:
    """Warns when a quantised model holds stacked experts that its quantiser did not reach.

    Quantisers replace linear modules, and experts are stacked parameters: in a large model nearly
    all of it.

    Args:
        model: Just loaded; one that is not quantised is left alone.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        _warn_of_plain_experts(model)


def warn_of_quantized_projections(model: PreTrainedModel, block: Block) -> None:
    """Warns likewise in a forward, for models that were quantised by hand after they were loaded.

    Args:
        model: Whose forward it is.
        block: Any of its blocks: a quantiser of linear modules changes all of them.
    """
    if torch.compiler.is_compiling() or _is_plain(block.self_attention.q_proj.weight):
        return
    if getattr(model, "hf_quantizer", None) is None:
        _warn_of_plain_experts(model)


def _warn_of_plain_experts(model: PreTrainedModel) -> None:
    """Warns with the number of parameters of plain experts, if there are any."""
    total = sum(parameter.numel() for parameter in model.parameters())
    plain = 0
    for module in model.modules():
        if isinstance(module, Experts):
            plain += sum(weight.numel() for weight in module.parameters() if _is_plain(weight))
    if plain:
        warnings.warn(
            f"The quantiser left the stacked experts as they were: {plain:,} of {total:,} "
            f"parameters ({plain / total:.0%}). torchao reaches them by name, with the linear "
            "modules: FqnToConfig({'re:.*_proj': config}), inside of TorchAoConfig for "
            "from_pretrained, or with filter_fn=None for quantize_.",
            stacklevel=3,
        )


def _is_plain(weight: Tensor) -> bool:
    """Returns whether a weight is of floating-point numbers, and no stand-in for them."""
    return weight.is_floating_point() and not is_quantized(weight)
