"""The training loop of pre-training and fine-tuning, which can be interrupted and resumed."""

import dataclasses
import math
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing
from pathlib import Path

import torch

from moe.checkpoint.best_model import remove_scores
from moe.checkpoint.final_model import damage_of_model, save_model_on_mesh
from moe.checkpoint.integrity import latest_checkpoint, newest_whole_checkpoint
from moe.checkpoint.optimizer_state import load_optimizer_state
from moe.checkpoint.run_state import RunState, check_same_run, load_state
from moe.checkpoint.writer import CheckpointWriter, load_checkpoint
from moe.data.ngrams import loss_sentence
from moe.distributed.collectives import broadcast_from_rank_zero, enter_on_rank_zero, is_rank_zero
from moe.distributed.mesh import MeshConfig
from moe.distributed.replica_groups import LostStepError
from moe.errors import CheckpointError, DataError, DivergenceError, Interrupted, NonFiniteError
from moe.files import check_kind, claim_folder, remove_leftovers
from moe.kernels.host_memory import keep_freed_memory
from moe.kernels.product_choice import products_in_use, use_products
from moe.optim.optimizers import OPTIMIZERS
from moe.optim.parameter_groups import parameter_groups
from moe.training.command import save_recipe
from moe.training.heldout_loss import TEXT_LOSS
from moe.training.interruption import stop_requests
from moe.training.metrics import METRICS_FILE, last_value
from moe.training.planned_steps import LiveState, PlannedStep, ShareSource, live_steps
from moe.training.reporter import Reporter, is_due, open_metrics, warn_on_rank_zero
from moe.training.run import CHECKPOINTS_FOLDER, MODEL_FOLDER, RECIPE_FILE, TRAINING_RUN, Run
from moe.training.step import StepRanks, take_step

_MESH_SETTINGS = frozenset(f"mesh.{axis.name}" for axis in dataclasses.fields(MeshConfig))

# Settings that a resumed run may change: no loss depends on them.
_CHANGEABLE_SETTINGS = _MESH_SETTINGS.union(
    {
        "training.activation_checkpointing",
        "training.log_every",
        "training.evaluate_every",
        "training.held_out_batches",
        "training.checkpoint_every",
        "training.keep_checkpoints",
        "training.micro_batch_size",
        # Removed; the checkpoints of earlier versions have them. Whether batches are the same, their
        # fingerprint tells.
        "data.bad_rows",
        "data.shuffle_rows",
        "data.stream",
        "data.temperature",
        "data.workers",
        "training.probe_every",
        "training.probe_batches",
    }
)


def train(
    run: Run,
    *,
    resume: bool = False,
    description: str = "train",
    process_start: float | None = None,
) -> Path:
    """Trains to the last step of the recipe and returns the folder of the final model.

    On a mesh every rank calls it with its part of the model; rank zero writes metrics and messages.

    Args:
        run: What to train.
        resume: Whether to continue from the newest whole checkpoint in the folder, or from the start if there is none;
            losses are then bit-identical to an uninterrupted run's (same machine, threads and mesh).
        description: Label of the progress bar.
        process_start: When this process started, in seconds since 1970, if it serves only this run:
            its seconds are then counted from its start to its exit.

    Raises:
        DataError: When the folder holds a run and `resume` is not given, or anything but a run, or
            another process writes to it.
        CheckpointError: When all checkpoints are damaged, the checkpoint belongs to other settings
            or data, the optimizer state to another optimizer or model, or loss or gradient is not
            finite.
        Interrupted: After Ctrl-C or SIGTERM: the step is finished, and its checkpoint is complete.
        ConfigError: When the recipe's numbers contradict each other.
    """
    model_folder = run.folder / MODEL_FOLDER
    model, layouts, mesh = run.built
    with enter_on_rank_zero(lambda: _hold_run_folder(run.folder, resume)):
        if resume and _is_complete(run):
            _print_on_rank_zero(f"{run.folder} is complete: its model is in {model_folder}.")
            return model_folder

        checkpoint = _checkpoint_to_resume(run) if resume else None

        # All ranks multiply with the same libraries.
        if model.device.type == "cpu":
            keep_freed_memory()
            use_products(broadcast_from_rank_zero(products_in_use))

        # Model and optimizer as of the last saved step, or initial ones.
        optimizer = _build_optimizer(run)
        first_step = _restore_state(run, optimizer, checkpoint)
        broadcast_from_rank_zero(lambda: save_recipe(run.recipe, run.folder / RECIPE_FILE))

        keep = run.recipe.training.keep_checkpoints
        with (
            stop_requests() as stop_requested,
            open_metrics(run.folder, first_step) as writer,
            CheckpointWriter(run.folder / CHECKPOINTS_FOLDER, keep=keep) as checkpoints,
        ):
            reporter = Reporter(run, writer, description, first_step, process_start)
            _run_steps(run, optimizer, first_step, reporter, checkpoints, stop_requested)
        quality = broadcast_from_rank_zero(lambda: _held_out_sentence(run))
        _print_on_rank_zero(reporter.timeline.summary())
        if quality:
            _print_on_rank_zero(quality)

        # The model's folder marks a run as complete.
        sections = {"Training": _training_text(run, quality)} if quality else None
        save_model_on_mesh(model, layouts, mesh, model_folder, run.tokenizer, sections=sections)
        reporter.timeline.end()
    return model_folder


# ---------------------------------------------------------------------------
# Steps


def _run_steps(
    run: Run,
    optimizer: torch.optim.Optimizer,
    first_step: int,
    reporter: Reporter,
    checkpoints: CheckpointWriter,
    stop_requested: Callable[[], int | None],
) -> None:
    """Takes all steps from `first_step` on, reporting and saving as often as the recipe says."""
    model, layouts, mesh = run.built
    training = run.recipe.training
    ranks = StepRanks(mesh, run.replicas)

    # The baseline of held-out losses is before any update.
    model.train()
    if first_step == 0:
        reporter.report_held_out(0)

    planned_steps = _planned_steps(run, optimizer, first_step)
    with closing(planned_steps), reporter.bar:
        started = time.perf_counter()
        for step, shares, data_wait in planned_steps:
            done = step + 1
            try:
                metrics = take_step(model, optimizer, run.recipe, shares, step, ranks, run.forward)

                # From here on the step counts as done; weights that are not finite are never saved.
                loss = float(metrics.loss)
                grad_norm = float(metrics.grad_norm)
                if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                    what = f"The loss is {loss} and the gradient's norm {grad_norm} at step {done}."
                    raise _divergence(what, run.folder)
                reporter.report_step(done, metrics, time.perf_counter() - started, data_wait)

                if is_due(done, training.evaluate_every, training.steps):
                    reporter.report_held_out(done)
                    reporter.report_dev_scores(done)
            except LostStepError:
                started = time.perf_counter()
                continue  # it comes again
            except NonFiniteError as error:  # inside the model
                what = f"At step {done} training has diverged. {error}"
                raise _divergence(what, run.folder) from error

            # A run that is told to stop saves its work.
            signal_number = stop_requested()
            saves = is_due(done, training.checkpoint_every, training.steps)
            if saves or signal_number is not None:
                checkpoint = checkpoints.save(model, optimizer, layouts, _run_state(run, done))
                if signal_number is not None:
                    checkpoints.wait()
                    raise Interrupted(
                        f"Stopped after step {done:,}; {checkpoint} is complete.", signal_number
                    )
            started = time.perf_counter()


def _planned_steps(
    run: Run, optimizer: torch.optim.Optimizer, first_step: int
) -> Generator[PlannedStep, None, None]:
    """Returns the steps from `first_step` on, with this rank's rows of their batches."""
    steps = range(first_step, run.recipe.training.steps)
    source = ShareSource(run.source, run.recipe.mesh, run.workers, run.built.model.device)
    if run.replicas is None:
        mesh = run.built.mesh
        source = source._replace(config=mesh.config if mesh else MeshConfig())
        return source.plan([mesh.data_rank if mesh else 0], steps)

    # Groups that do not train the same run would corrupt each other's weights.
    def check_settings(others: RunState) -> None:
        where = Path("The state of the live replica groups")
        changeable = _CHANGEABLE_SETTINGS - _MESH_SETTINGS
        check_same_run(where, others, _run_state(run, others.step), changeable)

    state = LiveState(run.built, optimizer, _run_state(run, first_step), check_settings)
    return live_steps(run.replicas, source, state, steps)


def _build_optimizer(run: Run) -> torch.optim.Optimizer:
    optim = run.recipe.optim
    return OPTIMIZERS.get(optim.optimizer).build(
        parameter_groups(run.built.model),
        clipping_threshold=optim.clipping_threshold,
        weight_decay=optim.weight_decay,
        **optim.optimizer_options,
    )


def _divergence(what: str, folder: Path) -> DivergenceError:
    """Returns the error that says how to continue a run; earlier checkpoints stay."""
    return DivergenceError(
        f"{what} The checkpoints in {folder / CHECKPOINTS_FOLDER} are from before. "
        "Lower optim.lr or optim.clipping_threshold, and start a new run."
    )


# ---------------------------------------------------------------------------
# Where a run ends


def _held_out_sentence(run: Run) -> str:
    """Returns the last held-out loss next to those of n-gram tables; empty without tables."""
    if run.held_out is None or not run.held_out.ngram_losses:
        return ""
    loss = last_value(run.folder / METRICS_FILE, TEXT_LOSS)
    return "" if loss is None else loss_sentence(loss, run.held_out.ngram_losses)


def _training_text(run: Run, quality: str) -> str:
    """Returns what the model card says about the run, including the sentence on its held-out loss."""
    training = run.recipe.training
    return (
        f"The last run took {training.steps:,} updates of {training.batch_size:,} span-corruption examples. "
        f"{quality} The training text is not named here; add it before you publish the model."
    )


def _print_on_rank_zero(text: str) -> None:
    if is_rank_zero():
        print(text)  # noqa: T201  the answer to --resume


# ---------------------------------------------------------------------------
# Where a run begins


def _is_complete(run: Run) -> bool:
    """Returns whether the model of a run is written.

    Raises:
        CheckpointError: When the run had other settings or data; more steps would not be taken.
    """
    if damage_of_model(run.folder / MODEL_FOLDER) is not None:
        return False
    folder = run.folder / CHECKPOINTS_FOLDER
    broadcast_from_rank_zero(lambda: _check_checkpoint(latest_checkpoint(folder), run))
    return True


def _checkpoint_to_resume(run: Run) -> Path | None:
    """Returns the checkpoint that a run continues from; None to start at the first step.

    Raises:
        CheckpointError: When the checkpoint belongs to other settings or data, all checkpoints are
            damaged, or a damaged model cannot be rewritten.
    """
    folder = run.folder / CHECKPOINTS_FOLDER
    model = run.folder / MODEL_FOLDER

    # Puts back a checkpoint that a killed run was replacing.
    broadcast_from_rank_zero(lambda: remove_leftovers(folder, "step_*"))
    checkpoint = newest_whole_checkpoint(
        folder,
        advice=f"Restore the files from a copy, or remove {folder}: --resume then starts at the first step.",
    )
    broadcast_from_rank_zero(lambda: _check_checkpoint(checkpoint, run))

    if broadcast_from_rank_zero(model.exists):
        damage = damage_of_model(model)
        if checkpoint is None:
            raise CheckpointError(
                f"The model of this run is damaged: {model}: {damage}. There is no checkpoint to write it again "
                f"from. Restore it from a copy, or remove {model}: --resume then trains from the first step."
            )
        warn_on_rank_zero(f"{model} is not whole: {damage}. It is written again.")
    if checkpoint is None:
        warn_on_rank_zero(f"{run.folder} has no checkpoint yet: the run starts at its first step.")
    return checkpoint


def _restore_state(run: Run, optimizer: torch.optim.Optimizer, checkpoint: Path | None) -> int:
    """Loads the initial state of a run into model and optimizer, and returns its first step."""
    model, layouts, _ = run.built
    if checkpoint is not None:
        load_checkpoint(checkpoint, model, optimizer, layouts)
        state = load_state(checkpoint)
        if state.products is not None:
            use_products(state.products)
        return state.step

    # Scores of a run that stopped before its first checkpoint.
    broadcast_from_rank_zero(lambda: remove_scores(run.folder))
    if run.earlier_checkpoints is not None:
        name = run.recipe.optim.optimizer
        load_optimizer_state(run.earlier_checkpoints, model, optimizer, layouts, name)
    return 0


def _check_checkpoint(path: Path | None, run: Run) -> None:
    """Raises a CheckpointError unless a checkpoint, if there is one, is of these settings and data."""
    if path is None:
        return
    saved = load_state(path)
    check_same_run(path, saved, _run_state(run, saved.step), _CHANGEABLE_SETTINGS)

    # `training.steps` must not be lowered below the completed steps.
    if saved.step > run.recipe.training.steps:
        raise CheckpointError(
            f"{path} is from step {saved.step:,}, but the run ends at training.steps, {run.recipe.training.steps:,}. "
            "Remove it to resume from an earlier checkpoint, or restore its state.json."
        )


def _run_state(run: Run, step: int) -> RunState:
    """Returns the state of the run after `step` updates, for a checkpoint."""
    recipe = dataclasses.asdict(run.recipe)
    if recipe.get("parameters") != "lora":
        recipe.pop("lora", None)  # checkpoints of earlier versions have none
    products = products_in_use() if run.built.model.device.type == "cpu" else None
    return RunState(step, run.source.fingerprint, recipe, products)


# ---------------------------------------------------------------------------
# The folder


def _hold_run_folder(folder: Path, resume: bool) -> AbstractContextManager[None]:
    """Returns the lock on a run's folder, which ends with the process.

    Raises:
        DataError: When the folder holds a run that would be lost, or another process holds it.
    """
    refuse_to_overwrite(folder, resume)
    in_use = f"Another process trains in {folder}. Wait for it, or choose another --out."
    return claim_folder(folder, TRAINING_RUN, in_use=in_use)


def refuse_to_overwrite(folder: Path, resume: bool) -> None:
    """Raises when a folder holds a run that would be lost, or anything but a run.

    Args:
        folder: Folder of the new run; may be absent.
        resume: Whether the run in it is resumed.

    Raises:
        DataError: Names what to do instead.
    """
    check_kind(folder, TRAINING_RUN)
    names = (METRICS_FILE, CHECKPOINTS_FOLDER, MODEL_FOLDER)
    holds_run = any((folder / name).exists() for name in names)
    if holds_run and not resume:
        raise DataError(
            f"{folder} already holds a run. Use --resume to continue it, choose another --out, or remove it."
        )
