"""Load, mean output and first-order effect of all experts, from one backward pass.

Comes after `interventions`, which need the first two; `ablation` prints the third beside the exact
effect.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.data.pipeline import Batch
from moe.models.inputs import IGNORED_LABEL
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.outputs import STMoEOutput
from moe.sparse.dispatch import RowDispatcher, sort_rows
from moe.sparse.editing import LayerKey, PlanEdit, edit_routing, sparse_layers
from moe.sparse.layer import RouterOutput, SparseFeedForward
from moe.sparse.plan import DispatchPlan, RouterScores


class ExpertMeasures(NamedTuple):
    """Measures of the experts of one layer.

    Attributes:
        load: <int64>[E] accepted choices of each expert.
        mean_output: <float64>[E, D] mean output of each expert over them, before its weight; 0 for
            an expert without any.
        estimate: <float64>[E] first-order estimate of what dropping the expert adds to the loss,
            in nats for each target token.
    """

    load: Tensor
    mean_output: Tensor
    estimate: Tensor


@torch.inference_mode(False)
@torch.enable_grad()
def measure_experts(
    model: STMoEForConditionalGeneration, batches: Iterable[Batch]
) -> dict[LayerKey, ExpertMeasures]:
    """Returns the measures of all experts of all sparse layers, by one backward pass a batch.

    The estimate is the slope of the loss where all weights g of an expert shrink together: the sum
    over its tokens of grad(y) . (-g f), with f the expert's output and y the layer's. It is exact
    for an infinitesimal part of the expert; dropping all of it is far from that.

    Args:
        model: In evaluation mode.
        batches: Batches with labels, on the model's device; at least one.
    """
    sums: dict[LayerKey, _Sums] = {}
    num_targets = 0
    for batch in batches:
        # The gradient of the outputs of all layers, and of nothing else.
        with observe_layers(model) as observations:
            output = model(**batch, use_cache=False)
        losses = target_losses(output, batch)
        nudges = [observation.nudge for observation in observations.values()]
        gradients = torch.autograd.grad(losses.sum(), nudges)

        # Sums over the rows of each expert add up over batches.
        layers = sparse_layers(model)
        for key, gradient in zip(observations, gradients, strict=True):
            of_batch = _sum_rows(layers[key], observations[key], gradient)
            if key in sums:
                of_batch = _Sums(*map(torch.add, sums[key], of_batch))
            sums[key] = of_batch
        num_targets += losses.numel()

    # Means over rows, and over targets.
    measures = {}
    for key, total in sums.items():
        num_rows = total.load.clamp(min=1)[:, None]
        measures[key] = ExpertMeasures(
            load=total.load,
            mean_output=total.output / num_rows,
            estimate=total.slope / max(1, num_targets),
        )
    return measures


def target_losses(output: STMoEOutput, batch: Batch) -> Tensor:
    """Returns the cross-entropy <float64>[n] of each target token of a batch in nats, row by row."""
    labels = batch["labels"]
    is_target = labels != IGNORED_LABEL  # [B, T]
    assert output.logits is not None, "the model returns logits"
    logits = output.logits[is_target].double()  # [n, V]
    return F.cross_entropy(logits, labels[is_target], reduction="none")


# ---------------------------------------------------------------------------
# One layer in one forward pass


class Observation:
    """What one sparse layer did in a forward pass.

    Attributes:
        plan: The plan that it carried out.
        tokens: <any float>[B, L, D] its input.
        nudge: <any float>[B, L, D] zeros that were added to its output, whose gradient is that of
            the output; made only where gradients are.
    """

    plan: DispatchPlan
    tokens: Tensor
    nudge: Tensor

    def keep_plan(self, scores: RouterScores, plan: DispatchPlan) -> DispatchPlan:
        """Keeps the plan, and returns it as it is."""
        self.plan = plan
        return plan

    def keep_output(
        self, layer: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, RouterOutput | None]
    ) -> tuple[Tensor, RouterOutput | None] | None:
        """Keeps the input, and adds the nudge to the output."""
        self.tokens = args[0].detach()
        if not torch.is_grad_enabled():
            return None

        # A leaf that has a gradient whether or not parameters have one.
        y, router_output = output
        self.nudge = torch.zeros_like(y, requires_grad=True)
        return y + self.nudge, router_output


@contextmanager
def observe_layers(
    model: STMoEForConditionalGeneration,
) -> Iterator[Mapping[LayerKey, Observation]]:
    """Gives an observation of each sparse layer, which the forward pass inside the block fills."""
    layers = sparse_layers(model)
    observations = {key: Observation() for key in layers}
    edits: dict[LayerKey, PlanEdit] = {}
    for key, observation in observations.items():
        edits[key] = observation.keep_plan

    # An edit that changes nothing sees the plan, a hook what goes in and out.
    with ExitStack() as contexts:
        contexts.enter_context(edit_routing(model, edits))
        for key, observation in observations.items():
            hook = layers[key].register_forward_hook(observation.keep_output)
            contexts.enter_context(hook)
        yield observations


class _Sums(NamedTuple):
    """Sums over the rows of each expert: how many, their outputs, their slopes."""

    load: Tensor
    output: Tensor
    slope: Tensor


@torch.no_grad()
def _sum_rows(layer: SparseFeedForward, observation: Observation, gradient: Tensor) -> _Sums:
    """Returns the sums of one layer in one batch; <float>[B, L, D] is the gradient of its output."""
    # The output f of every expert for every row that it accepted, one after the other.
    num_experts = layer.config.num_experts
    rows = sort_rows(observation.plan, num_experts)
    tokens = layer.expert_tokens(observation.tokens)  # [T, D]
    in_flight = RowDispatcher(rows).dispatch(tokens)
    f = layer.experts(in_flight).double()  # [N, D]

    # grad(y) . (-g f) of each row.
    gradient = gradient.flatten(0, 1).double()  # [T, D]
    gradient = gradient.index_select(0, rows.token)  # [N, D]
    g = rows.weight.double()  # [N]
    slope = -g * (gradient * f).sum(dim=-1)

    # Rows are sorted by expert.
    expert = torch.repeat_interleave(rows.counts)  # [N]
    output = f.new_zeros(num_experts, f.shape[1])  # [E, D]
    total_slope = slope.new_zeros(num_experts)  # [E]
    return _Sums(
        load=rows.counts,
        output=output.index_add(0, expert, f),
        slope=total_slope.index_add(0, expert, slope),
    )
