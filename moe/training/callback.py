"""A callback for transformers' Trainer that logs the parts of the loss and the routers' statistics.

Through it, routers that balance themselves learn from their load, as in `train_step`.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from moe.checks import check, check_integer
from moe.data.pipeline import ALL_ROWS, Batch
from moe.distributed.collectives import broadcast_from_rank_zero, is_rank_zero, sum_each_over_ranks
from moe.errors import ConfigError, DataError
from moe.models.outputs import STMoEOutput
from moe.sparse.stats import RouterStats, add_layers, router_values, sum_stats, unflatten_stats
from moe.tracing.probe_file import has_probes
from moe.training.router_health import RouterHealth, layer_keys
from moe.training.routing_probe import PROBE_FOLDER, RoutingProbe, max_logits, probe_values
from moe.training.step import add_layer_stats, learns_from_load, router_outputs

_NEEDED = {"input_ids", "labels"}


class RouterStatsCallback(TrainerCallback):
    """Adds the parts of the loss and the routers' statistics to the log of transformers' Trainer.

    Besides `loss`, the log and its history then contain the cross-entropy `ce_loss` and the
    vocabulary's `z_loss`, both as means over the updates since the last log, and
    `router/{encoder,decoder}/...`, summed exactly over the same updates, micro-batches, layers and
    processes. Reporters prefix names with `train/`.

    A router that learns from its load, such as `bias_balanced`, does so only with this callback,
    and not when frozen. With a `compute_loss_func` of the Trainer, the model gets no labels, and
    the log contains only the routers' part.

    It warns once, through Python's logging, of a layer whose experts die or whose drops rise. With
    `probe_every` it also stores the routing of a fixed text in `output_dir/probe`, see
    moe/tracing/probe_file.py, logs its numbers as `probe/...`, and warns of routers that saturate.

    Example:
        trainer = Seq2SeqTrainer(model, args, train_dataset=data, callbacks=[RouterStatsCallback()])

    Args:
        probe_every: Updates from one probe to the next; 0 disables probes.
        probe_batches: The text: whole batches with labels, the same in every process. Not packed.

    Raises:
        ConfigError: When one of the two is given without the other.
    """

    def __init__(self, *, probe_every: int = 0, probe_batches: Iterable[Batch] = ()) -> None:
        batches = tuple(probe_batches)
        check_integer("probe_every", probe_every, least=0)
        if bool(probe_every) != bool(batches):
            raise ConfigError(
                f"probe_every is {probe_every}, "
                f"and there are {len(batches)} probe_batches; "
                "expected both, or neither."
            )
        for batch in batches:
            is_batch = isinstance(batch, Mapping) and batch.keys() >= _NEEDED
            expected = "whole batches with input_ids and labels, as a collator makes them"
            check(is_batch, "one of probe_batches", batch, expected)

        self._probe_every = probe_every
        self._probe_batches = batches
        self._probe: RoutingProbe | None = None
        self._probe_values: dict[str, float] = {}
        self._health = RouterHealth([])
        self._hooks: list[RemovableHandle] = []
        # Sums of ce_loss and z_loss since the last log, <float64>[2]; None before the first.
        self._losses: Tensor | None = None
        self._num_updates = 0
        self._since_update: list[RouterStats] = []
        self._since_log: list[RouterStats] = []

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Starts to watch the model.

        Raises:
            ConfigError: When the model is not one of this library, or has no sparse layer to probe.
            DataError: When the probes of another training would be lost.
        """
        if not hasattr(model, "sparse_layers"):
            raise ConfigError(
                f"RouterStatsCallback was given to a Trainer of {type(model).__name__}; expected a model with sparse "
                "layers of this library, STMoEForConditionalGeneration. Leave the callback out for other models."
            )
        # Reporters created by the Trainer itself come before any callback.
        if args.report_to:
            warnings.warn(
                f"The reporters of report_to={args.report_to} log before RouterStatsCallback adds its numbers, so "
                'they miss them. Set report_to="none" and give the reporters as callbacks behind it, for example '
                "callbacks=[RouterStatsCallback(), TensorBoardCallback()] with TensorBoardCallback from "
                "transformers.integrations.",
                stacklevel=2,
            )

        self._stop_watching()
        self._hooks = [
            model.register_forward_pre_hook(_request_router_outputs, with_kwargs=True),
            model.register_forward_hook(self._add_output),
        ]

        self._health = RouterHealth(layer_keys(model.config))
        if self._probe_every:
            folder = Path(args.output_dir or ".") / PROBE_FOLDER
            self._begin_probe(folder, model, state.global_step)

    def _begin_probe(self, folder: Path, model: Any, step: int) -> None:
        """Prepares the probes of a training run after `step` updates."""
        has_layers = bool(model.sparse_layers())
        expected = "0 for a model without sparse layers"
        check(has_layers, "probe_every", self._probe_every, expected)

        # Training from the start would remove them.
        is_taken = broadcast_from_rank_zero(lambda: has_probes(folder))
        if is_taken and not step:
            raise DataError(
                f"{folder} holds the probes of another training run. Resume it, choose another output_dir, or move "
                "the folder away."
            )

        num_batches = len(self._probe_batches)
        self._probe = RoutingProbe(
            folder,
            model,
            GivenBatches(self._probe_batches),
            num_batches,
            text=f"{num_batches} batches given to RouterStatsCallback",
        )
        self._probe.begin(step)

        # The first probe shows the model before any update.
        if not step:
            self._probe.record(0)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Lets the routers learn from the load of the update, once for each update."""
        for layer, stats in zip(model.sparse_layers(), self._since_update, strict=True):
            if learns_from_load(layer):
                layer.router.update(sum_stats(stats))

        self._since_log = add_layer_stats(self._since_log, self._since_update)
        self._since_update = []
        self._num_updates += 1

        # Probes are due at intervals, and at the end.
        step = state.global_step
        is_due = self._probe_every and step % self._probe_every == 0
        if self._probe and (is_due or step == state.max_steps):
            scores = self._probe.record(step).scores

            # The next log contains its step.
            self._probe_values = probe_values(scores)
            self._probe_values["probe/step"] = step
            if is_rank_zero():
                self._health.observe_logits(step, max_logits(scores))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Adds the numbers to a log of the training loss, and resets the sums.

        Every process must log, since their numbers are summed.
        """
        if logs is None:
            return

        # Every kind of log gets the probes since the last one.
        logs.update(self._probe_values)
        state.log_history[-1].update(self._probe_values)
        self._probe_values = {}

        if "loss" not in logs or not self._num_updates:
            return

        # All processes together, in one exchange.
        losses = [] if self._losses is None else [self._losses]
        sums = sum_each_over_ranks([*losses, *chain.from_iterable(self._since_log)])

        values: dict[str, float] = {}
        if losses:
            # Without averaging over devices each process divided by its own number of tokens, so
            # that the sum over processes is `world_size` times the mean.
            shares = 1 if args.average_tokens_across_devices else args.world_size
            means = (sums[0] / self._num_updates / shares).tolist()
            values = dict(zip(("ce_loss", "z_loss"), means, strict=True))

        layers = unflatten_stats(sums[len(losses) :])
        num_encoder_layers = model.config.num_sparse_encoder_layers
        encoder = layers[:num_encoder_layers]
        decoder = layers[num_encoder_layers:]
        for stack, stack_layers in (("encoder", encoder), ("decoder", decoder)):
            if stack_layers:
                values.update(router_values(stack, add_layers(stack_layers)))
        if is_rank_zero():
            self._health.observe(state.global_step, layers)

        logs.update(values)
        state.log_history[-1].update(values)
        self._reset_sums()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restores the model."""
        self._stop_watching()

    @torch.no_grad()
    def _add_output(self, model: nn.Module, inputs: tuple[Any, ...], output: STMoEOutput) -> None:
        """Adds losses and statistics of a training micro-batch; a forward hook of the model."""
        if not model.training:
            return

        if output.ce_loss is not None and output.z_loss is not None:
            losses = torch.stack([output.ce_loss, output.z_loss]).double()
            self._losses = losses if self._losses is None else self._losses + losses

        stats = [router.stats for router in router_outputs(output)]
        self._since_update = add_layer_stats(self._since_update, stats)

    def _stop_watching(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._probe = None
        self._since_update = []
        self._reset_sums()

    def _reset_sums(self) -> None:
        self._losses = None
        self._num_updates = 0
        self._since_log = []


class GivenBatches:
    """A source of given batches."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches
        self.batch_size = batches[0]["labels"].shape[0]
        self.lengths = None
        self.fingerprint = ""

    def batch(self, step: int, rows: slice = ALL_ROWS) -> Batch:
        """Returns a batch; see `BatchSource`."""
        batch = self._batches[step]
        return {name: values[rows] for name, values in batch.items()}


def _request_router_outputs(
    model: nn.Module, inputs: tuple[Any, ...], arguments: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Requests the routers' outputs in a training step; a forward pre-hook of the model."""
    if model.training:
        arguments = {**arguments, "output_router_logits": True}
    return inputs, arguments
