"""Folders that hold the low-rank adapters of a model, and not its weights.

Such a folder has the files of PEFT, adapter_config.json and adapter_model.safetensors, and besides
them config.json, generation_config.json, the tokenizer and the card of the adapted model.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from transformers.utils.peft_utils import ADAPTER_SAFE_WEIGHTS_NAME, find_adapter_config_file

from moe.errors import CheckpointError, ConfigError
from moe.models.checkpoint_formats import read_json_object
from moe.models.transformers_private import find_file
from moe.models.weight_files import LazyTensor, check_weights, open_weights

_WEIGHTS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME)


def is_adapter(name: str) -> bool:
    """Returns whether a parameter is a factor of an adapter, by its name in the model."""
    return ".lora_" in name


def stored_name(name: str) -> str:
    """Returns the name of a parameter in the files of the adapters or of their base model."""
    if is_adapter(name):
        return "base_model.model." + name.replace(".default.", ".")
    return name.replace(".base_layer", "")


def find_base(source: Path | str | None, **download: Any) -> str | None:
    """Returns the model whose adapters are in a folder or hub name; None if a model is there.

    Args:
        source: The folder or hub name; None for none.
        download: `revision`, `token`, `cache_dir` and the like.

    Raises:
        CheckpointError: When the base model is missing.
        ConfigError: When peft is not installed.
    """
    path = None if source is None else find_adapter_config_file(str(source), **download)
    base = None if path is None else read_json_object(path).get("base_model_name_or_path")
    if source is None or not base or any(find_file(source, name, **download) for name in _WEIGHTS):
        return None
    if find_spec("peft") is None:
        raise ConfigError(f"{source} holds adapters, for which `pip install 'stmoe[finetune]'`.")
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise CheckpointError(
            f"{source} holds adapters of {base}, which is missing. Copy the model there, or correct the name in {path}."
        )
    return base


def attach_saved_adapters(model: Any, source: Path | str, **download: Any) -> dict[str, LazyTensor]:
    """Attaches the adapters of a folder or hub name without their values, which it returns.

    Args:
        model: Their base model, an STMoEPreTrainedModel, or one without memory.
        source: The folder or hub name.
        download: `revision`, `token`, `cache_dir` and the like.

    Returns:
        The factors <float>[...] by their stored names.

    Raises:
        CheckpointError: When their file is missing or torn.
    """
    from peft import PeftConfig

    model.add_adapter(PeftConfig.from_pretrained(str(source), **download))
    check_weights(Path(source))
    file = find_file(source, ADAPTER_SAFE_WEIGHTS_NAME, **download)
    return open_weights([file or Path(source, ADAPTER_SAFE_WEIGHTS_NAME)])
