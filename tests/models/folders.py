"""Changes to a model's folder, as other tools and users make them."""

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor


def change_config(folder: Path, **fields: object) -> None:
    """Sets fields of a config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrites the weights, without checksums."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, {"format": "pt"})
    (folder / "SHA256SUMS").unlink(missing_ok=True)
