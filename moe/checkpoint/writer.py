"""Checkpoints that are whole or absent: each rank writes its shards aside, while training goes on;
then they appear.

A checkpoint is what snapshot.py says of model and optimizer, in the format of
torch.distributed.checkpoint, a file state.json, and the checksums of all of them. All randomness of
a run is a function of its seed and step, and so is the
place in data and schedule: the step is all that is kept of them.
"""

import os
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
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
    checkpoint_folder,
    checkpoint_folders,
    first_damage,
    holds_only_checkpoint_files,
    step_of,
    visible_damage,
)
from moe.checkpoint.loading import describe_misfits
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
from moe.files import kind_of, remove_folder, remove_leftovers, whole_folder


class CheckpointWriter:
    """Writes checkpoints below a folder, one at a time, and keeps the newest.

    A kill of any rank at any moment, or a full disk, leaves the earlier ones as they were. Every
    rank must enter, save and wait alike; `folder` must be one that all of them see.

    Example:
        with CheckpointWriter(folder, keep=2) as writer:
            writer.save(model, optimizer, layouts, RunState(step, fingerprint, recipe))

    Args:
        folder: Receives a folder for each checkpoint: `step_` and 8 digits.
        keep: Newest whole checkpoints that stay.
        damaged: Checkpoints that are known to be damaged and do not count as whole.
        timeout: How long a rank waits for the others to have written; None for torch's default.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        damaged: Iterable[Path] = (),
        timeout: timedelta | None = None,
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._damaged = set(damaged)
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = None
        self._running: tuple[_Save, Future[Any]] | None = None

    def __enter__(self) -> "CheckpointWriter":
        """Removes what killed runs have left; gives the background threads of all ranks a group of
        their own.
        """
        if dist.is_initialized():
            self._group = cast(
                dist.ProcessGroup, dist.new_group(backend="gloo", timeout=self._timeout)
            )
        else:  # said by torch at each save, in its thread, where it cannot be caught
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        broadcast_from_rank_zero(lambda: remove_leftovers(self._folder, "step_*"))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for the last checkpoint; after an error, which is then what counts, without raising
        its own.
        """
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
        """Copies weights and the optimizer's state, begins to write them in the background, and
        returns where.

        Waits for the save before, if that is still running. When all ranks have written, the
        checkpoint appears and all but the newest are removed.

        Raises:
            DataError: When something else lies where the checkpoint should be.
            Others: Those of `wait`, for the save before.
        """
        self.wait()
        target = checkpoint_folder(self._folder, state.step)
        opened = ExitStack()

        def begin() -> Path:
            _remove_torn(target)
            return opened.enter_context(whole_folder(target, kind="checkpoint"))

        partial = broadcast_from_rank_zero(begin)
        saving = _Save(target, opened)
        with (
            ExitStack() as after_failure,
            closing(DefaultStager(StagingOptions(False, False, False, False))) as stager,
        ):
            after_failure.push(opened)
            future = async_save(
                {**model_tensors(model, layouts), **optimizer_tensors(model, optimizer, layouts)},
                storage_writer=_Writer(partial, saving, state, self._keep, self._damaged),
                process_group=self._group,
                no_dist=self._group is None,
                async_stager=stager,
            )
            after_failure.pop_all()
        self._running = saving, cast(Future[Any], future)
        return target

    def wait(self) -> None:
        """Waits until the last save is on the disk.

        Raises:
            OSError: When the disk is full or fails on any rank; names the checkpoint.
            CheckpointError: When it failed otherwise, e.g. because a rank died.
        """
        if self._running is None:
            return
        (target, opened), future = self._running
        self._running = None
        try:
            with opened:  # empty when all went well
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
        opened: Holds the folder that is being filled; when it is closed, that becomes `target`.
    """

    target: Path
    opened: ExitStack


class _Written(NamedTuple):
    """What a rank tells the first one of the files that it has written.

    Attributes:
        pieces: torch's list of what lies where.
        digests: SHA-256 of each file, by name.
    """

    pieces: list[Any]
    digests: dict[str, str]


class _Writer(FileSystemWriter):
    """Writes one checkpoint; torch calls `finish` on the first rank once all ranks have written."""

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
        """Writes this rank's shards, waits until they are on the disk, and computes their
        checksums.

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

        names = {piece.storage_data.relative_path for piece in pieces}
        digests = {name: sha256_of(self._partial / name) for name in sorted(names)}
        written: torch.futures.Future[_Written] = torch.futures.Future()
        written.set_result(_Written(pieces, digests))
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        """Writes index, state.json and checksums, lets the checkpoint appear, and removes those
        that are too many.
        """
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
        self._save.opened.close()
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
    """Puts weights and the optimizer's state of a checkpoint into `model` and `optimizer`, wherever
    it was made.

    Every rank must call it; it reads what it holds. Parameters whose state the checkpoint has not,
    since they never had a gradient, start fresh.

    Args:
        path: The checkpoint.
        model: On the mesh that training goes on with.
        optimizer: Of its parameters, before the first step or after.
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
    saved = read_shapes(path)
    saved_state = {name: shape for name, shape in saved.items() if name.startswith(OPTIMIZER)}
    weights = model_tensors(model, layouts)
    refuse_misfits(
        path, "model", "Weights", {k: v for k, v in saved.items() if k not in saved_state}, weights
    )
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
    own: Mapping[str, Tensor],
) -> None:
    """Raises when tensors of a checkpoint and of a run differ in names or shapes.

    Raises:
        CheckpointError: Lists what does not fit.
    """
    both = [(name, saved[name], tuple(own[name].shape)) for name in own.keys() & saved.keys()]
    reshaped = [(name, there, here) for name, there, here in both if there != here]
    if text := describe_misfits(own.keys() - saved.keys(), saved.keys() - own.keys(), reshaped):
        raise CheckpointError(
            f"{path} is a checkpoint of another {kind}. {subject} {text}. Use the recipe of its run."
        )


def _not_written(target: Path, reason: str) -> CheckpointError:
    """Returns the error that says so."""
    return CheckpointError(
        f"{target} could not be written: {reason}. Earlier checkpoints are as they were: the same command with "
        "--resume goes on from the last."
    )


def _remove_torn(target: Path) -> None:
    """Removes what is left of a checkpoint without its state and index: a removal that was killed
    half-way.
    """
    if target.is_dir() and kind_of(target) is None and holds_only_checkpoint_files(target):
        remove_folder(target)


def _remove_old(newest: Path, keep: int, damaged: set[Path]) -> None:
    """Removes the checkpoints that are older than the newest `keep` whole ones, and what is damaged
    among them.

    Args:
        newest: The checkpoint that was just written; those of later steps are left alone.
        keep: Whole checkpoints that stay.
        damaged: Checkpoints that do not count as whole.
    """
    until_now = [
        path for path in checkpoint_folders(newest.parent) if step_of(path) <= step_of(newest)
    ]
    whole = [path for path in until_now if path not in damaged and visible_damage(path) is None]
    for path in until_now[: until_now.index(whole[-keep])] if len(whole) >= keep else ():
        if path in whole or holds_only_checkpoint_files(path):
            remove_folder(path)


def _flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
