"""The JSON files of a model folder: read as objects, and config.json written for transformers.

transformers can load a saved model in a process that never imported this library, as `lm_eval` is:
with `trust_remote_code=True` it imports the file that `auto_map` of a config.json names. Ours
imports the installed library and holds no code of a model, so that a checkpoint never carries an
older copy of it.
"""

import json
from pathlib import Path
from typing import Any

from moe.errors import CheckpointError
from moe.files import write_text
from moe.parsing import read_json, to_record

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
        advice: What the user can do when it is damaged.

    Raises:
        CheckpointError: When the file is damaged, or holds something else.
    """
    content = read_json(Path(path), advice=advice, error=CheckpointError, nan=True)
    return to_record(dict[str, Any], content, where=str(path), advice=advice, error=CheckpointError)


def write_config(text: str, path: Path) -> None:
    """Writes a config.json with `auto_map`, and beside it the module that this names.

    Args:
        text: The config as JSON.
        path: Of the config.json.
    """
    fields = {**json.loads(text), "auto_map": _AUTO_MAP}
    content = json.dumps(fields, indent=2, sort_keys=True)
    write_text(path, f"{content}\n")

    write_text(path.with_name(f"{_REMOTE_MODULE}.py"), _REMOTE_SOURCE)
