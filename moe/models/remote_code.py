"""What lets transformers load a saved model in a process that never imported this library, as
`lm_eval` is.

With `trust_remote_code=True` transformers imports the file that `auto_map` of a config.json names.
Ours imports the installed library and holds no code of a model, so that a checkpoint never carries
an older copy of it.
"""

import json
from pathlib import Path

MODULE = "modeling_st_moe"
AUTO_MAP = {
    "AutoConfig": f"{MODULE}.STMoEConfig",
    "AutoModel": f"{MODULE}.STMoEModel",
    "AutoModelForSeq2SeqLM": f"{MODULE}.STMoEForConditionalGeneration",
}

_SOURCE = '''\
"""Finds the classes of this model in the library `moe`, for transformers with trust_remote_code=True."""

try:  # transformers would advise to install a package called moe, which is another one
    from moe import STMoEConfig, STMoEForConditionalGeneration, STMoEModel
except ImportError as error:
    raise ImportError(f"This model needs the library `moe`: pip install stmoe. ({error})") from error

__all__ = ["STMoEConfig", "STMoEForConditionalGeneration", "STMoEModel"]
'''


def write_config(text: str, path: Path) -> None:
    """Writes the text of a config with `auto_map`, and beside it the file that this names."""
    fields = {**json.loads(text), "auto_map": AUTO_MAP}
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    path.with_name(f"{MODULE}.py").write_text(_SOURCE, encoding="utf-8")
