"""Low-rank adapters that PEFT put around the experts of a layer, read for the experts' products.

PEFT's wrapper of a stacked parameter computes W + B A for all experts in every forward pass. The
layer reads the factors of its wrappers instead of calling them, and experts.py adds x A^T B^T to the
products of each expert's rows.
"""

from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import nn

from moe.distributed.mesh import ExpertAxis
from moe.errors import ConfigError
from moe.kernels.expert_weights import LowRank

_PRODUCTS = {"gate_up_proj": "first", "up_proj": "first", "down_proj": "down"}


class Adapters(NamedTuple):
    """Adapters of the experts on this rank.

    Attributes:
        first: Of the first product; None for none.
        down: Of the second product; None for none.
        dropout_rate: Share of the inputs of A that is set to zero; 0 outside training.
    """

    first: LowRank | None = None
    down: LowRank | None = None
    dropout_rate: float = 0.0


NO_ADAPTERS = Adapters()


def unwrapped(module: Any) -> Any:
    """Returns the module inside PEFT's wrappers, or the module itself."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def read_adapters(
    experts: nn.Module, num_experts: int, ep: ExpertAxis | None
) -> tuple[nn.Module, Adapters]:
    """Returns the module to call for the experts, and the adapters to give it.

    A wrapper that cannot be read is called itself: one of another method, or with hooks, by which PEFT
    passes an adapter for each example, which it refuses for stacked parameters.

    Args:
        experts: The experts, within one wrapper of PEFT for each adapted parameter.
        num_experts: Experts of all ranks, E.
        ep: The ranks, of which each reads the factors of its own experts; None for one.

    Raises:
        ConfigError: When adapters that are active together have different rates of dropout.
    """
    wrapper: Any = experts
    by_product: dict[str, LowRank] = {}
    rates: set[float] = set()
    while hasattr(wrapper, "get_base_layer"):
        product = _PRODUCTS.get(getattr(wrapper, "parameter_name", ""))
        if product is None or wrapper._forward_pre_hooks or wrapper._forward_hooks:
            return experts, NO_ADAPTERS

        # As PEFT's own forward: a merged adapter is part of the weights until it is disabled.
        active = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
        if wrapper.disable_adapters and wrapper.merged:
            wrapper.unmerge()
        if active and not wrapper.disable_adapters and not wrapper.merged:
            by_product[product] = _read_factors(wrapper, active, num_experts, ep)
            rates |= {getattr(wrapper.lora_dropout[name], "p", 0.0) for name in active}
        wrapper = wrapper.base_layer

    if len(rates) > 1:
        raise ConfigError(
            f"Adapters of experts that are active together must have one lora_dropout, got {sorted(rates)}. "
            "Activate one of them."
        )
    rate = rates.pop() if rates and experts.training else 0.0
    return wrapper, Adapters(**by_product, dropout_rate=rate)


def _read_factors(
    wrapper: Any, names: list[str], num_experts: int, ep: ExpertAxis | None
) -> LowRank:
    """Returns the factors of a wrapper's adapters side by side, for the experts of this rank."""
    local = slice(None)
    if ep is not None:
        num_local = num_experts // ep.size
        local = slice(ep.group.rank() * num_local, (ep.group.rank() + 1) * num_local)

    # In PEFT's A the experts are the slowest index of a dimension, in its B the fastest. Products
    # with gradients are faster for a transposed copy of B; in decoding most experts are not used.
    parts: list[LowRank] = []
    for name in names:
        a = wrapper.lora_A[name].weight
        b = wrapper.lora_B[name].weight.t()
        if torch.is_grad_enabled():
            b = b.contiguous()
        a = rearrange(a, "(e r) i -> e r i", e=num_experts)[local]
        b = rearrange(b, "(r e) o -> e r o", e=num_experts)[local]
        parts.append(LowRank(a, b, a.new_full((a.shape[1],), wrapper.scaling[name])))
    if len(parts) == 1:
        return parts[0]
    a, b, scale = zip(*parts, strict=True)
    return LowRank(torch.cat(a, dim=1), torch.cat(b, dim=1), torch.cat(scale))
