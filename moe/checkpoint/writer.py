"""Writes checkpoints atomically: the folder appears when all shards are written.

A checkpoint is the train state of train_state.py in the format of torch.distributed.checkpoint, a
file state.json with the sizes of all files. All randomness of a run is a function of its seed and
step, and so is the position in data and schedule: only the step is stored.
"""

import os
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from moe.checkpoint.index import cause_of, read_into, read_shapes
from moe.checkpoint.integrity import (
    INDEX_FILE,
    checkpoint_folder,
    checkpoint_folders,
    holds_only_checkpoint_files,
    step_of,
    visible_damage,
)
from moe.checkpoint.loading import describe_shape_misfits
from moe.checkpoint.run_state import STATE_FILE, RunState, write_state
from moe.checkpoint.train_state import (
    OPTIMIZER,
    fresh_state,
    model_tensors,
    optimizer_tensors,
    parameter_of,
    set_numbers,
)
from moe.distributed.collectives import broadcast_from_rank_zero
from moe.distributed.sharding import Layout
from moe.errors import CheckpointError
from moe.files import kind_of, register_folder_kind, remove_folder, remove_leftovers, whole_folder

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
        self._running: tuple[_Save, Future[Any]] | None = None

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

        # Rank zero holds a work folder; closing `folder_context` renames it to the target.
        target = checkpoint_folder(self._folder, state.step)
        folder_context = ExitStack()

        def open_folder() -> Path:
            _remove_torn(target)
            return folder_context.enter_context(whole_folder(target, kind=CHECKPOINT))

        partial = broadcast_from_rank_zero(open_folder)
        save = _Save(target, folder_context)

        # The copy is made before `async_save` returns; a failure until then removes the folder.
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        with ExitStack() as on_failure, closing(DefaultStager(options)) as stager:
            on_failure.push(folder_context)
            tensors = model_tensors(model, layouts)
            tensors.update(optimizer_tensors(model, optimizer, layouts))
            future = async_save(
                tensors,
                storage_writer=_Writer(partial, save, state, self._keep),
                process_group=self._group,
                no_dist=self._group is None,
                async_stager=stager,
            )
            on_failure.pop_all()
        self._running = save, cast(Future[Any], future)
        return target

    def wait(self) -> None:
        """Waits until the last save is on the disk.

        Raises:
            OSError: When the disk is full or fails on any rank; names the checkpoint.
            CheckpointError: When it fails otherwise, e.g. because a rank died.
        """
        if self._running is None:
            return
        (target, folder_context), future = self._running
        self._running = None
        try:
            # Empty after success; after a failure it removes the folder.
            with folder_context:
                future.result()
        except CheckpointException as failed:
            rank, error = cause_of(failed)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(target)) from failed
            raise _not_written(target, f"rank {rank} failed with {error!r}") from failed
        except RuntimeError as error:
            raise _not_written(target, str(error)) from error


class _Save(NamedTuple):
    """A save in the background.

    Attributes:
        target: Final folder of the checkpoint.
        folder_context: Holds the work folder, which becomes `target` when it is closed.
    """

    target: Path
    folder_context: ExitStack


class _Writer(FileSystemWriter):
    """Writes one checkpoint; torch calls `finish` on rank zero once all ranks have written."""

    def __init__(self, partial: Path, save: _Save, state: RunState, keep: int) -> None:
        super().__init__(partial)
        self._partial = partial
        self._save = save
        self._state = state
        self._keep = keep

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Writes this rank's shards.

        Raises:
            OSError: When the disk fails; torch raises a RuntimeError, which would lose the reason on
                the way to other ranks.
        """
        written = super().write_data(plan, planner)
        try:
            written.wait()
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from error
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        """Writes index and state.json, renames the folder, and removes old checkpoints."""
        super().finish(metadata, results)
        write_state(self._partial, self._state)

        # Everything is flushed to disk before the checkpoint gets its name.
        _flush(self._partial / STATE_FILE)
        _flush(self._partial)
        self._save.folder_context.close()
        _flush(self._save.target.parent)
        _remove_old(self._save.target, self._keep)


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
            of another shape; names or lists it, and changes nothing.
    """
    damage = broadcast_from_rank_zero(lambda: visible_damage(path))
    if damage is not None:
        raise CheckpointError(
            f"{path} is damaged: {damage}. Resume from another checkpoint, or restore it from a copy."
        )

    saved_weights: dict[str, tuple[int, ...]] = {}
    saved_state: dict[str, tuple[int, ...]] = {}
    for name, shape in read_shapes(path).items():
        if name.startswith(OPTIMIZER):
            saved_state[name] = shape
        else:
            saved_weights[name] = shape

    # Names and shapes are checked before the first number is read.
    weights = model_tensors(model, layouts)
    refuse_misfits(path, "model", "Weights", saved_weights, weights)
    with fresh_state(model, optimizer, {parameter_of(name) for name in saved_state}):
        state = optimizer_tensors(model, optimizer, layouts)
        refuse_misfits(path, "optimizer", "Its state:", saved_state, state)
        read_into(path, {**weights, **state})
    set_numbers(model, optimizer, state)


def refuse_misfits(
    path: Path,
    kind: str,
    subject: str,
    saved: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, Tensor],
) -> None:
    """Raises when tensors of a checkpoint and of a run differ in names or shapes.

    Args:
        path: The checkpoint.
        kind: `model` or `optimizer`.
        subject: Start of the list of misfits, e.g. `Weights`.
        saved: Shapes of the checkpoint's tensors, by name.
        expected: Tensors <any>[...] of the run, by name.

    Raises:
        CheckpointError: Lists what does not fit.
    """
    misfits = describe_shape_misfits(saved, expected)
    if misfits:
        raise CheckpointError(
            f"{path} is a checkpoint of another {kind}. {subject} {misfits}. Use the recipe of its run."
        )


def _not_written(target: Path, reason: str) -> CheckpointError:
    """Returns the error of a save that failed."""
    return CheckpointError(
        f"{target} could not be written: {reason}. Earlier checkpoints are as they were: the same command with "
        "--resume continues from the last."
    )


def _remove_torn(target: Path) -> None:
    """Removes the remains of an interrupted removal: files without state and index."""
    if target.is_dir() and kind_of(target) is None and holds_only_checkpoint_files(target):
        remove_folder(target)


def _remove_old(newest: Path, keep: int) -> None:
    """Removes checkpoints, whole or damaged, that are older than the newest `keep` whole ones.

    Args:
        newest: The checkpoint just written; those of later steps are kept.
        keep: Number of whole checkpoints that are kept.
    """
    checkpoints: list[Path] = []
    whole: list[Path] = []
    for path in checkpoint_folders(newest.parent):
        if step_of(path) > step_of(newest):
            break
        checkpoints.append(path)
        if visible_damage(path) is None:
            whole.append(path)
    if len(whole) < keep:
        return

    # From a damaged checkpoint, only files that belong to checkpoints are removed.
    oldest_kept = whole[-keep]
    for path in checkpoints[: checkpoints.index(oldest_kept)]:
        if path in whole or holds_only_checkpoint_files(path):
            remove_folder(path)


def _flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
