"""Reads and writes config.json, and recognizes other libraries' formats.

`from_pretrained` reads other libraries' checkpoints by `model_type`. The models do not depend on
other libraries: `moe.convert` registers its formats here when `moe` is imported.

transformers can load a saved model in a process that never imported this library, such as
`lm_eval`: with `trust_remote_code=True` it imports the file that `auto_map` of a config.json names.
Ours imports the installed library and holds no code of a model, so that a checkpoint never carries
an older copy of it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe.checks import shown
from moe.errors import CheckpointError, ConfigError
from moe.files import write_text
from moe.parsing import read_json, to_record
from moe.registry import Registry

OUR_MODEL_TYPE = "st_moe"


@dataclass(frozen=True)
class CheckpointFormat:
    """How checkpoints of another library become models of this one.

    Attributes:
        convert_config: Returns the fields of STMoEConfig for the content of a config.json.
        open_weights: Called as `open_weights(source, raw_config, config, leave_out=,
            use_safetensors=, **download)`: folder or hub name, its config.json, the STMoEConfig of
            the model, patterns of our names that the model does not have, and see
            `find_weight_files`. Returns our weights as LazyTensors by name.
    """

    convert_config: Callable[[Mapping[str, Any]], dict[str, Any]]
    open_weights: Callable[..., dict[str, Any]]


CHECKPOINT_FORMATS: Registry[CheckpointFormat] = Registry("checkpoint format")
"""By the `model_type` in config.json."""


def find_format(raw_config: Mapping[str, Any]) -> CheckpointFormat | None:
    """Returns the format of a config.json; None for ours and for one without a `model_type`.

    Args:
        raw_config: Content of the config.json.

    Raises:
        ConfigError: When no format has that `model_type`.
    """
    model_type = raw_config.get("model_type")
    if model_type in (None, OUR_MODEL_TYPE):
        return None

    known = CHECKPOINT_FORMATS.names()
    if model_type not in known:
        raise ConfigError(
            f"config.json describes a model of type {shown(model_type)}, which is not supported; expected "
            f"{OUR_MODEL_TYPE}, or one of {', '.join(known)}, which are converted. Load it with its own class."
        )
    return CHECKPOINT_FORMATS.get(model_type)


COPY_AGAIN = "Copy or download the model again."

_REMOTE_MODULE = "modeling_st_moe"
_AUTO_MAP = {
    "AutoConfig": f"{_REMOTE_MODULE}.STMoEConfig",
    "AutoModel": f"{_REMOTE_MODULE}.STMoEModel",
    "AutoModelForSeq2SeqLM": f"{_REMOTE_MODULE}.STMoEForConditionalGeneration",
}

_REMOTE_SOURCE = '''\
"""Finds the classes of this model in the library `moe`, for transformers with trust_remote_code=True."""

try:  # transformers would advise to install a package called moe, which is another one
    from moe import STMoEConfig, STMoEForConditionalGeneration, STMoEModel
except ImportError as error:
    raise ImportError(f"This model needs the library `moe`: pip install stmoe. ({error})") from error

__all__ = ["STMoEConfig", "STMoEForConditionalGeneration", "STMoEModel"]
'''


def read_json_object(path: Path | str, *, advice: str = COPY_AGAIN) -> dict[str, Any]:
    """Returns the object in a JSON file; NaN and Infinity, which Python writes, are numbers.

    Args:
        path: The file.
        advice: Advice to the user if the file is damaged.

    Raises:
        CheckpointError: When the file is damaged, or holds something else.
    """
    content = read_json(Path(path), advice=advice, error=CheckpointError)
    return to_record(dict[str, Any], content, where=str(path), advice=advice, error=CheckpointError)


def write_config(text: str, path: Path) -> None:
    """Writes a config.json with `auto_map`, and the module that it names.

    Args:
        text: The config as JSON.
        path: Path of the config.json.
    """
    fields = {**json.loads(text), "auto_map": _AUTO_MAP}
    content = json.dumps(fields, indent=2, sort_keys=True)
    write_text(path, f"{content}\n")

    write_text(path.with_name(f"{_REMOTE_MODULE}.py"), _REMOTE_SOURCE)
