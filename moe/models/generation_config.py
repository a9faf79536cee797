"""Settings of generation: those of generation_config.json, and those that have no place here."""

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file

from moe.checks import check, check_flag, check_integer, check_number, is_kind, shown
from moe.errors import ConfigError
from moe.models.json_files import read_json_object

_NONE_IF_MISSING = {
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
}


def _is_guidance(scale: object) -> bool:
    return scale is not None and scale != 1


def _is_quantized(cache: object) -> bool:
    return cache == "quantized"


_REFUSED_SETTINGS = {
    "token_healing": (
        bool,
        "transformers heals the prompts of decoders alone: it needs a tokenizer with a token for "
        "the beginning of a text, which encoder-decoders lack.",
    ),
    "guidance_scale": (
        _is_guidance,
        "transformers computes the scores without a prompt by a decoder alone: an encoder-decoder "
        "would be called without the decoder's inputs.",
    ),
    "cache_implementation": (
        _is_quantized,
        "transformers has no quantized cache for encoder-decoders; 'dynamic', 'static' and "
        "'offloaded' work.",
    ),
}
"""Settings of generation that are not supported: which values, and why."""


def refuse_settings_of_decoders(arguments: Mapping[str, Any], defaults: Any) -> None:
    """Refuses settings of generation that transformers has for decoders alone.

    Args:
        arguments: Keyword arguments of `generate`.
        defaults: Settings that hold where the arguments name none.

    Raises:
        ConfigError: With the setting and the reason.
    """
    for name, (is_refused, reason) in _REFUSED_SETTINGS.items():
        value = arguments.get(name, getattr(defaults, name, None))
        if is_refused(value):
            raise ConfigError(f"{name} is {shown(value)}, but {reason} Leave it out.")


def load_generation_config(source: Any, download: dict[str, Any]) -> GenerationConfig:
    """Returns the generation settings of a folder or hub name.

    They are those of their own file, or else of config.json.

    Args:
        source: The folder or name.
        download: `revision`, `token`, `cache_dir` and the like of transformers' `cached_file`.

    Raises:
        CheckpointError: When the file is damaged.
        ConfigError: When a setting is of another type than it has.
    """
    path = cached_file(source, GENERATION_CONFIG_NAME, **_NONE_IF_MISSING, **download)
    if path is None:
        settings = {"config_file_name": "config.json", "_from_model_config": True, **download}
        return GenerationConfig.from_pretrained(source, **settings)

    _check_types(read_json_object(path), path)
    try:
        return GenerationConfig.from_pretrained(source, **download)
    except (ValueError, TypeError, AttributeError, LookupError) as failure:
        raise ConfigError(f"{path} has settings that cannot be used: {failure}") from failure


def _check_types(settings: Mapping[str, Any], path: str) -> None:
    """Raises a ConfigError when a setting is of another type than its default."""
    defaults = GenerationConfig._get_default_generation_params()
    for name, value in settings.items():
        label = f"{name} of {path}"
        if name.endswith("_token_id"):
            check(_are_token_ids(value), label, value, "a token id")
            continue

        # early_stopping may be "never".
        default = defaults.get(name)
        if value is None or default is None or name == "early_stopping":
            continue
        if isinstance(default, bool):
            check_flag(label, value)
        elif isinstance(default, int):
            check_integer(label, value)
        elif isinstance(default, float):
            check_number(label, value)


def _are_token_ids(value: object) -> bool:
    """Returns whether a value is the id of a token, a list of them, or null for none."""
    ids = value if isinstance(value, list) else [value]
    return all(token_id is None or is_kind(token_id, int) for token_id in ids)
