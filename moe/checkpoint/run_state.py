"""The file state.json of a checkpoint: step, data and settings of its run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import transformers
from pydantic import Field

from moe.checks import shown
from moe.errors import CheckpointError
from moe.kernels.product_choice import ProductChoice
from moe.parsing import read_record, to_json

STATE_FILE = "state.json"
FORMAT = 2
"""Version of the layout of a checkpoint."""

_Count = Annotated[int, Field(ge=0)]


class RunState(NamedTuple):
    """The state of a run after some steps, apart from weights and the optimizer's state: the content of state.json.

    Attributes:
        step: Updates so far; also the position in the data.
        fingerprint: Fingerprint of the data, see `BatchSource`.
        recipe: All settings as plain values.
        products: Library used for each product on a CPU; None on an accelerator.
        sizes: Bytes of each other file of the checkpoint; None before it is written.
        versions: Versions of the libraries, for people.
        format: See `FORMAT`.
    """

    step: _Count
    fingerprint: str
    recipe: dict[str, Any]
    products: ProductChoice | None = None
    sizes: dict[str, _Count] | None = None
    versions: dict[str, str] | None = None
    format: int = 1


def write_state(folder: Path, state: RunState) -> None:
    """Writes state.json into a checkpoint that lacks only it."""
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    versions = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    products = to_json(state.products)
    content = {**state._asdict(), "products": products, "sizes": sizes, "versions": versions}
    text = json.dumps({**content, "format": FORMAT}, indent=1) + "\n"
    (folder / STATE_FILE).write_text(text, encoding="utf-8")


def load_state(path: Path) -> RunState:
    """Returns the state of the run in the checkpoint at `path`.

    Raises:
        CheckpointError: When state.json is missing, damaged, or of another version of this library.
    """
    file = path / STATE_FILE
    advice = "Go on from another checkpoint."
    state = read_record(file, RunState, advice=advice, error=CheckpointError)
    if state.format != FORMAT:
        raise CheckpointError(
            f"{file}: format is {state.format}; expected {FORMAT}. Use the version of this library that wrote it."
        )
    return state


def check_same_run(
    path: Path, saved: RunState, current: RunState, changeable: frozenset[str]
) -> None:
    """Raises if the data or settings differ from those of a checkpoint.

    Args:
        path: The checkpoint, for the message.
        saved: State in the checkpoint.
        current: State according to the command.
        changeable: Dotted names of settings that may differ.

    Raises:
        CheckpointError: When something else differs; names it with both values.
    """
    # Settings on which losses depend.
    before = _flatten(saved.recipe)
    now = _flatten(current.recipe)
    changed = []
    for name in sorted(before.keys() | now.keys()):
        old_value = before.get(name)
        new_value = now.get(name)
        if old_value != new_value and name not in changeable:
            changed.append(f"{name} was {shown(old_value)} and is {shown(new_value)}")
    if changed:
        raise CheckpointError(
            f"{path} belongs to a run with other settings: {'; '.join(changed)}. Resume with the settings of that "
            "run, or start a new one with another --out."
        )

    # Data: the fingerprint covers every token.
    if saved.fingerprint != current.fingerprint:
        raise CheckpointError(
            f"{path} belongs to a run on other data (fingerprint {shown(saved.fingerprint)}, now "
            f"{shown(current.fingerprint)}). Resume with the same corpus, tokenizer and teacher (if any), or start a "
            "new run with another --out."
        )


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat
