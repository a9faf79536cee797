"""Checkpoints that are whole or absent: written aside, flushed to disk, then renamed."""

import errno
import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
import transformers
from torch import nn

from moe.data.storage import whole_folder
from moe.errors import CheckpointError
from moe.models.loading import describe_misfits

WEIGHTS_FILE, OPTIMIZER_FILE, STATE_FILE = "model.safetensors", "optimizer.pt", "state.json"


class RunState(NamedTuple):
    """What a checkpoint says beside weights and moments.

    Attributes:
        step: Updates behind it; also the position in the data.
        fingerprint: Of the data, see `BatchSource`.
        recipe: All settings as plain values.
    """

    step: int
    fingerprint: str
    recipe: dict[str, Any]


def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: RunState, *, keep: int
) -> Path:
    """Writes a checkpoint below `folder` and removes all but the `keep` newest.

    A full disk or a kill at any moment leaves the earlier ones as they were.

    Returns:
        The checkpoint's folder, `step_` and 8 digits.
    """
    target = folder / f"step_{state.step:08d}"
    with whole_folder(target, marker=STATE_FILE) as partial, disk_errors(target):
        safetensors.torch.save_model(model, str(partial / WEIGHTS_FILE))
        moments = io.BytesIO()  # torch reports a full disk as a RuntimeError, a file as an OSError
        torch.save(optimizer.state_dict(), moments)
        (partial / OPTIMIZER_FILE).write_bytes(moments.getbuffer())
        sizes = {name: (partial / name).stat().st_size for name in (WEIGHTS_FILE, OPTIMIZER_FILE)}
        versions = {"torch": str(torch.__version__), "transformers": transformers.__version__}
        facts = {**state._asdict(), "sizes": sizes, "versions": versions}
        (partial / STATE_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        for name in (*sizes, STATE_FILE):
            _flush(partial / name)
        _flush(partial)
    _flush(folder)
    for old in _complete(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def latest_checkpoint(folder: Path) -> Path | None:
    """Returns the newest complete checkpoint below `folder`; None when there is none."""
    complete = _complete(folder)
    return complete[-1] if complete else None


def load_state(path: Path) -> RunState:
    """Returns what the checkpoint at `path` says of its run."""
    facts = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    return RunState(**{name: facts[name] for name in RunState._fields})


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Puts weights and moments of a checkpoint into `model` and `optimizer`.

    Raises:
        CheckpointError: When weights are missing, unexpected or of another shape; lists them, and changes nothing.
    """
    weights = safetensors.torch.load_file(path / WEIGHTS_FILE)
    own = dict(model.state_dict(keep_vars=True))
    tied = {name for name, weight in own.items() if any(weight is own[first] for first in own if first < name)}
    both = [(name, weights[name].shape, own[name].shape) for name in own.keys() & weights.keys()]
    reshaped = [(name, saved, shape) for name, saved, shape in both if saved != shape]
    if text := describe_misfits(own.keys() - weights.keys() - tied, weights.keys() - own.keys(), reshaped):
        raise CheckpointError(f"{path} is a checkpoint of another model. Weights {text}. Use the recipe of its run.")
    model.load_state_dict(weights, strict=False)
    optimizer.load_state_dict(torch.load(path / OPTIMIZER_FILE, weights_only=True))


def check_same_run(path: Path, saved: RunState, current: RunState, free: frozenset[str]) -> None:
    """Refuses to go on with other data or settings than a checkpoint was made with.

    Args:
        path: The checkpoint, for the message.
        saved: What it says.
        current: What the command asks for.
        free: Dotted names of settings that may differ.

    Raises:
        CheckpointError: When something else differs; names it with both values.
    """
    before, now = _flatten(saved.recipe), _flatten(current.recipe)
    changed = [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and name not in free
    ]
    if changed:
        raise CheckpointError(
            f"{path} belongs to a run with other settings: {'; '.join(changed)}. Resume with the settings of that "
            "run, or start a new one with another --out."
        )
    if saved.fingerprint != current.fingerprint:
        raise CheckpointError(
            f"{path} belongs to a run on other data (fingerprint {saved.fingerprint}, now {current.fingerprint}). "
            "Resume with the same corpus and tokenizer, or start a new run with another --out."
        )


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns a failed write of safetensors into the OSError that it is, about `path`."""
    try:
        yield
    except safetensors.SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error


def _complete(folder: Path) -> list[Path]:
    """Returns the complete checkpoints below `folder`, oldest first."""
    return [path for path in sorted(folder.glob("step_*")) if _is_complete(path)]


def _is_complete(path: Path) -> bool:
    """Returns whether every file of a checkpoint is there with the size it was written with."""
    try:
        facts = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        return all((path / name).stat().st_size == size for name, size in facts["sizes"].items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat.update(_flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value})
    return flat
