"""The options of each router, and the layers it supports.

Read with config.py, which checks every configuration against it. A router is entered here when it
is registered (router.py), so that configurations need to know neither routers nor tensors.
"""

import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from moe.checks import check, check_field_types, is_kind
from moe.errors import ConfigError, did_you_mean
from moe.registry import Registry

_KINDS = {bool: "True or False", int: "an integer", float: "a finite number"}


@dataclass(frozen=True)
class NoOptions:
    """Options of a router without options."""


@dataclass(frozen=True)
class RouterRequirements:
    """A router's requirements for a configuration.

    Attributes:
        options: Frozen dataclass of the options of this router alone. A method `check(config)` of
            it is optional; it raises a ConfigError.
        causal: Whether the router may be used in a decoder; see `Router`.
        single: Whether a token has one expert, so that `num_selected_experts` must be 1.
        needs_token_ids: Whether the router reads the ids of the tokens.
    """

    options: type[Any]
    causal: bool
    single: bool
    needs_token_ids: bool


ROUTER_REQUIREMENTS: Registry[RouterRequirements] = Registry("router")


class RouterSettings(Protocol):
    """The fields of SparseConfig that select and configure the router."""

    @property
    def router(self) -> str:
        """Name of the router."""
        ...

    @property
    def router_options(self) -> Mapping[str, Any]:
        """Options of that router, by name."""
        ...

    @property
    def num_selected_experts(self) -> int:
        """Experts that a token may use, K."""
        ...

    @property
    def decoder(self) -> bool:
        """Whether the layer is in a decoder."""
        ...


def check_router(config: RouterSettings) -> None:
    """Checks the router, its options, and its requirements for the other settings.

    Raises:
        ConfigError: When there is no such router or option, or the layer does not support it.
    """
    requirements = ROUTER_REQUIREMENTS.get(config.router)
    _check_options(config, requirements)

    # Requirements of the router for its layer.
    if config.decoder:
        check_causal(config.router, "Use it in the encoder only, and here")
    if requirements.single and config.num_selected_experts != 1:
        raise ConfigError(
            f"Router {config.router!r} gives each token one expert, but num_selected_experts is "
            f"{config.num_selected_experts}. Set num_selected_experts to 1."
        )


def _check_options(config: RouterSettings, requirements: RouterRequirements) -> None:
    """Raises a ConfigError for an option that the router does not have, or cannot use."""
    known = option_names(requirements)
    kinds = typing.get_type_hints(requirements.options)

    # The name and the kind of each option that is given.
    for name, value in config.router_options.items():
        if name not in known:
            raise ConfigError(
                f"Router {config.router!r} has no option {name!r}.{did_you_mean(name, known)} "
                f"Known: {', '.join(known) or 'none'}."
            )
        kind = kinds[name]
        if kind in _KINDS:
            check(is_kind(value, kind), f"{name} of router {config.router!r}", value, _KINDS[kind])

    # The values of all options together, defaults included.
    options = requirements.options(**config.router_options)
    check_field_types(options)
    if hasattr(options, "check"):
        options.check(config)


def check_causal(name: str, advice: str) -> None:
    """Raises a ConfigError when router `name` is for encoders only.

    Args:
        name: Name of a router.
        advice: Advice that precedes the names of the other routers in the message.
    """
    if ROUTER_REQUIREMENTS.get(name).causal:
        return

    names = ROUTER_REQUIREMENTS.names()
    causal = ", ".join(other for other in names if ROUTER_REQUIREMENTS.get(other).causal)
    raise ConfigError(
        f"Router {name!r} cannot be used in a decoder: it routes a token by looking at later tokens, which do not "
        f"exist during generation. {advice} one of {causal}."
    )


def option_names(requirements: RouterRequirements) -> list[str]:
    """Returns the names of a router's options."""
    return [option.name for option in fields(requirements.options)]


def router_options_by_name() -> dict[str, list[str]]:
    """Returns the name of every option, with the names of the routers that have it."""
    routers_by_option: dict[str, list[str]] = {}
    for router in ROUTER_REQUIREMENTS.names():
        for option in option_names(ROUTER_REQUIREMENTS.get(router)):
            routers_by_option.setdefault(option, []).append(router)
    return routers_by_option
