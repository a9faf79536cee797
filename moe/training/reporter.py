"""Reports on a running training: metrics.jsonl, timeline.jsonl, progress bar, warnings.

The loop (loop.py) calls it after every step.
"""

import atexit
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path

from tqdm import tqdm

from moe.checkpoint.best_model import format_scores, score_model
from moe.checkpoint.final_model import save_model_on_mesh
from moe.distributed.collectives import is_rank_zero
from moe.distributed.replica_groups import ReplicaSeconds
from moe.sparse.editing import sparse_layers
from moe.training.heldout_loss import evaluate_held_out
from moe.training.metrics import MetricsWriter, step_values
from moe.training.router_health import DeadExperts
from moe.training.run import Run
from moe.training.step import StepMetrics
from moe.training.timeline import TIMELINE_FILE, Timeline, TimelineEvent


class Reporter:
    """Reports steps, held-out losses and dev scores: to metrics.jsonl and on the progress bar.

    Every rank measures; rank zero writes and warns.

    Attributes:
        timeline: Says how the seconds of the run are spent.
        bar: Progress bar over the steps; only rank zero shows it.

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
        self._dead_experts = DeadExperts(sparse_layers(run.built.model))
        path = run.folder / TIMELINE_FILE if writer else None
        self.timeline = Timeline(path, first_step, started=process_start)
        if process_start is not None:
            atexit.register(self.timeline.end)
        self.bar = tqdm(
            total=run.recipe.training.steps,
            initial=first_step,
            desc=description,
            unit="step",
            mininterval=1.0,
            disable=writer is None,
        )

        # Of the steps since the last line of metrics.
        self._tokens = 0.0
        self._seconds = 0.0
        self._data_wait = 0.0
        self._num_steps = 0

    def report_step(
        self, step: int, metrics: StepMetrics, seconds: float, data_wait: float
    ) -> None:
        """Counts an update, and writes its metrics when they are due.

        Args:
            step: Updates so far.
            metrics: Result of the last one.
            seconds: Duration of the update, including the wait for its batch.
            data_wait: Seconds of this wait.
        """
        training = self._run.recipe.training
        self._tokens += float(metrics.tokens)
        self._seconds += seconds
        self._data_wait += data_wait
        self._num_steps += 1
        if self._writer is not None and is_due(step, training.log_every, training.steps):
            self._write_step(self._writer, step, metrics)

        # A healed replica group has skipped steps.
        self.bar.update(step - self.bar.n)

    def _write_step(self, writer: MetricsWriter, step: int, metrics: StepMetrics) -> None:
        """Writes the metrics of an update, and how the seconds since the last call were spent."""
        values = step_values(metrics, self._tokens / self._seconds)
        replicas = ReplicaSeconds()
        if self._run.replicas is not None:
            replicas = self._run.replicas.take_seconds()
            values["replicas/live"] = replicas.live
        writer.write(step, values)
        self.timeline.append(
            TimelineEvent(
                event="steps",
                time=time.time(),
                step=step,
                num_steps=self._num_steps,
                seconds=self._seconds,
                data_wait=self._data_wait,
                meeting=replicas.meeting,
                healing=replicas.healing,
                lost=replicas.lost,
                healed=replicas.healed,
            )
        )
        self._tokens = 0.0
        self._seconds = 0.0
        self._data_wait = 0.0
        self._num_steps = 0

        self._dead_experts.observe(step, metrics.layer_stats)
        ce_loss = f"{float(metrics.ce_loss):.3f}"
        self.bar.set_postfix(ce_loss=ce_loss, lr=f"{metrics.lr:.2g}", refresh=False)

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

    @contextmanager
    def _evaluation(self, step: int) -> Iterator[None]:
        """Measures an evaluation after `step` updates."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self.timeline.append(TimelineEvent("evaluation", time.time(), step, seconds=seconds))


def open_metrics(folder: Path, first_step: int) -> AbstractContextManager[MetricsWriter | None]:
    """Returns the writer of metrics on rank zero, and None on the others."""
    if is_rank_zero():
        return closing(MetricsWriter(folder, first_step))
    return nullcontext()


def warn_on_rank_zero(text: str) -> None:
    """Prints a warning, once for all ranks."""
    if is_rank_zero():
        print(f"warning: {text}", file=sys.stderr, flush=True)  # noqa: T201  on the terminal


def is_due(step: int, every: int, last_step: int) -> bool:
    """Returns whether `step` is a multiple of `every`, or the last step."""
    return step % every == 0 or step == last_step
