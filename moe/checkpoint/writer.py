"""Checkpoints that are whole or absent: ranks write their shards aside, then the folder appears.

A checkpoint is the train state of train_state.py in the format of torch.distributed.checkpoint, a
file state.json, and the checksums of all files. All randomness of a run is a function of its seed
and step, and so is the position in data and schedule: the step is all that is kept of them.
"""

import os
import warnings
from collections.abc import Iterable, Mapping
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
    first_damage,
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
from moe.checksums import SUMS_FILE, sha256_of, write_sums
from moe.distributed.collectives import broadcast_from_rank_zero
from moe.distributed.sharding import Layout
from moe.errors import CheckpointError
from moe.files import kind_of, register_folder_kind, remove_folder, remove_leftovers, whole_folder

CHECKPOINT = register_folder_kind(
    "checkpoint", markers=[STATE_FILE, INDEX_FILE], parts=["__*.distcp", INDEX_FILE, STATE_FILE]
)


class CheckpointWriter:
    """Writes checkpoints below a folder, one at a time, and keeps the newest.

    A kill of any rank at any moment, or a full disk, leaves the earlier ones as they were. Every
    rank must enter, save and wait alike; `folder` must be one that all of them see.

    Example:
        with CheckpointWriter(folder, keep=2) as writer:
            writer.save(model, optimizer, layouts, RunState(step, fingerprint, recipe))

    Args:
        folder: Receives a folder for each checkpoint: `step_` and 8 digits.
        keep: Number of whole checkpoints that stay, the newest.
        damaged: Checkpoints that are known to be damaged and do not count as whole.
    """

    def __init__(self, folder: Path, *, keep: int, damaged: Iterable[Path] = ()) -> None:
        self._folder = folder
        self._keep = keep
        self._damaged = set(damaged)
        self._group: dist.ProcessGroup | None = None
        self._running: tuple[_Save, Future[Any]] | None = None

    def __enter__(self) -> "CheckpointWriter":
        """Makes a process group for the background threads, and removes what killed runs left."""
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

        After an error in the block, which is then what counts, it raises none of its own.
        """
        # The group of the background threads ends with them, whatever happened.
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
        """Copies the train state, begins to write it in the background, and returns where to.

        Waits for the save before, if that is still running. When all ranks have written, the
        checkpoint appears and all but the newest are removed.

        Raises:
            DataError: When something else lies where the checkpoint should be.
            Others: Those of `wait`, for the save before.
        """
        self.wait()

        # On rank zero the folder is filled aside; closing `folder_context` lets it appear.
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
                storage_writer=_Writer(partial, save, state, self._keep, self._damaged),
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
            CheckpointError: When it failed otherwise, e.g. because a rank died.
        """
        if self._running is None:
            return
        (target, folder_context), future = self._running
        self._running = None
        try:
            # Empty when all went well; after a failure it removes the folder.
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
        target: Where the checkpoint will appear.
        folder_context: Holds the folder that is being filled; when it is closed, that becomes
            `target`.
    """

    target: Path
    folder_context: ExitStack


class _Written(NamedTuple):
    """The files that a rank has written, for rank zero.

    Attributes:
        pieces: torch's list of the tensors' parts in the files.
        digests: SHA-256 of each file, by name.
    """

    pieces: list[Any]
    digests: dict[str, str]


class _Writer(FileSystemWriter):
    """Writes one checkpoint; torch calls `finish` on rank zero once all ranks have written."""

    def __init__(
        self, partial: Path, save: _Save, state: RunState, keep: int, damaged: set[Path]
    ) -> None:
        super().__init__(partial)
        self._partial = partial
        self._save = save
        self._state = state
        self._keep = keep
        self._damaged = damaged

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Writes this rank's shards and computes their checksums.

        Raises:
            OSError: When the disk fails; torch says RuntimeError, and the reason would be lost on
                the way to others.
        """
        try:
            pieces = super().write_data(plan, planner).wait()
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from error

        # A file holds many pieces; it is read once.
        digests: dict[str, str] = {}
        for piece in pieces:
            name = piece.storage_data.relative_path
            if name not in digests:
                digests[name] = sha256_of(self._partial / name)
        written: torch.futures.Future[_Written] = torch.futures.Future()
        written.set_result(_Written(pieces, digests))
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        """Writes index, state.json and checksums, lets the checkpoint appear, and removes old ones."""
        super().finish(metadata, [written.pieces for written in results])
        write_state(self._partial, self._state)

        # Every file has a checksum; the index, state.json and the empty file of an idle rank get
        # theirs here.
        digests: dict[str, str] = {}
        for written in results:
            digests.update(written.digests)
        for file in sorted(self._partial.iterdir()):
            if file.name not in digests:
                digests[file.name] = sha256_of(file)
        write_sums(self._partial, digests)

        # All of it is on the disk before the checkpoint has its name.
        for path in (self._partial / STATE_FILE, self._partial / SUMS_FILE, self._partial):
            _flush(path)
        self._save.folder_context.close()
        _flush(self._save.target.parent)

        self._damaged.discard(self._save.target)
        _remove_old(self._save.target, self._keep, self._damaged)


def load_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    layouts: Mapping[str, Layout],
    *,
    verified: bool = False,
) -> None:
    """Loads a checkpoint, made on whatever mesh, into `model` and `optimizer`.

    Every rank must call it; it reads what it holds. Parameters whose state the checkpoint has not,
    since they never had a gradient, start fresh.

    Args:
        path: The checkpoint.
        model: On the mesh that training goes on with.
        optimizer: Optimizer of its parameters, before the first step or after.
        layouts: Where each parameter lies.
        verified: Whether `newest_whole_checkpoint` has just read every file of it.

    Raises:
        CheckpointError: When a file is not what was written, or something is missing, unexpected or
            of another shape; names or lists it, and changes nothing.
    """
    if not verified and (damage := first_damage(path)) is not None:
        raise CheckpointError(
            f"{path} is damaged: {damage}. Go on from another checkpoint, or restore it from a copy."
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
        subject: Begins the list of what does not fit, e.g. `Weights`.
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
        "--resume goes on from the last."
    )


def _remove_torn(target: Path) -> None:
    """Removes what a removal that was killed half-way has left: files without state and index."""
    if target.is_dir() and kind_of(target) is None and holds_only_checkpoint_files(target):
        remove_folder(target)


def _remove_old(newest: Path, keep: int, damaged: set[Path]) -> None:
    """Removes checkpoints, whole or damaged, that are older than the newest `keep` whole ones.

    Args:
        newest: The checkpoint that was just written; those of later steps are left alone.
        keep: Number of whole checkpoints that stay.
        damaged: Checkpoints that do not count as whole.
    """
    checkpoints: list[Path] = []
    whole: list[Path] = []
    for path in checkpoint_folders(newest.parent):
        if step_of(path) > step_of(newest):
            break
        checkpoints.append(path)
        if path not in damaged and visible_damage(path) is None:
            whole.append(path)
    if len(whole) < keep:
        return

    # Of a damaged one nothing is removed that was not written with a checkpoint.
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
