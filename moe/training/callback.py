"""A callback for transformers' Trainer that logs the parts of the loss and the routers' statistics.

Through it, routers that balance themselves learn from their load, as in `take_step`.
"""

import warnings
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from moe.distributed.collectives import is_rank_zero, sum_each_over_ranks
from moe.errors import ConfigError
from moe.models.outputs import STMoEOutput
from moe.sparse.adapters import unwrapped
from moe.sparse.editing import sparse_layers
from moe.sparse.stats import RouterStats
from moe.training.router_health import DeadExperts, router_values
from moe.training.step import add_layer_stats, learns_from_load, router_outputs


class RouterStatsCallback(TrainerCallback):
    """Adds the parts of the loss and the routers' statistics to the log of transformers' Trainer.

    Besides `loss`, the log and its history then contain the cross-entropy `ce_loss` and the
    vocabulary's `z_loss`, both as means over the updates since the last log, and
    `router/{encoder,decoder}/...`, summed exactly over the same updates, micro-batches, layers and
    processes. Reporters prefix names with `train/`.

    A router that learns from its load, such as `bias_balanced`, does so only with this callback,
    and not when frozen. With a `compute_loss_func` of the Trainer, the model gets no labels, and
    the log contains only the routers' part.

    It warns once, through Python's logging, of a layer whose experts die.

    Example:
        trainer = Seq2SeqTrainer(model, args, train_dataset=data, callbacks=[RouterStatsCallback()])
    """

    def __init__(self) -> None:
        self._dead_experts = DeadExperts([])
        self._hooks: list[RemovableHandle] = []
        # Sums of ce_loss and z_loss since the last log, <float64>[2]; None before the first.
        self._losses: Tensor | None = None
        self._num_updates = 0
        self._since_update: list[RouterStats] = []
        self._since_log: list[RouterStats] = []

    def on_train_begin(
        self, args: TrainingArguments, *others: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Starts to watch the model.

        Raises:
            ConfigError: When the model is not one of this library.
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

        self._dead_experts = DeadExperts(sparse_layers(model))

    def on_step_end(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        """Lets the routers learn from the load of the update, once for each update."""
        for layer, stats in zip(model.sparse_layers(), self._since_update, strict=True):
            if learns_from_load(layer):
                unwrapped(layer.router).update(stats.all_reduce())

        self._since_log = add_layer_stats(self._since_log, self._since_update)
        self._since_update = []
        self._num_updates += 1

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
        if logs is None or "loss" not in logs or not self._num_updates:
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

        layers = RouterStats.unflatten(sums[len(losses) :])
        num_encoder_layers = model.config.num_sparse_encoder_layers
        stacks = {"encoder": layers[:num_encoder_layers], "decoder": layers[num_encoder_layers:]}
        for stack, stack_layers in stacks.items():
            if stack_layers:
                values.update(router_values(stack, RouterStats.sum(stack_layers)))
        if is_rank_zero():
            self._dead_experts.observe(state.global_step, layers)

        logs.update(values)
        state.log_history[-1].update(values)
        self._reset_sums()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
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
        self._since_update = []
        self._reset_sums()

    def _reset_sums(self) -> None:
        self._losses = None
        self._num_updates = 0
        self._since_log = []


def _request_router_outputs(
    model: nn.Module, inputs: tuple[Any, ...], arguments: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Requests the routers' outputs in a training step; a forward pre-hook of the model."""
    if model.training:
        arguments = {**arguments, "output_router_logits": True}
    return inputs, arguments
