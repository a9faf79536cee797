"""Quantised models: the warning that a quantiser of transformers left the experts as they were."""

import warnings

from torch import Tensor
from transformers import PreTrainedModel

from moe.sparse.experts import Experts


def warn_of_plain_experts(model: PreTrainedModel) -> None:
    """Warns when a quantised model holds stacked experts that its quantiser did not reach.

    Quantisers replace linear modules, and experts are stacked parameters: in a large model nearly
    all of it.

    Args:
        model: Just loaded; one that is not quantised is left alone.
    """
    if getattr(model, "hf_quantizer", None) is None:
        return

    total = sum(parameter.numel() for parameter in model.parameters())
    plain = 0
    for module in model.modules():
        if isinstance(module, Experts):
            plain += sum(weight.numel() for weight in module.parameters() if _is_plain(weight))
    if plain:
        warnings.warn(
            f"The quantization_config left the stacked experts as they were: {plain:,} of "
            f"{total:,} parameters ({plain / total:.0%}). torchao reaches them by name, with "
            "the linear modules: TorchAoConfig(FqnToConfig({'re:.*_proj': config})).",
            stacklevel=3,
        )


def _is_plain(weight: Tensor) -> bool:
    """Returns whether a weight is of floating-point numbers, and no stand-in for them."""
    return weight.is_floating_point() and not hasattr(weight, "qdata")
