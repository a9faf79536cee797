"""Private names of transformers that the models call or override.

A private name may change in any release: tests/models/test_transformers_private.py says what breaks
when one disappears. Class attributes and methods by which every model of transformers declares
itself, such as `_no_split_modules` and `_init_weights`, are in the model classes.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file

from moe.errors import CheckpointError, ConfigError
from moe.models.checkpoint_formats import COPY_AGAIN, read_json_object

_WITHOUT_BIAS = ("flash", "flex", "paged", "/")
"""Parts of names of attention implementations that cannot add a bias; `/` occurs in hub names."""


def find_file(source: Path | str, name: str, **download: Any) -> Path | None:
    """Returns a file of a folder or hub name, downloaded if necessary; None when there is none."""
    path = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **download)
    return None if path is None else Path(path)


def load_generation_config(source: Path | str, download: dict[str, Any]) -> GenerationConfig:
    """Returns the generation settings of a folder or hub name.

    They are read from their own file, or else from config.json.

    Raises:
        CheckpointError: When the file is not a JSON object, or has a setting of a wrong type.
    """
    path = find_file(source, GENERATION_CONFIG_NAME, **download)
    if path is None:
        settings = {"config_file_name": CONFIG_NAME, "_from_model_config": True}
        return GenerationConfig.from_pretrained(source, **settings, **download)
    read_json_object(path)
    try:
        return GenerationConfig.from_pretrained(source, **download)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}. {COPY_AGAIN}") from error


def attention_implementation(config: PreTrainedConfig) -> str:
    """Returns transformers' name of the attention that a model uses."""
    return config._attn_implementation or "eager"


def names_in_model(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """Returns the names of a checkpoint's tensors in the class of a model, as `from_pretrained` renames them."""
    conversions = get_model_conversion_mapping(model)
    renamings = [change for change in conversions if isinstance(change, WeightRenaming)]
    state = model.state_dict()
    prefix = model.base_model_prefix
    return {name: rename_source_key(name, renamings, [], prefix, state)[0] for name in stored}


class PrivateConfigHooks:
    """The private method of transformers' configurations that ours overrides."""

    @classmethod
    def _dict_from_json_file(cls, json_file: str | os.PathLike[str]) -> dict[str, Any]:
        """Returns the object in a config.json; transformers reads each of them by this.

        Raises:
            CheckpointError: When the file is torn or holds something else.
        """
        return cast(Any, cls)._decode_special_floats(read_json_object(Path(json_file)))


class PrivateModelHooks:
    """The private methods of transformers' models that ours override."""

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> str:
        """Returns the implementation of attention that transformers uses.

        Raises:
            ConfigError: For an implementation that cannot add T5's position bias to the
                scores. It is raised before transformers looks for kernels on the hub.
        """
        name = attn_implementation
        if isinstance(name, str) and any(part in name for part in _WITHOUT_BIAS):
            raise ConfigError(
                f"attn_implementation is {name!r}; expected 'sdpa' or 'eager'. Attention scores get a trained "
                "position bias and a mask, which flash attention and hub kernels do not support; flex attention "
                "would need its own kernel. On a GPU 'sdpa' uses torch's memory-efficient kernel."
            )
        return cast(Any, super())._check_and_adjust_attn_implementation(name, *args, **kwargs)

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        """Switches activation checkpointing; both public names of transformers come through here.

        Raises:
            ConfigError: When it would be reentrant, as it is by torch's default.
        """
        function = kwargs.get("gradient_checkpointing_func")
        keywords = getattr(function, "keywords", {})
        if function is not None and keywords.get("use_reentrant") is not False:
            raise ConfigError(
                "Activation checkpointing was enabled without use_reentrant=False: reentrant checkpointing loses the "
                "gradient of the routers' losses. Add it to the keyword arguments, or pass none."
            )
        cast(Any, super())._set_gradient_checkpointing(*args, **kwargs)
