"""The edit point: functions that change the plan of a sparse layer before it is executed.

Comes after layer.py. `edits.py` has edits that take experts away or exchange them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Literal

from torch import nn

from moe.checks import check, shown
from moe.errors import ConfigError, DataError
from moe.sparse.inputs import can_read_values
from moe.sparse.layer import PlanEdit, SparseFeedForward
from moe.sparse.plan import DispatchPlan, RouterScores, reassign_slots
from moe.sparse.recomputation import Recomputation

Stack = Literal["encoder", "decoder"]

STACKS: tuple[Stack, Stack] = ("encoder", "decoder")

LayerKey = tuple[Stack, int]
"""Names a sparse layer: its stack, and its number among the sparse layers there, from 0."""


class LayerEdit(ABC):
    """An edit that needs to know its layer."""

    @abstractmethod
    def for_layer(self, layer: SparseFeedForward) -> PlanEdit:
        """Returns the edit of the plans of one layer.

        Raises:
            ConfigError: When the layer cannot be edited so.
        """


RoutingEdit = PlanEdit | LayerEdit
"""A function of scores and plan that returns the plan to use, or a value that makes one."""


def sparse_layers(module: nn.Module) -> dict[LayerKey, SparseFeedForward]:
    """Returns the sparse layers inside a module, in the order of its blocks."""
    layers: dict[LayerKey, SparseFeedForward] = {}
    num_layers: dict[Stack, int] = {"encoder": 0, "decoder": 0}
    for part in module.modules():
        if isinstance(part, SparseFeedForward):
            stack: Stack = "decoder" if part.config.decoder else "encoder"
            layers[stack, num_layers[stack]] = part
            num_layers[stack] += 1
    return layers


@contextmanager
def edit_routing(module: nn.Module, edits: Mapping[LayerKey, RoutingEdit]) -> Iterator[None]:
    """Changes the plans of sparse layers inside the block.

    An edit gets the router's scores and plan, and returns the plan that is executed and reported.
    It can ignore slots: they are reassigned, and every accepted choice gets one, regardless of the
    capacity. Padding is never accepted, and a choice that is not accepted weighs nothing.
    Auxiliary losses follow from the scores and the new plan.
    Edits apply to every forward pass: in training, in evaluation, and in each step of generation,
    where a call has one token of each sequence. With nested contexts, the outer one edits first.
    With activation checkpointing the backward pass belongs inside the block.

    Example:
        with edit_routing(model, {("encoder", 1): DropExperts(3)}):
            loss = model(**batch).loss

    Args:
        module: A model with sparse layers, at any depth.
        edits: A function `(scores, plan) -> plan`, or a `LayerEdit`, by layer.

    Raises:
        ConfigError: When the module has no such layer, a value is not an edit, or the context ends
            before the backward pass of checkpointed layers.
        DataError: In the forward pass, when an edit does not return a valid plan for these tokens.
    """
    # Every edited layer must exist.
    layers = sparse_layers(module)
    recomputation = Recomputation()
    bound_edits: dict[LayerKey, PlanEdit] = {}
    for key, edit in edits.items():
        check_layer(key, layers, module)
        check(isinstance(edit, LayerEdit) or callable(edit), f"edit of {key}", edit, _AN_EDIT)
        function = edit.for_layer(layers[key]) if isinstance(edit, LayerEdit) else edit
        bound_edits[key] = partial(_edited, key, function, layers[key], recomputation)

    # Each layer gets its edits back as they were, even after an error.
    earlier = {key: layers[key].plan_edits for key in bound_edits}
    for key, edit in bound_edits.items():
        layers[key].plan_edits = (*earlier[key], edit)
    try:
        yield
    finally:
        for key, edits_before in earlier.items():
            layers[key].plan_edits = edits_before

    if recomputation.is_due:
        raise ConfigError(
            "edit_routing ended before the backward pass, but activation checkpointing will call the sparse layers "
            "again there, and then without the edits. Call loss.backward() inside the context, or open "
            "torch.no_grad() around it if no gradient is wanted."
        )


_AN_EDIT = "a function (scores, plan) -> plan, or a LayerEdit"


def check_layer(
    key: LayerKey, layers: Mapping[LayerKey, SparseFeedForward], module: nn.Module
) -> None:
    """Raises a ConfigError when a module has no sparse layer of that name."""
    if key not in layers:
        names = ", ".join(map(str, layers)) or "none"
        raise ConfigError(
            f"This {type(module).__name__} has no sparse layer {shown(key)}. Its sparse layers, by stack and number "
            f"from 0: {names}."
        )


def _edited(
    key: LayerKey,
    edit: PlanEdit,
    layer: SparseFeedForward,
    recomputation: Recomputation,
    scores: RouterScores,
    plan: DispatchPlan,
) -> DispatchPlan:
    """Returns the plan after an edit, checked and with a slot for every choice."""
    # Backward passes that recompute the layer also come here.
    recomputation.watch()
    edited = edit(scores, plan)
    if edited is plan:
        return plan
    _check_plan(key, edited, plan, layer.config.num_experts)

    accepted = edited.accepted & plan.token_mask[..., None]
    weight = edited.combine_weight.masked_fill(~accepted, 0)
    edited = edited._replace(accepted=accepted, combine_weight=weight)
    return reassign_slots(edited, layer.config.num_experts)


def _check_plan(key: LayerKey, edited: DispatchPlan, plan: DispatchPlan, num_experts: int) -> None:
    """Raises a DataError when an edit returned no plan for the tokens of `plan`."""
    advice = f"in {key}; expected a DispatchPlan for the same tokens, e.g. plan._replace(...)"
    if not isinstance(edited, DispatchPlan):
        raise DataError(f"An edit returned {shown(edited)} {advice}.")

    # The same tokens, and each choice described in full.
    choices = edited.expert_index.shape
    of_choices = (edited.slot, edited.accepted, edited.combine_weight, edited.requested)
    has_shapes = all(tensor.shape == choices for tensor in of_choices)
    if not has_shapes or choices[:2] != plan.token_mask.shape:
        raise DataError(f"An edit returned choices of shape {tuple(choices)} {advice}.")

    # Values are read only where this does not wait for a device.
    if not can_read_values(edited.expert_index):
        return
    experts = edited.expert_index[edited.accepted]
    if experts.numel() and not 0 <= int(experts.min()) <= int(experts.max()) < num_experts:
        raise DataError(
            f"An edit chose expert {int(experts.min())} to {int(experts.max())} of {num_experts} {advice}."
        )
