"""The training loop: one for pre-training and fine-tuning, interrupted and resumed at will."""

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from moe.checkpoint.best_model import DevEvaluation, remove_scores, score_model
from moe.checkpoint.final_model import damage_of_model, export_model
from moe.checkpoint.integrity import latest_checkpoint, newest_whole_checkpoint
from moe.checkpoint.optimizer_state import load_optimizer_state
from moe.checkpoint.run_state import RunState, check_same_run, load_state
from moe.checkpoint.writer import CheckpointWriter, load_checkpoint
from moe.data.batches_ahead import batches_ahead
from moe.data.pipeline import ALL_ROWS, BatchSource
from moe.distributed.collectives import (
    broadcast_from_rank_zero,
    enter_on_rank_zero,
    is_rank_zero,
)
from moe.distributed.mesh import Mesh, MeshConfig
from moe.distributed.waiting import Waits, measured_waits
from moe.errors import CheckpointError, DataError, DivergenceError, Interrupted, NonFiniteError
from moe.files import check_kind, claim_folder, remove_leftovers
from moe.kernels.product_choice import products_in_use, use_products
from moe.optim.optimizers import OPTIMIZERS
from moe.optim.parameter_groups import parameter_groups
from moe.training.build import BuiltModel
from moe.training.command import save_recipe
from moe.training.heldout_loss import HeldOut, evaluate_held_out, to_device
from moe.training.interruption import stop_requests
from moe.training.metrics import METRICS_FILE, MetricsWriter, step_values
from moe.training.probe import (
    PROBE_FOLDER,
    RoutingProbe,
    check_probe,
    max_logits,
    probe_histograms,
    probe_values,
)
from moe.training.recipe import Recipe, with_later_settings
from moe.training.recipe_files import rename_settings
from moe.training.router_health import RouterHealth, layer_keys
from moe.training.step import StepMetrics, train_step
from moe.training.stragglers import RankClock, StragglerWatch, metric_values, straggler_text

FOLDER_KIND = "training run"
MODEL_FOLDER = "model"
CHECKPOINTS_FOLDER = "checkpoints"
RECIPE_FILE = "recipe.yaml"

# Settings that a resumed run may have changed: no loss depends on them.
_CHANGEABLE_SETTINGS = frozenset(
    {
        "training.activation_checkpointing",
        "training.log_every",
        "training.evaluate_every",
        "training.held_out_batches",
        "training.probe_every",
        "training.probe_batches",
        "training.checkpoint_every",
        "training.keep_checkpoints",
        "training.micro_batch_size",
        "data.workers",
        *(f"mesh.{axis.name}" for axis in dataclasses.fields(MeshConfig)),
    }
)


class Run(NamedTuple):
    """Everything that a run is made of.

    Attributes:
        folder: Receives metrics.jsonl, tensorboard/, probe/, checkpoints/, recipe.yaml, with
            several ranks rank_seconds.jsonl, and in the end model/; on several machines it lies on
            a file system that all of them see.
        recipe: All settings.
        built: The model with its initial weights, on its device or mesh.
        tokenizer: Saved beside the model.
        source: Training batches.
        held_out: Batches for the held-out loss; None for no such measure.
        earlier_checkpoints: Folder of the checkpoints of an earlier run, whose optimizer state the
            first step starts with; None for fresh state.
        dev: Scores models at every evaluation; the best stays in best/, see best_model.py. None
            for no scores.
        probe_source: Held-out batches, not packed, of which the first are probed; None for none.
        workers: Processes that make batches ahead; see `batches_ahead`.
    """

    folder: Path
    recipe: Recipe
    built: BuiltModel
    tokenizer: PreTrainedTokenizerFast
    source: BatchSource
    held_out: HeldOut | None
    earlier_checkpoints: Path | None = None
    dev: DevEvaluation | None = None
    probe_source: BatchSource | None = None
    workers: int | None = 0


def train(run: Run, *, resume: bool = False, description: str = "train") -> Path:
    """Trains to the last step of the recipe and returns the folder of the final model.

    On a mesh every rank calls it with its part of the model; rank zero writes metrics and messages.

    Args:
        run: What to train.
        resume: Goes on from the newest whole checkpoint in the folder, or from the start when there
            is none; the losses that follow are bit-identical to those of a run that was never
            stopped (same machine, threads and mesh).
        description: Label of the progress bar.

    Raises:
        DataError: When the folder holds a run and `resume` is not given, something else than a run,
            or probes of another text, or another process writes to it.
        CheckpointError: When all checkpoints are damaged, the checkpoint belongs to other settings
            or data, the optimizer state to another optimizer or model, or loss or gradient is not
            finite.
        Interrupted: After Ctrl-C or SIGTERM: the step is finished, and its checkpoint is whole.
        ConfigError: When the recipe's numbers do not go together.
    """
    model_folder = run.folder / MODEL_FOLDER
    model, layouts, mesh = run.built
    check_probe(run.recipe, model.config, run.probe_source)
    with enter_on_rank_zero(lambda: _hold_run_folder(run.folder, resume)):
        start = _find_start(run) if resume else _Start()
        if start is None:
            _print_on_rank_zero(f"{run.folder} is complete: its model is in {model_folder}.")
            return model_folder

        # All ranks multiply with the same libraries.
        if model.device.type == "cpu":
            use_products(broadcast_from_rank_zero(products_in_use))

        # Model and optimizer as they were after the last step that is saved, or as they begin.
        optimizer = _build_optimizer(run)
        first_step = _restore_state(run, optimizer, start)
        probe = _begin_probe(run, first_step)
        broadcast_from_rank_zero(lambda: save_recipe(run.recipe, run.folder / RECIPE_FILE))

        keep = run.recipe.training.keep_checkpoints
        with (
            stop_requests() as stop_requested,
            measured_waits() as waits,
            _open_metrics(run.folder, first_step) as writer,
            CheckpointWriter(
                run.folder / CHECKPOINTS_FOLDER, keep=keep, damaged=start.damaged
            ) as checkpoints,
        ):
            reporter = _Reporter(run, writer, probe, waits, description)
            _run_steps(run, optimizer, first_step, reporter, checkpoints, stop_requested)

        # The model's folder is what tells a complete run from one that was stopped.
        export_model(model, layouts, mesh, model_folder, run.tokenizer)
    return model_folder


# ---------------------------------------------------------------------------
# Steps


def _run_steps(
    run: Run,
    optimizer: torch.optim.Optimizer,
    first_step: int,
    reporter: "_Reporter",
    checkpoints: CheckpointWriter,
    stop_requested: Callable[[], int | None],
) -> None:
    """Takes all steps from `first_step` on, reporting and saving as often as the recipe says."""
    model, layouts, mesh = run.built
    training = run.recipe.training
    rows = mesh.rows(run.source.batch_size) if mesh else ALL_ROWS

    # A held-out loss before any update is what the others are compared with; so is a probe.
    model.train()
    if first_step == 0:
        reporter.report_held_out(0)
        reporter.report_probe(0)

    steps = range(first_step, training.steps)
    made = batches_ahead(run.source, rows, steps, workers=run.workers)
    with closing(made) as batches, reporter.progress_bar(first_step) as bar:
        reporter.restart_clock()
        for step in steps:
            reporter.begin_step()
            with reporter.waiting_for_data():
                batch = to_device(next(batches), model.device)
            done = step + 1
            with _divergence_where_not_finite(done, run.folder):
                metrics = train_step(model, optimizer, run.recipe, batch, step, mesh)

                # From here on the step counts as done; weights that are not finite are never saved.
                _refuse_non_finite(metrics, done, run.folder)
                reporter.report_step(done, metrics, bar)

                if _is_due(done, training.evaluate_every, training.steps):
                    reporter.report_held_out(done)
                    reporter.report_dev_scores(done)
                    reporter.restart_clock()
                reporter.report_probe(done)

            # A run that is asked to end keeps what it has done.
            signal_number = stop_requested()
            is_due = _is_due(done, training.checkpoint_every, training.steps)
            if is_due or signal_number is not None:
                checkpoint = checkpoints.save(model, optimizer, layouts, _run_state(run, done))
                if signal_number is not None:
                    checkpoints.wait()
                    raise Interrupted(
                        f"Stopped after step {done:,}; {checkpoint} is whole.", signal_number
                    )


def _is_due(step: int, every: int, last_step: int) -> bool:
    """Returns whether something happens after `step` updates: every so often, and at the end."""
    return step % every == 0 or step == last_step


def _build_optimizer(run: Run) -> torch.optim.Optimizer:
    optim = run.recipe.optim
    return OPTIMIZERS.get(optim.optimizer).build(
        parameter_groups(run.built.model),
        clipping_threshold=optim.clipping_threshold,
        weight_decay=optim.weight_decay,
        **optim.optimizer_options,
    )


@contextmanager
def _divergence_where_not_finite(step: int, folder: Path) -> Iterator[None]:
    """Raises a DivergenceError for numbers inside the model that are not finite."""
    try:
        yield
    except NonFiniteError as error:
        raise _divergence(f"At step {step} training has diverged. {error}", folder) from error


def _refuse_non_finite(metrics: StepMetrics, step: int, folder: Path) -> None:
    """Raises a DivergenceError when training has diverged, before such weights are saved.

    Earlier checkpoints stay.
    """
    loss = float(metrics.loss)
    grad_norm = float(metrics.grad_norm)
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        what = f"The loss is {loss} and the gradient's norm {grad_norm} at step {step}."
        raise _divergence(what, folder)


def _divergence(what: str, folder: Path) -> DivergenceError:
    """Returns the error that says how a run can go on."""
    return DivergenceError(
        f"{what} The checkpoints in {folder / CHECKPOINTS_FOLDER} are from before. "
        "Lower optim.lr or optim.clipping_threshold, and start a new run."
    )


# ---------------------------------------------------------------------------
# Reports


class _Reporter:
    """Reports steps, held-out losses, dev scores and probes: to metrics.jsonl and on the progress bar.

    Every rank measures; rank zero writes and warns.

    Args:
        run: What is trained.
        writer: Writes metrics; None on other ranks than zero.
        probe: Records the routing of a text; None for none.
        waits: Counts what this rank waits for others.
        description: Label of the progress bar.
    """

    def __init__(
        self,
        run: Run,
        writer: MetricsWriter | None,
        probe: RoutingProbe | None,
        waits: Waits,
        description: str,
    ) -> None:
        self._run = run
        self._writer = writer
        self._probe = probe
        self._description = description
        self._health = RouterHealth(layer_keys(run.built.model.config))
        self._ranks = _rank_clock(run.built.mesh, waits)
        self._stragglers = StragglerWatch()
        self.restart_clock()

    def progress_bar(self, first_step: int) -> "tqdm[NoReturn]":
        """Returns a progress bar over the steps; on other ranks than zero it shows nothing."""
        return tqdm(
            total=self._run.recipe.training.steps,
            initial=first_step,
            desc=self._description,
            unit="step",
            mininterval=1.0,
            disable=self._writer is None,
        )

    def restart_clock(self) -> None:
        """Begins to count tokens and seconds anew, after something that is not training."""
        self._started = time.perf_counter()
        self._tokens = 0.0
        self._data_seconds = 0.0
        self._num_steps = 0

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Counts the seconds of the block as those for which a step waits for its batch."""
        started = time.perf_counter()
        yield
        self._data_seconds += time.perf_counter() - started
        self._num_steps += 1

    def begin_step(self) -> None:
        """Begins to measure the work of this rank; `report_step` ends it."""
        if self._ranks is not None:
            self._ranks.begin_step()

    def report_step(self, step: int, metrics: StepMetrics, bar: "tqdm[NoReturn]") -> None:
        """Counts an update, and writes its metrics when they are due."""
        training = self._run.recipe.training
        self._tokens += float(metrics.tokens)
        self._report_ranks(step)
        if self._writer is not None and _is_due(step, training.log_every, training.steps):
            tokens_per_second = self._tokens / (time.perf_counter() - self._started)
            data_wait = self._data_seconds / self._num_steps
            self._writer.write(step, step_values(metrics, tokens_per_second, data_wait))
            self._health.observe(step, metrics.layer_stats)
            ce_loss = f"{float(metrics.ce_loss):.3f}"
            bar.set_postfix(ce_loss=ce_loss, lr=f"{metrics.lr:.2g}", refresh=False)
            self.restart_clock()
        bar.update()

    def _report_ranks(self, step: int) -> None:
        """Counts the work of this rank, and writes that of all ranks when it is due."""
        if self._ranks is None:
            return
        self._ranks.end_step()
        training = self._run.recipe.training
        if not _is_due(step, training.log_every, training.steps):
            return

        # Every rank takes part; rank zero compares and writes.
        seconds = self._ranks.gather()
        if self._writer is not None:
            straggler = self._stragglers.observe(seconds)
            self._writer.write(step, metric_values(seconds, straggler))
            self._writer.write_ranks(step, seconds.columns)
            if straggler is not None and self._stragglers.is_news:
                _warn_on_rank_zero(straggler_text(seconds, step))

    def report_held_out(self, step: int) -> None:
        """Writes the held-out loss after `step` updates, if there are held-out batches."""
        run = self._run
        if run.held_out is None or run.held_out.num_batches == 0:
            return
        bfloat16 = run.recipe.training.precision == "bfloat16"
        values = evaluate_held_out(run.built.model, run.held_out, run.built.mesh, bfloat16=bfloat16)
        if self._writer is not None:
            self._writer.write(step, values)

    def report_dev_scores(self, step: int) -> None:
        """Writes the dev scores after `step` updates, if there are any, and keeps the best model."""
        run = self._run
        if run.dev is None:
            return

        def export(folder: Path) -> None:
            export_model(*run.built, folder, run.tokenizer)

        scores = score_model(run.folder, step, export, run.dev)
        if self._writer is not None:
            self._writer.write(step, {f"eval/{name}": value for name, value in scores.items()})

    def report_probe(self, step: int) -> None:
        """Records the routing after `step` updates and writes its numbers, when that is due."""
        training = self._run.recipe.training
        every = training.probe_every
        if self._probe is None or not _is_due(step, every, training.steps):
            return

        # Every rank takes part in the record.
        scores = self._probe.record(step).scores
        if self._writer is not None:
            self._writer.write(step, probe_values(scores))
            self._writer.write_histograms(step, probe_histograms(scores))
            self._health.observe_logits(step, max_logits(scores))
        self.restart_clock()


def _rank_clock(mesh: Mesh | None, waits: Waits) -> RankClock | None:
    """Returns the clock of this rank; None where there is no other."""
    return RankClock(mesh, waits) if mesh else None


def _open_metrics(folder: Path, first_step: int) -> AbstractContextManager[MetricsWriter | None]:
    """Returns the writer of metrics on rank zero, nothing on the others."""
    if is_rank_zero():
        return MetricsWriter(folder, first_step)
    return nullcontext()


def _print_on_rank_zero(text: str) -> None:
    if is_rank_zero():
        print(text)  # noqa: T201  the answer to --resume


def _warn_on_rank_zero(text: str) -> None:
    if is_rank_zero():
        print(f"warning: {text}", file=sys.stderr, flush=True)  # noqa: T201  likewise


# ---------------------------------------------------------------------------
# Where a run begins


class _Start(NamedTuple):
    """Where a run begins.

    Attributes:
        checkpoint: Checkpoint to go on from; None to begin at the first step.
        damaged: Newer checkpoints that were passed over.
    """

    checkpoint: Path | None = None
    damaged: Collection[Path] = ()


def _find_start(run: Run) -> _Start | None:
    """Returns where a resumed run begins; None when it is complete.

    Raises:
        CheckpointError: When the checkpoint belongs to other settings or data (a complete run is
            checked too: more steps would not be taken), all checkpoints are damaged, or a damaged
            model could not be written again.
    """
    folder = run.folder / CHECKPOINTS_FOLDER
    model = run.folder / MODEL_FOLDER
    model_damage = damage_of_model(model)
    if model_damage is None:
        broadcast_from_rank_zero(lambda: _check_checkpoint(latest_checkpoint(folder), run))
        return None

    # Puts back a checkpoint that a killed run was replacing.
    broadcast_from_rank_zero(lambda: remove_leftovers(folder, "step_*"))
    checkpoint, damaged = newest_whole_checkpoint(
        folder,
        advice=f"Restore the files from a copy, or remove {folder}: --resume then starts at the first step.",
    )
    broadcast_from_rank_zero(lambda: _check_checkpoint(checkpoint, run))

    model_exists = broadcast_from_rank_zero(model.exists)
    if model_exists and checkpoint is None:
        raise CheckpointError(
            f"The model of this run is damaged: {model}: {model_damage}. There is no checkpoint to write it again "
            f"from. Restore it from a copy, or remove {model}: --resume then trains from the first step."
        )
    if model_exists:
        _warn_on_rank_zero(f"{model} is not whole: {model_damage}. It is written again.")
    if checkpoint is None:
        _warn_on_rank_zero(f"{run.folder} has no checkpoint yet: the run starts at its first step.")
    return _Start(checkpoint, damaged)


def _restore_state(run: Run, optimizer: torch.optim.Optimizer, start: _Start) -> int:
    """Loads what a run begins with into model and optimizer, and returns its first step."""
    model, layouts, _ = run.built
    if start.checkpoint is not None:
        load_checkpoint(start.checkpoint, model, optimizer, layouts, verified=True)
        state = load_state(start.checkpoint)
        if state.products is not None:
            use_products(state.products)
        return state.step

    # Scores of a run that was stopped before its first checkpoint.
    broadcast_from_rank_zero(lambda: remove_scores(run.folder))
    if run.earlier_checkpoints is not None:
        name = run.recipe.optim.optimizer
        load_optimizer_state(run.earlier_checkpoints, model, optimizer, layouts, name)
    return 0


def _begin_probe(run: Run, first_step: int) -> RoutingProbe | None:
    """Returns what probes the run from `first_step` on; None when nothing does.

    Raises:
        DataError: When earlier probes of the run could not be compared with those to come.
    """
    training = run.recipe.training
    if not training.probe_every:
        return None

    assert run.probe_source is not None, "check_probe wants a text"
    probe = RoutingProbe(
        run.folder / PROBE_FOLDER,
        run.built.model,
        run.probe_source,
        training.probe_batches,
        text=f"the first {training.probe_batches} held-out batches of {training.batch_size}",
        mesh=run.built.mesh,
        bfloat16=training.precision == "bfloat16",
    )
    probe.begin(first_step)
    return probe


def _check_checkpoint(path: Path | None, run: Run) -> None:
    """Raises a CheckpointError unless a checkpoint, if there is one, is of these settings and data."""
    if path is None:
        return
    saved = load_state(path)
    settings = with_later_settings(rename_settings(saved.recipe), type(run.recipe))
    saved = saved._replace(recipe=settings)
    check_same_run(path, saved, _run_state(run, saved.step), _CHANGEABLE_SETTINGS)

    # `training.steps` may not be lowered below what is done.
    if saved.step > run.recipe.training.steps:
        raise CheckpointError(
            f"{path} is of step {saved.step:,}, and the run ends at training.steps, {run.recipe.training.steps:,}. "
            "Remove it to go on from an earlier one, or restore its state.json."
        )


def _run_state(run: Run, step: int) -> RunState:
    """Returns what a checkpoint of the run after `step` updates says."""
    recipe = dataclasses.asdict(run.recipe)
    products = products_in_use() if run.built.model.device.type == "cpu" else None
    return RunState(step, run.source.fingerprint, recipe, products)


# ---------------------------------------------------------------------------
# The folder


def _hold_run_folder(folder: Path, resume: bool) -> AbstractContextManager[None]:
    """Returns the lock on a run's folder; it goes with the process, however that ends.

    Raises:
        DataError: When the folder holds a run that would be lost, or another process holds it.
    """
    refuse_to_overwrite(folder, resume)
    taken = f"Another process trains in {folder}. Wait for it, or choose another --out."
    return claim_folder(folder, FOLDER_KIND, taken=taken)


def refuse_to_overwrite(folder: Path, resume: bool) -> None:
    """Raises when a folder holds a run that would be lost, or something else than a run.

    Args:
        folder: Folder of the new run; may be absent.
        resume: Whether the run in it goes on.

    Raises:
        DataError: Names what to do instead.
    """
    check_kind(folder, FOLDER_KIND)
    names = (METRICS_FILE, CHECKPOINTS_FOLDER, MODEL_FOLDER)
    holds_run = any((folder / name).exists() for name in names)
    if holds_run and not resume:
        raise DataError(
            f"{folder} already holds a run. Give --resume to go on with it, choose another --out, or remove it."
        )
