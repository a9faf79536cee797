"""The training loop: one for pre-training and fine-tuning, interrupted and resumed at will."""

import dataclasses
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from moe.checkpoint.best_model import DevEvaluation, forget_scores, score_model
from moe.checkpoint.final_model import damage_of_model, export_model
from moe.checkpoint.integrity import latest_checkpoint, newest_whole_checkpoint
from moe.checkpoint.optimizer_state import load_slots
from moe.checkpoint.run_state import RunState, check_same_run, load_state
from moe.checkpoint.writer import CheckpointWriter, load_checkpoint
from moe.data.pipeline import ALL_ROWS, BatchSource
from moe.distributed.collectives import broadcast_from_rank_zero, is_rank_zero
from moe.distributed.mesh import MeshConfig
from moe.errors import CheckpointError, DataError
from moe.files import check_kind, claim_folder, remove_leftovers
from moe.optim.optimizers import OPTIMIZERS
from moe.optim.parameter_groups import parameter_groups
from moe.training.build import PlacedModel
from moe.training.command import save_recipe
from moe.training.heldout_loss import HeldOut, evaluate_held_out, to_device
from moe.training.metrics import METRICS_FILE, MetricsWriter, step_values
from moe.training.recipe import Recipe
from moe.training.step import train_step

FOLDER_KIND = "training run"
MODEL_FOLDER, CHECKPOINTS_FOLDER, RECIPE_FILE = "model", "checkpoints", "recipe.yaml"
_FREE_TO_CHANGE = frozenset(
    f"training.{name}"
    for name in (
        "activation_checkpointing",
        "log_every",
        "evaluate_every",
        "held_out_batches",
        "checkpoint_every",
        "keep_checkpoints",
        "micro_batch_size",
    )
) | frozenset(f"mesh.{item.name}" for item in dataclasses.fields(MeshConfig))


class Run(NamedTuple):
    """Everything that a run is made of.

    Attributes:
        folder: Receives metrics.jsonl, tensorboard/, checkpoints/, recipe.yaml and in the end
            model/; on several machines it lies on a file system that all of them see.
        recipe: All settings.
        placed: The model with its initial weights, on its device or mesh.
        tokenizer: Saved beside the model.
        source: Training batches.
        held_out: What to measure on; None for nothing.
        slots: Folder of the checkpoints whose optimizer state the first step starts with; None for
            fresh state.
        dev: Scores models at every evaluation; the best stays in best/, see peak.py. None for no
            scores.
    """

    folder: Path
    recipe: Recipe
    placed: PlacedModel
    tokenizer: PreTrainedTokenizerFast
    source: BatchSource
    held_out: HeldOut | None
    slots: Path | None = None
    dev: DevEvaluation | None = None


def train(run: Run, *, resume: bool = False, description: str = "train") -> Path:
    """Trains to the last step of the recipe and returns the folder of the finished model.

    On a mesh every rank calls it with its part of the model; the first one writes metrics and
    messages.

    Args:
        run: What to train.
        resume: Goes on from the newest whole checkpoint in the folder, or from the start when there
            is none; the losses that follow are bit-identical to those of a run that was never
            stopped (same machine, threads and mesh).
        description: Names the progress bar.

    Raises:
        DataError: When the folder holds a run and `resume` is not given, something else than a run,
            or another process writes to it.
        CheckpointError: When all checkpoints are damaged, the checkpoint belongs to other settings
            or data, the slots to another optimizer or model, or loss or gradient is not finite.
        ConfigError: When the recipe's numbers do not go together.
    """
    finished = run.folder / MODEL_FOLDER
    model = run.placed.model
    layouts = run.placed.layouts
    with _only_writer(run.folder, resume):
        start_from = _where_to_start(run) if resume else _Start(None, ())
        if start_from is None:
            if is_rank_zero():
                print(f"{run.folder} is complete: its model is in {finished}.")  # noqa: T201  the answer to --resume
            return finished

        optim = run.recipe.optim
        optimizer = OPTIMIZERS.get(optim.optimizer).build(
            parameter_groups(model),
            clipping_threshold=optim.clipping_threshold,
            weight_decay=optim.weight_decay,
        )
        first_step = 0
        if start_from.checkpoint is not None:
            load_checkpoint(start_from.checkpoint, model, optimizer, layouts, verified=True)
            first_step = load_state(start_from.checkpoint).step
        else:
            broadcast_from_rank_zero(lambda: forget_scores(run.folder))
            if run.slots is not None:
                load_slots(run.slots, model, optimizer, layouts, optim.optimizer)

        broadcast_from_rank_zero(lambda: save_recipe(run.recipe, run.folder / RECIPE_FILE))
        keep = run.recipe.training.keep_checkpoints
        with (
            _interrupts_between_steps() as stop_here,
            MetricsWriter(run.folder, first_step) if is_rank_zero() else nullcontext() as writer,
            CheckpointWriter(
                run.folder / CHECKPOINTS_FOLDER, keep=keep, damaged=start_from.damaged
            ) as checkpoints,
        ):
            _run_steps(run, optimizer, writer, checkpoints, first_step, description, stop_here)
        export_model(model, layouts, run.placed.mesh, finished, run.tokenizer)
    return finished


def _run_steps(
    run: Run,
    optimizer: torch.optim.Optimizer,
    writer: MetricsWriter | None,
    checkpoints: CheckpointWriter,
    start: int,
    description: str,
    stop_here: Callable[[], None],
) -> None:
    """Takes all steps from `start` on, reporting and saving as the recipe says; `stop_here` is
    called after each.
    """
    training, (model, layouts, mesh) = run.recipe.training, run.placed
    rows = mesh.rows(run.source.batch_size) if mesh else ALL_ROWS
    model.train()
    if start == 0:
        _report_held_out(run, writer, 0)
    clock, tokens = time.perf_counter(), 0.0
    with tqdm(
        total=training.steps,
        initial=start,
        desc=description,
        unit="step",
        mininterval=1.0,
        disable=writer is None,
    ) as bar:
        for step in range(start, training.steps):
            batch = to_device(run.source.batch(step, rows), model.device)
            metrics = train_step(model, optimizer, run.recipe, batch, step, mesh)
            done = step + 1
            tokens += float(metrics.tokens)
            _refuse_non_finite(float(metrics.loss), float(metrics.grad_norm), done, run.folder)
            if writer is not None and (done % training.log_every == 0 or done == training.steps):
                writer.write(done, step_values(metrics, tokens / (time.perf_counter() - clock)))
                bar.set_postfix(
                    ce_loss=f"{float(metrics.ce_loss):.3f}", lr=f"{metrics.lr:.2g}", refresh=False
                )
                clock, tokens = time.perf_counter(), 0.0
            bar.update()
            if done % training.evaluate_every == 0 or done == training.steps:
                _report_held_out(run, writer, done)
                _report_dev(run, writer, done)
                clock, tokens = time.perf_counter(), 0.0
            if done % training.checkpoint_every == 0 or done == training.steps:
                checkpoints.save(model, optimizer, layouts, _state(run, done))
            stop_here()


def _report_held_out(run: Run, writer: MetricsWriter | None, step: int) -> None:
    """Writes the held-out numbers after `step` updates, if there is something to measure on."""
    if run.held_out is not None and run.held_out.num_batches > 0:
        bfloat16 = run.recipe.training.precision == "bfloat16"
        values = evaluate_held_out(
            run.placed.model, run.held_out, run.placed.mesh, bfloat16=bfloat16
        )
        if writer is not None:
            writer.write(step, values)


def _report_dev(run: Run, writer: MetricsWriter | None, step: int) -> None:
    """Writes the dev scores after `step` updates, if there is something that scores, and keeps the
    best model.
    """
    if run.dev is not None:
        model, layouts, mesh = run.placed
        scores = score_model(
            run.folder,
            step,
            lambda to: export_model(model, layouts, mesh, to, run.tokenizer),
            run.dev,
        )
        if writer is not None:
            writer.write(step, {f"eval/{name}": value for name, value in scores.items()})


class _Start(NamedTuple):
    """Where a run begins.

    Attributes:
        checkpoint: What it goes on from; None for its first step.
        damaged: Checkpoints that were passed over.
    """

    checkpoint: Path | None
    damaged: Collection[Path]


def _where_to_start(run: Run) -> _Start | None:
    """Returns where a resumed run begins; None when it is finished.

    Raises:
        CheckpointError: When the checkpoint belongs to other settings or data (a finished run is
            checked too: more steps would not be taken), all checkpoints are damaged, or a damaged
            model could not be written again.
    """
    folder = run.folder / CHECKPOINTS_FOLDER
    model = run.folder / MODEL_FOLDER
    model_damage = damage_of_model(model)
    if model_damage is None:
        broadcast_from_rank_zero(lambda: _check_same_run(latest_checkpoint(folder), run))
        return None

    broadcast_from_rank_zero(
        lambda: remove_leftovers(folder, "step_*")
    )  # puts back what a killed run was replacing
    anew = f"Restore the files from a copy, or remove {folder}: --resume then starts at the first step."
    checkpoint, damaged = newest_whole_checkpoint(folder, advice=anew)
    broadcast_from_rank_zero(lambda: _check_same_run(checkpoint, run))
    model_exists = broadcast_from_rank_zero(model.exists)
    if model_exists and checkpoint is None:
        raise CheckpointError(
            f"The model of this run is damaged: {model}: {model_damage}. There is no checkpoint to write it again "
            f"from. Restore it from a copy, or remove {model}: --resume then trains from the first step."
        )
    if is_rank_zero():
        if model_exists:
            _warn(f"{model} is not whole: {model_damage}. It is written again.")
        if checkpoint is None:
            _warn(f"{run.folder} has no checkpoint yet: the run starts at its first step.")
    return _Start(checkpoint, damaged)


def _check_same_run(path: Path | None, run: Run) -> None:
    """Raises a CheckpointError unless a checkpoint, if there is one, is of these settings and data."""
    if path is None:
        return
    saved = load_state(path)
    check_same_run(path, saved, _state(run, saved.step), _FREE_TO_CHANGE)
    if saved.step > run.recipe.training.steps:
        raise CheckpointError(
            f"{path} is of step {saved.step:,}, and the run ends at training.steps, {run.recipe.training.steps:,}. "
            "Remove it to go on from an earlier one, or restore its state.json."
        )


def _warn(text: str) -> None:
    """Prints a line for people on stderr."""
    print(f"warning: {text}", file=sys.stderr, flush=True)  # noqa: T201  an answer to --resume


def _state(run: Run, step: int) -> RunState:
    """Returns what a checkpoint of the run after `step` updates says."""
    return RunState(step, run.source.fingerprint, dataclasses.asdict(run.recipe))


def refuse_to_overwrite(folder: Path, resume: bool) -> None:
    """Raises a DataError when the folder holds a run that would be lost, or something else than a
    run.
    """
    check_kind(folder, FOLDER_KIND)
    if not resume and any(
        (folder / name).exists() for name in (METRICS_FILE, CHECKPOINTS_FOLDER, MODEL_FOLDER)
    ):
        raise DataError(
            f"{folder} already holds a run. Give --resume to go on with it, choose another --out, or remove it."
        )


def _refuse_non_finite(loss: float, grad_norm: float, step: int, folder: Path) -> None:
    """Raises a CheckpointError when training has diverged, before such weights are saved;
    checkpoints stay.
    """
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise CheckpointError(
            f"The loss is {loss} and the gradient's norm {grad_norm} at step {step}. The "
            f"checkpoints in {folder / CHECKPOINTS_FOLDER} are from before. "
            "Lower optim.lr or optim.clipping_threshold, and start a new run."
        )


@contextmanager
def _interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back until the yielded function is called; a second Ctrl-C acts at once.

    An interrupt in the middle of an exchange would leave other ranks waiting, and in the middle of
    a line half of it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    def stop_here() -> None:
        if received:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, receive)
    try:
        yield stop_here
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _only_writer(folder: Path, resume: bool) -> Iterator[None]:
    """Holds the folder for this run; the lock goes with the first rank's process, however it ends.

    Raises:
        DataError: When it holds a run that would be lost, or another process holds it.
    """
    with ExitStack() as held:

        def hold() -> None:
            refuse_to_overwrite(folder, resume)
            taken = f"Another process trains in {folder}. Wait for it, or choose another --out."
            held.enter_context(claim_folder(folder, FOLDER_KIND, taken=taken))

        broadcast_from_rank_zero(hold)
        yield
