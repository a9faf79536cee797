"""Finds the checkpoint to continue from: the newest of a run without damage."""

import re
import sys
from pathlib import Path

from moe.checkpoint.run_state import load_state
from moe.distributed.collectives import broadcast_from_rank_zero
from moe.errors import CheckpointError

_FOLDER_NAME = re.compile(r"step_(\d{8,})")


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


def visible_damage(path: Path) -> str | None:
    """Returns the damage of a checkpoint that is visible without reading shards; None for none.

    A shard is a file of torch, whose reader notices most damage inside it.
    """
    try:
        state = load_state(path)
        for name, size in (state.sizes or {}).items():
            present_size = (path / name).stat().st_size
            if present_size != size:
                return f"{name} has {present_size:,} bytes instead of {size:,}"
    except (CheckpointError, OSError) as error:
        return str(error)
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

    def find() -> Path | None:
        damages: list[str] = []
        for path in reversed(checkpoint_folders(folder)):
            damage = visible_damage(path)
            if damage is None:
                if damages:
                    text = f"warning: going on from {path.name}, the newest whole checkpoint. {'; '.join(damages)}"
                    print(text, file=sys.stderr, flush=True)  # noqa: T201  for the terminal
                return path
            damages.append(f"{path} is damaged: {damage}")

        if damages:
            raise CheckpointError(
                f"Every checkpoint in {folder} is damaged. Nothing was changed. {advice} ({'; '.join(damages)})"
            )
        return None

    return broadcast_from_rank_zero(find)
