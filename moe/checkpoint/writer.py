"""Writes checkpoints atomically: the folder appears when all shards are written.

A checkpoint is the train state of train_state.py in the format of torch.distributed.checkpoint, and a
file state.json with the sizes of all files. All randomness of a run is a function of its seed and
step, and so is the position in data and schedule: only the step is stored.
"""

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from moe.checkpoint.index import INDEX_FILE, cause_of, read_into, read_shapes
from moe.checkpoint.integrity import checkpoint_folder, checkpoint_folders, step_of, visible_damage
from moe.checkpoint.loading import describe_shape_misfits
from moe.checkpoint.run_state import STATE_FILE, RunState, write_state
from moe.checkpoint.sharded_weights import flush_to_disk
from moe.checkpoint.train_state import (
    OPTIMIZER,
    model_tensors,
    optimizer_tensors,
    parameter_of,
    prepare_state,
    set_numbers,
)
from moe.distributed.collectives import broadcast_from_rank_zero
from moe.distributed.sharding import Layout
from moe.errors import CheckpointError, DataError
from moe.files import (
    check_replaceable,
    register_folder_kind,
    remove_folder,
    remove_leftovers,
    whole_folder,
)

CHECKPOINT = register_folder_kind(
    "checkpoint", markers=[STATE_FILE, INDEX_FILE], parts=["__*.distcp", INDEX_FILE, STATE_FILE]
)


class CheckpointWriter:
    """Writes checkpoints below a folder, one at a time, and keeps the newest.

    If any rank is killed at any moment, or the disk is full, earlier checkpoints stay unchanged.
    Every rank must enter, save and wait alike; `folder` must be shared by all of them.

    Example:
        with CheckpointWriter(folder, keep=2) as writer:
            writer.save(model, optimizer, layouts, RunState(step, fingerprint, recipe))

    Args:
        folder: Parent folder of the checkpoints, `step_` and 8 digits each.
        keep: Number of newest whole checkpoints that are kept.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._group: dist.ProcessGroup | None = None
        self._running: tuple[Path, ExitStack, Future[Any]] | None = None

    def __enter__(self) -> "CheckpointWriter":
        """Makes a process group for the background threads, and removes remains of killed runs."""
        if dist.is_initialized():
            group = dist.new_group(backend="gloo")
            self._group = cast(dist.ProcessGroup, group)
        else:
            # torch warns at each save, in its own thread, where no caller can catch it.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        broadcast_from_rank_zero(lambda: remove_leftovers(self._folder, "step_*"))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for the last checkpoint.

        After an error in the block, errors of the checkpoint are suppressed.
        """
        # The background threads' group is always destroyed.
        try:
            if kind is None:
                self.wait()
            else:
                with suppress(Exception):
                    self.wait()
        finally:
            if self._group is not None:
                dist.destroy_process_group(self._group)
                self._group = None

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        layouts: Mapping[str, Layout],
        state: RunState,
    ) -> Path:
        """Copies the train state, starts to write it in the background, and returns the target.

        Waits for the previous save if it is still running. When all ranks have written, the
        checkpoint appears and old ones are removed.

        Raises:
            DataError: When the path of the checkpoint holds something else.
            Others: As for `wait`, about the previous save.
        """
        self.wait()

        # Rank zero holds a work folder, which becomes the target when it is closed without an error.
        target = checkpoint_folder(self._folder, state.step)
        folder = ExitStack()
        partial = broadcast_from_rank_zero(
            lambda: folder.enter_context(whole_folder(target, kind=CHECKPOINT))
        )

        def finish() -> None:
            write_state(partial, state)

            # Everything is flushed to disk before the checkpoint gets its name.
            flush_to_disk(partial / STATE_FILE)
            flush_to_disk(partial)
            folder.close()
            flush_to_disk(target.parent)
            _remove_old(target, self._keep)

        # The copy is made before `async_save` returns; a failure until then removes the folder.
        with ExitStack() as on_failure:
            on_failure.push(folder)
            tensors = model_tensors(model, layouts)
            tensors.update(optimizer_tensors(model, optimizer, layouts))
            future = async_save(
                tensors,
                storage_writer=_Writer(partial, finish),
                process_group=self._group,
                no_dist=self._group is None,
            )
            on_failure.pop_all()
        self._running = target, folder, cast(Future[Any], future)
        return target

    def wait(self) -> None:
        """Waits until the last save is on the disk.

        Raises:
            OSError: When the disk is full or fails on any rank; names the checkpoint.
            CheckpointError: When it fails otherwise, e.g. because a rank died.
        """
        if self._running is None:
            return
        target, folder, future = self._running
        self._running = None
        try:
            # Empty after success; after a failure it removes the folder.
            with folder:
                future.result()
        except CheckpointException as failed:
            rank, error = cause_of(failed)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(target)) from failed
            raise _not_written(target, f"rank {rank} failed with {error!r}") from failed
        except RuntimeError as error:
            raise _not_written(target, str(error)) from error


class _Writer(FileSystemWriter):
    """Writes one checkpoint; torch calls `finish` on rank zero once all ranks have written."""

    def __init__(self, partial: Path, at_end: Callable[[], None]) -> None:
        super().__init__(partial)
        self._at_end = at_end

    def finish(self, metadata: Any, results: Any) -> None:
        """Writes the index, and calls `at_end`."""
        super().finish(metadata, results)
        self._at_end()


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, layouts: Mapping[str, Layout]
) -> None:
    """Loads a checkpoint, made on any mesh, into `model` and `optimizer`.

    Every rank must call it and reads its own shards. Parameters without state in the checkpoint,
    since they never had a gradient, start with fresh state.

    Args:
        path: The checkpoint.
        model: On the mesh of further training.
        optimizer: Optimizer of its parameters, before the first step or after.
        layouts: Layout of each parameter.

    Raises:
        CheckpointError: When a file is not what was written, or something is missing, unexpected or
            of another shape; names or lists it, and changes no weight.
    """
    damage = broadcast_from_rank_zero(lambda: visible_damage(path))
    if damage is not None:
        raise CheckpointError(
            f"{path} is damaged: {damage}. Resume from another checkpoint, or restore it from a copy."
        )

    shapes = read_shapes(path)
    saved_state = {name: shape for name, shape in shapes.items() if name.startswith(OPTIMIZER)}
    saved_weights = {name: shape for name, shape in shapes.items() if name not in saved_state}

    # Names and shapes are checked before the first number is read.
    weights = model_tensors(model, layouts)
    refuse_misfits(path, "model", saved_weights, weights)
    prepare_state(model, optimizer, {parameter_of(name) for name in saved_state})
    state = optimizer_tensors(model, optimizer, layouts)
    refuse_misfits(path, "optimizer", saved_state, state)
    read_into(path, {**weights, **state})
    set_numbers(model, optimizer, state)


def refuse_misfits(
    path: Path, kind: str, saved: Mapping[str, tuple[int, ...]], expected: Mapping[str, Tensor]
) -> None:
    """Raises when tensors of a checkpoint and of a run differ in names or shapes.

    Args:
        path: The checkpoint.
        kind: `model` or `optimizer`.
        saved: Shapes of the checkpoint's tensors, by name.
        expected: Tensors <any>[...] of the run, by name.

    Raises:
        CheckpointError: Lists what does not fit.
    """
    misfits = describe_shape_misfits(saved, expected)
    if misfits:
        raise CheckpointError(
            f"{path} is a checkpoint of another {kind}: {misfits}. Use the recipe of its run."
        )


def _not_written(target: Path, reason: str) -> CheckpointError:
    """Returns the error of a save that failed."""
    return CheckpointError(
        f"{target} could not be written: {reason}. Earlier checkpoints are as they were: the same command with "
        "--resume continues from the last."
    )


def _remove_old(newest: Path, keep: int) -> None:
    """Removes checkpoints, whole or damaged, that are older than the newest `keep` whole ones.

    Args:
        newest: The checkpoint just written; those of later steps are kept.
        keep: Number of whole checkpoints that are kept.
    """
    num_whole = 0
    for path in reversed(checkpoint_folders(newest.parent)):
        if step_of(path) > step_of(newest):
            continue
        if num_whole < keep:
            num_whole += visible_damage(path) is None
            continue

        # A folder with files of something else stays.
        with suppress(DataError):
            check_replaceable(path, kind=CHECKPOINT)
            remove_folder(path)
