"""Reports on a running training: metrics.jsonl, timeline.jsonl, progress bar, warnings.

The loop (loop.py) calls it after every step.
"""

import atexit
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from moe.checkpoint.best_model import format_scores, score_model
from moe.checkpoint.final_model import save_model_on_mesh
from moe.distributed.collectives import is_rank_zero
from moe.distributed.replica_groups import ReplicaSeconds
from moe.training.heldout_loss import evaluate_held_out
from moe.training.metrics import MetricsWriter, replica_values, step_values
from moe.training.planned_steps import PlannedStep
from moe.training.router_health import RouterHealth, layer_keys
from moe.training.run import Run
from moe.training.step import StepMetrics
from moe.training.timeline import TIMELINE_FILE, Timeline


class Reporter:
    """Reports steps, held-out losses and dev scores: to metrics.jsonl and on the progress bar.

    Every rank measures; rank zero writes and warns.

    Args:
        run: The run.
        writer: Writes metrics; None on ranks other than zero.
        description: Label of the progress bar.
        first_step: Updates so far.
        process_start: When this process started, in seconds since 1970, if it serves only this run.
    """

    def __init__(
        self,
        run: Run,
        writer: MetricsWriter | None,
        description: str,
        first_step: int,
        process_start: float | None = None,
    ) -> None:
        self._run = run
        self._writer = writer
        self._description = description
        self._health = RouterHealth(layer_keys(run.built.model.config))
        path = run.folder / TIMELINE_FILE if writer else None
        self._timeline = Timeline(path, first_step, started=process_start)
        if process_start is not None:
            atexit.register(self.end)
        self._step_started = time.perf_counter()
        self.restart_clock()

    def progress_bar(self, first_step: int) -> "tqdm[NoReturn]":
        """Returns a progress bar over the steps; only rank zero shows it."""
        return tqdm(
            total=self._run.recipe.training.steps,
            initial=first_step,
            desc=self._description,
            unit="step",
            mininterval=1.0,
            disable=self._writer is None,
        )

    def restart_clock(self) -> None:
        """Resets the counts of tokens and seconds, after work other than training."""
        self._started = time.perf_counter()
        self._tokens = 0.0
        self._data_seconds = 0.0
        self._num_steps = 0

    def count_step(self, data_wait: float) -> None:
        """Counts an update, which ends now, and its seconds of waiting for the batch."""
        self._data_seconds += data_wait
        self._num_steps += 1
        self._timeline.count_step(time.perf_counter() - self._step_started, data_wait)

    def measured(self, planned_steps: Iterable[PlannedStep]) -> Iterator[PlannedStep]:
        """Yields the steps, and measures each from before it is planned."""
        self._step_started = time.perf_counter()
        for step in planned_steps:
            yield step
            self._step_started = time.perf_counter()

    def report_step(self, step: int, metrics: StepMetrics, bar: "tqdm[NoReturn]") -> None:
        """Counts an update, and writes its metrics when they are due."""
        training = self._run.recipe.training
        self._tokens += float(metrics.tokens)
        if self._writer is not None and is_due(step, training.log_every, training.steps):
            tokens_per_second = self._tokens / (time.perf_counter() - self._started)
            data_wait = self._data_seconds / self._num_steps
            self._writer.write(step, step_values(metrics, tokens_per_second, data_wait))
            self._report_seconds(step)
            self._health.observe(step, metrics.layer_stats)
            ce_loss = f"{float(metrics.ce_loss):.3f}"
            bar.set_postfix(ce_loss=ce_loss, lr=f"{metrics.lr:.2g}", refresh=False)
            self.restart_clock()

        # A healed replica group has skipped steps.
        bar.update(step - bar.n)

    def _report_seconds(self, step: int) -> None:
        """Writes how the seconds since the last call were spent."""
        seconds = ReplicaSeconds()
        if self._writer is not None and self._run.replicas is not None:
            seconds = self._run.replicas.take_seconds()
            self._writer.write(step, replica_values(seconds))
        self._timeline.write(step, seconds)

    def report_held_out(self, step: int) -> None:
        """Writes the held-out loss after `step` updates, if there are held-out batches."""
        run = self._run
        if run.held_out is None or run.held_out.num_batches == 0:
            return
        training = run.recipe.training
        bfloat16 = training.precision == "bfloat16"
        model, _, mesh = run.built

        # Only pre-training has n-gram tables. The shuffled loss is measured once, as it takes as long again.
        shuffled = step == training.steps and bool(run.held_out.ngram_losses)
        with self._evaluation(step):
            values = evaluate_held_out(
                model, run.held_out, mesh, bfloat16=bfloat16, shuffled=shuffled
            )
        if self._writer is not None:
            self._writer.write(step, values)

    def report_dev_scores(self, step: int) -> None:
        """Writes the dev scores after `step` updates, if there are any, and keeps the best model."""
        run = self._run
        if run.dev is None:
            return

        def export(folder: Path) -> None:
            save_model_on_mesh(*run.built, folder, run.tokenizer)

        with self._evaluation(step):
            scores = score_model(run.folder, step, export, run.dev)
        if self._writer is not None:
            self._writer.write(step, {f"eval/{name}": value for name, value in scores.items()})
            tqdm.write(f"step {step:,}: {format_scores(scores)}")

    def summary(self) -> str:
        """Returns a line on how the seconds of this process were spent."""
        goodput = self._timeline.goodput()
        noun = "step" if goodput.steps == 1 else "steps"
        return (
            f"{goodput.steps:,} {noun} in {goodput.total:,.1f} s: a step waited for its batch in "
            f"{goodput.data_wait_share:.1%} of its time; evaluations took "
            f"{goodput.evaluation_share:.1%} of all."
        )

    def end(self) -> None:
        """Writes that the run is complete, or that its process exits."""
        self._timeline.end()

    @contextmanager
    def _evaluation(self, step: int) -> Iterator[None]:
        """Measures an evaluation after `step` updates."""
        started = time.perf_counter()
        yield
        self._timeline.write_evaluation(step, time.perf_counter() - started)


def open_metrics(folder: Path, first_step: int) -> AbstractContextManager[MetricsWriter | None]:
    """Returns the writer of metrics on rank zero, and None on the others."""
    if is_rank_zero():
        return MetricsWriter(folder, first_step)
    return nullcontext()


def warn_on_rank_zero(text: str) -> None:
    """Prints a warning, once for all ranks."""
    if is_rank_zero():
        print(f"warning: {text}", file=sys.stderr, flush=True)  # noqa: T201  on the terminal


def is_due(step: int, every: int, last_step: int) -> bool:
    """Returns whether `step` is a multiple of `every`, or the last step."""
    return step % every == 0 or step == last_step
