"""Which feed-forwards of a host are sparse, and how: plain values that are saved in its config.json."""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig

from moe.checks import check, check_choice, check_field_types, check_integer, check_number
from moe.convert.host_weights import HOST_FORMATS
from moe.errors import ConfigError
from moe.hosts.host import Host
from moe.models.pretrained import DOWNLOAD
from moe.models.weight_files import names_in_index
from moe.sparse.config import CONVENTIONS, Rules, SparseConfig
from moe.sparse.editing import STACKS
from moe.sparse.router_options import ROUTERS
from moe.surgery.upcycle import EXACT_ROUTING, Upcycling, every_second

_DERIVED = ("d_model", "d_ff", "activation", "gated", "product_bias", "decoder")
_DERIVED += ("num_experts", "num_selected_experts")
"""Fields of a sparse layer that follow from the host, or from another setting."""


@dataclass(frozen=True)
class HostSettings:
    """Settings of the sparse layers of a host.

    Attributes:
        encoder_blocks: Numbers of the blocks of the encoder that are sparse, from 0.
        decoder_blocks: The same of the decoder.
        num_experts: Experts of a layer, E; the largest number if layers differ.
        encoder_experts: Experts of each sparse block of the encoder, in order; None for
            `num_experts` in each.
        decoder_experts: The same of the decoder.
        num_selected_experts: Experts of a token, K.
        granularity: Parts into which each copy of a feed-forward is cut; an expert has d_ff /
            granularity units.
        layer: Further fields of SparseConfig, for both stacks; see there.
        load_balance_loss_weight: Factor of the balance loss in the loss of the model.
        router_z_loss_weight: Factor of the router z-loss.
    """

    encoder_blocks: tuple[int, ...]
    decoder_blocks: tuple[int, ...]
    num_experts: int
    num_selected_experts: int
    encoder_experts: tuple[int, ...] | None = None
    decoder_experts: tuple[int, ...] | None = None
    granularity: int = 1
    layer: Mapping[str, Any] = field(default_factory=dict)
    load_balance_loss_weight: float = 0.01
    router_z_loss_weight: float = 0.001

    def __post_init__(self) -> None:
        """Raises a ConfigError for a value that sparse layers of a host do not support."""
        # JSON has lists.
        for stack in STACKS:
            name = f"{stack}_blocks"
            blocks = getattr(self, name)
            check(isinstance(blocks, list | tuple), name, blocks, "a list of numbers of blocks")
            object.__setattr__(self, name, tuple(blocks))

            name = f"{stack}_experts"
            experts = getattr(self, name)
            if experts is not None:
                fits = isinstance(experts, list | tuple) and len(experts) == len(blocks)
                check(fits, name, experts, f"a number for each of the {len(blocks)} sparse blocks")
                object.__setattr__(self, name, tuple(experts))
        known = [item.name for item in fields(SparseConfig)]
        is_known = isinstance(self.layer, Mapping) and set(known).issuperset(self.layer)
        check(is_known, "layer", self.layer, f"fields of SparseConfig: {', '.join(known)}")
        check_field_types(self)
        check_integer("granularity", self.granularity, least=1)
        check_number("load_balance_loss_weight", self.load_balance_loss_weight, least=0)
        check_number("router_z_loss_weight", self.router_z_loss_weight, least=0)

        for name in sorted(self.layer.keys() & _DERIVED):
            raise ConfigError(
                f"{name} cannot be set as a field: it follows from the host or from another "
                "setting. Leave it out."
            )
        _check_inputs(self.layer)
        sparse = self.encoder_blocks + self.decoder_blocks
        check(bool(sparse), "The sparse blocks of the host", sparse, "at least one in either stack")

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> "HostSettings":
        """Returns the settings in the configuration of a model.

        Raises:
            ConfigError: When there are none, or one is unknown or invalid.
        """
        saved: Any = getattr(config, "sparse_layers", None)
        expected = "the settings that upcycle_host writes into config.json"
        check(isinstance(saved, Mapping), "sparse_layers", saved, expected)
        try:
            return cls(**saved)
        except TypeError as error:
            raise ConfigError(f"sparse_layers of config.json cannot be read: {error}") from error

    @classmethod
    def from_upcycling(cls, host: Host, model: nn.Module, upcycling: Upcycling) -> "HostSettings":
        """Returns the settings of an upcycled host; those that are not given lose nothing.

        Args:
            host: The host.
            model: A dense model of it.
            upcycling: Its `fields` are fields of SparseConfig, or of this class.

        Raises:
            ConfigError: When a setting does not fit the host.
        """
        given = dict(upcycling.fields)
        weights = ("load_balance_loss_weight", "router_z_loss_weight")
        losses = {name: given.pop(name) for name in weights if name in given}

        # Both stacks have the same router.
        exact = {n: value for n, value in EXACT_ROUTING.items() if not n.startswith("decoder_")}
        layer = {**exact, **given}
        layer["router_options"] = upcycling.router_options(layer["router"], "router_options")
        G = upcycling.granularity

        # The last block of each equal stretch of a stack.
        blocks: dict[str, tuple[int, ...]] = {}
        for stack in STACKS:
            num_blocks = len(host.stack(model, stack).layers)
            name = f"num_sparse_{stack}_layers"
            number = getattr(upcycling, name)
            if number is None:
                number = every_second(num_blocks)
            divides = number == 0 or (number > 0 and num_blocks % number == 0)
            check(divides, name, number, f"0 or a divisor of the {num_blocks} blocks of the stack")
            stretch = num_blocks // number if number else num_blocks + 1
            blocks[f"{stack}_blocks"] = tuple(range(stretch - 1, num_blocks, stretch))

        return cls(
            **blocks,
            num_experts=G * upcycling.num_experts,
            num_selected_experts=G * upcycling.num_selected_experts,
            granularity=G,
            layer=layer,
            **losses,
        )

    @property
    def rules(self) -> Rules:
        """The rules of the convention of the layers."""
        return CONVENTIONS[self.layer.get("convention", "ours")]

    def sites(self, host: Host, model: nn.Module) -> list[tuple[Any, SparseConfig]]:
        """Returns the blocks of a dense model that become sparse, and the settings of their layers.

        The encoder's are first.

        Raises:
            ConfigError: When there is no such block, `granularity` does not divide the width, or a
                setting is invalid.
        """
        sites: list[tuple[Any, SparseConfig]] = []
        for stack in STACKS:
            blocks = host.stack(model, stack).layers
            numbers = getattr(self, f"{stack}_blocks")
            experts = getattr(self, f"{stack}_experts") or (self.num_experts,) * len(numbers)
            for number, num_experts in zip(numbers, experts, strict=True):
                check_integer(f"{stack}_blocks", number, least=0, most=len(blocks) - 1)
                host_fields = host.layer_fields(model, stack)
                d_ff = host_fields["d_ff"]
                parts = f"a divisor of d_ff, {d_ff} in the {stack}: a layer has equal parts"
                check(d_ff % self.granularity == 0, "granularity", self.granularity, parts)
                settings = {
                    **host_fields,
                    "d_ff": d_ff // self.granularity,
                    "num_experts": num_experts,
                    "num_selected_experts": self.num_selected_experts,
                    **self.layer,
                }
                sites.append((blocks[number], SparseConfig(**settings)))
        return sites


class SparseHostConfig:
    """Put before the configuration of a host, it reads and changes the settings of sparse layers."""

    sparse_layers: dict[str, Any] | None

    @property
    def expert_quantization(self) -> Mapping[str, int] | None:
        """How the experts' weights are held and saved; see SparseConfig."""
        return HostSettings.from_config(cast(Any, self)).layer.get("expert_quantization")

    def replaced(self, **settings: Any) -> Any:
        """Returns a copy with other settings of the sparse layers.

        Args:
            settings: Fields of HostSettings or SparseConfig.

        Raises:
            ConfigError: When one is unknown or out of range.
        """
        saved = asdict(HostSettings.from_config(cast(Any, self)))
        own = {name: value for name, value in settings.items() if name in saved}
        of_layer = {name: value for name, value in settings.items() if name not in saved}
        layer = {**saved["layer"], **of_layer}
        config = copy.deepcopy(self)
        config.sparse_layers = asdict(HostSettings(**{**saved, "layer": layer, **own}))
        return config

    @classmethod
    def get_config_dict(
        cls, source: Any, *args: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the fields of a config.json, of this class or converted, and the arguments not used."""
        raw, unused = cast(Any, super()).get_config_dict(source, *args, **kwargs)
        host_format = HOST_FORMATS.get(raw.get("model_type"))
        if host_format is None:
            return raw, unused
        download = {name: kwargs[name] for name in DOWNLOAD if name in kwargs}
        return host_format.convert_config(raw, names_in_index(source, **download)), unused


def _check_inputs(layer: Mapping[str, Any]) -> None:
    """Raises a ConfigError for routing that needs what a host's feed-forward is not given."""
    # It is given hidden states alone, and computes its loss from one call on one rank.
    check_choice("router_input", layer.get("router_input", "hidden"), ("hidden",))
    check_choice("balance_scope", layer.get("balance_scope", "group"), ("group", "micro_batch"))
    router = layer.get("router", SparseConfig.router)
    if ROUTERS.get(router).needs_token_ids:
        raise ConfigError(
            f"Router {router!r} needs the ids of the tokens, but the feed-forward of a host is "
            "given hidden states. Choose a router with a gate, e.g. 'token_choice' or 'switch'."
        )
