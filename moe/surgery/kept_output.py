"""How much of a dense layer's output a sparse layer of its copies keeps, and which settings lose the rest.

Comes after `upcycle`. Experts that are copies turn the layer's output into the dense one times the
sum of a token's gates, and times the scale of the experts' output.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe.data.pipeline import Batch
from moe.models.inputs import IGNORED_LABEL
from moe.sparse.editing import LayerKey, edit_routing, sparse_layers
from moe.sparse.plan import DispatchPlan, RouterScores
from moe.sparse.router import Router

_TOLERANCE = 1e-3


class Kept(NamedTuple):
    """Mean over tokens of the sum of gates times the scale, in one mode.

    Attributes:
        chosen: Share of all choices of a token.
        requested: Share of the choices that the policy requests.
        accepted: Share of the choices that get a slot, i.e. of the dense output.
    """

    chosen: float
    requested: float
    accepted: float


class KeptOutput(NamedTuple):
    """Share of the output that one layer keeps.

    Attributes:
        key: The layer.
        training: With the capacity and policy of training.
        evaluation: With the settings of evaluation.
    """

    key: LayerKey
    training: Kept
    evaluation: Kept

    def losses(self) -> list[str]:
        """Returns which settings change the output in training, and by how much."""
        chosen, requested, accepted = self.training
        reasons = []
        if abs(chosen - 1) > _TOLERANCE:
            reasons.append(f"the gates of a token, times the scale, sum to {chosen:.2f}")
        if chosen - requested > _TOLERANCE:
            lost = 1 - requested / chosen
            reasons.append(f"the policy for second experts leaves out {100 * lost:.0f} %")
        if requested - accepted > _TOLERANCE:
            lost = 1 - accepted / requested
            reasons.append(f"the capacity drops {100 * lost:.0f} %")
        return reasons


def without_labels(model: PreTrainedModel, batch: Batch) -> Batch:
    """Returns inputs that route the same tokens, but have no loss."""
    inputs = dict(batch)
    labels = inputs.pop("labels")
    inputs["decoder_input_ids"] = cast(Any, model).prepare_decoder_input_ids_from_labels(labels)
    inputs["decoder_attention_mask"] = labels != IGNORED_LABEL
    return inputs


@torch.no_grad()
def kept_output(
    model: PreTrainedModel, batches: Iterable[Batch], *, scale: float = 1.0
) -> list[KeptOutput]:
    """Returns what each layer of an upcycled model keeps of the dense output on some batches.

    Args:
        model: The model, whole and in evaluation mode, before any training.
        batches: Keyword arguments of its forward, with labels.
        scale: The factor on the experts' output with which the model was built.
    """
    examples = list(batches)
    training = _kept_in_mode(model, examples, scale, training=True)
    evaluation = _kept_in_mode(model, examples, scale, training=False)
    return [KeptOutput(key, training[key], evaluation[key]) for key in training]


def _kept_in_mode(
    model: PreTrainedModel, batches: Iterable[Batch], scale: float, *, training: bool
) -> dict[LayerKey, Kept]:
    """Returns what each layer keeps with its router in one mode, in which it stays."""
    layers = sparse_layers(model)
    sums = {key: torch.zeros(3, dtype=torch.float64) for key in layers}
    num_tokens = dict.fromkeys(layers, 0)

    def add(
        key: LayerKey, router: Router, scores: RouterScores, plan: DispatchPlan
    ) -> DispatchPlan:
        gates = router.gates(scores, plan.expert_index)  # [G, S, K]
        real = plan.token_mask[..., None]
        # Experts that choose request what fits into their capacity.
        requested = real if router.experts_choose else plan.requested
        choices: list[Tensor] = [gates * real, gates * requested, plan.combine_weight]
        sums[key] += torch.stack([weights.double().sum() for weights in choices]).cpu()
        num_tokens[key] += int(plan.token_mask.sum())
        return plan

    edits = {}
    for key, layer in layers.items():
        layer.router.train(training)
        edits[key] = partial(add, key, layer.router)
    with edit_routing(model, edits):
        for batch in batches:
            model(**without_labels(model, batch), logits_to_keep=1, use_cache=False)
    return {key: Kept(*(scale * sums[key] / max(1, num_tokens[key])).tolist()) for key in layers}
