"""The base of all models: loading, saving, initialisation, activation checkpointing."""

import os
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import CommitInfo, HfApi
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from moe.checks import check
from moe.distributed.mesh import ExpertAxis, MeshConfig
from moe.distributed.sharding import local_shard, refuse_to_save
from moe.errors import CheckpointError, MoEError
from moe.files import refuse_links, register_folder_kind
from moe.kernels.expert_weights import is_quantized
from moe.kernels.quantized_weight import QuantizedWeight
from moe.models.adapter_files import find_base
from moe.models.attention import (
    Attention,
    Projection,
    RelativePositionBias,
    RMSNorm,
    plain_projections,
)
from moe.models.blocks import FeedForward, Stack
from moe.models.card import (
    CARD_NAME,
    add_tags,
    fetch_card,
    find_source_model,
    model_card,
    write_card,
)
from moe.models.checkpoint_formats import COPY_AGAIN, CheckpointFormat, find_format
from moe.models.configuration import STMoEConfig
from moe.models.experts_interface import ExpertsByName
from moe.models.model_warnings import warn_of_plain_experts
from moe.models.transformers_private import PrivateModelHooks, load_generation_config
from moe.models.weight_files import (
    check_files,
    check_finite,
    checking_weights,
    first_names,
    forget_weight_sums,
    keep_quantized_experts,
    open_weights,
    remove_replaced_weights,
    saved_weights,
    stored_state,
    write_weight_sums,
)
from moe.sparse.experts import PROJECTIONS, Experts
from moe.sparse.layer import SparseFeedForward
from moe.sparse.router import Router

TOKENIZER_FILES = (
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "spiece.model",
    "tokenizer.model",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "sentencepiece.bpe.model",
    "source.spm",
    "target.spm",
    "vocab.json",
    "target_vocab.json",
    "merges.txt",
)
"""Files of the tokenizer and the processor in a model's folder."""

MODEL = register_folder_kind(
    "model",
    markers=["config.json", "model.safetensors", "model.safetensors.index.json"],
    parts=[
        "model*.safetensors",
        "model.safetensors.index*.json",
        "config.json",
        "generation_config.json",
        "adapter_*",
        "languages.json",
        "README.md",
        "modeling_st_moe.py",
        *TOKENIZER_FILES,
    ],
)

DOWNLOAD = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)
"""Arguments that locate a file of the hub."""

DTYPES = ("dtype", "torch_dtype")
"""Arguments for the weights, which are not fields of the config; "auto" means the dtype in the files."""

_COMMIT_OPTIONS = ("commit_message", "commit_description", "create_pr", "revision")

_TRANSFORMERS_MESH = ("distributed_config", "tp_plan", "tp_size")

_MODULES_WITH_WEIGHTS = (Experts, Projection, RelativePositionBias, RMSNorm, Router, nn.Embedding)

_ALIGNMENT = 64  # bytes


class StoredWeights:
    """Put before a class of transformers, it loads and saves weights that are stored quantized."""

    @staticmethod
    def _load_pretrained_model(
        model: Any,
        state_dict: Any,
        checkpoint_files: Any,
        load_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Loads weights by name, or from files; every loading of transformers comes through here.

        Raises:
            CheckpointError: When a file is missing, torn, or outside of the folder.
        """
        if state_dict is None:
            paths = [Path(file) for file in checkpoint_files or ()]
            check_files(load_config.pretrained_model_name_or_path, paths)
            stored = open_weights(paths)
            if any(weight.read_quantized is not None for weight in stored.values()):
                keeps = model.config.expert_quantization is not None
                state_dict = keep_quantized_experts(stored) if keeps else stored

        load = PreTrainedModel._load_pretrained_model
        return load(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    def gather_sharded_state_dict_for_save(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Returns the tensors that `save_pretrained` writes, by name."""
        state = cast(Any, super()).gather_sharded_state_dict_for_save(*args, **kwargs)
        return state if cast(Any, self).config.expert_quantization is None else stored_state(state)


class STMoEPreTrainedModel(ExpertsByName, PrivateModelHooks, StoredWeights, PreTrainedModel):
    """Loading, saving and initialisation shared by the models.

    Attributes:
        source_model: Hub name of the model that this one was loaded from, or those of the base
            models in its folder's card.
        mesh_config: Sizes of the mesh that `shard_model` has sharded it over; None for a whole model.
    """

    source_model: str | list[str] | None = None
    mesh_config: MeshConfig | None = None
    config: STMoEConfig
    config_class = STMoEConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["Block"]

    # In a model loaded in float16, routers and what leads back to D still compute in float32.
    _keep_in_fp32_modules = ["router", "down_proj"]

    # False on a mesh whose ranks hold different experts; see shard_model.
    _can_compile_fullgraph = True

    def argument_or_config(self, name: str, argument: bool | None) -> bool:
        """Returns an argument of `forward`, or when it is None the config's field of that name."""
        return bool(getattr(self.config, name) if argument is None else argument)

    def post_init(self) -> None:
        """Completes the model at the end of its `__init__`."""
        super().post_init()
        self.set_experts_implementation(self.config._experts_implementation)

    def set_parallel_axes(self, ep: ExpertAxis | None, tp: ProcessGroup | None) -> None:
        """Tells the layers which ranks have the other experts, heads and hidden units."""
        for module in self.modules():
            if isinstance(module, SparseFeedForward):
                module.set_parallel_axes(ep, tp)
            elif isinstance(module, Attention | FeedForward | Stack):
                module.tp = tp

    @classmethod
    def get_init_context(
        cls, dtype: Any, is_quantized: bool, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Returns the contexts in which `from_pretrained` builds a model and a quantizer replaces its modules."""
        contexts: list[Any] = super().get_init_context(dtype, is_quantized, *args, **kwargs)
        return [*contexts, plain_projections()] if is_quantized else contexts

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Re-initializes the weights of one module; transformers keeps those that were loaded."""
        if isinstance(module, _MODULES_WITH_WEIGHTS):
            module.reset_parameters()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the model of a folder or hub name, which computes bit for bit as when it was saved.

        A T5 or Switch of transformers is converted as it is read, one shard at a time; loading raises
        unless all of its tensors are accounted for; see `conversion_report`. `save_pretrained` then
        writes our format. A folder of adapters gives their base model with them attached. Weights
        stored in 8 bits become floats, except those of experts if the config has
        `expert_quantization`; see moe.models.weight_files.

        Arguments and results are the same as in transformers. Weights read from safetensors may
        start at any address, and matrix products on a CPU round differently by address; each such
        weight is moved to an aligned one.

        Raises:
            CheckpointError: When weights are not those that were saved or not finite, or tensors of a
                T5 or Switch are missing or unexpected.
            ConfigError: When its config.json has a value that this library cannot represent.
        """
        source = pretrained_model_name_or_path
        for name in _TRANSFORMERS_MESH:
            expected = "None: shard the model by moe.shard_model(model, mesh)"
            check(kwargs.get(name) is None, name, kwargs.get(name), expected)
        download = {name: kwargs[name] for name in DOWNLOAD if name in kwargs}
        raw_config = _read_raw_config(source, download)
        checkpoint_format = None if raw_config is None else find_format(raw_config)
        base = find_base(source, **download)

        with _checking_local_weights(source, download):
            try:
                if base is not None:
                    has_config = raw_config is not None
                    result = cls._load_adapted(source, base, has_config, *args, **kwargs)
                elif raw_config is not None and checkpoint_format is not None:
                    result = cls._convert(
                        source, raw_config, checkpoint_format, *args, download=download, **kwargs
                    )
                else:
                    if raw_config is not None and cls.can_generate():
                        kwargs.setdefault(
                            "generation_config", load_generation_config(source, download)
                        )
                    result = super().from_pretrained(source, *args, **kwargs)
            except (MoEError, OSError):
                raise
            except Exception as error:
                reason = " ".join(str(error).split())
                raise CheckpointError(f"{source} cannot be loaded: {reason}") from error

        # With output_loading_info the result is a pair.
        model = result[0] if isinstance(result, tuple) else result
        warn_of_plain_experts(model)
        refuse_not_finite(model, source)
        is_quantized_file = (raw_config or {}).get("expert_quantization") is not None
        keeps_quantized = is_quantized_file and model.config.expert_quantization is not None
        freeze_quantized_experts(model, source if keeps_quantized else None)
        align_weights(model)
        model.source_model = None if source is None else find_source_model(source)
        return result

    @classmethod
    def _convert(
        cls,
        source: Any,
        raw_config: dict[str, Any],
        checkpoint_format: CheckpointFormat,
        *args: Any,
        download: dict[str, Any],
        **kwargs: Any,
    ) -> Any:
        """Returns the model of a checkpoint in another format; see `from_pretrained`."""
        # The dtype is an argument for the weights, not a field of the config.
        options = {name: value for name, value in kwargs.items() if name not in DOWNLOAD}
        dtypes = {name: options.pop(name) for name in DTYPES if name in options}
        config = options.pop("config", None)
        if config is None:
            fields = checkpoint_format.convert_config(raw_config)
            config, options = STMoEConfig.from_dict(fields, return_unused_kwargs=True, **options)
        elif not isinstance(config, STMoEConfig):
            read_config = cast(Any, STMoEConfig).from_pretrained
            config, options = read_config(config, return_unused_kwargs=True, **download, **options)

        generation_config = options.pop("generation_config", None)
        if generation_config is None:
            generation_config = load_generation_config(source, download)
        weights = checkpoint_format.open_weights(
            source,
            raw_config,
            config,
            leave_out=cls._keys_to_ignore_on_load_unexpected or (),
            use_safetensors=options.pop("use_safetensors", None),
            **download,
        )
        result = super().from_pretrained(
            None,
            *args,
            config=config,
            state_dict=weights,
            generation_config=generation_config,
            **dtypes,
            **options,
        )
        model = result[0] if isinstance(result, tuple) else result
        model.name_or_path = str(source)
        model.config.name_or_path = str(source)
        return result

    @classmethod
    def _load_adapted(
        cls, source: Any, base: str, has_config: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """Returns the base model of a folder of adapters with them attached, and the folder's settings if any."""
        download = {name: kwargs.pop(name) for name in DOWNLOAD if name in kwargs}
        if has_config:
            config = kwargs.pop("config", None) or STMoEConfig.from_pretrained(source, **download)
            fields = STMoEConfig.__annotations__.keys() & kwargs.keys()
            kwargs["config"] = config.replaced(**{name: kwargs.pop(name) for name in fields})
            kwargs.setdefault("generation_config", load_generation_config(source, download))
        kwargs.pop("adapter_kwargs", None)  # of Auto classes: the same folder

        result = cls.from_pretrained(base, *args, **kwargs)
        model = result[0] if isinstance(result, tuple) else result
        missing = model.load_adapter(str(source), adapter_kwargs=download).missing_keys
        if missing:
            raise CheckpointError(f"{source} lacks {first_names(sorted(missing))}. {COPY_AGAIN}")
        return result

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *args: Any,
        push_to_hub: bool = False,
        card: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Saves config, weights and a model card, README.md.

        A card that the user wrote or changed is kept. Weights are saved as they are in memory: those
        that were loaded from 8 bits as floats, quantized experts quantized. `stmoe quantize --all`
        stores them in 8 bits again.

        Args:
            save_directory: The folder.
            args: As in transformers.
            push_to_hub: Whether to upload the new files of the folder; takes the arguments of
                `push_to_hub`.
            card: Arguments of `model_card`: `license`, `datasets`, `metrics`, `stats` and others.
            kwargs: As in transformers.

        Raises:
            ConfigError: On a mesh, where `save_model_on_mesh` saves the model.
        """
        folder = Path(save_directory)
        if push_to_hub:
            self._save_and_push(folder, card, args, kwargs)
            return

        # Reject invalid arguments before writing anything.
        refuse_to_save(self.mesh_config)
        text = self._card_text(card or {})
        self.config.validate()
        refuse_links(folder, kind=MODEL)

        is_writer = self.should_save_on_this_rank(kwargs.get("is_main_process", True))
        writes_weights = is_writer and not getattr(self, "_hf_peft_config_loaded", False)

        # If killed from here on, the folder has no checksums rather than wrong ones.
        if writes_weights:
            forget_weight_sums(folder)
        super().save_pretrained(save_directory, *args, **kwargs)

        if writes_weights:
            remove_replaced_weights(folder, saved_weights(folder))
            write_weight_sums(folder)
            write_card(folder, text)
        elif is_writer and getattr(self, "hf_quantizer", None) is None:
            self.config.save_pretrained(folder)  # a folder of adapters keeps its settings

    def push_to_hub(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, repo_id: str, *, card: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> CommitInfo | None:
        """Uploads config, weights and a model card.

        The repository's card is kept if others wrote or changed it.

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
        """Saves into a folder and uploads its new files; transformers would upload an empty card."""
        refuse_to_save(self.mesh_config)
        commit = {name: kwargs.pop(name) for name in _COMMIT_OPTIONS if name in kwargs}
        repo_id = kwargs.pop("repo_id", folder.name)
        private = kwargs.pop("private", None)
        tags = kwargs.pop("tags", None) or []
        token = kwargs.get("token")

        # Only one rank communicates with the hub.
        is_writer = self.should_save_on_this_rank(kwargs.get("is_main_process", True))
        if not is_writer:
            self.save_pretrained(folder, *args, card=card, **kwargs)
            return None

        repository = HfApi().create_repo(repo_id, private=private, token=token, exist_ok=True)
        timestamps = self._get_files_timestamps(folder) if folder.is_dir() else {}
        if not fetch_card(repository.repo_id, folder, token):
            # The folder's old card is better than none.
            timestamps.pop(CARD_NAME, None)

        self.save_pretrained(folder, *args, card=card, **kwargs)
        new_tags = [tags] if isinstance(tags, str) else tags
        add_tags(folder, [*(self.model_tags or []), *new_tags])
        return self._upload_modified_files(
            folder, repository.repo_id, timestamps, token=token, **commit
        )

    def _card_text(self, card: Mapping[str, Any]) -> str:
        """Returns the model card from the given arguments and the facts of the model."""
        check(isinstance(card, Mapping), "card", card, "a mapping of arguments of model_card")
        # A token uses K of the E experts of each layer.
        num_parameters = self.num_parameters()
        num_idle = 0
        for module in self.modules():
            if isinstance(module, Experts):
                num_experts = module.config.num_experts
                num_unused = max(0, num_experts - module.config.num_selected_experts)
                for weight in module.parameters():
                    num_idle += weight.numel() // num_experts * num_unused

        return model_card(
            self.config,
            model_class=type(self).__name__.removeprefix("FSDP"),
            parameters=(num_parameters, num_parameters - num_idle),
            **{"base_model": self.source_model, **card},
        )


@torch.no_grad()
def refuse_not_finite(model: nn.Module, source: Any) -> None:
    """Raises a CheckpointError for a weight that holds NaN or infinity; names the first."""
    for name, parameter in model.named_parameters():
        weight = local_shard(parameter)
        if weight.device.type != "meta":
            check_finite(name, weight, source)


def freeze_quantized_experts(model: nn.Module, source: Any) -> None:
    """Makes quantized weights constants again; transformers lets every float parameter train.

    Args:
        model: A newly loaded model.
        source: Folder or hub name whose experts must all be QuantizedWeights; None for a model
            that torchao may have quantized.

    Raises:
        CheckpointError: When one was not in the file.
    """
    for module_name, module in model.named_modules():
        if isinstance(module, Experts):
            is_stored = source is not None and module.config.expert_quantization is not None
            for name in PROJECTIONS & module._parameters.keys():
                weight = module.get_parameter(name)
                if is_stored and not isinstance(weight, QuantizedWeight):
                    raise CheckpointError(f"{source} has no {module_name}.{name}_q. {COPY_AGAIN}")
                if is_quantized(weight):
                    weight.requires_grad_(False)


def align_weights(model: nn.Module) -> None:
    """Moves weights on a CPU to aligned addresses, and copies quantized ones: products do not depend on the file."""
    for parameter in model.parameters():
        if isinstance(parameter, QuantizedWeight):
            for name in parameter.__tensor_flatten__()[0]:
                setattr(parameter, name, getattr(parameter, name).clone())
        elif parameter.device.type == "cpu" and parameter.data_ptr() % _ALIGNMENT:
            parameter.data = parameter.data.clone()


def _read_raw_config(source: Any, download: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the raw config.json of a folder or hub name; None when there is none."""
    if source is None:
        return None
    try:
        return STMoEConfig.read_raw(source, **download)
    except OSError:
        # It may be an adapter; transformers raises the error if it is neither.
        return None


def _checking_local_weights(source: Any, download: dict[str, Any]) -> AbstractContextManager[None]:
    """Returns a context that checks the weights of a folder in the background; see `check_weights`."""
    if isinstance(source, str | os.PathLike):
        folder = Path(source) / (download.get("subfolder") or "")
        if folder.is_dir():
            return checking_weights(folder)
    return nullcontext()


def enable_activation_checkpointing(
    model: PreTrainedModel, settings: dict[str, bool] | None = None
) -> None:
    """Makes a model recompute its activations; transformers 5.17 has only the older name."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None:
        enable = model.gradient_checkpointing_enable
    enable(settings)
