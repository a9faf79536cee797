"""STMoEConfig: every setting of a model, and the sizes that follow from them.

The settings are flat, as config.json is; `sparse_config` gathers those of a sparse layer.
"""

import os
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from transformers import AutoConfig, PreTrainedConfig
from transformers import __version__ as transformers_version

from moe.checks import check
from moe.errors import ConfigError
from moe.models.checkpoint_formats import find_format, write_config
from moe.models.configuration_checks import (
    check_dtype,
    check_keywords,
    check_rates,
    check_settings,
    check_sizes,
    check_source,
    check_sparse_layers,
    check_token_ids,
    drop_removed_fields,
    strict_config,
)
from moe.models.prefixes import check_prefixes
from moe.models.presets import PRESETS
from moe.models.transformers_private import PrivateConfigHooks
from moe.sparse.all_routers import load_routers
from moe.sparse.config import (
    CONVENTIONS,
    BalanceScope,
    Convention,
    Dispatch,
    ExpertBias,
    RouterInput,
    Rules,
    SparseConfig,
    earlier_options,
    take_convention,
)

FeedForward = Literal["gated-gelu", "gated-silu", "relu"]
SparsePosition = Literal["last", "second"]


@strict_config
class STMoEConfig(PrivateConfigHooks, PreTrainedConfig):  # pyright: ignore[reportIncompatibleVariableOverride]
    """Configuration of an encoder-decoder Transformer with sparse feed-forward layers.

    The defaults are the T5-1.1 backbone and the ST-MoE router; `num_experts=0` is a dense T5. An
    unknown keyword is an error; an unknown field of a config.json is kept as an attribute, with a
    warning. `from_preset(name)` gives every published configuration.

    Attributes:
        vocab_size: Rows of the embedding, V.
        d_model: Width of the residual stream, D.
        d_kv: Width of one attention head; heads x d_kv need not equal d_model.
        d_ff: Hidden width of a feed-forward layer, F.
        expert_d_ff: Hidden width of one expert; None for `d_ff`.
        num_layers: Blocks of the encoder.
        num_decoder_layers: Blocks of the decoder; None for as many as the encoder has.
        num_heads: Attention heads, H.
        feed_forward_proj: `gated-gelu` (GEGLU with tanh GELU, T5-1.1 and ST-MoE), `gated-silu`
            (SwiGLU, UL2) or `relu` (T5-1.0 and Switch).
        tie_word_embeddings: Whether the head is the embedding.
        scale_decoder_outputs: Whether the head's input is scaled by d_model^-0.5; None for as
            `tie_word_embeddings` says. It stays when a tied head is untied, as PEFT does.
        relative_attention_num_buckets: Buckets of the relative position bias.
        relative_attention_max_distance: Distance in tokens from which all positions share a bucket.
        relative_bias_in_every_block: Whether each block has a table of relative positions, as in
            umT5; otherwise the blocks of a stack share one.
        layer_norm_epsilon: Added to the mean square of RMSNorm.
        dropout_rate: Dropout of embeddings, attention, feed-forward layers and residual branches.
        expert_dropout_rate: Dropout inside the experts; None for `dropout_rate`.
        initializer_scale: s of the initialisations with variance s / fan_in.
        num_experts: Experts in a sparse layer, E; 0 makes every layer dense.
        encoder_experts: Experts of each sparse layer of the encoder, in order, if layers differ;
            `num_experts` is then the largest of all. None for `num_experts` in each.
        decoder_experts: The same for the decoder.
        num_sparse_encoder_layers: Sparse layers of the encoder, one in each equal stretch of
            blocks.
        num_sparse_decoder_layers: The same for the decoder.
        sparse_position: Which block of a stretch is sparse: the `last`, or the `second` as in
            transformers' Switch (the only one where a stretch is one block).
        sparse_dense_stacking: Whether a dense feed-forward layer follows each sparse one.
        router: Name in ROUTERS of the encoder's router.
        router_options: Its settings by name; others have their defaults. None for no settings.
        decoder_router: The decoder's router; None for the same.
        decoder_router_options: Its settings; None uses the encoder's if it has the same router,
            else the defaults.
        num_selected_experts: See `SparseConfig` for this and the following fields, up to
            `expert_quantization`.
        prefix_experts: Experts that only texts with a certain prefix may use, beside the base experts
            that all texts use. Records of a `prefix`, its `token_ids` and its `num_experts`: they
            are the last experts of every sparse layer, in this order. None for none.
        load_balance_loss_weight: Factor of the balance loss.
        router_z_loss_weight: Factor of the router z-loss; independent of the other.
        z_loss_weight: Factor of the z-loss on the vocabulary logits.
        label_smoothing: Probability that targets give to all tokens in equal parts; in training
            mode alone.
        noise_density: Share of the tokens that span corruption masked in pre-training; None when
            unknown. The model reads neither this nor the next field: they tell tools how to mask
            text for this model.
        mean_noise_span_length: Mean length of a masked span in tokens; None when unknown.
        output_router_logits: Whether outputs contain the records of the routers.
        pad_token_id: Id of padding.
        eos_token_id: Id or ids that end generation; None for none.
        bos_token_id: Kept for tokenizers and harnesses; not used here.
        decoder_start_token_id: Id before the first target.

    Source:
        ST-MoE (arXiv:2202.08906) §3, Table 11, appendix C; T5-1.1 (released_checkpoints.md).
    """

    model_type: ClassVar[str] = "st_moe"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "ce_loss",
        "z_loss",
        "load_balance_loss",
        "router_z_loss",
        "past_key_values",
        "encoder_last_hidden_state",
        "encoder_router_logits",
        "decoder_router_logits",
        "encoder_router_outputs",
        "decoder_router_outputs",
    ]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_decoder_layers",  # transformers sizes the decoder's cache by it
        "head_dim": "d_kv",
    }

    # The backbone.
    vocab_size: int = 32128
    d_model: int = 768
    d_kv: int = 64
    d_ff: int = 2048
    expert_d_ff: int | None = None
    num_layers: int = 12
    num_decoder_layers: int | None = None
    num_heads: int = 12
    feed_forward_proj: FeedForward = "gated-gelu"
    tie_word_embeddings: bool = False
    scale_decoder_outputs: bool | None = None
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    relative_bias_in_every_block: bool = False
    layer_norm_epsilon: float | int = 1e-6
    dropout_rate: float | int = 0.0
    expert_dropout_rate: float | int | None = None
    initializer_scale: float | int = SparseConfig.initializer_scale

    # Positions of the sparse layers.
    num_experts: int = 0
    encoder_experts: list[int] | None = None
    decoder_experts: list[int] | None = None
    num_sparse_encoder_layers: int = 0
    num_sparse_decoder_layers: int = 0
    sparse_position: SparsePosition = "last"
    sparse_dense_stacking: bool = False

    # Their routers.
    router: str = SparseConfig.router
    router_options: dict[str, Any] | None = None
    decoder_router: str | None = None
    decoder_router_options: dict[str, Any] | None = None

    # Fields of SparseConfig under the same names and with the same defaults.
    num_selected_experts: int = SparseConfig.num_selected_experts
    num_shared_experts: int = SparseConfig.num_shared_experts
    prefix_experts: list[dict[str, Any]] | None = None
    router_input: RouterInput = SparseConfig.router_input
    convention: Convention = SparseConfig.convention
    capacity_factor: float | int | None = SparseConfig.capacity_factor
    eval_capacity_factor: float | int | None = SparseConfig.eval_capacity_factor
    min_expert_capacity: int = SparseConfig.min_expert_capacity
    expert_capacity: int | None = SparseConfig.expert_capacity
    group_size: int = SparseConfig.group_size
    balance_scope: BalanceScope = SparseConfig.balance_scope
    dispatch: Dispatch = SparseConfig.dispatch
    expert_bias: ExpertBias = SparseConfig.expert_bias
    router_initializer_std: float | int | None = SparseConfig.router_initializer_std
    expert_quantization: dict[str, int] | None = None

    # The loss.
    load_balance_loss_weight: float | int = 0.01
    router_z_loss_weight: float | int = 0.001
    z_loss_weight: float | int = 1e-4
    label_smoothing: float | int = 0.0

    # How pre-training masked its text.
    noise_density: float | int | None = None
    mean_noise_span_length: float | int | None = None

    # Settings that transformers expects of every model.
    output_router_logits: bool = True
    use_cache: bool = True
    is_encoder_decoder: bool = True
    pad_token_id: int = 0
    eos_token_id: int | list[int] | None = 1
    bos_token_id: int | None = None
    decoder_start_token_id: int = 0

    def __post_init__(self, **kwargs: Any) -> None:
        """Fills derived values; `validate_settings` then checks all of them."""
        for alias in self.attribute_map.keys() & kwargs.keys():
            setattr(self, alias, kwargs.pop(alias))
        drop_removed_fields(kwargs)
        self._set_earlier_convention(kwargs)
        check_keywords(self, kwargs)
        check_dtype(kwargs.get("torch_dtype") if self.dtype is None else self.dtype)

        # `to_json_file` writes it again.
        kwargs.pop("auto_map", None)
        if self.num_decoder_layers is None:
            self.num_decoder_layers = self.num_layers
        if self.scale_decoder_outputs is None:
            self.scale_decoder_outputs = self.tie_word_embeddings
        for stack, decoder in (("encoder", False), ("decoder", True)):
            self._leave_out_defaults(stack, decoder=decoder)
        try:
            super().__post_init__(**kwargs)
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"transformers cannot use the config: {error}") from error

    def _set_earlier_convention(self, kwargs: dict[str, Any]) -> None:
        """Sets the convention that a config.json of an earlier version has as several fields."""
        convention = take_convention(kwargs)
        if convention is None:
            return
        check(
            self.convention == "ours",
            "convention",
            self.convention,
            "ours beside fields it replaced",
        )
        self.convention = convention

        # Options that such a file leaves out have our defaults. A decoder router inherits them.
        self.router_options = {
            **earlier_options(self.router, convention),
            **(self.router_options or {}),
        }
        router = self.decoder_router or self.router
        if router != self.router or self.decoder_router_options is not None:
            self.decoder_router_options = {
                **earlier_options(router, convention),
                **(self.decoder_router_options or {}),
            }

    def _leave_out_defaults(self, stack: str, *, decoder: bool) -> None:
        """Replaces lists that equal their default by None, so that equal models have equal configs."""
        _, num_sparse = self.stack_sizes(decoder)
        numbers = getattr(self, f"{stack}_experts") or []
        if len(numbers) == num_sparse and set(numbers) <= {self.num_experts}:
            setattr(self, f"{stack}_experts", None)

    def validate_settings(self) -> None:
        """Raises a ConfigError for a value that is out of range or contradicts another."""
        check_sizes(self)
        check_rates(self)
        check_prefixes(self)
        check_sparse_layers(self)

    def validate_token_ids(self) -> None:
        """Raises a ConfigError for a special token outside the vocabulary."""
        check_token_ids(self)

    def validate_output_attentions(self) -> None:
        """Accepts every implementation of attention: weights are computed by the eager one."""

    def __eq__(self, other: object) -> bool:
        """Returns whether all settings are equal, regardless of their file or version."""
        if not isinstance(other, STMoEConfig):
            return NotImplemented
        return self.settings() == other.settings()

    __hash__ = None

    def settings(self) -> dict[str, Any]:
        """Returns the content of config.json without the name of the model and the version."""
        settings = self.to_dict()
        for name in ("_name_or_path", "transformers_version"):
            settings.pop(name, None)
        return settings

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "STMoEConfig":
        """Returns the published configuration called `name`, with `overrides` applied.

        Raises:
            ConfigError: When there is no such preset; the message names the closest.
        """
        return cls(**{**PRESETS.get(name).fields, **overrides})

    def replaced(self, **settings: Any) -> "STMoEConfig":
        """Returns a copy with other settings, validated again.

        Args:
            settings: Fields of this class.

        Raises:
            ConfigError: When one is unknown or out of range.
        """
        check_settings(self, settings)
        return type(self)(**{**self.to_dict(), **settings})

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the fields of a config.json, ours or converted, and the arguments not used.

        Raises:
            ConfigError: When it describes another model, or has a value that this library cannot
                represent.
        """
        raw, unused = cls._read(*args, **kwargs)
        checkpoint_format = find_format(raw)
        if checkpoint_format is not None:
            raw = checkpoint_format.convert_config(raw)
        return raw, unused

    @classmethod
    def read_raw(cls, source: Path | str, **download: Any) -> dict[str, Any]:
        """Returns the config.json of a folder or hub name as it is, ours or of another library.

        Args:
            source: The folder or name.
            download: `revision`, `token`, `cache_dir` and the like of transformers' `cached_file`.

        Raises:
            OSError: When there is none, or it is not JSON.
        """
        return cls._read(source, **download)[0]

    @classmethod
    def _read(cls, source: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the config.json of a folder or hub name as it is, and the arguments not used.

        Raises:
            OSError: When there is no config.json, which transformers treats as an empty one.
        """
        check_source(source)
        try:
            raw, unused = super().get_config_dict(source, **kwargs)
        except OSError as error:
            if error.errno is None and str(source) not in str(error):  # transformers' own, offline
                raise OSError(f"{source}: {error}") from error
            raise
        if not raw:
            raise OSError(
                f"{source} holds no model: it has no config.json, or one without a field. Give "
                "a folder made by save_pretrained, e.g. the model/ folder of a run."
            )
        return raw, unused

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Returns the configuration of a config.json; see `PreTrainedConfig.from_dict`.

        Fields that this class does not have are kept as attributes, with a warning.

        Raises:
            ConfigError: When a value is out of range.
        """
        # Fields among the arguments are validated together with the file's fields.
        names = ({item.name for item in fields(cls)} | cls.attribute_map.keys()) - {"dtype"}
        settings = {name: kwargs.pop(name) for name in names & kwargs.keys()}

        # The version marks the fields as read from a file, in which unknown fields are not an
        # error.
        version = {"transformers_version": transformers_version}
        return super().from_dict({**version, **config_dict, **settings}, **kwargs)

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        """Writes config.json, and the module with which `trust_remote_code=True` finds this library."""
        write_config(self.to_json_string(use_diff), Path(json_file_path))

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Does nothing: config.json has `auto_map` already.

        transformers would copy this file into every checkpoint.
        """

    def get_text_config(self, *args: Any, **kwargs: Any) -> "STMoEConfig":
        """Returns the config itself: encoder and decoder share it."""
        return self

    def layer_experts(self, *, decoder: bool) -> list[int]:
        """Returns the number of experts of each sparse layer of a stack."""
        numbers = self.decoder_experts if decoder else self.encoder_experts
        if numbers is not None:
            return list(numbers)
        _, num_sparse = self.stack_sizes(decoder)
        return [self.num_experts] * num_sparse

    def sparse_configs(self, *, decoder: bool) -> list[SparseConfig]:
        """Returns the settings of the sparse layers of a stack, in order; see `sparse_config`."""
        _, num_sparse = self.stack_sizes(decoder)
        return [self.sparse_config(decoder=decoder, layer=layer) for layer in range(num_sparse)]

    def all_sparse_configs(self) -> list[SparseConfig]:
        """Returns the settings of all sparse layers, the encoder's first."""
        return self.sparse_configs(decoder=False) + self.sparse_configs(decoder=True)

    def sparse_config(self, *, decoder: bool, layer: int = 0) -> SparseConfig:
        """Returns the settings of one sparse layer; layers of a stack differ only in their experts.

        Args:
            decoder: Whether the layer is in the decoder.
            layer: Number of the layer among the sparse layers of its stack, from 0.

        Raises:
            ConfigError: When one of them is out of range, or the model is dense.
        """
        # A different decoder router does not inherit the encoder's options.
        router = self.router
        options = self.router_options
        if decoder and self.decoder_router not in (None, router):
            router = self.decoder_router
            options = None
        if decoder and self.decoder_router_options is not None:
            options = self.decoder_router_options

        expert_dropout_rate = self.expert_dropout_rate
        if expert_dropout_rate is None:
            expert_dropout_rate = self.dropout_rate

        # Settings of a layer that follow from several of ours.
        settings: dict[str, Any] = {
            "router": router,
            "router_options": options or {},
            "num_experts": self.layer_experts(decoder=decoder)[layer],
            "d_ff": self.expert_d_ff or self.d_ff,
            "decoder": decoder,
            "activation": self.activation,
            "gated": self.gated,
            "product_bias": False,
            "prefix_experts": self.prefix_counts(),
            "expert_dropout_rate": expert_dropout_rate,
        }

        # All others are fields of this class under the same name.
        for item in fields(SparseConfig):
            if item.name not in settings:
                settings[item.name] = getattr(self, item.name)
        return SparseConfig(**settings)

    def prefix_counts(self) -> tuple[int, ...]:
        """Returns the number of experts of each prefix."""
        return tuple(record["num_experts"] for record in self.prefix_experts or ())

    @property
    def gated(self) -> bool:
        """Whether feed-forward layers and experts are gated linear units."""
        return self.feed_forward_proj.startswith("gated-")

    @property
    def activation(self) -> str:
        """The activation of feed-forward layers and experts, by its name in transformers."""
        kind = self.feed_forward_proj.removeprefix("gated-")
        return "gelu_pytorch_tanh" if kind == "gelu" else kind

    @property
    def rules(self) -> Rules:
        """The rules of the convention."""
        return CONVENTIONS[self.convention]

    @property
    def eval_capacity_field(self) -> str | None:
        """Name of the field that bounds an expert's tokens in evaluation; None for no bound."""
        if not self.num_experts:
            return None
        if self.expert_capacity is not None:
            return "expert_capacity"
        if self.eval_capacity_factor is not None:
            return "eval_capacity_factor"
        return None

    def is_sparse_block(self, block: int, *, decoder: bool) -> bool:
        """Returns whether block number `block`, counted from 0, holds a sparse layer.

        Source:
            flaxformer `LayerLayout.MIXED` at 399ea3a8: the last block of each of `num_sparse` equal
            stretches; transformers 5.23.0 `SwitchTransformersStack`: the second.
        """
        num_layers, num_sparse = self.stack_sizes(decoder)
        if not num_sparse:
            return False

        stretch = num_layers // num_sparse
        position = stretch - 1
        if self.sparse_position == "second":
            position = min(1, stretch - 1)
        return block % stretch == position

    def stack_sizes(self, decoder: bool) -> tuple[int, int]:
        """Returns the number of blocks and the number of sparse layers of a stack."""
        assert self.num_decoder_layers is not None, "__post_init__ fills it"
        if decoder:
            return self.num_decoder_layers, self.num_sparse_decoder_layers
        return self.num_layers, self.num_sparse_encoder_layers

    def num_parameters(self) -> int:
        """Returns the number of parameters, before anything is built."""
        return self._count_parameters(active=False)

    def num_active_parameters(self) -> int:
        """Returns the parameters that one token uses: all dense and shared ones, and K of every E experts.

        If experts choose their tokens, a token has on average as many experts as the capacity
        factor, not K.
        """
        return self._count_parameters(active=True)

    def num_active_stack_parameters(self, *, decoder: bool) -> int:
        """Returns the active parameters of the encoder or the decoder.

        The embedding and the head belong to neither.
        """
        return self._count_stack_parameters(active=True, decoder=decoder)

    def _count_parameters(self, *, active: bool) -> int:
        """Returns the parameters with all or only a token's experts, and whole routers."""
        # The embedding, and a separate head.
        total = self.vocab_size * self.d_model
        if not self.tie_word_embeddings:
            total *= 2
        for decoder in (False, True):
            total += self._count_stack_parameters(active=active, decoder=decoder)
        return total

    def _count_stack_parameters(self, *, active: bool, decoder: bool) -> int:
        """Returns the parameters of the encoder or the decoder, likewise."""
        D = self.d_model
        attention = 4 * D * self.num_heads * self.d_kv  # query, key, value, output
        num_matrices = 3 if self.gated else 2
        feed_forward = num_matrices * D * self.d_ff

        num_layers, num_sparse = self.stack_sizes(decoder)
        num_stacked = num_sparse if self.sparse_dense_stacking else 0
        num_dense = num_layers - num_sparse + num_stacked
        attentions = 2 if decoder else 1  # of one block

        num_tables = num_layers if self.relative_bias_in_every_block else 1
        total = num_tables * self.relative_attention_num_buckets * self.num_heads
        total += num_layers * attentions * attention
        total += num_dense * feed_forward
        for layer in self.sparse_configs(decoder=decoder):
            num_experts = layer.num_selected_experts if active else layer.num_experts
            num_experts += layer.num_shared_experts
            expert_bias = layer.d_ff if self.expert_bias != "none" else 0
            total += num_experts * (num_matrices * D * layer.d_ff + expert_bias)
            total += load_routers().get(layer.router).num_parameters(layer)

        # A norm before each layer of a block, and one at the end.
        num_norms = num_layers * (attentions + 1) + num_stacked + 1
        return total + num_norms * D


AutoConfig.register(STMoEConfig.model_type, STMoEConfig)
