"""Outputs of experts replaced by their mean: what is left when an expert says the same to all.

Comes after `choices`; `interventions` offers it beside the edits of plans.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from moe.errors import DataError
from moe.inspection.ablation.choices import ChoiceMask
from moe.sparse.editing import LayerKey, check_layer, edit_routing, sparse_layers
from moe.sparse.edits import drop_choices
from moe.sparse.layer import RouterOutput
from moe.sparse.plan import DispatchPlan, RouterScores


@contextmanager
def replace_by_mean(
    module: nn.Module, key: LayerKey, choices: ChoiceMask, mean_output: Tensor
) -> Iterator[None]:
    """Replaces the outputs of some choices by the mean outputs of their experts inside the block.

    The weights stay. In the reported plan these choices are dropped.

    Example:
        with replace_by_mean(model, ("encoder", 0), choices_of(3), measures.mean_output):
            loss = model(**batch).loss

    Args:
        module: A model with sparse layers.
        key: Name of the layer.
        choices: Finds the choices.
        mean_output: <any float>[E, D] mean output of each expert, before its weight.

    Raises:
        ConfigError: When the module has no such layer.
        DataError: When `mean_output` has another shape.
    """
    layers = sparse_layers(module)
    check_layer(key, layers, module)
    layer = layers[key]

    # A mean for each expert of this layer.
    expected = (layer.config.num_experts, layer.config.d_model)
    if mean_output.shape != expected:
        raise DataError(
            f"mean_output has shape {tuple(mean_output.shape)}, but {key} has {expected[0]} experts of width "
            f"{expected[1]}. Give the mean output of each expert, [E, D]."
        )

    # The edit comes first in a forward pass, the hook last.
    replacement = _Replacement(choices, mean_output)
    with (
        edit_routing(module, {key: replacement.drop}),
        layer.register_forward_hook(replacement.add),
    ):
        yield


class _Replacement:
    """Drops the choices from a plan, and adds the means to what the layer then returns."""

    def __init__(self, choices: ChoiceMask, mean_output: Tensor) -> None:
        self._choices = choices
        self._mean_output = mean_output
        self._added: Tensor | None = None

    def drop(self, scores: RouterScores, plan: DispatchPlan) -> DispatchPlan:
        # The weight of each choice that is replaced.
        replaced = self._choices(plan)
        weight = plan.combine_weight * replaced  # [G, S, K]

        # The same by expert, times the expert's mean.
        by_expert = weight.new_zeros(scores.probs.shape)  # [G, S, E]
        by_expert = by_expert.scatter_add(-1, plan.expert_index, weight)
        mean_output = self._mean_output.to(weight)
        self._added = by_expert @ mean_output  # [G, S, D]
        return drop_choices(plan, replaced)

    def add(
        self, layer: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, RouterOutput | None]
    ) -> tuple[Tensor, RouterOutput | None]:
        assert self._added is not None, "the plan is edited before the layer returns"
        y, router_output = output  # [B, L, D]
        added = self._added.to(y.dtype)
        return y + added.view_as(y), router_output
