"""Checkpoints that are whole or absent: each rank writes its shards aside, while training goes on; then they appear.

A checkpoint is what snapshot.py says of model and optimizer, in the format of torch.distributed.checkpoint, and a file
state.json. All randomness of a run is a function of its seed and step, and so is the place in data and schedule: the
step is all that is kept of them.
"""

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from moe.distributed.exchange import from_first_rank
from moe.distributed.sharding import Layout
from moe.errors import CheckpointError
from moe.files import whole_folder
from moe.models.loading import describe_misfits
from moe.training.snapshot import OPTIMIZER, fresh_state, optimizer_state, put_numbers, weights_of

STATE_FILE, _INDEX_FILE = "state.json", ".metadata"


class RunState(NamedTuple):
    """What a checkpoint says beside weights and the optimizer's state.

    Attributes:
        step: Updates behind it; also the position in the data.
        fingerprint: Of the data, see `BatchSource`.
        recipe: All settings as plain values.
    """

    step: int
    fingerprint: str
    recipe: dict[str, Any]


class CheckpointWriter:
    """Writes checkpoints below a folder, one at a time, and keeps the newest.

    A kill of any rank at any moment, or a full disk, leaves the earlier ones as they were. Every rank must enter, save
    and wait alike; `folder` must be one that all of them see.

    Example:
        with CheckpointWriter(folder, keep=2) as writer:
            writer.save(model, optimizer, layouts, RunState(step, fingerprint, recipe))

    Args:
        folder: Receives a folder for each checkpoint: `step_` and 8 digits.
        keep: Newest checkpoints that stay.
        timeout: How long a rank waits for the others to have written; None for torch's default.
    """

    def __init__(self, folder: Path, *, keep: int, timeout: timedelta | None = None) -> None:
        self._folder, self._keep, self._timeout = folder, keep, timeout
        self._group: dist.ProcessGroup | None = None
        self._running: _Save | None = None

    def __enter__(self) -> "CheckpointWriter":
        """Removes what killed runs have left; gives the background threads of all ranks a group of their own."""
        if dist.is_initialized():
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=self._timeout))
        else:  # said by torch at each save, in its thread, where it cannot be caught
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        from_first_rank(lambda: _remove_leftovers(self._folder))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for the last checkpoint; after an error, which is then what counts, without raising its own."""
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
        self, model: nn.Module, optimizer: torch.optim.Optimizer, layouts: Mapping[str, Layout], state: RunState
    ) -> Path:
        """Copies weights and the optimizer's state, begins to write them in the background, and returns where.

        Waits for the save before, if that is still running. When all ranks have written, the checkpoint appears and
        all but the newest are removed.

        Raises:
            DataError: When something else lies where the checkpoint should be.
            Others: Those of `wait`, for the save before.
        """
        self.wait()
        target = self._folder / f"step_{state.step:08d}"
        opened = ExitStack()
        partial = from_first_rank(lambda: opened.enter_context(whole_folder(target, kind="checkpoint")))
        with ExitStack() as after_failure, closing(DefaultStager(StagingOptions(False, False, False, False))) as stager:
            after_failure.push(opened)
            future = async_save(
                {**weights_of(model, layouts), **optimizer_state(model, optimizer, layouts)},
                storage_writer=_Writer(partial, target, state, opened, self._keep),
                process_group=self._group,
                no_dist=self._group is None,
                async_stager=stager,
            )
            after_failure.pop_all()
        self._running = _Save(target, cast(Future[Any], future), opened)
        return target

    def wait(self) -> None:
        """Waits until the last save is on the disk.

        Raises:
            OSError: When the disk is full or fails on any rank; names the checkpoint.
            CheckpointError: When it failed otherwise, e.g. because a rank died.
        """
        if self._running is None:
            return
        (target, future, opened), self._running = self._running, None
        try:
            with opened:  # empty when all went well
                future.result()
        except CheckpointException as failed:
            rank, error = _cause(failed)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(target)) from failed
            raise _not_written(target, f"rank {rank} failed with {error!r}") from failed
        except RuntimeError as error:
            raise _not_written(target, str(error)) from error


class _Save(NamedTuple):
    """A save in the background: its folder, when it is done, and what holds the folder that is being filled."""

    target: Path
    future: Future[Any]
    opened: ExitStack


class _Writer(FileSystemWriter):
    """Writes one checkpoint; torch calls `finish` on the first rank once all ranks have written."""

    def __init__(self, partial: Path, target: Path, state: RunState, opened: ExitStack, keep: int) -> None:
        super().__init__(partial)
        self._partial, self._target, self._state, self._opened, self._keep = partial, target, state, opened, keep

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Writes this rank's shards and waits until they are on the disk.

        Raises:
            OSError: When the disk fails; torch says RuntimeError, and the reason would be lost on the way to others.
        """
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from error

    def finish(self, metadata: Any, results: Any) -> None:
        """Writes the index and state.json, lets the checkpoint appear, and removes those that are too many."""
        super().finish(metadata, results)
        sizes = {file.name: file.stat().st_size for file in sorted(self._partial.iterdir())}
        versions = {"torch": str(torch.__version__), "transformers": transformers.__version__}
        facts = {**self._state._asdict(), "sizes": sizes, "versions": versions}
        (self._partial / STATE_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        for path in (self._partial / _INDEX_FILE, self._partial / STATE_FILE, self._partial):
            _flush(path)
        self._opened.close()
        _flush(self._target.parent)
        for old in _complete(self._target.parent)[: -self._keep]:
            shutil.rmtree(old)


def latest_checkpoint(folder: Path) -> Path | None:
    """Returns the newest complete checkpoint below `folder`; None when there is none."""
    complete = _complete(folder)
    return complete[-1] if complete else None


def load_state(path: Path) -> RunState:
    """Returns what the checkpoint at `path` says of its run."""
    facts = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    return RunState(**{name: facts[name] for name in RunState._fields})


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, layouts: Mapping[str, Layout]
) -> None:
    """Puts weights and the optimizer's state of a checkpoint into `model` and `optimizer`, wherever it was made.

    Every rank must call it; it reads what it holds. Parameters whose state the checkpoint has not, since they never
    had a gradient, start fresh.

    Args:
        path: The checkpoint.
        model: On the mesh that training goes on with.
        optimizer: Of its parameters, before the first step or after.
        layouts: Where each parameter lies.

    Raises:
        CheckpointError: When something is missing, unexpected or of another shape; lists it, and changes nothing.
    """
    saved = read_shapes(path)
    saved_state = {name: shape for name, shape in saved.items() if name.startswith(OPTIMIZER)}
    weights = weights_of(model, layouts)
    refuse_misfits(path, "model", "Weights", {k: v for k, v in saved.items() if k not in saved_state}, weights)
    with fresh_state(model, optimizer, {owner(name) for name in saved_state}):
        state = optimizer_state(model, optimizer, layouts)
        refuse_misfits(path, "optimizer", "Its state:", saved_state, state)
        read_into(path, {**weights, **state})
    put_numbers(model, optimizer, state)


def owner(key: str) -> str:
    """Returns the parameter that a checkpoint's `optimizer/NAME/KEY` belongs to; an empty string for other entries."""
    return key.split("/")[1] if key.startswith(OPTIMIZER) else ""


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors of a checkpoint, by name.

    Raises:
        CheckpointError: When it has no readable index.
    """
    try:
        index = FileSystemReader(path).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path} has no index of its shards ({error}): it is torn, or of an earlier version of this library. Go on "
            "from another checkpoint, or start a new run."
        ) from error
    return {name: tuple(cast(Any, entry).size) for name, entry in index.state_dict_metadata.items()}


def read_into(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fills tensors <any>[...], whole or cut, from a checkpoint, by name.

    Raises:
        CheckpointError: When a rank cannot read its parts.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            load(tensors, checkpoint_id=path)
        except CheckpointException as failed:
            rank, error = _cause(failed)
            raise CheckpointError(f"{path} could not be read: rank {rank} failed with {error!r}.") from failed


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


def refuse_misfits(
    path: Path, kind: str, subject: str, saved: Mapping[str, tuple[int, ...]], own: Mapping[str, Tensor]
) -> None:
    """Raises when tensors of a checkpoint and of a run differ in names or shapes.

    Raises:
        CheckpointError: Lists what does not fit.
    """
    both = [(name, saved[name], tuple(own[name].shape)) for name in own.keys() & saved.keys()]
    reshaped = [(name, there, here) for name, there, here in both if there != here]
    if text := describe_misfits(own.keys() - saved.keys(), saved.keys() - own.keys(), reshaped):
        raise CheckpointError(f"{path} is a checkpoint of another {kind}. {subject} {text}. Use the recipe of its run.")


def _cause(failed: CheckpointException) -> tuple[int, BaseException]:
    """Returns a rank that failed, and how: the first with an error of the disk, else the first."""
    return min(
        ((rank, wrapped[0]) for rank, wrapped in failed.failures.items()),
        key=lambda item: (not isinstance(item[1], OSError), item[0]),
    )


def _not_written(target: Path, reason: str) -> CheckpointError:
    """Returns the error that says so."""
    return CheckpointError(
        f"{target} could not be written: {reason}. Earlier checkpoints are as they were: the same command with "
        "--resume goes on from the last."
    )


def _remove_leftovers(folder: Path) -> None:
    """Removes what runs that were killed in the middle of a save have left; puts back what they were replacing."""
    for replaced in folder.glob(".step_*.replaced"):
        target = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))
        if not target.exists():
            replaced.rename(target)
    for pattern in (".step_*.partial", ".step_*.replaced"):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover)


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
