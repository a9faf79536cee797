"""The table of routers, and the checks of the options and requirements that each of them has.

Read with config.py, which checks every configuration against it. A router is entered here when its
file is imported (router.py), so that configurations need to know neither routers nor tensors.
"""

import typing
from dataclasses import dataclass, fields
from typing import Any

from moe.checks import check, check_field_types, is_kind
from moe.errors import ConfigError, did_you_mean
from moe.registry import Registry

_KINDS = {bool: "True or False", int: "an integer", float: "a finite number"}

ROUTERS: Registry[type[Any]] = Registry("router")
"""Subclasses of `moe.sparse.router.Router` by name."""


@dataclass(frozen=True)
class NoOptions:
    """Options of a router without options."""


def check_router(config: Any) -> None:
    """Checks the router of a SparseConfig, its options, and its requirements for other settings.

    Raises:
        ConfigError: When there is no such router or option, or the layer does not support it.
    """
    name = config.router
    router = ROUTERS.get(name)
    if config.decoder and not router.causal:
        causal = ", ".join(other for other in ROUTERS.names() if ROUTERS.get(other).causal)
        raise ConfigError(
            f"Router {name!r} cannot be used in a decoder: it routes a token by looking at later tokens, which do not "
            f"exist during generation. Use it in the encoder only, and here (decoder_router) one of {causal}."
        )
    if router.single and config.num_selected_experts != 1:
        raise ConfigError(
            f"Router {name!r} gives each token one expert, but num_selected_experts is "
            f"{config.num_selected_experts}. Set num_selected_experts to 1."
        )

    if config.prefix_experts and not router.knows_prefixes:
        raise ConfigError(
            f"Router {name!r} cannot have experts of a prefix. Use token_choice, batch_prioritized or pools."
        )

    # The name and the kind of each option that is given.
    known = option_names(router)
    kinds = typing.get_type_hints(router.Options)
    for option, value in config.router_options.items():
        if option not in known:
            raise ConfigError(
                f"Router {name!r} has no option {option!r}.{did_you_mean(option, known)} "
                f"Known: {', '.join(known) or 'none'}."
            )
        kind = kinds[option]
        if kind in _KINDS:
            check(is_kind(value, kind), f"{option} of router {name!r}", value, _KINDS[kind])

    # The values of all options together, defaults included.
    options = router.Options(**config.router_options)
    check_field_types(options)
    if hasattr(options, "check"):
        options.check(config)


def option_names(router: type[Any]) -> list[str]:
    """Returns the names of a router's options."""
    return [option.name for option in fields(router.Options)]
