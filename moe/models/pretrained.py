"""What all models share: loading, saving, initialisation, activation checkpointing."""

import os
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import CommitInfo, HfApi
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from moe.checks import check, check_flag, check_integer, check_number, is_kind
from moe.distributed.sharding import local_shard
from moe.errors import CheckpointError, ConfigError
from moe.models.attention import Projection, RelativePositionBias, RMSNorm
from moe.models.card import (
    CARD_NAME,
    add_tags,
    check_card,
    fetch_card,
    model_card,
    origin,
    write_card,
)
from moe.models.checkpoint_formats import CheckpointFormat, find_format
from moe.models.configuration import STMoEConfig
from moe.models.configuration_checks import check_config, check_savable, check_source
from moe.models.quantized import warn_of_plain_experts
from moe.models.weight_checksums import checking_weights, forget_weight_sums, write_weight_sums
from moe.models.weight_files import (
    COPY_AGAIN,
    check_finite,
    describe_misfits,
    find_weight_files,
    incomplete,
    open_weights,
    refuse_integers,
    remove_replaced_weights,
    saved_weights,
)
from moe.parsing import read_json, to_record
from moe.sparse.experts import Experts
from moe.sparse.router import Router

DOWNLOAD = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)
"""Arguments that say where a file of the hub comes from."""

_PRODUCTS_OF_DISPATCH = {"ragged": "grouped_mm", "static": "batched_mm"}  # in transformers' words
_QUIETLY = {
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
}

_OF_A_COMMIT = ("commit_message", "commit_description", "create_pr", "revision")


class STMoEPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation shared by the models.

    Attributes:
        origin: Name on the hub of the model that this one was loaded from, or that its folder's
            card calls its base.
    """

    origin: str | None = None
    config: STMoEConfig
    config_class = STMoEConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _can_compile_fullgraph = (
        True  # of a dense model and of static dispatch; an instance that cannot says so
    )
    _no_split_modules = ["Block"]

    def __init__(self, config: STMoEConfig) -> None:
        check_config(config)  # from_pretrained sets fields after the config has checked them
        super().__init__(config)
        self._can_compile_fullgraph = config.num_experts == 0 or config.dispatch == "static"

    def get_correct_attn_implementation(
        self, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        """Returns what computes attention, as transformers decides.

        Raises:
            ConfigError: For kinds of attention that cannot add T5's bias of positions to the
                scores.
        """
        if requested_attention is not None and (
            "flash" in requested_attention or "flex" in requested_attention
        ):
            raise ConfigError(
                f"attn_implementation is {requested_attention!r}; expected 'sdpa' or 'eager'. Every score of attention "
                "has a trained bias of the distance added, and masks with it: flash attention has no place for them, "
                "and flex attention would need a kernel of its own. On a GPU 'sdpa' takes torch's memory-efficient one."
            )
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """Returns `eager`, transformers' word for a model that runs its experts itself.

        Raises:
            ConfigError: For an implementation other than that of the config's `dispatch`.
        """
        products = _PRODUCTS_OF_DISPATCH[self.config.dispatch]
        if requested_experts not in (None, "eager", products):
            raise ConfigError(
                f"experts_implementation is {requested_experts!r}, but experts run as the field dispatch says: with "
                f"{self.config.dispatch!r}, by {products!r}. Expected that or 'eager', which both stand for it; the "
                "other is dispatch='static' for 'batched_mm' and dispatch='ragged' for 'grouped_mm'."
            )
        return "eager"

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the model of a folder or hub name, with weights that compute bit for bit what was
        saved.

        A T5 or Switch of transformers is converted as it is read, one shard at a time, and refused
        unless every one of its tensors is accounted for; see `conversion_report`. `save_pretrained`
        then writes our format.

        Arguments and results are those of transformers. Weights read from safetensors may lie at
        any address, and matrix products on a CPU round differently by address; each such weight is
        moved to an aligned one.

        Raises:
            CheckpointError: When a file is damaged, weights are of another shape or no finite
                numbers, or tensors of a T5 or Switch are missing or unexpected.
            ConfigError: When its config.json holds what this library cannot represent.
        """
        source, download = (
            pretrained_model_name_or_path,
            {name: kwargs[name] for name in DOWNLOAD if name in kwargs},
        )
        if source is not None:
            check_source(source)
        _refuse_adapter_of_foreign(source, download)
        with _checking_local_weights(source, download):
            checkpoint_format = _find_format(source, download)
            if checkpoint_format is not None:
                result = cls._from_foreign(
                    source, checkpoint_format, *args, download=download, **kwargs
                )
            else:
                cls._check_files(source, download, kwargs)
                result = super().from_pretrained(source, *args, **kwargs)
        model = result[0] if isinstance(result, tuple) else result
        warn_of_plain_experts(model)
        refuse_not_finite(model, source)
        model.origin = None if source is None else origin(source)
        for parameter in model.parameters():
            if parameter.device.type == "cpu" and parameter.data_ptr() % 64:
                parameter.data = parameter.data.clone()
        return result

    @classmethod
    def _check_files(
        cls, source: Any, download: dict[str, Any], options: Mapping[str, Any]
    ) -> None:
        """Checks the files of a folder before transformers reads them.

        Args:
            source: The folder; names of the hub are left to transformers.
            download: Of `options`, where files come from.
            options: Arguments of `from_pretrained`.

        Raises:
            CheckpointError: When a file is damaged, or holds other than a model's numbers.
            ConfigError: When a setting of generation cannot be used.
        """
        if (
            source is None
            or not (Path(source) / download.get("subfolder", "") / CONFIG_NAME).is_file()
        ):
            return
        if options.get("generation_config") is None:
            load_generation_config(source, download)
        if options.get("state_dict") is not None or options.get("gguf_file") is not None:
            return

        # What is in the files, of which only names and shapes are read.
        chosen = {name: options.get(name) for name in ("use_safetensors", "variant")}
        stored = open_weights(find_weight_files(source, **chosen, **download))

        # What the model expects under those names: a part of the whole model, or the whole, by
        # names of either.
        config = options.get("config")
        if not isinstance(config, STMoEConfig):
            settings = {name: value for name, value in options.items() if name != "config"}
            config, _ = cast(Any, STMoEConfig).from_pretrained(
                config or source, return_unused_kwargs=True, **settings
            )
        if hasattr(config, "quantization_config") or options.get("quantization_config") is not None:
            return
        with torch.device("meta"):
            expected = cls(config).state_dict()
        prefix = f"{cls.base_model_prefix}."
        for name in expected.keys() - stored.keys():
            for other in (f"{prefix}{name}", name.removeprefix(prefix)):
                if other in stored:
                    stored[name] = stored.pop(other)
        refuse_integers(source, expected, {name: tensor.dtype for name, tensor in stored.items()})

        shapes = {name: tensor.shape for name, tensor in stored.items()}
        both = [
            (name, shapes[name], tuple(expected[name].shape))
            for name in shapes.keys() & expected.keys()
        ]
        reshaped = [(name, saved, own) for name, saved, own in both if saved != own]
        if reshaped and not options.get("ignore_mismatched_sizes"):
            misfits = describe_misfits(
                expected.keys() - shapes.keys(), shapes.keys() - expected.keys(), reshaped
            )
            raise CheckpointError(incomplete(source, cls.__name__, misfits))

    @classmethod
    def _from_foreign(
        cls,
        source: Any,
        checkpoint_format: CheckpointFormat,
        *args: Any,
        download: dict[str, Any],
        **kwargs: Any,
    ) -> Any:
        """Returns the model of a T5 or Switch of transformers; see `from_pretrained`."""
        for name in ("variant", "key_mapping", "state_dict"):
            if kwargs.get(name) is not None:
                raise ConfigError(
                    f"from_pretrained got {name} {kwargs[name]!r} for {source}, a model of another library that is "
                    f"converted. Leave {name} out."
                )
        kwargs = {name: value for name, value in kwargs.items() if name not in DOWNLOAD}
        dtypes = {name: kwargs.pop(name) for name in ("dtype", "torch_dtype") if name in kwargs}
        config = kwargs.pop("config", None)
        if not isinstance(config, STMoEConfig):
            settings = {"return_unused_kwargs": True, **download, **kwargs}
            config, kwargs = cast(Any, STMoEConfig.from_pretrained(config or source, **settings))
            kwargs = {name: value for name, value in kwargs.items() if name not in DOWNLOAD}
        generation = kwargs.pop("generation_config", None) or load_generation_config(
            source, download
        )
        use_safetensors = kwargs.pop("use_safetensors", None)
        weights = checkpoint_format.open_weights(
            source,
            config,
            leave_out=cls._keys_to_ignore_on_load_unexpected or (),
            use_safetensors=use_safetensors,
            **download,
        )
        result = super().from_pretrained(
            None,
            *args,
            config=config,
            state_dict=weights,
            generation_config=generation,
            **dtypes,
            **kwargs,
        )
        model = result[0] if isinstance(result, tuple) else result
        model.config.name_or_path = model.name_or_path = str(source)
        return result

    def argument_or_config(self, name: str, argument: bool | None) -> bool:
        """Returns an argument of `forward`, or when it is None the config's field of that name."""
        return bool(getattr(self.config, name) if argument is None else argument)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *args: Any,
        push_to_hub: bool = False,
        card: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Saves config, weights and a model card, README.md; a card that somebody else wrote or
        changed stays.

        Args:
            save_directory: The folder.
            args: As in transformers.
            push_to_hub: Whether to upload what is new in the folder; its arguments are those of
                `push_to_hub`.
            card: Arguments of `model_card`: `license`, `datasets`, `metrics`, `stats` and others.
            kwargs: As in transformers.
        """
        if push_to_hub:
            self._save_and_push(Path(save_directory), card, args, kwargs)
            return
        text = self._card(card or {})  # what is wrong with it is said before anything is written
        check_config(self.config)
        check_savable(self.config)

        folder, variant = Path(save_directory), kwargs.get("variant")
        adapters_only = getattr(self, "_hf_peft_config_loaded", False)
        writes = (
            self.should_save_on_this_rank(kwargs.get("is_main_process", True)) and not adapters_only
        )
        if writes:  # killed from here on, the folder holds no checksums rather than wrong ones
            forget_weight_sums(folder)
        super().save_pretrained(save_directory, *args, **kwargs)

        if writes:
            remove_replaced_weights(folder, saved_weights(folder, variant), variant)
            write_weight_sums(folder)
            write_card(folder, text)

    def push_to_hub(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, repo_id: str, *, card: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> CommitInfo | None:
        """Uploads config, weights and a model card, unless the repository's card was written or
        changed by others.

        Args:
            repo_id: Name on the hub.
            card: See `save_pretrained`.
            kwargs: As in transformers.
        """
        with tempfile.TemporaryDirectory() as folder:
            return self._save_and_push(Path(folder), card, (), {"repo_id": repo_id, **kwargs})

    def _save_and_push(
        self,
        folder: Path,
        card: Mapping[str, Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> CommitInfo | None:
        """Saves into a folder and uploads what is new there; transformers would upload an empty
        card.
        """
        commit = {name: kwargs.pop(name) for name in _OF_A_COMMIT if name in kwargs}
        repo_id, token = kwargs.pop("repo_id", folder.name), kwargs.get("token")
        private, tags, before = kwargs.pop("private", None), kwargs.pop("tags", None) or [], {}
        speaks = self.should_save_on_this_rank(kwargs.get("is_main_process", True))
        if speaks:
            repo_id = (
                HfApi().create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
            )
            before = self._get_files_timestamps(folder) if folder.is_dir() else {}
            if not fetch_card(repo_id, folder, token):
                before.pop(CARD_NAME, None)  # the folder's own, be it older, is better than none
        self.save_pretrained(folder, *args, card=card, **kwargs)
        if not speaks:
            return None
        add_tags(folder, [*(self.model_tags or []), *([tags] if isinstance(tags, str) else tags)])
        return self._upload_modified_files(folder, repo_id, before, token=token, **commit)

    def _card(self, given: Mapping[str, Any]) -> str:
        """Returns the model card, of what is given and what the model knows."""
        total = self.num_parameters()
        idle = 0
        for module in self.modules():
            if isinstance(module, Experts):
                num_experts, used = module.config.num_experts, module.config.num_selected_experts
                share = max(0, num_experts - used)
                idle += sum(weight.numel() // num_experts * share for weight in module.parameters())
        check_card(given)
        return model_card(
            self.config,
            model_class=type(self).__name__.removeprefix("FSDP"),
            parameters=(total, total - idle),
            **{"base_model": self.origin, **given},
        )

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        """Switches activation checkpointing on or off; both public names of transformers come
        through here.

        Raises:
            ConfigError: When it would be reentrant, as it is by torch's default.
        """
        function = kwargs.get("gradient_checkpointing_func")
        if (
            function is not None
            and getattr(function, "keywords", {}).get("use_reentrant") is not False
        ):
            raise ConfigError(
                "Activation checkpointing was asked for without use_reentrant=False: the reentrant kind loses the "
                "gradient of the routers' losses. Add it to the keyword arguments, or give none."
            )
        cast(Any, super())._set_gradient_checkpointing(*args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draws the weights of one module anew; transformers keeps those that were loaded."""
        if isinstance(
            module, Experts | nn.Embedding | Projection | RelativePositionBias | RMSNorm | Router
        ):
            module.reset_parameters()


@torch.no_grad()
def refuse_not_finite(model: nn.Module, source: Any) -> None:
    """Raises a CheckpointError for a weight that holds NaN or infinity; names the first."""
    for name, parameter in model.named_parameters():
        weight = local_shard(parameter)
        if weight.device.type != "meta":
            check_finite(name, weight, source)


def _find_format(source: Any, download: dict[str, Any]) -> CheckpointFormat | None:
    """Returns the format of a folder or hub name of another library; None for ours and for none."""
    if source is None:
        return None
    try:
        return find_format(STMoEConfig.read_raw(source, **download))
    except OSError:
        return None  # no config.json: an adapter, or nothing; transformers says so


def _refuse_adapter_of_foreign(source: Any, download: dict[str, Any]) -> None:
    """Raises a ConfigError for adapters of PEFT whose base is a T5 or Switch, which transformers
    would draw anew.
    """
    path = (
        find_adapter_config_file(str(source), **download)
        if isinstance(source, str | os.PathLike)
        else None
    )
    if path is None:
        return
    adapters = _read_object(Path(path))
    if (Path(source) / "config.json").is_file():
        return
    base = adapters.get("base_model_name_or_path")
    check(
        base is None or isinstance(base, str),
        f"base_model_name_or_path of {path}",
        base,
        "a folder or hub name",
    )
    if base and _find_format(base, download) is not None:
        raise ConfigError(
            f"{source} holds adapters of {base}, a model of another library. Load the base by "
            f"from_pretrained({base!r}) and then the adapters by PeftModel.from_pretrained(model, {str(source)!r})."
        )


def _checking_local_weights(source: Any, download: dict[str, Any]) -> AbstractContextManager[None]:
    """Returns a block at whose end a CheckpointError says whether the weights of a folder are those
    that were saved.
    """
    if isinstance(source, str | os.PathLike):
        folder = Path(source) / (download.get("subfolder") or "")
        if folder.is_dir():
            return checking_weights(folder)
    return nullcontext()


def load_generation_config(source: Any, download: dict[str, Any]) -> GenerationConfig:
    """Returns the generation settings of a folder or hub name: those of their own file, or else of
    config.json.

    Raises:
        CheckpointError: When the file is damaged.
        ConfigError: When a setting is of another type than it has.
    """
    path = cached_file(source, GENERATION_CONFIG_NAME, **_QUIETLY, **download)
    if path is None:
        settings = {"config_file_name": "config.json", "_from_model_config": True, **download}
        return GenerationConfig.from_pretrained(source, **settings)

    _check_generation_types(_read_object(Path(path)), path)
    try:
        return GenerationConfig.from_pretrained(source, **download)
    except (ValueError, TypeError, AttributeError, LookupError) as failure:
        raise ConfigError(f"{path} has settings that cannot be used: {failure}") from failure


def _check_generation_types(settings: Mapping[str, Any], path: str) -> None:
    """Raises a ConfigError when a setting of generation is of another type than its default, or an
    id is no number.
    """
    defaults = GenerationConfig._get_default_generation_params()
    for name, value in settings.items():
        if name.endswith("_token_id"):
            ids = value if isinstance(value, list) else [value]
            check(
                all(one is None or is_kind(one, int) for one in ids),
                f"{name} of {path}",
                value,
                "a token id",
            )
        elif (
            value is None or defaults.get(name) is None or name == "early_stopping"
        ):  # which may be "never"
            continue
        elif isinstance(defaults[name], bool):
            check_flag(f"{name} of {path}", value)
        elif isinstance(defaults[name], int):
            check_integer(f"{name} of {path}", value)
        elif isinstance(defaults[name], float):
            check_number(f"{name} of {path}", value)


def _read_object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file of a model folder.

    Raises:
        CheckpointError: When the file is damaged.
    """
    content = read_json(path, advice=COPY_AGAIN, error=CheckpointError, nan=True)
    return to_record(
        dict[str, Any], content, where=str(path), advice=COPY_AGAIN, error=CheckpointError
    )
