"""Finds the checkpoint to continue from: the newest of a run without damage."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from moe.checkpoint.run_state import STATE_FILE, read_state_file
from moe.checksums import SUMS_FILE, Damage
from moe.distributed.collectives import broadcast_from_rank_zero, is_rank_zero
from moe.errors import CheckpointError
from moe.files import KIND_FILE

INDEX_FILE = ".metadata"
_FOLDER_NAME = re.compile(r"step_(\d{8,})")
_SHARD_NAME = re.compile(r"__\d+_\d+\.distcp")


def checkpoint_folder(folder: Path, step: int) -> Path:
    """Returns the folder of the checkpoint after `step` updates."""
    return folder / f"step_{step:08d}"


def checkpoint_folders(folder: Path) -> list[Path]:
    """Returns all checkpoints below `folder`, whole or damaged, oldest first."""
    checkpoints = []
    for path in folder.glob("step_*"):
        if _FOLDER_NAME.fullmatch(path.name):
            checkpoints.append(path)
    return sorted(checkpoints, key=step_of)


def step_of(path: Path) -> int:
    """Returns the number of updates of a checkpoint, from the name of its folder."""
    return int(path.name.removeprefix("step_"))


def visible_damage(path: Path) -> Damage | None:
    """Returns the damage of a checkpoint that is visible without reading shards; None for none.

    A shard is a file of torch, whose reader notices most damage inside it.
    """
    if not path.is_dir():
        return Damage(path.name, "is not a folder")
    try:
        state = read_state_file(path)
    except CheckpointError as error:
        reason = str(error).removeprefix(str(path / STATE_FILE)).lstrip(": ")
        reason = reason.removesuffix(" Go on from another checkpoint.").removesuffix(".")
        return Damage(STATE_FILE, reason)

    # The folder is named after its step.
    if state.step != step_of(path):
        return Damage(STATE_FILE, f"says step {state.step}, and its folder is {path.name}")

    # Every file has the size it was written with.
    for name, size in state.sizes.items():
        try:
            present_size = (path / name).stat().st_size
        except (OSError, ValueError):
            return Damage(name, "is missing")
        if present_size != size:
            return Damage(name, f"has {present_size:,} bytes instead of {size:,}")
    return None


def latest_checkpoint(folder: Path) -> Path | None:
    """Returns the newest checkpoint below `folder` without visible damage; None when there is none."""
    for path in reversed(checkpoint_folders(folder)):
        if visible_damage(path) is None:
            return path
    return None


def newest_whole_checkpoint(folder: Path, *, advice: str) -> Path | None:
    """Returns the newest whole checkpoint below `folder`; None when there are none at all.

    Every rank must call it. A line on stderr names each damaged one that is skipped.

    Args:
        folder: Folder of the checkpoints; may be absent.
        advice: Advice for the user if all are damaged.

    Raises:
        CheckpointError: When there are checkpoints and all are damaged; lists them.
    """
    # Newest first, until one is complete.
    damaged: dict[Path, Damage] = {}
    for path in reversed(broadcast_from_rank_zero(lambda: checkpoint_folders(folder))):
        damage = broadcast_from_rank_zero(lambda path=path: visible_damage(path))
        if damage is None:
            _warn_of_damaged(damaged, path)
            return path
        damaged[path] = damage

    if damaged:
        every = "; ".join(f"{path.name}: {damage}" for path, damage in damaged.items())
        raise CheckpointError(
            f"Every checkpoint in {folder} is damaged ({every}). Nothing was changed. {advice}"
        )
    return None


def holds_only_checkpoint_files(path: Path) -> bool:
    """Returns whether everything in a folder may have been written as part of a checkpoint."""
    names = {STATE_FILE, INDEX_FILE, f"{INDEX_FILE}.tmp", SUMS_FILE, KIND_FILE}
    if not path.is_dir():
        return False
    others = [child.name for child in path.iterdir() if child.name not in names]
    return all(_SHARD_NAME.fullmatch(name) for name in others)


def _warn_of_damaged(damaged: Mapping[Path, Damage], chosen: Path) -> None:
    """Prints which checkpoints are damaged, and which one is used instead."""
    if not is_rank_zero():
        return
    for path, damage in damaged.items():
        print(  # noqa: T201  a warning that belongs to the command's messages
            f"warning: the checkpoint {path} is damaged: {damage}. Going on from the newest whole one, {chosen.name}.",
            file=sys.stderr,
            flush=True,
        )
